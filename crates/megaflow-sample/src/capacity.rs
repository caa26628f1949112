//! A set of small numbers that finds the next one quickly.

const WORD: usize = u64::BITS as usize;

/// Numbers below a bound, as bits in two levels.
pub(crate) struct CapacitySet {
    words: Vec<u64>,
    /// Which words are not 0.
    filled: Vec<u64>,
}

impl CapacitySet {
    pub(crate) fn new(bound: usize) -> Self {
        let words = bound.div_ceil(WORD);
        Self { words: vec![0; words], filled: vec![0; words.div_ceil(WORD)] }
    }

    pub(crate) fn insert(&mut self, number: usize) {
        let word = number / WORD;
        self.words[word] |= 1 << (number % WORD);
        self.filled[word / WORD] |= 1 << (word % WORD);
    }

    pub(crate) fn remove(&mut self, number: usize) {
        let word = number / WORD;
        self.words[word] &= !(1 << (number % WORD));
        if self.words[word] == 0 {
            self.filled[word / WORD] &= !(1 << (word % WORD));
        }
    }

    /// The smallest number that is not below `number`.
    pub(crate) fn first_from(&self, number: usize) -> Option<usize> {
        let word = number / WORD;
        let here = self.words.get(word)? & (u64::MAX << (number % WORD));
        if here != 0 {
            return Some(word * WORD + here.trailing_zeros() as usize);
        }
        let next = next_bit(&self.filled, word + 1)?;
        Some(next * WORD + self.words[next].trailing_zeros() as usize)
    }
}

fn next_bit(words: &[u64], from: usize) -> Option<usize> {
    let first = from / WORD;
    let mut mask = u64::MAX << (from % WORD);
    for (place, word) in words.iter().enumerate().skip(first) {
        if word & mask != 0 {
            return Some(place * WORD + (word & mask).trailing_zeros() as usize);
        }
        mask = u64::MAX;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_a_scan_finds() {
        let mut set = CapacitySet::new(10_000);
        let members = [0, 1, 63, 64, 65, 4095, 4096, 9999];
        members.iter().for_each(|&member| set.insert(member));
        for number in 0..10_000 {
            assert_eq!(set.first_from(number), members.iter().copied().find(|&member| member >= number));
        }
        members.iter().for_each(|&member| set.remove(member));
        assert_eq!(set.first_from(0), None);
        assert_eq!(set.first_from(10_001), None);
    }
}
