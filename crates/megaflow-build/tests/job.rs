//! Whole jobs on small files.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use std::time::Duration;

use megaflow_build::{BuildError, EmptyDocuments, JobInput, JobOptions, OnBadRecord, Provenance, Report, preprocess};
use megaflow_indexed::IndexedDataset;
use megaflow_source::Source;
use megaflow_tokenize::{EncodeOptions, Tokenizer};

const EOD: u32 = 3;

fn tokenizer() -> Tokenizer {
    let json =
        br#"{"added_tokens": [{"id": 3, "content": "<e>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true}], "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2, "<e>": 3}, "unk_token": "[UNK]"}}"#;
    Tokenizer::from_tokenizer_json(json).unwrap()
}

fn options(folder: &Path, content: &str) -> JobOptions {
    let input = folder.join("in.jsonl");
    fs::write(&input, content).unwrap();
    JobOptions {
        inputs: vec![input_of(input)],
        format: None,
        replace_invalid_utf8: false,
        every: None,
        sentences: None,
        output_prefix: folder.join("out"),
        json_keys: vec!["text".to_owned()],
        append_eod: Some(EOD),
        empty_documents: EmptyDocuments::Boundary,
        on_bad_record: OnBadRecord::Error,
        max_bad_records: None,
        encode: EncodeOptions::default(),
        threads: 1,
        block_bytes: 64,
        restart: false,
        journal_every: Duration::from_secs(3600),
        allow_no_documents: false,
        provenance: Provenance::default(),
    }
}

fn input_of(path: PathBuf) -> JobInput {
    JobInput { source: Source::file(path), range: None }
}

fn run(options: &JobOptions) -> Result<Report, BuildError> {
    preprocess(options, &tokenizer(), &mut |_| ControlFlow::Continue(()))
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Sequences of each document.
fn documents(prefix: &Path) -> Vec<Vec<Vec<i64>>> {
    let set = IndexedDataset::open(prefix).unwrap();
    let sequence = |index| {
        let mut tokens = vec![0; set.sequence_len(index).unwrap()];
        set.read_tokens(index, 0, &mut tokens).unwrap();
        tokens
    };
    (0..set.num_documents()).map(|d| set.document_bounds(d).unwrap().map(sequence).collect()).collect()
}

#[test]
fn documents_come_out_in_input_order_whatever_the_threads_and_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let content: String = (0..500).map(|i| format!("{{\"text\": \"{}\"}}\n", "a b ".repeat(i % 17))).collect();
    let mut seen = Vec::new();
    for (threads, block_bytes) in [(1, 1), (1, 1 << 20), (2, 100), (4, 37)] {
        let options = JobOptions { threads, block_bytes, ..options(folder.path(), &content) };
        let report = run(&options).unwrap();
        assert_eq!((report.records, report.pairs[0].2.documents), (500, 500));
        let pair: Vec<Vec<u8>> =
            [".bin", ".idx"].map(|s| fs::read(folder.path().join(format!("out_text_document{s}"))).unwrap()).to_vec();
        seen.push(pair);
    }
    assert!(seen.windows(2).all(|pair| pair[0] == pair[1]));
    let documents = documents(&folder.path().join("out_text_document"));
    assert_eq!(documents[2], [[0, 1, 0, 1, 3]]);
    assert_eq!(
        names(folder.path()),
        ["in.jsonl", "out_text_document.bin", "out_text_document.idx", "out_text_document.json"]
    );
}

#[test]
fn eod_goes_on_the_last_sequence_that_is_not_empty() {
    let folder = tempfile::tempdir().unwrap();
    let content = "{\"text\": [\"a\", \"\", \"b\", \" \"]}\n{\"text\": \"\"}\n\n{\"text\": []}\n";
    run(&options(folder.path(), content)).unwrap();
    let prefix = folder.path().join("out_text_document");
    assert_eq!(documents(&prefix), [vec![vec![0], vec![1, 3]], vec![], vec![]]);
    run(&JobOptions { empty_documents: EmptyDocuments::Eod, ..options(folder.path(), content) }).unwrap();
    assert_eq!(documents(&prefix), [vec![vec![0], vec![1, 3]], vec![vec![3]], vec![vec![3]]]);
    run(&JobOptions { append_eod: None, ..options(folder.path(), content) }).unwrap();
    assert_eq!(documents(&prefix), [vec![vec![0], vec![1]], vec![], vec![]]);
}

#[test]
fn a_bad_record_stops_the_job_and_leaves_an_older_result_alone() {
    let folder = tempfile::tempdir().unwrap();
    run(&options(folder.path(), "{\"text\": \"a\"}\n")).unwrap();
    let before = fs::read(folder.path().join("out_text_document.idx")).unwrap();
    let content = "{\"text\": \"b\"}\n\n{\"body\": \"b\"}\n{\"text\": 1}\n";
    for threads in [1, 4] {
        let options = JobOptions { threads, block_bytes: 1, ..options(folder.path(), content) };
        let message = run(&options).unwrap_err().to_string();
        assert!(message.contains("in.jsonl: line 3 (byte 15): the record has no key \"text\""), "{message}");
        assert_eq!(fs::read(folder.path().join("out_text_document.idx")).unwrap(), before);
        assert!(!folder.path().join("out.partial").exists(), "nothing was durable yet, so nothing is left");
    }
}

