//! Samples of made-up text: order, resume, threads, errors.
#![expect(clippy::unwrap_used, reason = "a test ends where its set-up fails")]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use megaflow_core::{SampleError, SampleSource, TokensMut};
use megaflow_source::{RandomAccess, Source};
use megaflow_stream::{OnBadRecord, StreamOptions, StreamSource, StreamState, text_share};
use megaflow_tokenize::{EncodeOptions, Tokenizer};

const EOD: u32 = 100;
const SEQ_LEN: usize = 7;

/// Words `0` to `99`, one id each.
fn tokenizer() -> Tokenizer {
    let vocab: Vec<String> = (0..100).map(|id| format!("\"{id}\": {id}")).collect();
    let json = format!(
        r#"{{"added_tokens": [], "pre_tokenizer": {{"type": "WhitespaceSplit"}},
        "model": {{"type": "WordLevel", "vocab": {{{}, "[UNK]": 101}}, "unk_token": "[UNK]"}}}}"#,
        vocab.join(", ")
    );
    Tokenizer::from_tokenizer_json(json.as_bytes()).unwrap()
}

fn options() -> StreamOptions {
    StreamOptions {
        seq_len: SEQ_LEN,
        seed: 1,
        shuffle: true,
        window_tokens: 300,
        interleave: 3,
        shard_bytes: 400,
        epochs: Some(2),
        keep_partial: true,
        pad_id: -1,
        key: "text".to_owned(),
        format: None,
        replace_invalid_utf8: false,
        append_eod: Some(EOD),
        on_bad_record: OnBadRecord::Error,
        part: None,
        encode: EncodeOptions::default(),
        num_threads: 1,
        block_bytes: 150,
    }
}

/// Two files of documents; document `n` begins with the words `n / 100` and `n % 100`.
fn corpus(folder: &Path) -> Vec<PathBuf> {
    let (mut first, mut second) = (String::new(), String::new());
    for n in 0..230_u32 {
        let file = if n < 150 { &mut first } else { &mut second };
        let words: Vec<String> = (0..n % 9).map(|word| ((n * 7 + word) % 100).to_string()).collect();
        writeln!(file, "{{\"text\": \"{} {} {}\"}}", n / 100, n % 100, words.join(" ")).unwrap();
    }
    let paths = [folder.join("a.jsonl"), folder.join("b.jsonl")];
    std::fs::write(&paths[0], first).unwrap();
    std::fs::write(&paths[1], second).unwrap();
    paths.to_vec()
}

fn open(paths: &[PathBuf], options: StreamOptions, start: Option<StreamState>) -> StreamSource {
    let sources = paths.iter().cloned().map(Source::file).collect();
    StreamSource::open(sources, tokenizer(), options, None, start).unwrap()
}

