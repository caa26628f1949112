//! Documents packed into samples without being cut.

use std::ops::Range;
use std::sync::Arc;

use megaflow_core::{KeyedPermutation, Piece, SampleError, SampleLayout, SampleSource, TokensMut, mix};
use megaflow_indexed::IndexedDataset;

use crate::capacity::CapacitySet;
use crate::error::BuildError;
use crate::gather::{Gather, add_piece, damaged, fetch, mark_padding, watched};
use crate::index::SequenceLengths;
use crate::split::{SplitMatrix, SplitName};

/// Bits of an item for the number of the part of its sequence.
const PART_BITS: u32 = 24;

/// How sequences are packed.
#[derive(Debug, Clone, PartialEq)]
pub struct BestFitConfig {
    /// Tokens of a sample, without the extra token.
    pub seq_len: usize,
    /// Samples, by repeating the packed ones as often as it takes; `None` is one epoch.
    pub num_samples: Option<u64>,
    /// Seed of the permutations, and of the choice among sequences of one length.
    pub seed: u64,
    /// Whether samples hold one token more, whose shift makes the labels.
    pub add_extra_token: bool,
    /// Shares of the splits.
    pub matrix: SplitMatrix,
    /// The split to read.
    pub split: SplitName,
    /// Id that fills up samples.
    pub pad_id: i64,
}

/// Samples of whole sequences: best fit, decreasing (Ding et al., "Fewer Truncations Improve Language Modeling", 2024).
///
/// A sequence longer than a sample is cut into samples that overlap by the extra token; its rest, and every other sequence,
/// goes whole into the sample with the least room that still holds it, the longest first. What stays free is padded.
/// Samples are handed out in a keyed permutation of their own in every epoch. The packing takes 8 bytes a sequence and 8
/// a sample of memory.
#[derive(Debug)]
pub struct BestFitDataset {
    indexed: Arc<IndexedDataset>,
    sequences: Range<usize>,
    /// Sequence and part, sample after sample.
    items: Vec<u64>,
    /// First item of each sample, and the number of items.
    bounds: Vec<u64>,
    step: u64,
    sample_len: u64,
    num_samples: u64,
    seed: u64,
    pad_id: i64,
    num_tokens: u64,
}