#[test]
fn skipped_records_are_counted_written_and_traceable() {
    let folder = tempfile::tempdir().unwrap();
    let content = b"{\"text\": \"a\"}\n\n{\"x\": 1}\nnope\n{\"text\": \"b\"}\n{\"text\": \"\xff\"}\n".to_vec();
    let skip = |options| JobOptions { on_bad_record: OnBadRecord::Skip, block_bytes: 1, threads: 2, ..options };
    let options = skip(options(folder.path(), ""));
    fs::write(options.inputs[0].source.name(), content).unwrap();
    let report = run(&options).unwrap();
    let counts: Vec<_> = report.rejected.iter().map(|(reason, count)| (reason.as_str(), *count)).collect();
    assert_eq!(counts, [("invalid-json", 1), ("invalid-utf8", 1), ("missing-key", 1)]);
    assert_eq!(documents(&folder.path().join("out_text_document")), [[[0, 3]], [[1, 3]]]);
    let rejects = fs::read_to_string(report.rejects_path.unwrap()).unwrap();
    let places: Vec<serde_json::Value> = rejects.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(places.iter().map(|reject| reject["line"].as_u64().unwrap()).collect::<Vec<_>>(), [3, 4, 6]);
    assert_eq!((&places[1]["raw"], places[2]["raw_hex"].as_str().unwrap().len()), (&"nope".into(), 26));
    let sidecar = fs::read(folder.path().join("out_text_document.json")).unwrap();
    let sidecar: serde_json::Value = serde_json::from_slice(&sidecar).unwrap();
    let source = &sidecar["sources"][0];
    assert_eq!(source["lines_without_document"], serde_json::json!([[2, 3], [6, 1]]));
    assert_eq!(
        (&source["num_records"], &source["num_documents"], &source["num_rejected"]),
        (&5.into(), &2.into(), &3.into())
    );
    let limited = JobOptions { max_bad_records: Some(2), ..options };
    assert!(run(&limited).unwrap_err().to_string().contains("line 6 (byte 43): 2 bad records were allowed"));
}

#[test]
fn no_documents_is_an_error_that_counts_what_was_seen() {
    let folder = tempfile::tempdir().unwrap();
    let options = JobOptions { on_bad_record: OnBadRecord::Skip, ..options(folder.path(), "{\"x\": 1}\n\n") };
    let message = run(&options).unwrap_err().to_string();
    assert_eq!(message, "no documents: the input has 1 records, 1 of them bad (missing-key: 1); nothing was written");
    assert_eq!(names(folder.path()), ["in.jsonl"]);
    run(&JobOptions { allow_no_documents: true, ..options }).unwrap();
    assert_eq!(fs::metadata(folder.path().join("out_text_document.idx")).unwrap().len(), 42);
}

