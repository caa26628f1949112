//! Any text, every split rule: the ids of the parts of a text, cut where the tokenizer allows it, are those of the whole.
#![no_main]

mod byte_level;

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use megaflow_tokenize::{EncodeOptions, Tokenizer};

static TOKENIZERS: LazyLock<Vec<Tokenizer>> = LazyLock::new(|| {
    let load = |spec: String| Tokenizer::from_tokenizer_json(spec.as_bytes()).expect("a valid description");
    byte_level::specs().map(load).collect()
});

fuzz_target!(|input: (u8, &str)| {
    let (step, text) = (usize::from(input.0), input.1);
    for tokenizer in TOKENIZERS.iter() {
        let encode = |text: &str, ids: &mut Vec<u32>| {
            let mut encoder = tokenizer.encoder(EncodeOptions::default()).expect("valid options");
            encoder.encode(text, ids).expect("all bytes are known");
        };
        let (mut whole, mut parts, mut rest) = (Vec::new(), Vec::new(), text);
        encode(text, &mut whole);
        while let Some(cut) = tokenizer.cut_point(rest, step) {
            assert!(cut > 0 && cut < rest.len(), "cut {cut} of {}", rest.len());
            let (part, behind) = rest.split_at(cut);
            encode(part, &mut parts);
            rest = behind;
        }
        encode(rest, &mut parts);
        assert_eq!(whole, parts);
    }
});
