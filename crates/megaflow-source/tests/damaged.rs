//! Damage at any byte of a table: rows or an error, never a panic.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use arrow_ipc::writer::{FileWriter, StreamWriter};
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

fn arrow_file() -> Vec<u8> {
    let mut writer = FileWriter::try_new(Vec::new(), &table().schema()).unwrap();
    writer.write(&table()).unwrap();
    writer.into_inner().unwrap()
}

fn arrow_stream() -> Vec<u8> {
    let mut writer = StreamWriter::try_new(Vec::new(), &table().schema()).unwrap();
    writer.write(&table()).unwrap();
    writer.into_inner().unwrap()
}

#[test]
fn damage_anywhere_is_an_error_or_harmless_and_never_a_panic() {
    let folder = tempfile::tempdir().unwrap();
    std::panic::set_hook(Box::new(|_| {})); // those that are caught would fill the screen
    let files = [
        (Format::Parquet, parquet(&folder.path().join("a.parquet"))),
        (Format::ArrowFile, arrow_file()),
        (Format::ArrowStream, arrow_stream()),
    ];
    for (format, good) in files {
        assert_eq!(read(good.clone(), format).unwrap(), 12, "{format:?}");
        let mut errors = 0;
        for place in 0..good.len() {
            // A stream's messages and compressed buffers say how much memory to take; their reader believes them (decision 10).
            let flips: &[u8] = if format == Format::ArrowStream { &[] } else { &[0x01, 0x80, 0xff] };
            for flip in flips {
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
fn a_batch_outside_of_an_arrow_file_is_refused_before_memory_is_taken_for_it() {
    let good = arrow_file();
    // A huge number at every place of the second half: one of them is the length of the batch in the footer.
    let mut found = false;
    for at in (good.len() / 2)..good.len() - 18 {
        let mut bytes = good.clone();
        bytes[at..at + 8].copy_from_slice(&(1_i64 << 46).to_le_bytes());
        if let Err(error) = read(bytes, Format::ArrowFile) {
            found |= error.to_string().contains("lies outside of the");
        }
    }
    assert!(found);
}
