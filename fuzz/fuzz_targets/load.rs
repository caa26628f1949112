//! Any bytes as a tokenizer file: an error or a tokenizer, never a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use megaflow_tokenize::{EncodeOptions, Tokenizer};

fuzz_target!(|bytes: &[u8]| {
    let loaded = [
        Tokenizer::from_sentencepiece(bytes),
        Tokenizer::from_tiktoken(bytes, r"\s", &Default::default()), // no known rule
        Tokenizer::from_tokenizer_json(bytes),
    ];
    for tokenizer in loaded.into_iter().flatten() {
        let mut ids = Vec::new();
        if let Ok(mut encoder) = tokenizer.encoder(EncodeOptions::default()) {
            let _ = encoder.encode("A text, with 3 words\n\u{4E2D}", &mut ids);
        }
        let _ = tokenizer.decode(&ids);
    }
});
