//! The word cache of one thread: word bytes to ids.
//!
//! Words of up to 15 bytes are keys of 16 bytes (the bytes and the length), two of them with their ids in one cache line:
//! most probes touch one line. A word whose line is full goes to the line beside it, and if that is full as well, takes
//! the place of another, so the table never fills up; it grows up to its byte budget and from then on forgets.

use crate::simd;

/// Ids that fit beside a key.
pub(crate) const INLINE: usize = 4;
/// Rows of more ids are read in steps of so many: behind the last row there is room for one.
pub(crate) const STEP: usize = 8;
/// Longest word with an inline key.
pub(crate) const SHORT: usize = 15;

const COUNT_SHIFT: u32 = 29;
const ID_MASK: u32 = (1 << COUNT_SHIFT) - 1;
/// Count that says: the ids are in the spill.
const SPILLED: u32 = 7;

/// Words of 8 bytes of a line: two entries of two words of key and two of ids.
const LINE: usize = 8;
const FIRST_LINES: usize = 1 << 13;
/// Lines that the second-level cache holds. A larger table is slower, and clearing it takes time.
const NEAR_LINES: usize = 1 << 14;

/// Key of a word of 1 to 15 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Key {
    low: u64,
    high: u64,
}

const LENGTH_MASK: [(u64, u64); 16] = length_masks();

const fn length_masks() -> [(u64, u64); 16] {
    let mut masks = [(0u64, 0u64); 16];
    let mut len = 0;
    while len < 16 {
        masks[len] = if len < 8 { ((1 << (8 * len)) - 1, 0) } else { (u64::MAX, (1 << (8 * (len - 8))) - 1) };
        len += 1;
    }
    masks
}

impl Key {
    /// From the 16 bytes at the word and its length.
    #[inline]
    pub(crate) fn new(bytes: &[u8; 16], len: usize) -> Self {
        let word = u128::from_le_bytes(*bytes);
        let (low, high) = LENGTH_MASK[len & 15];
        Self { low: word as u64 & low, high: ((word >> 64) as u64 & high) | (len as u64) << 56 }
    }

    #[inline]
    fn hash(self) -> u64 {
        let product = u128::from(self.low ^ 0x2D35_8DCC_AA6C_78A5) * u128::from(self.high ^ 0x8BB8_4B93_962E_ACC9);
        product as u64 ^ (product >> 64) as u64
    }
}

/// What a probe found.
pub(crate) enum Found<'a> {
    /// Up to four ids, and how many.
    Inline([u32; INLINE], usize),
    /// More ids, and how many; a multiple of [`STEP`] may be read.
    Spilled(&'a [u32], usize),
    /// Nothing.
    Missing,
}

/// Whether places of keys still hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lines {
    /// They do.
    Stay,
    /// The table has grown.
    Moved,
}

/// A cache with a byte budget.
pub(crate) struct WordCache {
    /// Lines, from the first address that is a multiple of their size on.
    words: Vec<u64>,
    aligned: usize,
    shift: u32,
    entries: usize,
    /// Words looked up and words added since the table grew: a table that is not hit does not grow.
    seen: usize,
    added: usize,
    max_lines: usize,
    /// Rows of ids, and [`STEP`] more behind the last.
    spill: Vec<u32>,
    max_spill: usize,
}

impl WordCache {
    /// An empty cache that will not take more than about `budget` bytes.
    pub(crate) fn new(budget: usize) -> Self {
        // All words of a line, twice: while the table grows, the old one is there as well.
        let max_lines = 1 << (budget / (LINE * 8) / 2).max(FIRST_LINES).ilog2();
        let mut cache = Self {
            words: Vec::new(),
            aligned: 0,
            shift: 0,
            entries: 0,
            seen: 0,
            added: 0,
            max_lines,
            spill: Vec::new(),
            max_spill: (budget / 8 / 4).clamp(1 << 12, u32::MAX as usize / 4),
        };
        cache.allocate(FIRST_LINES);
        cache
    }

