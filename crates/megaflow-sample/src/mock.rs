//! Samples of made-up documents, for runs without data.

use std::ops::Range;

use megaflow_core::{SampleError, SampleSource, TokensMut};

use crate::error::BuildError;
use crate::index::{GptIndex, IndexConfig};
use crate::split::{SplitMatrix, SplitName};

/// Megatron's mock data: document `i` counts from 1 up, modulo the vocabulary, and ends with EOD.
#[derive(Debug)]
pub struct MockDataset {
    lengths: Vec<i32>,
    index: GptIndex,
    sequences: Range<usize>,
    vocab_size: i64,
    eod_id: i64,
    sample_len: usize,
    extra: i64,
}

impl MockDataset {
    /// Lays out the samples of documents of these lengths.
    ///
    /// # Errors
    /// [`BuildError`] as [`GptIndex::build`]; also if the vocabulary is empty.
    pub fn build(
        lengths: Vec<i32>,
        (vocab_size, eod_id): (u32, i64),
        (matrix, split): (SplitMatrix, SplitName),
        config: &IndexConfig,
    ) -> Result<Self, BuildError> {
        if vocab_size == 0 {
            return Err(BuildError::BadSetting { setting: "vocab_size", expected: "1 or more", found: 0 });
        }
        let sequences = matrix.sequences(split, lengths.len()).unwrap_or(0..0);
        let index = GptIndex::build(&lengths[..], sequences.clone(), config)?;
        let extra = i64::from(config.add_extra_token);
        let sample_len = config.seq_len + usize::from(config.add_extra_token);
        Ok(Self { lengths, index, sequences, vocab_size: i64::from(vocab_size), eod_id, sample_len, extra })
    }

    /// The three arrays.
    pub fn index(&self) -> &GptIndex {
        &self.index
    }

    /// Sequences of the split.
    pub fn sequences(&self) -> Range<usize> {
        self.sequences.clone()
    }
}

impl SampleSource for MockDataset {
    fn num_samples(&self) -> u64 {
        self.index.shuffle_index.len() as u64
    }

    fn sample_len(&self) -> usize {
        self.sample_len
    }

    fn read_sample(&self, index: u64, out: &mut [i64]) -> Result<(), SampleError> {
        let outside = SampleError::OutOfRange { index, num_samples: self.num_samples() };
        let rows = usize::try_from(index).ok().and_then(|index| self.index.shuffle_index.get(index));
        let rows = rows
            .and_then(|sample| Some((self.index.sample_index.row(sample)?, self.index.sample_index.row(sample + 1)?)));
        let (first, last) = rows.ok_or(outside)?;
        let mut room = out.iter_mut();
        for position in first.0..=last.0 {
            let length = self.index.document_index.get(position).map_or(0, |document| self.lengths[document as usize]);
            let begin = if position == first.0 { first.1 } else { 0 };
            let end = if position == last.0 { last.1 + self.extra } else { i64::from(length) };
            for (token, place) in (begin..end).zip(&mut room) {
                *place = if token + 1 == i64::from(length) { self.eod_id } else { (token + 1) % self.vocab_size };
            }
        }
        room.for_each(|place| *place = self.eod_id);
        Ok(())
    }

    fn read_into(&self, index: u64, mut out: TokensMut<'_>) -> Result<(), SampleError> {
        let mut wide = vec![0; self.sample_len];
        self.read_sample(index, &mut wide)?;
        out.write_i64(index, &wide)
    }
}
