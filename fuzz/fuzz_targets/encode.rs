//! Any text, every split rule: the ids of the fast engine are those of the `tokenizers` crate.
#![no_main]

mod byte_level;

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use megaflow_tokenize::{EncodeOptions, Tokenizer};
use tokenizers::Tokenizer as HfTokenizer;

static PAIRS: LazyLock<Vec<(Tokenizer, HfTokenizer)>> = LazyLock::new(|| {
    let load = |spec: String| {
        let own = Tokenizer::from_tokenizer_json(spec.as_bytes()).expect("a valid description");
        (own, HfTokenizer::from_bytes(&spec).expect("a valid description"))
    };
    byte_level::specs().map(load).collect()
});

fuzz_target!(|text: &str| {
    for (own, reference) in PAIRS.iter() {
        let mut ids = Vec::new();
        own.encoder(EncodeOptions::default()).expect("valid options").encode(text, &mut ids).expect("all bytes are known");
        assert_eq!(ids, reference.encode_fast(text, false).expect("all bytes are known").get_ids());
    }
});
