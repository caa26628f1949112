//! Small byte-level tokenizers, one for each split rule.

use serde_json::json;

/// Split rules of GPT-2, Llama 3, Qwen 2 and o200k.
const PATTERNS: [&str; 4] = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// Characters that stand for the 256 bytes in byte-level vocabularies.
fn alphabet() -> Vec<char> {
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut next = 0x100u32;
    (0..=255u8)
        .map(|byte| {
            if printable(&byte) {
                return char::from(byte);
            }
            next += 1;
            char::from_u32(next - 1).expect("below the surrogates")
        })
        .collect()
}

/// Texts of `tokenizer.json`.
pub fn specs() -> impl Iterator<Item = String> {
    let chars = alphabet();
    let mut vocab: Vec<String> = chars.iter().map(char::to_string).collect();
    let mut merges = Vec::new();
    for pair in ["\u{120}t", "he", "in", "\u{120}\u{120}", "\u{10A}\u{10A}", "th", "'s", "re", "\u{E3}\u{123}", "12", "()"] {
        let (left, right) = pair.split_at(pair.chars().next().map_or(0, char::len_utf8));
        merges.push(json!([left, right]));
        vocab.push(pair.to_owned());
    }
    let vocab: serde_json::Map<_, _> = vocab.into_iter().zip(0..).map(|(token, id): (_, u32)| (token, json!(id))).collect();
    PATTERNS.iter().map(move |pattern| {
        json!({"version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null,
            "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
                {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]},
            "model": {"type": "BPE", "vocab": vocab, "merges": merges}})
        .to_string()
    })
}
