//! Damage at any byte of a table: rows or an error, never a panic.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use arrow_ipc::CompressionType;
use arrow_ipc::writer::{FileWriter, IpcWriteOptions, StreamWriter};
use megaflow_source::{
    Format, Outcome, ParseOptions, RandomAccess, ReadOptions, Source, SourceError, SourceReader, parse_block,
};

struct Bytes(Vec<u8>);

impl RandomAccess for Bytes {
    fn size_bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<usize> {
        let rest = &self.0[(offset as usize).min(self.0.len())..];
        let got = rest.len().min(buffer.len());
        buffer[..got].copy_from_slice(&rest[..got]);
        Ok(got)
    }
}

/// Number of records.
fn read(bytes: Vec<u8>, format: Format) -> Result<usize, SourceError> {
    let keys: Arc<[String]> = Arc::from(["text".to_owned()]);
    let options = ReadOptions { keys: Arc::clone(&keys), format: Some(format), block_bytes: 50 };
    let parse = ParseOptions::new(&keys, false);
    let source = Source::remote(PathBuf::from("damaged"), Arc::new(Bytes(bytes)));
    source.cuts(Some(format), 1)?;
    let mut reader = SourceReader::open(&source, &options, None)?;
    let mut records = 0;
    while let Some(block) = reader.next_block()? {
        parse_block(&block, &parse, |_, _, outcome| {
            records += usize::from(!matches!(outcome, Outcome::Blank));
            true
        });
    }
    Ok(records)
}

fn table() -> RecordBatch {
    let texts: Vec<String> = (0..12).map(|number| format!("text {}", "x".repeat(number % 5))).collect();
    let column: ArrayRef = Arc::new(StringArray::from_iter_values(texts));
    RecordBatch::try_from_iter([("text", column)]).unwrap()
}

fn parquet(path: &Path) -> Vec<u8> {
    let mut writer = parquet::arrow::ArrowWriter::try_new(File::create(path).unwrap(), table().schema(), None).unwrap();
    writer.write(&table()).unwrap();
    writer.close().unwrap();
    std::fs::read(path).unwrap()
}

fn options(codec: Option<CompressionType>) -> IpcWriteOptions {
    IpcWriteOptions::default().try_with_compression(codec).unwrap()
}

fn arrow_file(codec: Option<CompressionType>) -> Vec<u8> {
    let mut writer = FileWriter::try_new_with_options(Vec::new(), &table().schema(), options(codec)).unwrap();
    writer.write(&table()).unwrap();
    writer.into_inner().unwrap()
}

fn arrow_stream(codec: Option<CompressionType>) -> Vec<u8> {
    let mut writer = StreamWriter::try_new_with_options(Vec::new(), &table().schema(), options(codec)).unwrap();
    writer.write(&table()).unwrap();
    writer.into_inner().unwrap()
}

/// Those that are caught would fill the screen.
fn hide_panics_of_readers() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if panic.location().is_some_and(|place| place.file().ends_with("damaged.rs")) {
            usual(panic);
        }
    }));
}

/// Intact files of each kind.
fn files() -> Vec<(Format, Vec<u8>)> {
    let folder = tempfile::tempdir().unwrap();
    let mut files = vec![(Format::Parquet, parquet(&folder.path().join("a.parquet")))];
    for codec in [None, Some(CompressionType::LZ4_FRAME), Some(CompressionType::ZSTD)] {
        files.push((Format::ArrowFile, arrow_file(codec)));
        files.push((Format::ArrowStream, arrow_stream(codec)));
    }
    files
}

#[test]
fn damage_anywhere_is_an_error_or_harmless_and_never_a_panic() {
    hide_panics_of_readers();
    for (format, good) in files() {
        assert_eq!(read(good.clone(), format).unwrap(), 12, "{format:?}");
        let mut errors = 0;
        for place in 0..good.len() {
            for flip in [0x01, 0x80, 0xff] {
                let mut bytes = good.clone();
                bytes[place] ^= flip;
                errors += usize::from(read(bytes, format).is_err());
            }
            errors += usize::from(read(good[..place].to_vec(), format).is_err());
        }
        assert!(errors > good.len() / 2, "{format:?}: {errors} errors in {} bytes", good.len());
    }
}

#[test]
fn a_size_beyond_all_memory_is_an_error_wherever_it_stands() {
    hide_panics_of_readers();
    let sentences = [
        (Format::ArrowFile, None, vec!["lies outside of the", "lies outside of a batch"]),
        (Format::ArrowStream, None, vec!["it ends within a batch", "lies outside of a batch"]),
        (Format::ArrowFile, Some(CompressionType::LZ4_FRAME), vec!["they cannot"]),
        (Format::ArrowStream, Some(CompressionType::ZSTD), vec!["they cannot"]),
    ];
    for (format, codec, expected) in sentences {
        let good = if format == Format::ArrowFile { arrow_file(codec) } else { arrow_stream(codec) };
        let mut found = vec![false; expected.len()];
        for place in 0..good.len() - 8 {
            for size in [1_i64 << 46, i64::MAX, i64::from(i32::MAX), -2] {
                let mut bytes = good.clone();
                bytes[place..place + 8].copy_from_slice(&size.to_le_bytes());
                if let Err(error) = read(bytes, format) {
                    let error = error.to_string();
                    found.iter_mut().zip(&expected).for_each(|(found, words)| *found |= error.contains(words));
                }
            }
        }
        assert!(found.iter().all(|&found| found), "{format:?} {codec:?}: {found:?}");
    }
}

#[test]
fn a_stream_that_was_cut_within_a_message_says_where() {
    let good = arrow_stream(None);
    let error = read(good[..good.len() - 20].to_vec(), Format::ArrowStream).unwrap_err().to_string();
    assert!(error.contains("it ends within a batch"), "{error}");
}
