//! Byte pair encoding: vocabulary tables, the miss path, the word cache, the byte-level engine.

mod borders;
mod bytes;
mod cache;
mod engine;
mod heap;
mod long;
mod pairs;
mod small;
mod tiktoken;
mod trie;
mod vocab;
mod words;

pub(crate) use engine::ByteLevel;
pub(crate) use pairs::MAX_TOKENS;
pub(crate) use tiktoken::{Ranks, TiktokenConfig, read_ranks, read_tekken};
pub(crate) use trie::Trie;
pub(crate) use vocab::{Lengths, Merge, Tables, Unknown, VocabSource};
pub(crate) use words::{TokenId, WordEncoder};

/// The token that stands for bytes in a byte-level vocabulary.
#[cfg(test)]
pub(crate) fn token_of(bytes: &[u8]) -> String {
    bytes::ByteAlphabet::new().token(bytes)
}
