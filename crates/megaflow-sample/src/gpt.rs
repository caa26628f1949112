//! The samples of one split of one pair.

use std::ops::Range;
use std::sync::Arc;

use megaflow_core::{Piece, SampleError, SampleLayout, SampleSource, TokensMut};
use megaflow_indexed::IndexedDataset;

use crate::cache::{CacheOutcome, CachePlace};
use crate::error::BuildError;
use crate::gather::{Gather, add_piece, damaged, fetch, mark_padding, watched};
use crate::index::{GptIndex, IndexConfig};
use crate::split::{SplitMatrix, SplitName};

/// How a pair is cut into samples.
#[derive(Debug, Clone, PartialEq)]
pub struct GptConfig {
    /// What determines the order.
    pub index: IndexConfig,
    /// Shares of the splits.
    pub matrix: SplitMatrix,
    /// The split to read.
    pub split: SplitName,
    /// Id that fills up a sample shorter than the others.
    pub pad_id: i64,
}

/// The samples of one split of one pair, in Megatron's order.
#[derive(Debug)]
pub struct GptDataset {
    indexed: Arc<IndexedDataset>,
    sequences: Range<usize>,
    index: GptIndex,
    add_extra_token: bool,
    sample_len: usize,
    pad_id: i64,
    keep_partial: bool,
    cached: Option<CacheOutcome>,
}

impl GptDataset {
    /// Lays out the samples. A split that is switched off, or rounds to no sequence while no sample is asked of it, has
    /// none.
    ///
    /// # Errors
    /// [`BuildError`] as [`GptIndex::build`], and if samples are asked of a split without sequences.
    pub fn build(indexed: Arc<IndexedDataset>, config: &GptConfig) -> Result<Self, BuildError> {
        Self::build_with(indexed, config, 1, None)
    }

    /// As [`build`](Self::build), on up to `num_threads` threads and kept in `cache`.
    ///
    /// # Errors
    /// As [`build`](Self::build).
    pub fn build_with(
        indexed: Arc<IndexedDataset>,
        config: &GptConfig,
        num_threads: usize,
        cache: Option<&CachePlace>,
    ) -> Result<Self, BuildError> {
        let num_sequences = indexed.num_sequences();
        let sequences = config.matrix.sequences(config.split, num_sequences).unwrap_or(0..0);
        if let (true, Some(num_samples @ 1..)) = (sequences.is_empty(), config.index.num_samples) {
            let dataset = indexed.prefix().display().to_string();
            return Err(BuildError::EmptySplit { dataset, split: config.split, num_sequences, num_samples });
        }
        let (index, cached) = GptIndex::build_with(&*indexed, sequences.clone(), &config.index, num_threads, cache)?;
        let add_extra_token = config.index.add_extra_token;
        let sample_len = config.index.seq_len + usize::from(add_extra_token);
        Ok(Self {
            indexed,
            sequences,
            index,
            add_extra_token,
            sample_len,
            pad_id: config.pad_id,
            keep_partial: config.index.keep_partial,
            cached,
        })
    }

    /// The pair.
    pub fn indexed(&self) -> &Arc<IndexedDataset> {
        &self.indexed
    }

    /// Sequences of the split.
    pub fn sequences(&self) -> Range<usize> {
        self.sequences.clone()
    }

    /// What became of the cache, if one was named.
    pub fn cached(&self) -> Option<&CacheOutcome> {
        self.cached.as_ref()
    }

    /// The three arrays.
    pub fn index(&self) -> &GptIndex {
        &self.index
    }

    #[inline]
    fn for_each_piece(
        &self,
        index: u64,
        mut visit: impl FnMut(Piece) -> Result<(), SampleError>,
    ) -> Result<(), SampleError> {
        let [first, last] = self.rows(index)?;
        let extra = i64::from(self.add_extra_token);
        for position in first.0..=last.0 {
            let sequence = self.index.document_index.get(position);
            let sequence = sequence.ok_or_else(|| beyond_documents(index, position))? as usize;
            // A row may point one token before an empty last sequence: nothing is there to be read.
            let offset = if position == first.0 { first.1.max(0) as u64 } else { 0 };
            let end = if position == last.0 {
                (last.1 + extra).max(0) as u64
            } else {
                self.indexed.sequence_len(sequence).map_err(|error| damaged(index, error))? as u64
            };
            let length = end.saturating_sub(offset);
            visit(Piece { dataset: 0, sequence: sequence as u64, offset, length })?;
        }
        Ok(())
    }

    /// The rows between which sample `index` lies.
    #[inline]
    fn rows(&self, index: u64) -> Result<[(usize, i64); 2], SampleError> {
        let num_samples = self.num_samples();
        let sample = usize::try_from(index).ok().and_then(|index| self.index.shuffle_index.get(index));
        let sample = sample.ok_or(SampleError::OutOfRange { index, num_samples })?;
        let row = |at: usize| self.index.sample_index.row(at).ok_or(SampleError::OutOfRange { index, num_samples });
        Ok([row(sample)?, row(sample + 1)?])
    }
}

#[cold]
fn beyond_documents(index: u64, position: usize) -> SampleError {
    let detail = format!("the sample index names document {position}, which the document index does not have");
    SampleError::Damaged { index, detail: format!("{detail}; delete the cache of the index") }
}

impl SampleSource for GptDataset {
    fn num_samples(&self) -> u64 {
        self.index.shuffle_index.len() as u64
    }

    fn sample_len(&self) -> usize {
        self.sample_len
    }

    fn read_sample(&self, index: u64, out: &mut [i64]) -> Result<(), SampleError> {
        self.read_into(index, TokensMut::I64(out))
    }

    fn read_into(&self, index: u64, out: TokensMut<'_>) -> Result<(), SampleError> {
        self.read_counted(index, out).map(|_| ())
    }

    fn read_counted(&self, index: u64, out: TokensMut<'_>) -> Result<usize, SampleError> {
        watched(&self.indexed, index, || {
            let mut gather = Gather::new(index, self.indexed.dtype(), out);
            self.for_each_piece(index, |piece| gather.push_piece(&self.indexed, piece))?;
            gather.finish(self.pad_id)
        })
    }

    fn sample_tokens(&self, index: u64) -> Result<usize, SampleError> {
        if !self.keep_partial {
            return Ok(self.sample_len);
        }
        watched(&self.indexed, index, || {
            let mut tokens = 0;
            self.for_each_piece(index, |piece| {
                tokens += piece.length as usize;
                Ok(())
            })?;
            Ok(tokens)
        })
    }

    fn layout(&self, index: u64, layout: &mut SampleLayout) -> Result<(), SampleError> {
        layout.clear();
        watched(&self.indexed, index, || {
            let mut begin = 0;
            self.for_each_piece(index, |piece| {
                add_piece(layout, &mut begin, piece);
                Ok(())
            })?;
            mark_padding(layout, begin, self.sample_len);
            Ok(())
        })
    }

    fn read_ahead(&self, index: u64) {
        // What cannot be read is told when it is read.
        let _ =
            watched(&self.indexed, index, || self.for_each_piece(index, |piece| fetch(&self.indexed, index, piece)));
    }
}
