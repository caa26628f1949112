//! How many epochs and samples there are, and the arrays that follow.

use std::ops::Range;

use super::{GptIndex, IndexConfig, SampleIndex, SequenceLengths, ShuffleIndex};
use crate::cache::CachePlace;
use crate::column::Column;
use crate::error::BuildError;
use crate::mt19937::Mt19937;

/// Lengths fetched in one go during the walk over the documents, so that the fetches overlap.
const LENGTHS_AHEAD: usize = 256;
/// Samples from which a second thread is worth its start.
pub(super) const THREADS_FROM: u64 = 1 << 14;
/// Below this share of a full epoch, the last epoch is shuffled apart.
const SEPARATE_BELOW: f64 = 0.80;

/// All numbers that follow from the lengths and the settings before anything is drawn.
pub(super) struct Plan {
    sequences: Range<i32>,
    seq_len: u64,
    extra: u64,
    wanted: Option<u64>,
    tokens_per_epoch: u64,
    num_epochs: u64,
    /// Samples of the index.
    num_samples: u64,
    /// Samples of all epochs but the last, if the last is shuffled apart.
    samples_before_last: Option<u64>,
}

impl Plan {
    pub(super) fn build<L: SequenceLengths + ?Sized>(
        &self,
        lengths: &L,
        seed: u32,
        num_threads: usize,
    ) -> Result<GptIndex, BuildError> {
        // The order of the draws is part of the result: documents first, then samples.
        let mut random = Mt19937::new(seed);
        let (document_index, shuffle_index) = if num_threads > 1 && self.num_samples >= THREADS_FROM {
            let mut later = random.clone();
            std::thread::scope(|scope| {
                let shuffle = scope.spawn(move || {
                    // The draws of the documents depend on their number alone.
                    let (mixed, last) = self.document_parts();
                    later.skip_shuffle(mixed);
                    later.skip_shuffle(last);
                    self.shuffle_index(&mut later)
                });
                let documents = self.document_index(&mut random);
                let shuffle = shuffle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                Ok::<_, BuildError>((documents?, shuffle?))
            })?
        } else {
            (self.document_index(&mut random)?, self.shuffle_index(&mut random)?)
        };
        let sample_index = if self.is_narrow() {
            SampleIndex::I32(Column::Owned(self.sample_index(lengths, &document_index, |value| value as i32)?))
        } else {
            SampleIndex::I64(Column::Owned(self.sample_index(lengths, &document_index, |value| value)?))
        };
        Ok(self.index(Column::Owned(document_index), sample_index, shuffle_index))
    }

    fn index(&self, document_index: Column<i32>, sample_index: SampleIndex, shuffle_index: ShuffleIndex) -> GptIndex {
        GptIndex {
            document_index,
            sample_index,
            shuffle_index,
            num_epochs: self.num_epochs,
            separate_last_epoch: self.samples_before_last.is_some(),
            tokens_per_epoch: self.tokens_per_epoch,
        }
    }

    /// Whether positions in the document index fit into 32 bits. Lengths always do.
    pub(super) fn is_narrow(&self) -> bool {
        self.num_documents().is_some_and(|count| i32::try_from(count).is_ok())
    }

    pub(super) fn num_documents(&self) -> Option<u64> {
        (self.sequences.len() as u64).checked_mul(self.num_epochs)
    }

    /// Entries of the document index that are shuffled together, and those of the last epoch if it is shuffled apart.
    fn document_parts(&self) -> (u64, u64) {
        let (total, last) = (self.num_documents().unwrap_or(u64::MAX), self.sequences.len() as u64);
        if self.samples_before_last.is_some() { (total - last, last) } else { (total, 0) }
    }

    /// Opens the arrays of a cache, if they have the types and shapes that follow from the lengths.
    pub(super) fn open(&self, place: &CachePlace) -> Result<GptIndex, String> {
        let too_large = || "too large for this machine".to_owned();
        let count = |count: Option<u64>| count.and_then(|count| usize::try_from(count).ok()).ok_or_else(too_large);
        let documents = Column::open_npy(&place.file("document_index.npy"), count(self.num_documents())?, 1)?;
        let (path, rows) = (place.file("sample_index.npy"), count(self.num_samples.checked_add(1))?);
        let samples = if self.is_narrow() {
            SampleIndex::I32(Column::open_npy(&path, rows, 2)?)
        } else {
            SampleIndex::I64(Column::open_npy(&path, rows, 2)?)
        };
        let (path, len) = (place.file("shuffle_index.npy"), count(Some(self.num_samples))?);
        let shuffle = if self.is_order_narrow() {
            ShuffleIndex::U32(Column::open_npy(&path, len, 1)?)
        } else {
            ShuffleIndex::I64(Column::open_npy(&path, len, 1)?)
        };
        Ok(self.index(documents, samples, shuffle))
    }

