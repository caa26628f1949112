//! The same records from every format, at every place a job may go on or be cut at.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::builder::{
    LargeStringBuilder, ListBuilder, StringBuilder, StringDictionaryBuilder, StringViewBuilder,
};
use arrow_array::types::Int32Type;
use arrow_array::{ArrayRef, RecordBatch, StructArray};
use arrow_schema::{DataType, Field as ArrowField, Schema};
use megaflow_source::{
    Field, Format, Outcome, ParseOptions, Position, ReadOptions, Resume, Source, SourceError, SourceReader, parse_block,
};
use proptest::prelude::*;

fn options(block_bytes: usize) -> ReadOptions {
    ReadOptions { keys: Arc::from(["text".to_owned()]), format: None, block_bytes }
}

/// Texts of all records, and for each block the place behind it.
fn read(
    source: &Source,
    options: &ReadOptions,
    resume: Option<&Resume>,
) -> Result<(Vec<String>, Vec<Resume>), SourceError> {
    collect(SourceReader::open(source, options, resume)?, options)
}

fn collect(mut reader: SourceReader, options: &ReadOptions) -> Result<(Vec<String>, Vec<Resume>), SourceError> {
    let parse = ParseOptions::new(&options.keys, false);
    let (mut texts, mut places) = (Vec::new(), Vec::new());
    while let Some(block) = reader.next_block()? {
        parse_block(&block, &parse, |place, _, outcome| {
            texts.push(match outcome {
                Outcome::Record(fields) => fields.iter().map(|field: &Field<'_>| field.texts().join("|")).collect(),
                Outcome::Blank => return true,
                Outcome::Bad(reason) => format!("{place}: {reason}"),
            });
            true
        });
        places.push(Resume { position: reader.position(), content: reader.content() });
    }
    Ok((texts, places))
}

fn write(folder: &Path, name: &str, bytes: &[u8]) -> Source {
    fs::write(folder.join(name), bytes).unwrap();
    Source::file(folder.join(name))
}

fn json_lines(texts: &[String]) -> Vec<u8> {
    texts
        .iter()
        .map(|text| format!("{}\n", serde_json::json!({"id": 1, "text": text})))
        .collect::<String>()
        .into_bytes()
}

fn batch(column: ArrayRef) -> RecordBatch {
    let numbers: ArrayRef = Arc::new(arrow_array::Int64Array::from_iter_values(0..column.len() as i64));
    RecordBatch::try_from_iter([("id", numbers), ("text", column)]).unwrap()
}

fn column(kind: &str, texts: &[String]) -> ArrayRef {
    match kind {
        "string" => Arc::new(arrow_array::StringArray::from_iter_values(texts)),
        "large" => {
            let mut builder = LargeStringBuilder::new();
            texts.iter().for_each(|text| builder.append_value(text));
            Arc::new(builder.finish())
        }
        "view" => {
            let mut builder = StringViewBuilder::new();
            texts.iter().for_each(|text| builder.append_value(text));
            Arc::new(builder.finish())
        }
        "dictionary" => {
            let mut builder = StringDictionaryBuilder::<Int32Type>::new();
            texts.iter().for_each(|text| builder.append_value(text));
            Arc::new(builder.finish())
        }
        "binary" => Arc::new(arrow_array::BinaryArray::from_iter_values(texts)),
        "list" => {
            let mut builder = ListBuilder::new(StringBuilder::new());
            for text in texts {
                text.split('|').for_each(|part| builder.values().append_value(part));
                builder.append(true);
            }
            Arc::new(builder.finish())
        }
        other => panic!("no such kind: {other}"),
    }
}

fn write_parquet(path: &Path, batches: &[RecordBatch], compression: parquet::basic::Compression, group_rows: usize) {
    let properties = parquet::file::properties::WriterProperties::builder()
        .set_compression(compression)
        .set_max_row_group_row_count(Some(group_rows))
        .build();
    let file = File::create(path).unwrap();
    let mut writer = parquet::arrow::ArrowWriter::try_new(file, batches[0].schema(), Some(properties)).unwrap();
    batches.iter().for_each(|batch| writer.write(batch).unwrap());
    writer.close().unwrap();
}

fn write_arrow_file(path: &Path, batches: &[RecordBatch], compression: Option<arrow_ipc::CompressionType>) {
    let options = arrow_ipc::writer::IpcWriteOptions::default().try_with_compression(compression).unwrap();
    let file = File::create(path).unwrap();
    let schema = batches[0].schema();
    let mut writer = arrow_ipc::writer::FileWriter::try_new_with_options(file, &schema, options).unwrap();
    batches.iter().for_each(|batch| writer.write(batch).unwrap());
    writer.finish().unwrap();
}

fn arrow_stream(batches: &[RecordBatch]) -> Vec<u8> {
    let mut writer = arrow_ipc::writer::StreamWriter::try_new(Vec::new(), &batches[0].schema()).unwrap();
    batches.iter().for_each(|batch| writer.write(batch).unwrap());
    writer.into_inner().unwrap()
}

fn texts() -> Vec<String> {
    (0..300).map(|i| format!("text {i} \u{e9}\u{4e00} {}", "x".repeat(i * 7 % 90))).collect()
}

/// The same rows in every container; the name tells which.
fn all_formats(folder: &Path, texts: &[String]) -> Vec<(String, Source)> {
    let lines = json_lines(texts);
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gz.write_all(&lines).unwrap();
    let mut sources = vec![
        ("jsonl".to_owned(), write(folder, "a.jsonl", &lines)),
        ("gz".to_owned(), write(folder, "a.jsonl.gz", &gz.finish().unwrap())),
        ("zst".to_owned(), write(folder, "a.jsonl.zst", &zstd::stream::encode_all(&lines[..], 3).unwrap())),
    ];
    let (first, second) = texts.split_at(texts.len() / 3);
    for kind in ["string", "large", "view", "dictionary", "binary"] {
        let batches = [batch(column(kind, first)), batch(column(kind, second))];
        let parquet = folder.join(format!("{kind}.parquet"));
        write_parquet(&parquet, &batches, parquet::basic::Compression::SNAPPY, 70);
        sources.push((format!("parquet of {kind}"), Source::file(parquet)));
        // A stream may replace a dictionary, a file may not.
        let batches = if kind == "dictionary" { vec![batch(column(kind, texts))] } else { batches.to_vec() };
        let arrow = folder.join(format!("{kind}.arrow"));
        write_arrow_file(&arrow, &batches, Some(arrow_ipc::CompressionType::ZSTD));
        sources.push((format!("arrow file of {kind}"), Source::file(arrow)));
        let stream = write(folder, &format!("{kind}.arrows"), &arrow_stream(&batches));
        sources.push((format!("arrow stream of {kind}"), stream));
    }
    sources
}

#[test]
fn every_format_gives_the_same_texts() {
    let folder = tempfile::tempdir().unwrap();
    for (name, source) in all_formats(folder.path(), &texts()) {
        for block_bytes in [1, 500, 1 << 20] {
            let (seen, places) = read(&source, &options(block_bytes), None).unwrap();
            assert_eq!(seen, texts(), "{name}, blocks of {block_bytes}");
            let content = &places[places.len() - 1].content;
            assert_eq!(content.bytes, fs::metadata(source.name()).unwrap().len(), "{name}");
            assert_eq!(content.xxh3_64.len(), 1, "{name}");
        }
    }
}

#[test]
fn going_on_behind_any_block_gives_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    for (name, source) in all_formats(folder.path(), &texts()) {
        let options = options(900);
        let (_, places) = read(&source, &options, None).unwrap();
        assert!(places.len() > 5, "{name}");
        for resume in places.iter().step_by(3) {
            let done = resume.position.record as usize - 1;
            let (rest, ends) = read(&source, &options, Some(resume)).unwrap();
            assert_eq!(rest, texts()[done..], "{name} behind {done}");
            if let Some(end) = ends.last() {
                assert_eq!(end.content, places[places.len() - 1].content, "{name}");
                assert_eq!(end.position, places[places.len() - 1].position, "{name}");
            }
        }
    }
}

