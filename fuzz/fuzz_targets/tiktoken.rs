//! Any ranks of tiktoken: damaged ones are refused, and the ids of whole ones are those of the definition, by which the two
//! neighbours whose bytes together have the lowest rank merge first.
#![no_main]

use std::collections::HashMap;
use std::fmt::Write as _;

use libfuzzer_sys::fuzz_target;
use megaflow_tokenize::{EncodeOptions, Tokenizer};

const GPT2: &str = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s";

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let number = chunk.iter().fold(0, |number, &byte| number << 8 | usize::from(byte)) << (8 * (3 - chunk.len()));
        for place in 0..4 {
            let digit = char::from(DIGITS[number >> (18 - 6 * place) & 63]);
            text.push(if place <= chunk.len() { digit } else { '=' });
        }
    }
    text
}

fn by_definition(ranks: &HashMap<Vec<u8>, u32>, word: &[u8]) -> Vec<u32> {
    let mut parts: Vec<Vec<u8>> = word.iter().map(|&byte| vec![byte]).collect();
    loop {
        let joined = parts.windows(2).enumerate().filter_map(|(at, two)| Some((*ranks.get(&two.concat())?, at)));
        let Some((_, at)) = joined.min() else { return parts.iter().map(|part| ranks[part]).collect() };
        let right = parts.remove(at + 1);
        parts[at].extend(right);
    }
}

fuzz_target!(|input: (&[u8], Vec<Vec<u8>>, Vec<u8>)| {
    let (raw, tokens, letters) = input;
    let none = HashMap::new();
    if let Ok(tokenizer) = Tokenizer::from_tiktoken(raw, GPT2, &none) {
        let mut ids = Vec::new();
        let mut encoder = tokenizer.encoder(EncodeOptions::default()).expect("valid options");
        let _ = encoder.encode("A text, with 3 words\n\u{4E2D}", &mut ids);
    }
    // Few letters, so that what is merged is met.
    let few = |bytes: &[u8]| bytes.iter().map(|byte| b'a' + byte % 4).collect::<Vec<u8>>();
    let mut ranks: HashMap<Vec<u8>, u32> = (0..=255u8).map(|byte| (vec![byte], u32::from(byte))).collect();
    for token in tokens.iter().filter(|token| (2..40).contains(&token.len())) {
        let next = ranks.len() as u32;
        ranks.entry(few(token)).or_insert(next);
    }
    let mut file = String::new();
    for (token, rank) in &ranks {
        let _ = writeln!(file, "{} {rank}", base64(token));
    }
    let tokenizer = Tokenizer::from_tiktoken(file.as_bytes(), GPT2, &none).expect("whole ranks");
    let mut encoder = tokenizer.encoder(EncodeOptions::default()).expect("valid options");
    let word = few(&letters[..letters.len().min(300)]);
    let text = std::str::from_utf8(&word).expect("letters");
    // tiktoken looks for the whole word first.
    let expected = ranks.get(&word).map_or_else(|| by_definition(&ranks, &word), |&rank| vec![rank]);
    for _ in 0..2 {
        let mut ids = Vec::new();
        encoder.encode(text, &mut ids).expect("all bytes are known");
        assert_eq!(ids, expected, "the second time from the word cache");
    }
});
