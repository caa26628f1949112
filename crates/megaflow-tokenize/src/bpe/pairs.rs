//! The merges of a vocabulary: a flat table from two tokens to the token that they make.

use crate::simd::Fixed;

/// Largest number of tokens that the packed table holds.
pub(crate) const MAX_TOKENS: usize = 1 << 21;

const HASH: u64 = 0x9E37_79B9_7F4A_7C15;

/// Open addressing over packed words: left (21 bits), right (21 bits), product (22 bits). A product is never 0, so an
/// empty word is 0.
pub(crate) struct PairTable {
    words: Fixed<u64>,
    shift: u32,
    /// A bit for each hash of a pair, [`FILTER`] times as many as words: the second-level cache holds it, and most pairs that
    /// are asked for are not there.
    filter: Fixed<u64>,
}

/// Binary logarithm of the bits of the filter for each word of the table.
const FILTER: u32 = 2;

impl PairTable {
    /// A table for at most `count` pairs.
    pub(crate) fn with_capacity(count: usize) -> Self {
        let size = (count * 2).next_power_of_two().max(64);
        let filter = vec![0; (size << FILTER) / 64].into();
        Self { words: vec![0; size].into(), shift: 64 - size.trailing_zeros(), filter }
    }

    #[inline]
    fn slot(&self, key: u64) -> usize {
        (key.wrapping_mul(HASH) >> self.shift) as usize
    }

    /// Word and bit of the filter.
    #[inline]
    fn bit(&self, key: u64) -> (usize, u64) {
        let hash = key.wrapping_mul(HASH) >> (self.shift - FILTER);
        ((hash / 64) as usize, 1 << (hash % 64))
    }

    /// Adds a pair that is not there yet.
    pub(crate) fn insert(&mut self, left: u32, right: u32, product: u32) {
        let key = (u64::from(left) << 21) | u64::from(right);
        let mask = self.words.len() - 1;
        let (word, bit) = self.bit(key);
        self.filter[word] |= bit;
        let mut slot = self.slot(key);
        while self.words[slot] != 0 {
            slot = (slot + 1) & mask;
        }
        self.words[slot] = (key << 22) | u64::from(product);
    }

    /// As [`Self::get`], for pairs most of which have no product.
    #[inline]
    pub(crate) fn get_rare(&self, left: u32, right: u32) -> u32 {
        let (word, bit) = self.bit((u64::from(left) << 21) | u64::from(right));
        if self.filter[word] & bit == 0 { u32::MAX } else { self.get(left, right) }
    }

    /// Product of a pair, or `u32::MAX`.
    #[inline]
    pub(crate) fn get(&self, left: u32, right: u32) -> u32 {
        let key = (u64::from(left) << 21) | u64::from(right);
        let mask = self.words.len() - 1;
        let mut slot = self.slot(key);
        loop {
            let word = self.words[slot & mask];
            if word >> 22 == key && word != 0 {
                return (word & 0x3F_FFFF) as u32;
            }
            if word == 0 {
                return u32::MAX;
            }
            slot += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_put_in_is_found_and_nothing_else() {
        let mut table = PairTable::with_capacity(1000);
        for index in 0..1000u32 {
            table.insert(index * 7 % 1000, index, index + 1);
        }
        for index in 0..1000u32 {
            assert_eq!(table.get(index * 7 % 1000, index), index + 1);
            assert_eq!(table.get_rare(index * 7 % 1000, index), index + 1);
            assert_eq!(table.get(index * 7 % 1000, index + 1000), u32::MAX);
            assert_eq!(table.get_rare(index * 7 % 1000, index + 1000), u32::MAX);
        }
        assert_eq!(table.get(1, 1), u32::MAX);
    }
}