#[test]
fn lists_nested_columns_and_nulls_of_tables() {
    let folder = tempfile::tempdir().unwrap();
    let texts: Vec<String> = ["a|b", "c"].map(str::to_owned).to_vec();
    let list = folder.path().join("list.parquet");
    write_parquet(&list, &[batch(column("list", &texts))], parquet::basic::Compression::UNCOMPRESSED, 10);
    assert_eq!(read(&Source::file(list), &options(1), None).unwrap().0, texts);

    let inner = Arc::new(arrow_array::StringArray::from(vec![Some("x"), None, Some("hidden")]));
    let fields = vec![ArrowField::new("text", DataType::Utf8, true)].into();
    let nulls = arrow_array::BooleanArray::from(vec![true, true, false]).values().clone();
    let data: ArrayRef = Arc::new(StructArray::new(fields, vec![inner], Some(nulls.into())));
    let batch = RecordBatch::try_from_iter_with_nullable([("data", data, true)]).unwrap();
    let nested = folder.path().join("nested.parquet");
    write_parquet(&nested, std::slice::from_ref(&batch), parquet::basic::Compression::UNCOMPRESSED, 2);
    let by_path = ReadOptions { keys: Arc::from(["data.text".to_owned()]), ..options(1) };
    let null = "the value of \"data.text\" is null; expected a string or a list of strings";
    let expected = ["x".to_owned(), format!("row 2: {null}"), format!("row 3: {null}")];
    assert_eq!(read(&Source::file(nested.clone()), &by_path, None).unwrap().0, expected);
    let schema = batch.schema();
    let reader = arrow_array::RecordBatchIterator::new([Ok(batch)], schema);
    let batches = Source::batches(PathBuf::from("a table"), Box::new(reader));
    assert_eq!(read(&batches, &by_path, None).unwrap().0, expected);
    assert!(read(&batches, &by_path, None).unwrap_err().to_string().contains("read before"));

    let missing = read(&Source::file(nested.clone()), &options(1), None).unwrap_err().to_string();
    assert!(missing.contains("nested.parquet: no column \"text\"; the columns are \"data\""), "{missing}");
    let whole = ReadOptions { keys: Arc::from(["data".to_owned()]), ..options(1) };
    let kind = read(&Source::file(nested), &whole, None).unwrap_err().to_string();
    assert!(kind.contains("column \"data\" is Struct") && kind.contains("expected strings"), "{kind}");
}

