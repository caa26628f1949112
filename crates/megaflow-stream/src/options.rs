//! What a stream is to do.

use std::ops::Range;

use megaflow_source::Format;
use megaflow_tokenize::EncodeOptions;
use xxhash_rust::xxh3::Xxh3;

use crate::StreamError;

/// What a record that is no document does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnBadRecord {
    /// The stream ends with an error at its place.
    Error,
    /// It is skipped and counted.
    Skip {
        /// How many are allowed.
        limit: Option<u64>,
    },
}

/// What a stream is to do.
#[derive(Debug, Clone)]
pub struct StreamOptions {
    /// Tokens that the model sees of one sample; a sample has one more.
    pub seq_len: usize,
    /// Of all shuffles.
    pub seed: u64,
    /// Whether shards and documents are shuffled; else they come in input order.
    pub shuffle: bool,
    /// Tokens of the documents that are shuffled together.
    pub window_tokens: usize,
    /// Shards that are read side by side.
    pub interleave: usize,
    /// Bytes of a shard, about: a large file is cut into several where it can be.
    pub shard_bytes: u64,
    /// Times that the inputs are read; `None` has no end.
    pub epochs: Option<u64>,
    /// Whether the tokens left over at the very end make one more sample, padded.
    pub keep_partial: bool,
    /// What fills up the short sample.
    pub pad_id: i64,
    /// The key of the text.
    pub key: String,
    /// What the inputs are; `None` lets their first bytes decide.
    pub format: Option<Format>,
    /// Whether bytes that are not UTF-8 become U+FFFD, and do not make a record bad.
    pub replace_invalid_utf8: bool,
    /// Id appended to each document.
    pub append_eod: Option<u32>,
    /// What a record that is no document does.
    pub on_bad_record: OnBadRecord,
    /// Which documents are read: those whose [`text_share`] lies in it. `None` takes all.
    pub part: Option<Range<u64>>,
    /// How texts are encoded.
    pub encode: EncodeOptions,
    /// Threads that read and tokenize.
    pub num_threads: usize,
    /// Bytes of input that a thread takes at a time.
    pub block_bytes: usize,
}

/// Where a document lies between 0 and 2^32 - 1, from its text alone: spread evenly, and equal texts alike, so that a text
/// and its copies fall into one part of the data whatever file or row they stand in.
pub fn text_share<'a>(texts: impl Iterator<Item = &'a str>) -> u64 {
    let mut hash = Xxh3::new();
    for text in texts {
        hash.update(&(text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    }
    hash.digest() >> 32
}

impl StreamOptions {
    /// Options that make no sense.
    pub(crate) fn check(&self) -> Result<(), StreamError> {
        let checks = [
            ("seq_len", self.seq_len as u64, 1, 1 << 31),
            ("shuffle_window", self.window_tokens as u64, 1, 1 << 40),
            ("interleave", self.interleave as u64, 1, 1 << 16),
            ("shard_bytes", self.shard_bytes, 1, u64::MAX),
            ("epochs", self.epochs.unwrap_or(1), 1, u64::MAX),
            ("num_threads", self.num_threads as u64, 1, 1 << 10),
            ("block_bytes", self.block_bytes as u64, 1, 1 << 40),
        ];
        for (setting, found, low, high) in checks {
            if !(low..=high).contains(&found) {
                let expected = if found < low { "1 or more" } else { "a smaller number" };
                return Err(StreamError::BadSetting { setting, expected, found });
            }
        }
        Ok(())
    }
}
