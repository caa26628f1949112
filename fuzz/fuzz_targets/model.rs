//! Any SentencePiece `.model`, as bytes and as pieces in a well-formed message: an error, or a tokenizer whose ids lie in its
//! vocabulary and do not depend on what was encoded before.
#![no_main]

use libfuzzer_sys::fuzz_target;
use megaflow_tokenize::{EncodeOptions, Tokenizer};

fn field(number: u8, content: &[u8], out: &mut Vec<u8>) {
    out.push(number << 3 | 2);
    let mut len = content.len();
    while len >= 128 {
        out.push(len as u8 | 128);
        len >>= 7;
    }
    out.push(len as u8);
    out.extend_from_slice(content);
}

/// The message of pieces with their scores and kinds, of a model kind, and of a normaliser's three switches.
fn message(pieces: &[(String, f32, u8)], kind: u8, switches: u8) -> Vec<u8> {
    let mut model = Vec::new();
    let unknown = ("<unk>".to_owned(), 0.0, 1);
    for (text, score, kind) in std::iter::once(&unknown).chain(pieces) {
        let mut piece = Vec::new();
        field(1, text.as_bytes(), &mut piece);
        piece.push(2 << 3 | 5);
        piece.extend_from_slice(&score.to_le_bytes());
        piece.extend([3 << 3, 1 + kind % 6]);
        field(1, &piece, &mut model);
    }
    field(2, &[3 << 3, 1 + kind % 4, 35 << 3 & 0x7F | 0x80, 2, switches >> 3 & 1, 24 << 3 & 0x7F | 0x80, 1, switches >> 4 & 1], &mut model);
    field(3, &[3 << 3, switches & 1, 4 << 3, switches >> 1 & 1, 5 << 3, switches >> 2 & 1], &mut model);
    model
}

fn check(model: &[u8], texts: [&str; 2]) {
    let Ok(tokenizer) = Tokenizer::from_sentencepiece(model) else { return };
    let mut used = tokenizer.encoder(EncodeOptions::default()).expect("valid options");
    for text in texts.iter().chain(&texts) {
        let mut fresh = tokenizer.encoder(EncodeOptions::default()).expect("valid options");
        let (mut first, mut second) = (Vec::new(), Vec::new());
        let results = [used.encode(text, &mut first), fresh.encode(text, &mut second)];
        assert_eq!(results[0].is_ok(), results[1].is_ok());
        if results[0].is_ok() {
            assert_eq!(first, second);
            assert!(first.iter().all(|&id| u64::from(id) < tokenizer.vocab_size()));
            let _ = tokenizer.decode(&first);
        }
    }
}

fuzz_target!(|input: (&[u8], Vec<(String, f32, u8)>, [u8; 2], &str)| {
    let (raw, pieces, [kind, switches], text) = input;
    let words: String = pieces.iter().map(|(text, ..)| text.as_str()).collect();
    check(raw, [text, &words]);
    check(&message(&pieces, kind, switches), [text, &words]);
});