    /// Whether an index that another program wrote is one of these lengths: every sequence as often as there are epochs,
    /// the very samples that follow from them, every sample once. Only the order of the draws is taken on trust.
    pub(super) fn compare<L: SequenceLengths + ?Sized>(&self, lengths: &L, index: &GptIndex) -> Result<(), String> {
        let mut left = vec![self.num_epochs; self.sequences.len()];
        let mut documents = Vec::with_capacity(index.document_index.len());
        for document in index.document_index.iter() {
            let number = i64::from(document) - i64::from(self.sequences.start);
            let place = usize::try_from(number).ok().and_then(|number| left.get_mut(number));
            match place {
                Some(left) if *left > 0 => *left -= 1,
                _ => return Err(format!("its document index holds sequence {document} too often")),
            }
            documents.push(document);
        }
        let same = match &index.sample_index {
            SampleIndex::I32(rows) => {
                let own = self.sample_index(lengths, &documents, |value| value as i32);
                own.is_ok_and(|own| rows.iter().eq(own))
            }
            SampleIndex::I64(rows) => {
                let own = self.sample_index(lengths, &documents, |value| value);
                own.is_ok_and(|own| rows.iter().eq(own))
            }
        };
        if !same {
            return Err("its sample index was made from other lengths".to_owned());
        }
        let mut missing = vec![true; index.shuffle_index.len()];
        for position in 0..index.shuffle_index.len() {
            let sample = index.shuffle_index.get(position).and_then(|sample| missing.get_mut(sample));
            match sample {
                Some(missing) if *missing => *missing = false,
                _ => return Err(format!("its shuffle index is no order of the samples at position {position}")),
            }
        }
        Ok(())
    }

    pub(super) fn new<L: SequenceLengths + ?Sized>(
        lengths: &L,
        sequences: Range<usize>,
        config: &IndexConfig,
    ) -> Result<Self, BuildError> {
        let seq_len = config.seq_len as u64;
        if seq_len == 0 || i32::try_from(seq_len).is_err() {
            let found = i128::from(seq_len);
            return Err(BuildError::BadSetting { setting: "seq_len", expected: "1 to 2147483647", found });
        }
        let last = sequences.end;
        let ids = match (i32::try_from(sequences.start), i32::try_from(last)) {
            (Ok(first), Ok(behind)) => first..behind.max(first),
            _ => return Err(BuildError::TooManySequences { last }),
        };
        let tokens_per_epoch = count_tokens(lengths, sequences)?;
        let extra = u64::from(config.add_extra_token);
        let mut plan = Self {
            sequences: ids,
            seq_len,
            extra,
            wanted: config.num_samples,
            tokens_per_epoch,
            num_epochs: 1,
            num_samples: 0,
            samples_before_last: None,
        };
        plan.num_epochs = plan.count_epochs()?;
        // Fits: count_epochs has compared it with the largest i64.
        let total = plan.num_epochs * tokens_per_epoch;
        let left = total.saturating_sub(extra);
        plan.num_samples = if config.keep_partial {
            // Megatron divides in float32 here, so the count is rough above 2^24 tokens. Equal bits matter more.
            (left as f32 / seq_len as f32).ceil() as u64
        } else {
            left / seq_len
        };
        plan.samples_before_last = plan.count_samples_before_last();
        Ok(plan)
    }

    /// The smallest number of repetitions that gives the samples asked for.
    fn count_epochs(&self) -> Result<u64, BuildError> {
        let Some(num_samples) = self.wanted else { return Ok(1) };
        if self.tokens_per_epoch == 0 {
            if num_samples == 0 {
                return Ok(1);
            }
            let num_sequences = self.sequences.len();
            return Err(BuildError::NoTokens { num_sequences, num_samples });
        }
        let needed = u128::from(num_samples) * u128::from(self.seq_len) + u128::from(self.extra);
        let num_epochs = needed.div_ceil(u128::from(self.tokens_per_epoch)).max(1);
        if num_epochs * u128::from(self.tokens_per_epoch) > i64::MAX as u128 {
            return Err(self.too_large("document", num_epochs));
        }
        Ok(num_epochs as u64)
    }

    /// Samples of all epochs but the last, if the last is needed for so few samples that it is shuffled apart.
    fn count_samples_before_last(&self) -> Option<u64> {
        let wanted = self.wanted.filter(|_| self.num_epochs > 1)?;
        let before = ((self.num_epochs - 1) * self.tokens_per_epoch - self.extra) / self.seq_len;
        let per_epoch = (self.tokens_per_epoch - self.extra) / self.seq_len;
        // One epoch less is not enough, so `before` is below `wanted`.
        let in_last = wanted - before;
        (in_last < (SEPARATE_BELOW * per_epoch as f64) as u64).then_some(before)
    }