/// Tokens of a sample, or `None` behind the end.
fn sample(stream: &StreamSource, index: u64) -> Option<Vec<i64>> {
    let mut tokens = vec![0; SEQ_LEN + 1];
    loop {
        match stream.read_into(index, TokensMut::I64(&mut tokens)) {
            Ok(()) => return Some(tokens),
            Err(SampleError::OutOfRange { .. }) => return None,
            Err(SampleError::NotReady { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

fn all(stream: &StreamSource, first: u64) -> Vec<Vec<i64>> {
    let mut rows = Vec::new();
    loop {
        let index = first + rows.len() as u64;
        stream.announce(index);
        match sample(stream, index) {
            Some(row) => rows.push(row),
            None => return rows,
        }
        stream.received(index + 1);
    }
}

fn documents(rows: &[Vec<i64>]) -> Vec<Vec<i64>> {
    let tokens = rows.iter().enumerate().flat_map(|(at, row)| row[usize::from(at > 0)..].iter().copied());
    let tokens: Vec<i64> = tokens.filter(|&token| token >= 0).collect();
    tokens.split_inclusive(|&token| token == i64::from(EOD)).map(<[i64]>::to_vec).collect()
}

#[test]
fn every_document_comes_once_an_epoch_and_epochs_differ() {
    let folder = tempfile::tempdir().unwrap();
    let paths = corpus(folder.path());
    let found = documents(&all(&open(&paths, options(), None), 0));
    assert_eq!(found.len(), 460);
    let numbers = |documents: &[Vec<i64>]| -> Vec<i64> { documents.iter().map(|ids| ids[0] * 100 + ids[1]).collect() };
    let (first, second) = (numbers(&found[..230]), numbers(&found[230..]));
    assert_ne!(first, second);
    for epoch in [first, second] {
        let mut sorted = epoch.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..230).collect::<Vec<_>>());
        assert_ne!(epoch, sorted);
    }
}

#[test]
fn parts_share_the_documents_out_by_their_text() {
    let folder = tempfile::tempdir().unwrap();
    let paths = corpus(folder.path());
    let once = || StreamOptions { epochs: Some(1), ..options() };
    let whole = documents(&all(&open(&paths, once(), None), 0));
    let cut = 3 << 30; // three quarters
    let parts: Vec<_> = [0..cut, cut..1 << 32]
        .into_iter()
        .map(|part| {
            let other = StreamOptions { part: Some(part), seed: 9, block_bytes: 70, ..once() };
            documents(&all(&open(&paths, other, None), 0))
        })
        .collect();
    assert!((150..195).contains(&parts[0].len()), "{}", parts[0].len());
    let mut joined: Vec<_> = parts.concat();
    let mut expected = whole;
    joined.sort();
    expected.sort();
    assert_eq!(joined, expected);
    let nothing = StreamOptions { part: Some(5..5), ..once() };
    let error = open(&paths, nothing, None).read_into(0, TokensMut::I64(&mut [0; SEQ_LEN + 1])).unwrap_err();
    assert!(error.to_string().contains("hold no document of the part"), "{error}");
    assert_eq!(text_share(["ab", "c"].into_iter()), text_share(["ab", "c"].into_iter()));
    assert_ne!(text_share(["ab", "c"].into_iter()), text_share(["a", "bc"].into_iter()));
}

#[test]
fn a_stream_opened_at_any_position_goes_on_exactly() {
    let folder = tempfile::tempdir().unwrap();
    let paths = corpus(folder.path());
    let stream = open(&paths, options(), None);
    let mut straight = Vec::new();
    let mut states = vec![stream.position(0).unwrap()];
    while let Some(row) = sample(&stream, straight.len() as u64) {
        straight.push(row);
        let behind = straight.len() as u64;
        stream.received(behind);
        states.push(stream.position(behind).unwrap());
    }
    assert!(straight.len() > 300);
    for (place, state) in states.iter().enumerate().step_by(5) {
        let text = serde_json::to_string(state).unwrap();
        let state: StreamState = serde_json::from_str(&text).unwrap();
        let threads = StreamOptions { num_threads: 1 + place % 3, block_bytes: 90 + place, ..options() };
        let resumed = open(&paths, threads, Some(state));
        let rest: Vec<_> =
            (place..(place + 40).min(straight.len())).map(|index| sample(&resumed, index as u64).unwrap()).collect();
        assert_eq!(rest, straight[place..place + rest.len()], "at {place}");
    }
}

#[test]
fn a_sample_that_was_passed_over_is_gone_and_told() {
    let folder = tempfile::tempdir().unwrap();
    let stream = open(&corpus(folder.path()), options(), None);
    // Rank 1 of 2: every other sample is another rank's.
    for index in (1..40).step_by(2) {
        stream.announce(index);
    }
    assert!(sample(&stream, 39).is_some());
    let error = stream.read_sample(4, &mut [0; SEQ_LEN + 1]).unwrap_err().to_string();
    assert!(error.contains("goes forward only"), "{error}");
    stream.received(40);
    assert!(stream.read_sample(39, &mut [0; SEQ_LEN + 1]).is_err());
    assert!(stream.position(39).is_err() && stream.position(40).is_ok());
}

#[test]
fn closing_does_not_wait_for_a_consumer() {
    let folder = tempfile::tempdir().unwrap();
    let endless = StreamOptions { epochs: None, ..options() };
    let stream = open(&corpus(folder.path()), endless, None);
    assert!(sample(&stream, 5).is_some());
    let started = Instant::now();
    drop(stream);
    assert!(started.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_state_that_does_not_fit_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let paths = corpus(folder.path());
    let state = open(&paths, options(), None).position(0).unwrap();
    let sources = || paths.iter().cloned().map(Source::file).collect::<Vec<_>>();
    let refused = |state: StreamState| {
        StreamSource::open(sources(), tokenizer(), options(), None, Some(state)).err().unwrap().to_string()
    };
    let mut fewer = state.clone();
    fewer.window.lanes.pop();
    assert!(refused(fewer).contains("2 shards side by side, the inputs have 3"));
    assert!(refused(StreamState { version: 9, ..state.clone() }).contains("version 9"));
    let behind = open(&paths, options(), Some(StreamState { document: 5000, ..state }));
    let error = loop {
        match behind.read_sample(0, &mut [0; SEQ_LEN + 1]).unwrap_err() {
            SampleError::NotReady { .. } => {}
            error => break error.to_string(),
        }
    };
    assert!(error.contains("no token 0 of document 5000"), "{error}");
}

/// A remote file whose next read tells that it has begun and then lasts until the gate opens.
struct Blocked {
    begun: mpsc::SyncSender<()>,
    gate: Mutex<mpsc::Receiver<()>>,
}

impl RandomAccess for Blocked {
    fn size_bytes(&self) -> u64 {
        1 << 30
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<usize> {
        if offset >= 1 << 20 {
            let _ = self.begun.try_send(());
            let _ = self.gate.lock().unwrap().recv();
        }
        let line = b"{\"text\": \"1 2 3\"}\n";
        (offset..).zip(&mut *buffer).for_each(|(at, byte)| *byte = line[at as usize % line.len()]);
        Ok(buffer.len())
    }
}

#[test]
fn the_end_of_a_stream_does_not_wait_for_a_source_that_blocks() {
    let (begun, has_begun) = mpsc::sync_channel(1);
    let (open_gate, gate) = mpsc::channel::<()>();
    let access = Arc::new(Blocked { begun, gate: Mutex::new(gate) });
    let watched = Arc::downgrade(&access);
    let source = Source::remote("blocked.jsonl".into(), access);
    let options = StreamOptions { shuffle: false, shard_bytes: 1 << 40, block_bytes: 1 << 16, ..options() };
    let stream = StreamSource::open(vec![source], tokenizer(), options, None, None).unwrap();
    assert_eq!(sample(&stream, 0), Some(vec![1, 2, 3, 100, 1, 2, 3, 100]));
    stream.announce(1 << 40); // every block is wanted
    has_begun.recv().unwrap();
    drop(stream);
    assert!(watched.strong_count() > 0, "the thread was left behind with its source");
    drop(open_gate);
    let begin = Instant::now();
    while watched.strong_count() > 0 {
        assert!(begin.elapsed() < Duration::from_secs(30), "the thread ends once its source comes back");
        std::thread::sleep(Duration::from_millis(1));
    }
}
