//! What the tests of this crate share: where the test data is, and texts to try.
#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::path::PathBuf;

use megaflow_tokenize::{EncodeOptions, SpecialTokensInText, Tokenizer};

/// The folder that `MEGAFLOW_SHARED` names, or `../shared`; `None` (and a line that says so) if it is not there.
pub(crate) fn shared() -> Option<PathBuf> {
    let beside = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared");
    let folder = std::env::var_os("MEGAFLOW_SHARED").map_or_else(|| PathBuf::from(beside), PathBuf::from);
    if folder.join("data/tokenizers").is_dir() {
        return Some(folder.join("data"));
    }
    println!("skipped: {} holds no test data; set MEGAFLOW_SHARED", folder.display());
    None
}

/// Texts of a corpus of the test data, every `step`-th document.
pub(crate) fn corpus(name: &str, step: usize) -> Vec<String> {
    let Some(data) = shared() else { return Vec::new() };
    let file = match name {
        "multilingual" => data.join("corpora/multilingual/multi.jsonl"),
        _ => data.join(format!("corpora/{name}/{name}.jsonl")),
    };
    let lines = fs::read_to_string(file).unwrap();
    let text =
        |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["text"].as_str().unwrap().to_owned();
    lines.lines().step_by(step).map(text).collect()
}

/// Ids of a text.
pub(crate) fn encode(tokenizer: &Tokenizer, policy: SpecialTokensInText, text: &str) -> Vec<u32> {
    let options = EncodeOptions { special_tokens_in_text: policy, ..EncodeOptions::default() };
    let mut ids = Vec::new();
    tokenizer.encoder(options).unwrap().encode(text, &mut ids).unwrap();
    ids
}

/// Pieces of text in which tokenizers differ.
pub(crate) const PIECES: &[&str] = &[
    "a",
    "the",
    " the",
    "Hello",
    "s",
    "t",
    "'",
    "'s",
    "'S",
    "'ll",
    "'RE",
    "\u{17F}",
    " ",
    "  ",
    "    ",
    "\n",
    "\r\n",
    "\n\n",
    "\t",
    "\u{A0}",
    "\u{3000}",
    "\u{85}",
    "\u{2028}",
    "0",
    "12",
    "123",
    "1234567",
    "\u{661}",
    "\u{BD}",
    "!",
    ".",
    "...",
    "(",
    "()",
    ");",
    "//",
    "_",
    "-",
    "\u{2019}",
    "\u{1F600}",
    "\u{1F468}\u{200D}\u{1F469}\u{200D}\u{1F467}",
    "\u{E9}",
    "e\u{301}",
    "\u{4E2D}\u{6587}",
    "\u{3042}\u{30AB}",
    "\u{D55C}\u{AD6D}",
    "\u{915}\u{93F}",
    "\u{645}\u{631}",
    "\u{FEFF}",
    "\0",
    "\u{7F}",
    "\u{2581}",
    "<|endoftext|>",
    "<s>",
    "</s>",
    "<0x41>",
    "\u{10FFFF}",
    "\u{FB01}",
    "\u{212B}",
    "def f(x):\n    return x\n",
    "https://a.b/c?d=e",
    "aaaaaaaaaaaaaaaa",
    "================",
    "ABCdef",
    "camelCase",
    "\u{1100}\u{1161}",
    "\u{E000}",
];
