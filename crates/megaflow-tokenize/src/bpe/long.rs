//! The cache of words of more than 15 bytes: a table of lines with four entries each, which point into an arena.

use super::cache::STEP;
use crate::simd;

/// Longest word that is kept.
pub(crate) const LONGEST: usize = 255;
/// Words of 8 bytes of a line: four of tag and place in the arena, four of lengths.
const LINE: usize = 8;
const WAYS: usize = 4;
const FIRST_LINES: usize = 1 << 10;

/// Hash of a word of at least 16 bytes.
#[inline]
pub(crate) fn hash(word: &[u8]) -> u64 {
    let mix = |a: u64, b: u64| {
        let product = u128::from(a) * u128::from(b);
        product as u64 ^ (product >> 64) as u64
    };
    let read = |bytes: &[u8]| u64::from_le_bytes(*bytes.first_chunk().expect("8 bytes"));
    let mut hash = word.len() as u64 ^ 0xA076_1D64_78BD_642F;
    for pair in word.chunks_exact(16) {
        hash = mix(read(pair) ^ 0xE703_7ED1_A0B4_28DB, read(&pair[8..]) ^ hash);
    }
    let last = &word[word.len() - 16..];
    mix(read(last) ^ 0x8EBC_6AF0_9C88_C6E3, read(&last[8..]) ^ hash)
}

/// A cache with a byte budget; forgets everything when its arena is full.
pub(crate) struct LongCache {
    words: Vec<u64>,
    aligned: usize,
    lines: usize,
    max_lines: usize,
    entries: usize,
    /// For each word its bytes, then its ids; room for [`STEP`] more ids behind the last.
    arena: Vec<u8>,
    max_arena: usize,
}

impl LongCache {
    /// An empty cache that will not take more than about `budget` bytes.
    pub(crate) fn new(budget: usize) -> Self {
        let mut cache = Self {
            words: Vec::new(),
            aligned: 0,
            lines: 0,
            max_lines: 1 << (budget / 4 / (LINE * 8)).max(FIRST_LINES).ilog2(),
            entries: 0,
            arena: Vec::new(),
            max_arena: (budget / 2).clamp(1 << 16, u32::MAX as usize),
        };
        cache.allocate(FIRST_LINES);
        cache
    }

    fn allocate(&mut self, lines: usize) {
        self.words = vec![0; (lines + 1) * LINE];
        simd::advise_huge_pages(&self.words);
        self.aligned = (64 - self.words.as_ptr() as usize % 64) % 64 / 8;
        (self.lines, self.entries) = (lines, 0);
    }

    #[inline]
    fn place(&self, hash: u64) -> usize {
        self.aligned + (hash as usize & (self.lines - 1)) * LINE
    }

    /// Asks for the line of a hash.
    #[inline]
    pub(crate) fn prefetch(&self, hash: u64) {
        simd::prefetch(&self.words, self.place(hash));
    }

    #[inline]
    fn line(&self, hash: u64) -> &[u64; LINE] {
        let place = self.place(hash);
        self.words[place..place + LINE].first_chunk().expect("a slice of this length")
    }

    /// Asks for the bytes and ids of a word of this hash, whose line has come.
    #[inline]
    pub(crate) fn prefetch_word(&self, hash: u64) {
        let line = self.line(hash);
        if let Some(way) = (0..WAYS).find(|&way| line[way] >> 32 == hash >> 32) {
            let start = line[way] as u32 as usize;
            simd::prefetch(&self.arena, start);
            simd::prefetch(&self.arena, start + 64);
        }
    }

    /// Ids of a word, as little-endian bytes, and how many; a multiple of [`STEP`] may be read.
    #[inline]
    pub(crate) fn get(&self, word: &[u8], hash: u64) -> Option<(&[[u8; 4]], usize)> {
        let line = self.line(hash);
        (0..WAYS).find_map(|way| {
            if line[way] >> 32 != hash >> 32 || line[way + WAYS] >> 32 != word.len() as u64 {
                return None;
            }
            let start = line[way] as u32 as usize;
            let ids = start + word.len();
            let count = line[way + WAYS] as u32 as usize;
            is_same(&self.arena[start..ids], word)
                .then(|| (as_ids(&self.arena[ids..ids + count.next_multiple_of(STEP) * 4]), count))
        })
    }

