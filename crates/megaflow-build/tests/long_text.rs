//! One giant document is tokenized by all threads, and its ids do not tell.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(clippy::print_stdout, reason = "says why it skips")]

use std::fs;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Duration;

use megaflow_build::{EmptyDocuments, JobInput, JobOptions, OnBadRecord, Provenance, preprocess};
use megaflow_source::Source;
use megaflow_tokenize::{EncodeOptions, Tokenizer, TokenizerFiles};

/// GPT-2's tokenizer and the texts of the corpus of prose, from the test data.
fn data() -> Option<(Tokenizer, Vec<String>)> {
    let beside = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared");
    let shared = std::env::var_os("MEGAFLOW_SHARED").map_or_else(|| PathBuf::from(beside), PathBuf::from);
    let tokenizer = shared.join("data/tokenizers/gpt2/tokenizer.json");
    if !tokenizer.is_file() {
        println!("skipped: {} holds no test data; set MEGAFLOW_SHARED", shared.display());
        return None;
    }
    let corpus = fs::read_to_string(shared.join("data/corpora/prose/prose.jsonl")).unwrap();
    let text =
        |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["text"].as_str().unwrap().to_owned();
    Some((TokenizerFiles::from_path(&tokenizer).unwrap().tokenizer, corpus.lines().map(text).collect()))
}

/// The `.bin` of a job over `texts`, and the special tokens that it counted.
fn job(tokenizer: &Tokenizer, texts: &[&str], threads: usize) -> (Vec<u8>, u64) {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.jsonl");
    let lines: String = texts.iter().map(|text| serde_json::json!({"text": text}).to_string() + "\n").collect();
    fs::write(&input, lines).unwrap();
    let options = JobOptions {
        inputs: vec![JobInput { source: Source::file(input), range: None }],
        format: None,
        replace_invalid_utf8: false,
        every: None,
        sentences: None,
        output_prefix: folder.path().join("out"),
        json_keys: vec!["text".to_owned()],
        append_eod: Some(50256),
        empty_documents: EmptyDocuments::Boundary,
        on_bad_record: OnBadRecord::Error,
        max_bad_records: None,
        encode: EncodeOptions::default(),
        threads,
        block_bytes: 1 << 16,
        restart: false,
        journal_every: Duration::from_secs(3600),
        allow_no_documents: false,
        provenance: Provenance::default(),
    };
    let report = preprocess(&options, tokenizer, &mut |_| ControlFlow::Continue(())).unwrap();
    (fs::read(folder.path().join("out_text_document.bin")).unwrap(), report.special_hits)
}

/// What one encoder makes of the texts, without cuts.
fn expected(tokenizer: &Tokenizer, texts: &[&str]) -> Vec<u8> {
    let mut encoder = tokenizer.encoder(EncodeOptions::default()).unwrap();
    let mut ids = Vec::new();
    for text in texts {
        encoder.encode_u16(text, &mut ids).unwrap();
        ids.push(50256);
    }
    ids.into_iter().flat_map(u16::to_le_bytes).collect()
}

#[test]
fn a_giant_document_has_the_same_ids_whatever_the_threads() {
    let Some((tokenizer, corpus)) = data() else { return };
    let real: String = corpus.concat().chars().take(5_000_000).collect();
    let real = format!("{real}<|endoftext|> and on: {real}<|endoftext|>");
    let parts = tokenizer.parts(&real, EncodeOptions::default()).count();
    assert!(parts > 20, "real text is cut: {parts} parts of {} bytes", real.len());
    let uncut: String = "x1\n<|endoftext|>y\t".chars().cycle().take(3_000_000).collect();
    assert_eq!(tokenizer.parts(&uncut, EncodeOptions::default()).count(), 1, "no safe cut");
    let texts = ["one", &real, "two words", &uncut, &corpus[0]];
    let whole = expected(&tokenizer, &texts);
    let hits = uncut.matches("<|endoftext|>").count() as u64 + 2;
    for threads in [1, 2, 4] {
        let (bytes, counted) = job(&tokenizer, &texts, threads);
        assert!(bytes == whole, "{threads} threads: {} bytes, expected {}", bytes.len(), whole.len());
        assert_eq!(counted, hits, "{threads} threads");
    }
}
