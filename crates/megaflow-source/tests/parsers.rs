//! Properties of each parser over made-up input: JSON records, packed lines, tables.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use arrow_ipc::writer::{FileWriter, StreamWriter};
use megaflow_source::{
    Block, BlockBody, Format, Outcome, ParseOptions, Position, RandomAccess, ReadOptions, Resume, Source, SourceError,
    SourceReader, parse_block,
};
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;
use proptest::prelude::*;
use serde_json::{Map, Value};

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

type Records = Result<(Vec<String>, Vec<(usize, Resume)>), SourceError>;

/// Records, and how many of them come before each place where a job may go on.
fn read(bytes: &[u8], format: Option<Format>, block_bytes: usize, resume: Option<&Resume>) -> Records {
    let keys: Arc<[String]> = Arc::from(["text".to_owned()]);
    let options = ReadOptions { keys: Arc::clone(&keys), format, block_bytes };
    let parse = ParseOptions::new(&keys, false);
    let source = Source::remote(PathBuf::from("input"), Arc::new(Bytes(bytes.to_vec())));
    let mut reader = SourceReader::open(&source, &options, resume)?;
    let (mut records, mut places) = (Vec::new(), Vec::new());
    while let Some(block) = reader.next_block()? {
        parse_block(&block, &parse, |place, _, outcome| {
            match outcome {
                Outcome::Record(fields) => records.push(fields[0].texts().join("|")),
                Outcome::Blank => {}
                Outcome::Bad(reason) => records.push(format!("{place}: {}", reason.name())),
            }
            true
        });
        places.push((records.len(), Resume { position: reader.position(), content: reader.content() }));
    }
    Ok((records, places))
}

fn values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 20, 4, |inner| {
        let key = prop_oneof![Just("text".to_owned()), Just("a".to_owned()), Just("b".to_owned()), "[a-z\"\\\\.]{0,5}"];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((key, inner), 0..5)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect::<Map<_, _>>())),
        ]
    })
}

/// What a key should give: a string, or a list of strings.
fn texts(value: Option<&Value>) -> Option<Vec<String>> {
    match value? {
        Value::String(text) => Some(vec![text.clone()]),
        Value::Array(items) => items.iter().map(|item| item.as_str().map(str::to_owned)).collect(),
        _ => None,
    }
}

fn packed(kind: u8, data: &[u8]) -> Vec<u8> {
    match kind {
        0 => {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(data).unwrap();
            encoder.finish().unwrap()
        }
        1 => zstd::stream::encode_all(data, 1).unwrap(),
        2 => {
            let mut encoder = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
            encoder.write_all(data).unwrap();
            encoder.finish().unwrap()
        }
        _ => {
            let mut encoder = liblzma::write::XzEncoder::new(Vec::new(), 0);
            encoder.write_all(data).unwrap();
            encoder.finish().unwrap()
        }
    }
}

fn table(format: Format, values: &[Option<String>], rows: usize) -> Vec<u8> {
    let column: ArrayRef = Arc::new(StringArray::from_iter(values.iter().cloned()));
    let batch = RecordBatch::try_from_iter_with_nullable([("text", column, true)]).unwrap();
    let pieces = (0..values.len()).step_by(rows).map(|at| batch.slice(at, rows.min(values.len() - at)));
    match format {
        Format::Parquet => {
            let properties = WriterProperties::builder().set_max_row_group_row_count(Some(rows)).build();
            let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties)).unwrap();
            writer.write(&batch).unwrap();
            writer.into_inner().unwrap()
        }
        Format::ArrowFile => {
            let mut writer = FileWriter::try_new(Vec::new(), &batch.schema()).unwrap();
            pieces.for_each(|piece| writer.write(&piece).unwrap());
            writer.into_inner().unwrap()
        }
        _ => {
            let mut writer = StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
            pieces.for_each(|piece| writer.write(&piece).unwrap());
            writer.into_inner().unwrap()
        }
    }
}

proptest! {
    #[test]
    fn a_line_of_json_gives_the_texts_that_serde_gives(value in values(), edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3)) {
        let mut line = value.to_string().into_bytes();
        for (at, byte) in edits {
            let at = at.index(line.len());
            line[at] = if byte == b'\n' { b' ' } else { byte };
        }
        let keys = ["text".to_owned(), "a.b".to_owned()];
        let block = Block { position: Position::START, body: BlockBody::JsonLines(line.clone()), input_bytes: 0 };
        let mut found = Vec::new();
        parse_block(&block, &ParseOptions::new(&keys, false), |_, _, outcome| {
            found.push(match outcome {
                Outcome::Record(fields) => Some(fields.iter().map(|field| field.texts().iter().map(ToString::to_string).collect()).collect()),
                _ => None,
            });
            true
        });
        let expected: Option<Vec<Vec<String>>> = match serde_json::from_slice::<Value>(&line) {
            Ok(Value::Object(object)) => {
                let nested = object.get("a").and_then(|inner| inner.get("b"));
                [object.get("text"), object.get("a.b").or(nested)].into_iter().map(texts).collect()
            }
            _ => None,
        };
        prop_assert_eq!(found, vec![expected]);
    }

    #[test]
    fn packed_lines_are_plain_lines_and_cut_ones_an_error(
        lines in prop::collection::vec("[a-z]{0,40}", 1..30),
        kind in 0_u8..4,
        split in any::<prop::sample::Index>(),
        cut in any::<prop::sample::Index>(),
        block_bytes in 1_usize..200,
    ) {
        let data = lines.iter().map(|line| format!("{{\"text\": \"{line}\"}}\n")).collect::<String>().into_bytes();
        let (plain, _) = read(&data, None, block_bytes, None).unwrap();
        prop_assert_eq!(&plain, &lines);
        let (first, second) = data.split_at(split.index(data.len()));
        let first = packed(kind, first);
        let whole = [first.clone(), packed(kind, second)].concat();
        prop_assert_eq!(&read(&whole, None, block_bytes, None).unwrap().0, &lines);
        let cut = 6 + cut.index(whole.len() - 6); // behind what tells the compression
        prop_assert!(cut == first.len() || read(&whole[..cut], None, block_bytes, None).is_err(), "cut at {cut} of {}", whole.len());
    }

    #[test]
    fn tables_give_their_rows_at_any_cut(
        values in prop::collection::vec(prop::option::of("\\PC{0,20}"), 1..40),
        rows in 1_usize..12,
        block_bytes in 1_usize..300,
        stop in any::<prop::sample::Index>(),
    ) {
        let expected: Vec<String> = values.iter().enumerate().map(|(row, value)| match value {
            Some(text) => text.clone(),
            None => format!("row {}: not-text", row + 1),
        }).collect();
        for format in [Format::Parquet, Format::ArrowFile, Format::ArrowStream] {
            let bytes = table(format, &values, rows);
            let (records, places) = read(&bytes, None, block_bytes, None).unwrap();
            prop_assert_eq!(&records, &expected);
            let (done, resume) = &places[stop.index(places.len())];
            prop_assert_eq!(&read(&bytes, None, block_bytes, Some(resume)).unwrap().0, &expected[*done..]);
        }
    }
}
