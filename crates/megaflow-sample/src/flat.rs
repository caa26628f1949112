//! The tokens of a split as one endless run: the sequences in file order, again and again.

use std::ops::Range;
use std::sync::Arc;

use megaflow_core::{Piece, SampleError};
use megaflow_indexed::{IndexError, IndexedDataset};

use crate::gather::damaged;

/// Sequences of a pair, which lie back to back in its `.bin`, taken as a circle of tokens.
#[derive(Debug)]
pub(crate) struct FlatTokens {
    indexed: Arc<IndexedDataset>,
    sequences: Range<usize>,
    /// Tokens of the sequences, as positions in the `.bin`.
    tokens: Range<u64>,
}

impl FlatTokens {
    /// Looks up where the sequences begin and end: two entries of the index, at any size.
    pub(crate) fn new(indexed: Arc<IndexedDataset>, sequences: Range<usize>) -> Result<Self, IndexError> {
        let tokens = if sequences.is_empty() {
            0..0
        } else {
            let begin = indexed.sequence_tokens(sequences.start)?.start as u64;
            begin..(indexed.sequence_tokens(sequences.end - 1)?.end as u64).max(begin)
        };
        Ok(Self { indexed, sequences, tokens })
    }

    /// Asks the system to fetch tokens, without waiting for them.
    pub(crate) fn fetch(&self, begin: u64, count: u64) {
        self.indexed.fetch_bytes(self.run(begin, count));
    }

    pub(crate) fn indexed(&self) -> &Arc<IndexedDataset> {
        &self.indexed
    }

    pub(crate) fn sequences(&self) -> Range<usize> {
        self.sequences.clone()
    }

    /// Tokens of one turn.
    pub(crate) fn len(&self) -> u64 {
        self.tokens.end - self.tokens.start
    }

    /// Bytes of the tokens from `begin` (of the circle) on, `count` of them or up to the end of the turn.
    #[inline]
    pub(crate) fn run(&self, begin: u64, count: u64) -> &[u8] {
        let item_bytes = self.indexed.dtype().size_bytes();
        let first = self.tokens.start + begin;
        let last = (first + count).min(self.tokens.end);
        // Both lie inside the `.bin`: the ends of the split were checked when it was opened.
        &self.indexed.data_bytes()[first as usize * item_bytes..last as usize * item_bytes]
    }

    /// Calls `visit` with the pieces of sequences that make the `count` tokens from `begin` on, across the end of the
    /// turn. `begin` is below [`len`](Self::len).
    pub(crate) fn pieces(
        &self,
        index: u64,
        mut begin: u64,
        mut count: u64,
        mut visit: impl FnMut(Piece),
    ) -> Result<(), SampleError> {
        while count > 0 {
            let mut sequence = self.sequence_at(index, begin)?;
            while count > 0 && sequence < self.sequences.end {
                let tokens = self.indexed.sequence_tokens(sequence).map_err(|error| damaged(index, error))?;
                let start = tokens.start as u64 - self.tokens.start.min(tokens.start as u64);
                let length = tokens.len() as u64;
                let offset = begin.saturating_sub(start);
                if start > begin || offset > length || (offset == length && length > 0) {
                    return Err(self.gap(index, sequence));
                }
                let taken = (length - offset).min(count);
                visit(Piece { dataset: 0, sequence: sequence as u64, offset, length: taken });
                begin += taken;
                count -= taken;
                sequence += 1;
            }
            if count > 0 && begin != self.len() {
                return Err(self.gap(index, sequence.saturating_sub(1)));
            }
            begin = 0;
        }
        Ok(())
    }

    /// Calls `visit` with the parts of sequences that make the `count` tokens from `begin` on: begin in the turn, tokens,
    /// and whether the sequence goes on behind the last of these tokens. Reads the offsets alone, one after the other.
    pub(crate) fn parts(
        &self,
        index: u64,
        mut begin: u64,
        mut count: u64,
        mut visit: impl FnMut(u64, u64, bool),
    ) -> Result<(), SampleError> {
        let offsets = self.indexed.offset_bytes();
        let shift = self.indexed.dtype().size_bytes().trailing_zeros();
        while count > 0 {
            let mut sequence = self.sequence_at(index, begin)?;
            let end = begin.saturating_add(count).min(self.len());
            let mut from = begin;
            while from < end {
                sequence += 1;
                let next = if sequence < self.sequences.end {
                    let mut bytes = [0; 8];
                    bytes.copy_from_slice(&offsets[8 * sequence..8 * sequence + 8]);
                    (u64::from_le_bytes(bytes) >> shift).wrapping_sub(self.tokens.start)
                } else {
                    self.len()
                };
                // A damaged offset lies before, or so far behind that it is cut to the end: no token outside is read.
                if next < from {
                    return Err(self.gap(index, sequence));
                }
                let to = next.min(end);
                if to > from {
                    visit(from, to - from, next > end);
                }
                from = to;
            }
            count -= end - begin;
            begin = 0;
        }
        Ok(())
    }

    /// The sequence that holds token `at` of the turn.
    ///
    /// Guesses from the mean length, then looks further and further away, then halves: a few steps where lengths are
    /// alike, and never more than twice those of a plain binary search.
    pub(crate) fn sequence_at(&self, index: u64, at: u64) -> Result<usize, SampleError> {
        let target = self.tokens.start + at;
        let (first, count) = (self.sequences.start, self.sequences.len());
        let start = |number: usize| {
            let offset = self.indexed.sequence_offset(first + number).map_err(|error| damaged(index, error))?;
            Ok::<u64, SampleError>(offset as u64)
        };
        // The answer is the last number in `low..high` whose start is not behind the target; number 0 always is such.
        let guess = (u128::from(at) * count as u128 / u128::from(self.len().max(1))) as usize;
        let guess = guess.min(count.saturating_sub(1));
        let (mut low, mut high, mut step) = (guess, guess + 1, 1);
        while start(low)? > target {
            if low == 0 {
                return Err(self.gap(index, first));
            }
            high = low;
            low = low.saturating_sub(step);
            step *= 2;
        }
        step = 1;
        while high < count && start(high)? <= target {
            low = high;
            high = high.saturating_add(step).min(count);
            step *= 2;
        }
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if start(middle)? <= target {
                low = middle;
            } else {
                high = middle;
            }
        }
        Ok(first + low)
    }

    #[cold]
    fn gap(&self, index: u64, sequence: usize) -> SampleError {
        let path = self.indexed.index_path();
        let detail = format!(
            "{}: sequence {sequence} does not begin where the one before it ends; verify the pair, and write or copy \
             it again",
            path.display()
        );
        SampleError::Damaged { index, detail }
    }
}
