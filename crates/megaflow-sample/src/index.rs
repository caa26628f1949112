//! Document, sample and shuffle index, bit for bit those of Megatron-LM.

use std::ops::Range;

use megaflow_core::mix;
use megaflow_indexed::IndexedDataset;

use crate::cache::{CacheOutcome, CachePlace, CacheWriter, Cached};
use crate::column::Column;
use crate::error::BuildError;

mod plan;

use plan::Plan;

/// Where the lengths of sequences come from.
pub trait SequenceLengths {
    /// Number of sequences.
    fn num_sequences(&self) -> usize;

    /// Tokens of sequence `index`, which is below [`num_sequences`](Self::num_sequences). Negative in a damaged file.
    fn length(&self, index: usize) -> i32;
}

impl SequenceLengths for [i32] {
    fn num_sequences(&self) -> usize {
        self.len()
    }

    #[inline]
    fn length(&self, index: usize) -> i32 {
        self[index]
    }
}

impl SequenceLengths for IndexedDataset {
    fn num_sequences(&self) -> usize {
        self.num_sequences()
    }

    #[inline]
    fn length(&self, index: usize) -> i32 {
        self.raw_length(index)
    }
}

/// What determines the index, beside the lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexConfig {
    /// Tokens of a sample, without the extra token.
    pub seq_len: usize,
    /// Samples that must be reached, by repeating the sequences; `None` is one epoch.
    pub num_samples: Option<u64>,
    /// Seed of the shuffles.
    pub seed: u32,
    /// Whether samples overlap by one token, whose shift makes the labels.
    pub add_extra_token: bool,
    /// Whether the tokens left over at the end make one more, shorter sample. Megatron offers it for the valid split.
    pub keep_partial: bool,
}

/// Rows (position in the document index, offset in that sequence): sample k reaches from row k to row k + 1. Flat, two
/// values a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SampleIndex {
    /// The document index has at most 2^31 - 1 entries.
    I32(Column<i32>),
    /// It has more.
    I64(Column<i64>),
}

impl SampleIndex {
    /// Row `index`, if it exists.
    #[inline]
    pub fn row(&self, index: usize) -> Option<(usize, i64)> {
        let at = index.checked_mul(2)?;
        match self {
            Self::I32(rows) => Some((rows.get(at)? as usize, i64::from(rows.get(at + 1)?))),
            Self::I64(rows) => Some((rows.get(at)? as usize, rows.get(at + 1)?)),
        }
    }

    /// Number of rows: one more than samples.
    pub fn num_rows(&self) -> usize {
        match self {
            Self::I32(rows) => rows.len() / 2,
            Self::I64(rows) => rows.len() / 2,
        }
    }
}

/// Order in which the samples are handed out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ShuffleIndex {
    /// Fewer than 2^32 - 2 samples.
    U32(Column<u32>),
    /// More.
    I64(Column<i64>),
}

impl ShuffleIndex {
    /// Sample at position `index`, if it exists.
    #[inline]
    pub fn get(&self, index: usize) -> Option<usize> {
        match self {
            Self::U32(order) => order.get(index).map(|sample| sample as usize),
            Self::I64(order) => order.get(index).map(|sample| sample as usize),
        }
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        match self {
            Self::U32(order) => order.len(),
            Self::I64(order) => order.len(),
        }
    }

    /// Whether there is no sample.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The three arrays of one split of one dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GptIndex {
    /// Sequence numbers in the order in which their tokens are cut into samples, all epochs one after the other.
    pub document_index: Column<i32>,
    /// Where each sample begins and ends in that order.
    pub sample_index: SampleIndex,
    /// The order of the samples.
    pub shuffle_index: ShuffleIndex,
    /// Times that the sequences are repeated.
    pub num_epochs: u64,
    /// Whether the last epoch is shuffled apart, behind all others.
    pub separate_last_epoch: bool,
    /// Tokens of the sequences.
    pub tokens_per_epoch: u64,
}

impl GptIndex {
    /// Lays out the samples of `sequences`.
    ///
    /// # Errors
    /// [`BuildError`] if a setting is out of range, a length is negative, samples are asked of sequences without
    /// tokens, or the arrays do not fit into memory.
    ///
    /// # Panics
    /// If `sequences` reaches beyond the sequences of `lengths`.
    pub fn build<L: SequenceLengths + ?Sized>(
        lengths: &L,
        sequences: Range<usize>,
        config: &IndexConfig,
    ) -> Result<Self, BuildError> {
        Plan::new(lengths, sequences, config)?.build(lengths, config.seed, 1)
    }

    /// As [`build`](Self::build), on up to `num_threads` threads and kept in `cache`. The bits are the same.
    ///
    /// # Errors
    /// As [`build`](Self::build). A cache that cannot be used is no error.
    ///
    /// # Panics
    /// As [`build`](Self::build).
    pub fn build_with<L: SequenceLengths + Sync + ?Sized>(
        lengths: &L,
        sequences: Range<usize>,
        config: &IndexConfig,
        num_threads: usize,
        cache: Option<&CachePlace>,
    ) -> Result<(Self, Option<CacheOutcome>), BuildError> {
        let plan = Plan::new(lengths, sequences.clone(), config)?;
        let build = || plan.build(lengths, config.seed, num_threads);
        let Some(place) = cache else { return Ok((build()?, None)) };
        // Megatron's description names the pair and not its content; the index depends on the lengths and nothing else.
        let content = format!("{}lengths {:016x}\n", place.content, hash_lengths(lengths, sequences));
        let place = &CachePlace { content, ..place.clone() };
        let (index, outcome) =
            place.open_or_build(&|| plan.open(place), &|index| plan.compare(lengths, index), &build)?;
        Ok((index, Some(outcome)))
    }
}

impl Cached for GptIndex {
    fn save(&self, writer: &CacheWriter<'_>) -> std::io::Result<()> {
        writer.array("document_index", &self.document_index, 1)?;
        match &self.sample_index {
            SampleIndex::I32(rows) => writer.array("sample_index", rows, 2)?,
            SampleIndex::I64(rows) => writer.array("sample_index", rows, 2)?,
        }
        match &self.shuffle_index {
            ShuffleIndex::U32(order) => writer.array("shuffle_index", order, 1),
            ShuffleIndex::I64(order) => writer.array("shuffle_index", order, 1),
        }
    }
}

/// A hash of the lengths and their order.
fn hash_lengths<L: SequenceLengths + ?Sized>(lengths: &L, sequences: Range<usize>) -> u64 {
    let mut hash = mix(sequences.start as u64) ^ sequences.len() as u64;
    for sequence in sequences {
        hash = (hash.rotate_left(23) ^ u64::from(lengths.length(sequence) as u32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    mix(hash)
}

#[cfg(test)]
#[path = "index_tests.rs"]
mod tests;