    fn allocate(&mut self, lines: usize) {
        self.words = vec![0; (lines + 2) * LINE];
        simd::advise_huge_pages(&self.words);
        self.aligned = (128 - self.words.as_ptr() as usize % 128) % 128 / 8;
        self.shift = 64 - lines.trailing_zeros();
        self.entries = 0;
    }

    /// First line of a key; holds until [`Self::insert`] says otherwise.
    #[inline]
    pub(crate) fn place(&self, key: Key) -> usize {
        self.aligned + (key.hash() >> self.shift) as usize * LINE
    }

    /// Counts words that are looked up.
    #[inline]
    pub(crate) fn note_seen(&mut self, words: usize) {
        self.seen += words;
    }

    /// Asks for the line at `place`.
    #[inline]
    pub(crate) fn prefetch(&self, place: usize) {
        simd::prefetch(&self.words, place);
    }

    #[inline]
    fn line(&self, place: usize) -> &[u64; LINE] {
        self.words[place..place + LINE].first_chunk().expect("a slice of this length")
    }

    /// The line beside one.
    #[inline]
    fn beside(&self, place: usize) -> usize {
        ((place - self.aligned) ^ LINE) + self.aligned
    }

    /// Up to four ids of a word, if they are in its first line.
    #[inline]
    pub(crate) fn get_inline(&self, key: Key, place: usize) -> Option<([u32; INLINE], usize)> {
        let line = self.line(place);
        let entry = usize::from(line[4] == key.low && line[5] == key.high) * 4;
        if line[entry] != key.low || line[entry + 1] != key.high {
            return None;
        }
        let (first, second) = (line[entry + 2], line[entry + 3]);
        let count = first as u32 >> COUNT_SHIFT;
        let ids = [first as u32 & ID_MASK, (first >> 32) as u32, second as u32, (second >> 32) as u32];
        (count != SPILLED).then_some((ids, count as usize))
    }

    /// More than four ids of a word, if it is in its first line, and how many; a multiple of [`STEP`] may be read.
    #[inline]
    pub(crate) fn get_spilled(&self, key: Key, place: usize) -> Option<(&[u32], usize)> {
        let line = self.line(place);
        let entry = usize::from(line[4] == key.low && line[5] == key.high) * 4;
        let is_it = line[entry] == key.low && line[entry + 1] == key.high && is_spilled(line[entry + 2]);
        is_it.then(|| self.row(line[entry + 2], line[entry + 3]))
    }

    /// A row of the spill, by what an entry says of it.
    #[inline]
    fn row(&self, place: u64, len: u64) -> (&[u32], usize) {
        let (start, len) = ((place >> 32) as usize, len as usize);
        (&self.spill[start..start + len.next_multiple_of(STEP)], len)
    }