impl BestFitDataset {
    /// Packs the sequences of a split.
    ///
    /// # Errors
    /// [`BuildError`] if a setting is out of range, a length is negative, samples are asked of a split without tokens, or
    /// memory does not suffice.
    pub fn build(indexed: Arc<IndexedDataset>, config: &BestFitConfig) -> Result<Self, BuildError> {
        let seq_len = config.seq_len as u64;
        if !(1..1 << 30).contains(&seq_len) {
            let found = i128::from(seq_len);
            return Err(BuildError::BadSetting { setting: "seq_len", expected: "1 to 1073741823", found });
        }
        let num_sequences = indexed.num_sequences();
        let sequences = config.matrix.sequences(config.split, num_sequences).unwrap_or(0..0);
        let sample_len = seq_len + u64::from(config.add_extra_token);
        let packing = Packing::new(&*indexed, sequences.clone(), seq_len, sample_len, config.seed)?;
        if let (true, Some(num_samples @ 1..)) = (packing.items.is_empty(), config.num_samples) {
            let dataset = indexed.prefix().display().to_string();
            return Err(BuildError::EmptySplit { dataset, split: config.split, num_sequences, num_samples });
        }
        let packed = packing.bounds.len() as u64 - 1;
        Ok(Self {
            indexed,
            sequences,
            items: packing.items,
            bounds: packing.bounds,
            step: seq_len,
            sample_len,
            num_samples: config.num_samples.unwrap_or(packed),
            seed: config.seed,
            pad_id: config.pad_id,
            num_tokens: packing.num_tokens,
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

    /// Samples of one epoch.
    pub fn samples_per_epoch(&self) -> u64 {
        self.bounds.len() as u64 - 1
    }

    /// Tokens of the split.
    pub fn tokens_per_epoch(&self) -> u64 {
        self.num_tokens
    }

    /// Epochs that the samples take, a begun one included.
    pub fn num_epochs(&self) -> u64 {
        self.num_samples.div_ceil(self.samples_per_epoch().max(1)).max(1)
    }

    fn for_each_piece(
        &self,
        index: u64,
        mut visit: impl FnMut(Piece) -> Result<(), SampleError>,
    ) -> Result<(), SampleError> {
        if index >= self.num_samples {
            return Err(SampleError::OutOfRange { index, num_samples: self.num_samples });
        }
        let per_epoch = self.samples_per_epoch();
        let order = KeyedPermutation::new(self.seed, index / per_epoch, per_epoch);
        let sample = order.get(index % per_epoch) as usize;
        for &item in &self.items[self.bounds[sample] as usize..self.bounds[sample + 1] as usize] {
            let (sequence, part) = (item >> PART_BITS, item & ((1 << PART_BITS) - 1));
            let total = self.indexed.sequence_len(sequence as usize).map_err(|error| damaged(index, error))? as u64;
            let offset = part * self.step;
            let length = total.saturating_sub(offset).min(self.sample_len);
            visit(Piece { dataset: 0, sequence, offset, length })?;
        }
        Ok(())
    }
}

impl SampleSource for BestFitDataset {
    fn num_samples(&self) -> u64 {
        self.num_samples
    }

    fn sample_len(&self) -> usize {
        self.sample_len as usize
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
        watched(&self.indexed, index, || {
            layout.clear();
            let mut begin = 0;
            self.for_each_piece(index, |piece| {
                add_piece(layout, &mut begin, piece);
                Ok(())
            })?;
            mark_padding(layout, begin, self.sample_len());
            Ok(())
        })
    }

    fn read_ahead(&self, index: u64) {
        // What cannot be read is told when it is read.
        let _ =
            watched(&self.indexed, index, || self.for_each_piece(index, |piece| fetch(&self.indexed, index, piece)));
    }
}

/// Which parts of sequences share a sample.
struct Packing {
    items: Vec<u64>,
    bounds: Vec<u64>,
    num_tokens: u64,
}

/// A sample being filled: its last item, and the samples with the same room.
const NONE: u32 = u32::MAX;

impl Packing {
    fn new<L: SequenceLengths + ?Sized>(
        lengths: &L,
        sequences: Range<usize>,
        step: u64,
        capacity: u64,
        seed: u64,
    ) -> Result<Self, BuildError> {
        let (by_length, num_tokens) = sort_by_length(lengths, sequences, step, capacity, seed)?;
        let num_items = by_length.items.len();
        if num_items >= NONE as usize {
            return Err(BuildError::TooManySequences { last: num_items });
        }
        // Items of a sample form a list from the last to the first; `samples` holds the last.
        let mut previous = vec![NONE; num_items];
        let mut samples: Vec<u32> = Vec::new();
        // Samples with the same room form a list too.
        let mut with_room = vec![NONE; capacity as usize + 1];
        let mut same_room: Vec<u32> = Vec::new();
        let mut rooms = CapacitySet::new(capacity as usize + 1);
        for length in (1..=capacity as usize).rev() {
            for item in by_length.range(length) {
                let (sample, room) = match rooms.first_from(length) {
                    Some(room) => {
                        let sample = with_room[room];
                        with_room[room] = same_room[sample as usize];
                        if with_room[room] == NONE {
                            rooms.remove(room);
                        }
                        (sample, room - length)
                    }
                    None => {
                        samples.push(NONE);
                        same_room.push(NONE);
                        (samples.len() as u32 - 1, capacity as usize - length)
                    }
                };
                previous[item] = std::mem::replace(&mut samples[sample as usize], item as u32);
                if room > 0 {
                    same_room[sample as usize] = std::mem::replace(&mut with_room[room], sample);
                    rooms.insert(room);
                }
            }
        }
        let mut items = Vec::with_capacity(num_items);
        let mut bounds = Vec::with_capacity(samples.len() + 1);
        bounds.push(0);
        for mut item in samples {
            let first = items.len();
            while item != NONE {
                items.push(by_length.items[item as usize]);
                item = previous[item as usize];
            }
            items[first..].reverse();
            bounds.push(items.len() as u64);
        }
        Ok(Self { items, bounds, num_tokens })
    }
}

/// Items ordered by length.
struct ByLength {
    items: Vec<u64>,
    /// First item of each length, and the number of items.
    begins: Vec<usize>,
}

impl ByLength {
    fn range(&self, length: usize) -> Range<usize> {
        self.begins[length]..self.begins[length + 1]
    }
}

/// Tokens of the parts that a sequence gives: samples of its own, and the rest.
fn parts(length: u64, step: u64, capacity: u64) -> impl Iterator<Item = (u64, u64)> {
    let overlap = capacity - step;
    let count = if length <= capacity { u64::from(length > 0) } else { (length - overlap).div_ceil(step) };
    (0..count).map(move |part| (part, (length - part * step).min(capacity)))
}

/// A counting sort; sequences of one length come in an order that the seed chooses.
fn sort_by_length<L: SequenceLengths + ?Sized>(
    lengths: &L,
    sequences: Range<usize>,
    step: u64,
    capacity: u64,
    seed: u64,
) -> Result<(ByLength, u64), BuildError> {
    let mut begins = vec![0usize; capacity as usize + 2];
    let mut num_tokens = 0;
    for sequence in sequences.clone() {
        let found = lengths.length(sequence);
        let length = u64::try_from(found).map_err(|_| BuildError::BadLength { sequence, found })?;
        num_tokens += length;
        for (part, tokens) in parts(length, step, capacity) {
            if part >> PART_BITS != 0 {
                let (expected, found) = ("a sequence of at most 2^24 samples", i128::from(length));
                return Err(BuildError::BadSetting { setting: "length of a sequence", expected, found });
            }
            begins[tokens as usize + 1] += 1;
        }
    }
    for length in 1..begins.len() {
        begins[length] += begins[length - 1];
    }
    let mut items = Vec::new();
    let total = begins[begins.len() - 1];
    items.try_reserve_exact(total).map_err(|_| BuildError::TooManySamples { num_samples: total as u64 })?;
    items.resize(total, 0);
    let mut next = begins.clone();
    for sequence in sequences {
        for (part, tokens) in parts(lengths.length(sequence).max(0) as u64, step, capacity) {
            items[next[tokens as usize]] = (sequence as u64) << PART_BITS | part;
            next[tokens as usize] += 1;
        }
    }
    for length in 1..=capacity as usize {
        let same = &mut items[begins[length]..begins[length + 1]];
        let mut state = mix(seed ^ mix(length as u64));
        for left in (1..same.len()).rev() {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            same.swap(left, ((u128::from(mix(state)) * (left as u128 + 1)) >> 64) as usize);
        }
    }
    Ok((ByLength { items, begins }, num_tokens))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pack(lengths: &[i32], step: u64, capacity: u64) -> Vec<Vec<(u64, u64)>> {
        let packing = Packing::new(lengths, 0..lengths.len(), step, capacity, 1).unwrap();
        let unpack = |item: &u64| (item >> PART_BITS, item & ((1 << PART_BITS) - 1));
        let ranges = packing.bounds.windows(2).map(|pair| pair[0] as usize..pair[1] as usize);
        ranges.map(|range| packing.items[range].iter().map(unpack).collect()).collect()
    }

    #[test]
    fn least_room_that_holds_it_is_taken() {
        // 7 and 6 open two samples of 10; 3 goes beside 7 (room 3), 4 beside 6.
        assert_eq!(pack(&[3, 7, 4, 6], 9, 10), [[(1, 0), (0, 0)], [(3, 0), (2, 0)]]);
    }

    #[test]
    fn long_sequences_are_cut_with_the_overlap_and_short_ones_never() {
        // 25 tokens in samples of 9 + 1: 0..10, 9..19, and the rest 18..25.
        let mut samples = pack(&[25, 3, 0], 9, 10);
        samples.sort();
        assert_eq!(samples, [vec![(0, 0)], vec![(0, 1)], vec![(0, 2), (1, 0)]]);
        assert_eq!(parts(19, 9, 10).collect::<Vec<_>>(), [(0, 10), (1, 10)]);
        assert_eq!(parts(20, 9, 10).collect::<Vec<_>>(), [(0, 10), (1, 10), (2, 2)]);
        assert_eq!(parts(20, 10, 10).collect::<Vec<_>>(), [(0, 10), (1, 10)]);
    }
}
