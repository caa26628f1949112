//! Whole jobs on small files.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use megaflow_build::{BuildError, EmptyDocuments, JobOptions, OnBadRecord, Provenance, Report, preprocess};
use megaflow_indexed::IndexedDataset;
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
        inputs: vec![input],
        output_prefix: folder.join("out"),
        json_keys: vec!["text".to_owned()],
        append_eod: Some(EOD),
        empty_documents: EmptyDocuments::Boundary,
        on_bad_record: OnBadRecord::Error,
        max_bad_records: None,
        encode: EncodeOptions::default(),
        threads: 1,
        block_bytes: 64,
        allow_no_documents: false,
        provenance: Provenance::default(),
    }
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
        assert!(!folder.path().join("out.partial").exists());
    }
}

#[test]
fn skipped_records_are_counted_written_and_traceable() {
    let folder = tempfile::tempdir().unwrap();
    let content = b"{\"text\": \"a\"}\n\n{\"x\": 1}\nnope\n{\"text\": \"b\"}\n{\"text\": \"\xff\"}\n".to_vec();
    let skip = |options| JobOptions { on_bad_record: OnBadRecord::Skip, block_bytes: 1, threads: 2, ..options };
    let options = skip(options(folder.path(), ""));
    fs::write(&options.inputs[0], content).unwrap();
    let report = run(&options).unwrap();
    let counts: Vec<_> = report.rejected.iter().map(|(reason, count)| (*reason, *count)).collect();
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
    assert!(run(&limited).unwrap_err().to_string().contains("line 6: 2 bad records were allowed"));
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

#[test]
fn a_request_to_stop_ends_the_job_with_nothing_written() {
    let folder = tempfile::tempdir().unwrap();
    let content = "{\"text\": \"a b a b\"}\n".repeat(400_000);
    let options = JobOptions { block_bytes: 64, threads: 2, ..options(folder.path(), &content) };
    let mut calls = 0;
    let stopped = preprocess(&options, &tokenizer(), &mut |progress| {
        calls += 1;
        assert!(progress.bytes_done <= progress.bytes_total);
        ControlFlow::Break(())
    });
    assert!(matches!(stopped, Err(BuildError::Interrupted)));
    assert_eq!((calls, names(folder.path())), (1, vec!["in.jsonl".to_owned()]));
}

#[test]
fn several_inputs_and_keys_follow_one_another() {
    let folder = tempfile::tempdir().unwrap();
    let second = folder.path().join("second.jsonl");
    fs::write(&second, "{\"text\": \"b\", \"title\": \"a\"}\n").unwrap();
    let mut options = options(folder.path(), "{\"text\": \"a\", \"title\": \"b b\"}");
    options.inputs.push(second.clone());
    options.json_keys = vec!["title".to_owned(), "text".to_owned()];
    run(&options).unwrap();
    assert_eq!(documents(&folder.path().join("out_title_document")), [[vec![1, 1, 3]], [vec![0, 3]]]);
    assert_eq!(documents(&folder.path().join("out_text_document")), [[[0, 3]], [[1, 3]]]);
    options.inputs.push(PathBuf::from("gone.jsonl"));
    assert!(run(&options).unwrap_err().to_string().contains("gone.jsonl: no such input file"));
    options.json_keys.push("text".to_owned());
    assert!(run(&options).unwrap_err().to_string().contains("names a key twice"));
}
