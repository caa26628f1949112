//! Byte pair encoding: vocabulary tables, the miss path, the word cache, the byte-level engine.

mod bytes;
mod cache;
mod engine;
mod heap;
mod long;
mod pairs;
mod trie;
mod vocab;
mod words;

pub(crate) use engine::ByteLevel;