    pub(super) fn document_index(&self, random: &mut Mt19937) -> Result<Vec<i32>, BuildError> {
        let mut index = self.reserve("document", self.num_documents())?;
        for _ in 0..self.num_epochs {
            index.extend(self.sequences.clone());
        }
        let (mixed, last) = index.split_at_mut(self.document_parts().0 as usize);
        random.shuffle(mixed);
        random.shuffle(last);
        Ok(index)
    }

    /// The walk: sample k ends `k * seq_len + extra` tokens behind the start, in the first document that reaches so
    /// far.
    pub(super) fn sample_index<L: SequenceLengths + ?Sized, T: Copy>(
        &self,
        lengths: &L,
        document_index: &[i32],
        convert: impl Fn(i64) -> T,
    ) -> Result<Vec<T>, BuildError> {
        let values = self.num_samples.checked_add(1).and_then(|rows| rows.checked_mul(2));
        let mut rows = self.reserve("sample", values)?;
        rows.extend([convert(0), convert(0)]);
        let (step, extra) = (self.seq_len as i64, self.extra as i64);
        let mut begin = 0i64;
        let mut sample_end = step + extra;
        let mut missing = self.num_samples;
        let mut fetched = [0i32; LENGTHS_AHEAD];
        'walk: for (block, documents) in document_index.chunks(LENGTHS_AHEAD).enumerate() {
            for (length, &document) in fetched.iter_mut().zip(documents) {
                *length = lengths.length(document as usize);
            }
            let first = (block * LENGTHS_AHEAD) as i64;
            for (position, &length) in fetched[..documents.len()].iter().enumerate() {
                let end = begin + i64::from(length);
                while sample_end <= end {
                    if missing == 0 {
                        break 'walk;
                    }
                    rows.extend([convert(first + position as i64), convert(sample_end - extra - begin)]);
                    sample_end += step;
                    missing -= 1;
                }
                begin = end;
            }
        }
        // Only a kept partial sample runs out of documents: all rows that are left end with the last document.
        if let (Some(&document), true) = (document_index.last(), missing > 0) {
            let last = [document_index.len() as i64 - 1, i64::from(lengths.length(document as usize)) - extra];
            for _ in 0..missing {
                rows.extend(last.map(&convert));
            }
        }
        Ok(rows)
    }

    pub(super) fn is_order_narrow(&self) -> bool {
        self.num_samples < u64::from(u32::MAX) - 1
    }

    fn shuffle_index(&self, random: &mut Mt19937) -> Result<ShuffleIndex, BuildError> {
        Ok(if self.is_order_narrow() {
            ShuffleIndex::U32(Column::Owned(self.shuffled(random, |sample| sample as u32)?))
        } else {
            ShuffleIndex::I64(Column::Owned(self.shuffled(random, |sample| sample as i64)?))
        })
    }

    fn shuffled<T: Copy>(&self, random: &mut Mt19937, convert: impl Fn(u64) -> T) -> Result<Vec<T>, BuildError> {
        let mut index = self.reserve("shuffle", Some(self.num_samples))?;
        index.extend((0..self.num_samples).map(convert));
        // Megatron's float32 count may fall short of the exact one.
        let together = self.samples_before_last.unwrap_or(self.num_samples).min(self.num_samples) as usize;
        let (first, last) = index.split_at_mut(together);
        random.shuffle(first);
        random.shuffle(last);
        Ok(index)
    }

    fn reserve<T>(&self, array: &'static str, len: Option<u64>) -> Result<Vec<T>, BuildError> {
        let mut index = Vec::new();
        let len = len.and_then(|len| usize::try_from(len).ok());
        match len.map(|len| index.try_reserve_exact(len)) {
            Some(Ok(())) => Ok(index),
            _ => Err(self.too_large(array, u128::from(self.num_epochs))),
        }
    }

    fn too_large(&self, array: &'static str, num_epochs: u128) -> BuildError {
        BuildError::TooLarge {
            array,
            num_samples: self.wanted.unwrap_or(self.num_samples),
            seq_len: self.seq_len,
            tokens_per_epoch: self.tokens_per_epoch,
            num_epochs,
        }
    }
}

fn count_tokens<L: SequenceLengths + ?Sized>(lengths: &L, sequences: Range<usize>) -> Result<u64, BuildError> {
    let mut tokens = 0;
    for sequence in sequences {
        let length = lengths.length(sequence);
        if length < 0 {
            return Err(BuildError::BadLength { sequence, found: length });
        }
        // Fewer than 2^31 sequences of fewer than 2^31 tokens.
        tokens += length as u64;
    }
    Ok(tokens)
}