#[test]
fn damaged_and_short_tables_are_errors_that_name_the_file() {
    let folder = tempfile::tempdir().unwrap();
    for (name, source) in all_formats(folder.path(), &texts()) {
        if name == "jsonl" {
            continue; // a cut line is a bad record, not a bad file
        }
        let bytes = fs::read(source.name()).unwrap();
        for cut in [bytes.len() - 1, bytes.len() / 2, 30] {
            if name.starts_with("arrow stream") && cut == bytes.len() - 1 {
                continue; // the end mark of a stream may be missing
            }
            fs::write(source.name(), &bytes[..cut]).unwrap();
            let error = read(&source, &options(900), None).map(|(seen, _)| seen.len());
            let message = error.map_err(|error| error.to_string()).expect_err(&format!("{name} cut to {cut}"));
            assert!(message.contains(source.name().file_name().unwrap().to_str().unwrap()), "{message}");
        }
    }
}

#[test]
fn text_formats_are_read_when_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let book = write(folder.path(), "book.txt", b"\xef\xbb\xbfline one\n\nline two\n");
    let one = ReadOptions { format: Some(Format::Text), ..options(4) };
    assert_eq!(read(&book, &one, None).unwrap().0, ["line one\n\nline two\n"]);
    let lines = ReadOptions { format: Some(Format::TextLines), ..options(4) };
    assert_eq!(read(&book, &lines, None).unwrap().0, ["line one", "line two"]);
    let missing = read(&Source::file(folder.path().join("gone")), &lines, None).unwrap_err().to_string();
    assert!(missing.contains("gone: no such input file"));
}

#[test]
fn a_name_that_disagrees_is_a_warning_and_pipes_cannot_be_tables() {
    let folder = tempfile::tempdir().unwrap();
    let plain = write(folder.path(), "plain.jsonl.gz", &json_lines(&texts()));
    let reader = SourceReader::open(&plain, &options(100), None).unwrap();
    assert!(reader.warning().unwrap().contains("the name promises gzip data, the content is not compressed"));
    let packed = zstd::stream::encode_all(&b"PAR1 and more of it"[..], 1).unwrap();
    let packed = write(folder.path(), "a.parquet.zst", &packed);
    let error = SourceReader::open(&packed, &options(100), None).err().unwrap().to_string();
    assert!(error.contains("parquet data cannot be read from a pipe or a compressed file"), "{error}");
}

proptest! {
    #[test]
    fn ranges_of_a_file_share_its_lines_without_loss_or_overlap(
        lines in proptest::collection::vec("[a-c]{0,30}", 0..30),
        mut cuts in proptest::collection::vec(0_u64..900, 0..5),
        block_bytes in 1_usize..80,
        final_newline in any::<bool>(),
        crlf in any::<bool>(),
        bom in any::<bool>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let end = if crlf { "\r\n" } else { "\n" };
        let mut bytes = lines.iter().map(|line| format!("x{line}{end}")).collect::<String>().into_bytes();
        if bom {
            bytes.splice(0..0, *b"\xef\xbb\xbf");
        }
        if !final_newline && !lines.is_empty() {
            bytes.truncate(bytes.len() - end.len());
        }
        let source = write(folder.path(), "a.txt", &bytes);
        let options = ReadOptions { format: Some(Format::TextLines), ..options(block_bytes) };
        cuts.extend([0, u64::MAX]);
        cuts.sort_unstable();
        let mut seen = Vec::new();
        for pair in cuts.windows(2) {
            let reader = SourceReader::open_range(&source, &options, None, pair[0]..pair[1]).unwrap();
            let (texts, places) = collect(reader, &options).unwrap();
            for resume in &places {
                let reader = SourceReader::open_range(&source, &options, Some(resume), pair[0]..pair[1]).unwrap();
                let (rest, _) = collect(reader, &options).unwrap();
                let done = resume.position.record as usize - 1;
                prop_assert_eq!(&rest[..], &texts[done.min(texts.len())..]);
            }
            seen.extend(texts);
        }
        let expected: Vec<String> = lines.iter().map(|line| format!("x{line}")).collect();
        prop_assert_eq!(seen, expected);
    }
}

#[test]
fn positions_start_at_the_first_record() {
    assert_eq!(Position::START, Position { offset: 0, record: 1, counted_from: 0 });
    let _ = Schema::empty();
}