/// Stops a job at the `calls`-th report of progress.
fn stop_at(options: &JobOptions, calls: u32) -> Result<Report, BuildError> {
    let mut left = calls;
    preprocess(options, &tokenizer(), &mut |progress| {
        assert!(progress.bytes_done <= progress.bytes_total);
        left -= 1;
        if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
}

#[test]
fn a_stopped_job_goes_on_and_ends_with_the_bytes_of_a_straight_one() {
    let folder = tempfile::tempdir().unwrap();
    let line = |i: usize| {
        if i % 97 == 0 { "nope\n".to_owned() } else { format!("{{\"text\": \"{}\"}}\n", "a b ".repeat(i % 13)) }
    };
    let content: String = (0..30_000).map(line).collect();
    let base = options(folder.path(), &content);
    let skip = JobOptions { on_bad_record: OnBadRecord::Skip, block_bytes: 3000, threads: 2, ..base };
    let straight = JobOptions { output_prefix: folder.path().join("straight"), ..skip.clone() };
    let report = run(&straight).unwrap();
    let (mut stops, mut rounds) = (0, 0);
    for journal_every in [Duration::ZERO, Duration::from_millis(30)] {
        let options = JobOptions { journal_every, ..skip.clone() };
        let finished = loop {
            rounds += 1;
            match stop_at(&options, 1 + rounds % 2) {
                Ok(report) => break report,
                Err(error) => assert!(matches!(error, BuildError::Interrupted), "{error}"),
            }
            assert_eq!(names(folder.path()).iter().filter(|name| name.starts_with("out_text")).count(), 0);
            stops += 1;
        };
        assert_eq!((finished.records, &finished.rejected), (report.records, &report.rejected));
        assert_eq!((finished.text_bytes, finished.input_bytes), (report.text_bytes, report.input_bytes));
        for suffix in ["_text_document.bin", "_text_document.idx", ".rejects.jsonl"] {
            let read = |name: &str| fs::read(folder.path().join(format!("{name}{suffix}"))).unwrap();
            assert_eq!(read("out"), read("straight"), "{suffix}");
        }
        let sidecar = |name: &str| -> serde_json::Value {
            let text = fs::read(folder.path().join(format!("{name}_text_document.json"))).unwrap();
            serde_json::from_slice(&text).unwrap()
        };
        assert_eq!(sidecar("out"), sidecar("straight"));
        assert!(!folder.path().join("out.partial").exists());
        for suffix in [".bin", ".idx", ".json"] {
            fs::remove_file(folder.path().join(format!("out_text_document{suffix}"))).unwrap();
        }
    }
    assert!(stops >= 2, "the job was stopped {stops} times");
}

#[test]
fn a_job_stopped_before_its_first_document_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let options = options(folder.path(), &"{\"text\": \"a b\"}\n".repeat(50));
    let slow = JobOptions { block_bytes: 1 << 20, ..options };
    fs::create_dir(folder.path().join("out.partial")).unwrap();
    let staging = megaflow_indexed::StagingFolder::open(&folder.path().join("out")).unwrap();
    let prefix = folder.path().join("out_text_document");
    let mut writer =
        megaflow_indexed::IndexedWriter::create(&staging, &prefix, megaflow_core::TokenDtype::U16).unwrap();
    let state = writer.checkpoint().unwrap();
    drop(writer);
    let resumed = megaflow_indexed::IndexedWriter::resume(&staging, &prefix, megaflow_core::TokenDtype::U16, &state);
    assert_eq!(resumed.unwrap().finish().unwrap().idx.bytes, 42);
    drop(staging);
    assert_eq!(run(&slow).unwrap().records, 50);
}

#[test]
fn a_journal_of_another_job_is_refused_until_restart() {
    let folder = tempfile::tempdir().unwrap();
    let content = "{\"text\": \"a b a b\"}\n".repeat(400_000);
    let base = JobOptions { block_bytes: 64, threads: 2, ..options(folder.path(), &content) };
    assert!(matches!(stop_at(&base, 1), Err(BuildError::Interrupted)));
    assert!(folder.path().join("out.partial/journal.json").exists());
    let refused = |options: &JobOptions| run(options).unwrap_err().to_string();
    let message = refused(&JobOptions { append_eod: None, ..base.clone() });
    assert!(message.contains("end of document was token 3 and is none") && message.contains("--restart"), "{message}");
    fs::write(folder.path().join("in.jsonl"), "{\"text\": \"a\"}\n").unwrap();
    assert!(refused(&base).contains("in.jsonl has changed since"));
    assert!(folder.path().join("out.partial/journal.json").exists(), "a refusal leaves the work alone");
    assert_eq!(run(&JobOptions { restart: true, ..base }).unwrap().records, 1);
    assert!(!folder.path().join("out.partial").exists());
}

#[test]
fn a_partition_takes_every_nth_line() {
    let folder = tempfile::tempdir().unwrap();
    let content = "{\"text\": \"a\"}\n{\"text\": \"b\"}\n{\"text\": \"a a\"}\n{\"text\": \"b b\"}\n";
    let partition = JobOptions { every: Some((1, 3)), block_bytes: 1, ..options(folder.path(), content) };
    run(&partition).unwrap();
    assert_eq!(documents(&folder.path().join("out_text_document")), [[[1, 3]]]);
    run(&JobOptions { every: Some((0, 3)), ..partition.clone() }).unwrap();
    assert_eq!(documents(&folder.path().join("out_text_document")), [[vec![0, 3]], [vec![1, 1, 3]]]);
    let second = folder.path().join("second.jsonl");
    fs::write(&second, content).unwrap();
    let mut both = JobOptions { every: Some((1, 3)), ..partition };
    both.inputs.push(input_of(second));
    run(&both).unwrap();
    assert_eq!(documents(&folder.path().join("out_text_document")), [[vec![1, 3]], [vec![0, 3]], [vec![1, 1, 3]]]);
}

#[test]
fn several_inputs_and_keys_follow_one_another() {
    let folder = tempfile::tempdir().unwrap();
    let second = folder.path().join("second.jsonl");
    fs::write(&second, "{\"text\": \"b\", \"title\": \"a\"}\n").unwrap();
    let mut options = options(folder.path(), "{\"text\": \"a\", \"title\": \"b b\"}");
    options.inputs.push(input_of(second));
    options.json_keys = vec!["title".to_owned(), "text".to_owned()];
    run(&options).unwrap();
    assert_eq!(documents(&folder.path().join("out_title_document")), [[vec![1, 1, 3]], [vec![0, 3]]]);
    assert_eq!(documents(&folder.path().join("out_text_document")), [[[0, 3]], [[1, 3]]]);
    options.inputs.push(input_of(PathBuf::from("gone.jsonl")));
    assert!(run(&options).unwrap_err().to_string().contains("gone.jsonl: no such input file"));
    options.json_keys.push("text".to_owned());
    assert!(run(&options).unwrap_err().to_string().contains("names a key twice"));
}
