//! Any ids decode or are refused; the ids of any text decode to it.
#![no_main]

mod byte_level;

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use megaflow_tokenize::{EncodeOptions, Tokenizer};

static TOKENIZERS: LazyLock<Vec<Tokenizer>> = LazyLock::new(|| {
    let load = |spec: String| Tokenizer::from_tokenizer_json(spec.as_bytes()).expect("a valid description");
    byte_level::specs().map(load).collect()
});

fuzz_target!(|input: (Vec<u32>, Vec<u8>, &str)| {
    let (any, small, text) = input;
    for tokenizer in TOKENIZERS.iter() {
        let outside = any.iter().any(|&id| u64::from(id) >= tokenizer.vocab_size());
        assert_eq!(tokenizer.decode(&any).is_err(), outside);
        let small: Vec<u32> = small.iter().map(|&id| u32::from(id)).collect();
        tokenizer.decode(&small).expect("ids of the vocabulary");
        let mut ids = Vec::new();
        let mut encoder = tokenizer.encoder(EncodeOptions::default()).expect("valid options");
        encoder.encode(text, &mut ids).expect("all bytes are known");
        assert_eq!(tokenizer.decode(&ids).expect("ids of the vocabulary"), text);
    }
});