    /// Ids of a word, wherever they are.
    pub(crate) fn get(&self, key: Key) -> Found<'_> {
        let place = self.place(key);
        let line = self.line(place);
        if (line[1] == 0 || line[5] == 0) && [line[1], line[5]].iter().all(|&high| high != key.high) {
            return Found::Missing; // words go to the second line when the first one is full
        }
        for place in [place, self.beside(place)] {
            if let Some((ids, count)) = self.get_inline(key, place) {
                return Found::Inline(ids, count);
            }
            if let Some((ids, count)) = self.get_spilled(key, place) {
                return Found::Spilled(ids, count);
            }
        }
        Found::Missing
    }

    /// Keeps the ids of a word that is not there.
    pub(crate) fn insert(&mut self, key: Key, ids: &[u32]) -> Lines {
        let mut moved = Lines::Stay;
        let lines = self.words.len() / LINE - 2;
        self.added += 1;
        let wanted = if lines < NEAR_LINES { 2 } else { 3 } * self.added;
        if self.entries >= lines / 2 && lines < self.max_lines && self.seen >= wanted {
            (self.seen, self.added) = (0, 0);
            self.grow((lines * 2).min(self.max_lines));
            moved = Lines::Moved;
        }
        let payload = if ids.len() <= INLINE {
            let id = |index: usize| u64::from(ids.get(index).copied().unwrap_or(0));
            let first = id(0) | (ids.len() as u64) << COUNT_SHIFT;
            [first | id(1) << 32, id(2) | id(3) << 32]
        } else {
            if self.spill.len() + ids.len() > self.max_spill {
                self.forget_all();
            }
            let start = self.spill.len().saturating_sub(STEP);
            self.spill.truncate(start);
            self.spill.extend_from_slice(ids);
            self.spill.extend_from_slice(&[0; STEP]);
            let start = start as u64;
            [u64::from(SPILLED) << COUNT_SHIFT | start << 32, ids.len() as u64]
        };
        self.put([key.low, key.high, payload[0], payload[1]]);
        moved
    }

    fn put(&mut self, entry: [u64; 4]) {
        let place = self.place(Key { low: entry[0], high: entry[1] });
        let beside = self.beside(place);
        let empty = [place, place + 4, beside, beside + 4].into_iter().find(|&at| self.words[at + 1] == 0);
        // Without an empty one, the youngest neighbour gives way: older words are more frequent on average.
        let at = empty.unwrap_or(place + 4);
        self.entries += usize::from(empty.is_some());
        self.words[at..at + 4].copy_from_slice(&entry);
    }

    fn grow(&mut self, lines: usize) {
        let (old, start) = (std::mem::take(&mut self.words), self.aligned);
        self.allocate(lines);
        for entry in old[start..].chunks_exact(4) {
            if entry[1] != 0 {
                self.put([entry[0], entry[1], entry[2], entry[3]]);
            }
        }
    }

    fn forget_all(&mut self) {
        self.words.fill(0);
        self.entries = 0;
        self.spill.clear();
    }

    /// Bytes that it holds.
    pub(crate) fn bytes(&self) -> usize {
        self.words.len() * 8 + self.spill.capacity() * 4
    }
}

#[inline]
fn is_spilled(payload: u64) -> bool {
    payload as u32 >> COUNT_SHIFT == SPILLED
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(word: &str) -> Key {
        let mut bytes = [b'#'; 16];
        bytes[..word.len()].copy_from_slice(word.as_bytes());
        Key::new(&bytes, word.len())
    }

    fn ids(cache: &WordCache, word: &str) -> Option<Vec<u32>> {
        match cache.get(key(word)) {
            Found::Inline(ids, count) => Some(ids[..count].to_vec()),
            Found::Spilled(ids, count) => Some(ids[..count].to_vec()),
            Found::Missing => None,
        }
    }

    #[test]
    fn words_come_back_with_their_ids_and_only_they() {
        let (count, kept_bytes) = if cfg!(miri) { (500, 1 << 20) } else { (50_000, 1 << 24) };
        let mut cache = WordCache::new(kept_bytes);
        for index in 0..count {
            let expected: Vec<u32> = (0..index % 7 + 1).map(|place| index + place).collect();
            cache.insert(key(&format!("w{index}")), &expected);
            assert_eq!(ids(&cache, &format!("w{index}")), Some(expected));
        }
        let kept = (0..count).filter(|index| {
            let found = ids(&cache, &format!("w{index}"));
            found.is_none_or(|found| found == (0..index % 7 + 1).map(|place| index + place).collect::<Vec<_>>())
        });
        assert_eq!(kept.count(), count as usize);
        assert_eq!(ids(&cache, "x1"), None);
    }

    #[test]
    fn the_budget_holds() {
        let budget = 4 << 20;
        let mut cache = WordCache::new(budget);
        let count = if cfg!(miri) { 3000 } else { 300_000u32 };
        for index in 0..count {
            cache.insert(key(&format!("w{index}")), &[index; 6]);
        }
        assert!(cache.bytes() <= budget + budget / 4, "{}", cache.bytes());
        // What was forgotten with the room for its ids does not come back with those of other words.
        let right = |index: u32| ids(&cache, &format!("w{index}")).is_none_or(|found| found == [index; 6]);
        assert!((0..count).all(right));
    }

    #[test]
    fn bytes_behind_a_word_do_not_matter() {
        assert_eq!(Key::new(b"abcdefghijklmnop", 3), Key::new(b"abc             ", 3));
        assert_ne!(Key::new(b"abc\0............", 3), Key::new(b"abc\0............", 4));
    }
}
