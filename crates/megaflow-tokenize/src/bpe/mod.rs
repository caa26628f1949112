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
pub(crate) use tiktoken::{Ranks, TiktokenConfig, read_ranks, read_tekken};
pub(crate) use trie::Trie;
pub(crate) use vocab::{Merge, Tables, Unknown, VocabSource};
pub(crate) use words::{TokenId, WordEncoder};
