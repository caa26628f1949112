//! The samples of one split of one pair.

use std::ops::Range;
use std::sync::Arc;

use megaflow_core::{SampleError, SampleSource, TokenDtype};
use megaflow_indexed::{IndexError, IndexedDataset, widen_tokens};

use crate::error::BuildError;
use crate::index::{GptIndex, IndexConfig};
use crate::split::{SplitMatrix, SplitName};

/// Pieces of a sample that are looked up before the first is copied, so that their cache misses overlap.
const PIECES_AHEAD: usize = 16;
const CACHE_LINE_BYTES: usize = 64;

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

/// A run of tokens of one sequence, part of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Sequence of the pair.
    pub sequence: usize,
    /// First token in it.
    pub offset: usize,
    /// Tokens.
    pub length: usize,
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
}

impl GptDataset {
    /// Lays out the samples. A split that is switched off, or rounds to no sequence while no sample is asked of it, has
    /// none.
    ///
    /// # Errors
    /// [`BuildError`] as [`GptIndex::build`], and if samples are asked of a split without sequences.
    pub fn build(indexed: Arc<IndexedDataset>, config: &GptConfig) -> Result<Self, BuildError> {
        let num_sequences = indexed.num_sequences();
        let sequences = config.matrix.sequences(config.split, num_sequences).unwrap_or(0..0);
        if let (true, Some(num_samples @ 1..)) = (sequences.is_empty(), config.index.num_samples) {
            let dataset = indexed.prefix().display().to_string();
            return Err(BuildError::EmptySplit { dataset, split: config.split, num_sequences, num_samples });
        }
        let index = GptIndex::build(&*indexed, sequences.clone(), &config.index)?;
        let add_extra_token = config.index.add_extra_token;
        let sample_len = config.index.seq_len + usize::from(add_extra_token);
        Ok(Self { indexed, sequences, index, add_extra_token, sample_len, pad_id: config.pad_id })
    }

    /// The pair.
    pub fn indexed(&self) -> &Arc<IndexedDataset> {
        &self.indexed
    }

    /// Sequences of the split.
    pub fn sequences(&self) -> Range<usize> {
        self.sequences.clone()
    }

    /// The three arrays.
    pub fn index(&self) -> &GptIndex {
        &self.index
    }

    /// Where the tokens of sample `index` come from, in their order. Empty sequences leave no piece.
    ///
    /// # Errors
    /// [`SampleError`] if the sample does not exist or the data is damaged.
    pub fn pieces(&self, index: u64) -> Result<Vec<Piece>, SampleError> {
        let mut pieces = Vec::new();
        self.for_each_piece(index, |piece| {
            if piece.length > 0 {
                pieces.push(piece);
            }
            Ok(())
        })?;
        Ok(pieces)
    }

    #[inline]
    fn for_each_piece(
        &self,
        index: u64,
        mut visit: impl FnMut(Piece) -> Result<(), IndexError>,
    ) -> Result<(), SampleError> {
        let damaged = |error: IndexError| SampleError::Damaged { index, detail: error.to_string() };
        let [first, last] = self.rows(index)?;
        let extra = i64::from(self.add_extra_token);
        for position in first.0..=last.0 {
            let sequence = self.index.document_index[position] as usize;
            // A row may point one token before an empty last sequence: nothing is there to be read.
            let offset = if position == first.0 { first.1.max(0) as usize } else { 0 };
            let end = if position == last.0 {
                (last.1 + extra).max(0) as usize
            } else {
                self.indexed.sequence_len(sequence).map_err(damaged)?
            };
            visit(Piece { sequence, offset, length: end.saturating_sub(offset) }).map_err(damaged)?;
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

impl SampleSource for GptDataset {
    fn num_samples(&self) -> u64 {
        self.index.shuffle_index.len() as u64
    }

    fn sample_len(&self) -> usize {
        self.sample_len
    }

    fn read_sample(&self, index: u64, out: &mut [i64]) -> Result<(), SampleError> {
        let dtype = self.indexed.dtype();
        let mut rest = out;
        let mut ahead: [&[u8]; PIECES_AHEAD] = [&[]; PIECES_AHEAD];
        let mut count = 0;
        self.for_each_piece(index, |piece| {
            if count == PIECES_AHEAD {
                rest = copy_pieces(dtype, &ahead, std::mem::take(&mut rest));
                count = 0;
            }
            let bytes = self.indexed.token_bytes(piece.sequence, piece.offset..piece.offset + piece.length)?;
            // Fetches every cache line now: these loads do not wait for each other, those of the copy would.
            for byte in bytes.iter().step_by(CACHE_LINE_BYTES) {
                std::hint::black_box(*byte);
            }
            ahead[count] = bytes;
            count += 1;
            Ok(())
        })?;
        rest = copy_pieces(dtype, &ahead[..count], rest);
        rest.fill(self.pad_id);
        Ok(())
    }
}

/// Fills `out` with the tokens of `pieces` and returns what is left of it.
fn copy_pieces<'a>(dtype: TokenDtype, pieces: &[&[u8]], mut out: &'a mut [i64]) -> &'a mut [i64] {
    for bytes in pieces {
        let tokens = (bytes.len() / dtype.size_bytes()).min(out.len());
        let (filled, rest) = out.split_at_mut(tokens);
        widen_tokens(dtype, bytes, filled);
        out = rest;
    }
    out
}