    /// Keeps the ids of a word that is not there.
    pub(crate) fn insert(&mut self, word: &[u8], hash: u64, ids: &[u32]) {
        let needed = word.len() + (ids.len() + STEP) * 4;
        if self.arena.len() + needed > self.max_arena {
            self.words.fill(0);
            self.arena.clear();
            self.entries = 0;
        }
        if self.entries >= self.lines && self.lines < self.max_lines {
            self.grow();
        }
        if self.arena.capacity() - self.arena.len() < needed {
            let more = self.arena.len().clamp(needed, self.max_arena - self.arena.len());
            self.arena.reserve_exact(more); // twice as much, but not beyond the budget
        }
        let start = self.arena.len().saturating_sub(STEP * 4);
        self.arena.truncate(start);
        self.arena.extend_from_slice(word);
        ids.iter().for_each(|id| self.arena.extend_from_slice(&id.to_le_bytes()));
        self.arena.extend_from_slice(&[0; STEP * 4]);
        self.put(hash, start, (word.len() as u64) << 32 | ids.len() as u64);
    }

    fn put(&mut self, hash: u64, start: usize, lengths: u64) {
        let place = self.place(hash);
        let line = &mut self.words[place..place + LINE];
        let empty = (0..WAYS).find(|way| line[way + WAYS] == 0);
        self.entries += usize::from(empty.is_some());
        let way = empty.unwrap_or(start % WAYS);
        line[way] = hash >> 32 << 32 | start as u64;
        line[way + WAYS] = lengths;
    }

    /// Doubles twice. The lines do not hold whole hashes, so these are computed again.
    fn grow(&mut self) {
        let (old, from) = (std::mem::take(&mut self.words), self.aligned);
        self.allocate((self.lines * 4).min(self.max_lines));
        for line in old[from..].chunks_exact(LINE) {
            for way in 0..WAYS {
                let (start, lengths) = (line[way] as u32 as usize, line[way + WAYS]);
                if lengths != 0 {
                    let hash = hash(&self.arena[start..start + (lengths >> 32) as usize]);
                    self.put(hash, start, lengths);
                }
            }
        }
    }

    /// Bytes that it holds.
    pub(crate) fn bytes(&self) -> usize {
        self.words.len() * 8 + self.arena.capacity()
    }
}

/// Whether two words of one length, at least 16, are the same.
#[inline]
fn is_same(one: &[u8], other: &[u8]) -> bool {
    let read = |bytes: &[u8], at: usize| u128::from_le_bytes(*bytes[at..].first_chunk().expect("16 bytes"));
    let differ = |at: usize| read(one, at) ^ read(other, at);
    let last = one.len() - 16;
    (0..last).step_by(16).fold(differ(last), |different, at| different | differ(at)) == 0
}

/// Views bytes as groups of four.
fn as_ids(bytes: &[u8]) -> &[[u8; 4]] {
    simd::as_chunks_of_4(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_one_hash_are_told_apart() {
        let word = |last: u8| [0x8EBC_6AF0_9C88_C6E3u64.to_le_bytes(), [last; 8]].concat(); // one factor of the hash is 0
        let mut cache = LongCache::new(1 << 20);
        assert_eq!(hash(&word(1)), hash(&word(2)));
        cache.insert(&word(1), hash(&word(1)), &[5]);
        assert_eq!(cache.get(&word(2), hash(&word(2))), None);
        cache.insert(&word(2), hash(&word(2)), &[6]);
        let ids = |word: &[u8]| cache.get(word, hash(word)).map(|(ids, count)| ids[..count].to_vec());
        assert_eq!(ids(&word(1)), Some(vec![5u32.to_le_bytes()]));
        assert_eq!(ids(&word(2)), Some(vec![6u32.to_le_bytes()]));
    }

    #[test]
    fn the_budget_holds_and_what_is_found_is_right() {
        let budget = 4 << 20;
        let mut cache = LongCache::new(budget);
        let count = if cfg!(miri) { 2000 } else { 200_000u32 };
        for index in 0..count {
            let word = format!("a long word with a number {index}");
            let word = word.as_bytes();
            cache.insert(word, hash(word), &[index; 9]);
            let found = cache.get(word, hash(word)).map(|(ids, count)| &ids[..count]);
            assert_eq!(found, Some([index.to_le_bytes(); 9].as_slice()));
            assert_eq!(cache.get(&word[1..], hash(&word[1..])), None);
        }
        let count = if cfg!(miri) { 2000 } else { 200_000u32 };
        for index in 0..count {
            let word = format!("a long word with a number {index}");
            let found = cache.get(word.as_bytes(), hash(word.as_bytes()));
            assert!(found.is_none_or(|(ids, count)| ids[..count] == [index.to_le_bytes(); 9]));
        }
        assert!(cache.bytes() <= budget, "{}", cache.bytes());
    }
}
