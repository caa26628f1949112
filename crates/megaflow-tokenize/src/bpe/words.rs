//! Words to ids: the cache in front, the vocabulary tables behind it.

use super::cache::{Found, INLINE, Key, Lines, SHORT, STEP, WordCache};
use super::long::{self, LONGEST, LongCache};
use super::vocab::{Scratch, Tables};
use crate::{TokenizeError, simd};

/// A type that ids are written as.
pub(crate) trait TokenId: Copy + Default + PartialEq {
    /// Narrows an id; whoever chose the type has checked that the vocabulary fits.
    fn from_id(id: u32) -> Self;

    /// The row itself, if its numbers are as wide as ids.
    fn as_ids(out: &mut Vec<Self>) -> Option<&mut Vec<u32>>;
}

impl TokenId for u32 {
    #[inline]
    fn from_id(id: u32) -> Self {
        id
    }

    fn as_ids(out: &mut Vec<Self>) -> Option<&mut Vec<u32>> {
        Some(out)
    }
}

impl TokenId for u16 {
    #[inline]
    fn from_id(id: u32) -> Self {
        id as u16
    }

    fn as_ids(_: &mut Vec<Self>) -> Option<&mut Vec<u32>> {
        None
    }
}

/// Words whose cache lines are asked for before the first of them is read.
const BATCH: usize = 64;

/// State of one thread.
pub(crate) struct WordEncoder {
    cache: WordCache,
    long: LongCache,
    scratch: Scratch,
    ids: Vec<u32>,
}

#[derive(Clone, Copy)]
struct Probe {
    key: Key,
    /// Place in the cache of short words, or the hash of a long one.
    place: usize,
}

impl WordEncoder {
    /// With an empty cache of at most `budget` bytes.
    pub(crate) fn new(budget: usize) -> Self {
        Self {
            cache: WordCache::new(budget / 2),
            long: LongCache::new(budget / 2),
            scratch: Scratch::default(),
            ids: Vec::new(),
        }
    }

    /// Bytes that its caches hold.
    pub(crate) fn held_bytes(&self) -> usize {
        self.cache.bytes() + self.long.bytes()
    }

    /// Finds out where the words of a batch are looked for, and asks for what lies there.
    #[inline(always)]
    fn probe(&self, text: &[u8], mut start: usize, ends: &[u32], probes: &mut [Probe; BATCH]) {
        let (mut longs, mut long_count) = ([0u64; BATCH], 0);
        for (probe, &end) in probes.iter_mut().zip(ends) {
            let end = end as usize;
            if end - start <= SHORT {
                probe.key = key(text, start, end - start);
                probe.place = self.cache.place(probe.key);
                self.cache.prefetch(probe.place);
            } else if end - start <= LONGEST {
                let hash = long::hash(&text[start..end]);
                self.long.prefetch(hash);
                probe.place = hash as usize;
                longs[long_count] = hash;
                long_count += 1;
            }
            start = end;
        }
        longs[..long_count].iter().for_each(|&hash| self.long.prefetch_word(hash));
    }

    /// Appends the ids of the words that end at `ends` (the first begins at 0).
    pub(crate) fn encode<T: TokenId>(
        &mut self,
        tables: &Tables,
        text: &[u8],
        ends: &[u32],
        out: &mut Vec<T>,
    ) -> Result<(), TokenizeError> {
        let nothing = Probe { key: Key::new(&[0; 16], 0), place: 0 };
        let mut probes = [nothing; BATCH];
        let mut len = out.len();
        let mut batch_start = 0usize;
        for batch in ends.chunks(BATCH) {
            self.cache.note_seen(batch.len());
            self.probe(text, batch_start, batch, &mut probes);
            out.truncate(len);
            simd::make_room(out, BATCH * INLINE);
            out.resize(len + BATCH * INLINE, T::default());
            let mut start = batch_start;
            for (index, &end) in batch.iter().enumerate() {
                let (probe, end) = (probes[index], end as usize);
                if end - start <= SHORT {
                    if let Some((ids, count)) = self.cache.get_inline(probe.key, probe.place) {
                        let slots: &mut [T; INLINE] = out[len..].first_chunk_mut().expect("room for a batch");
                        *slots = ids.map(T::from_id);
                        len += count;
                        start = end;
                        continue;
                    }
                    if let Some((ids, count)) = self.cache.get_spilled(probe.key, probe.place) {
                        len = put(ids, count, |id| id, out, len, BATCH - index);
                        start = end;
                        continue;
                    }
                    if self.look_up_short(tables, &text[start..end], probe.key)? == Lines::Moved {
                        let lens = batch[index..].windows(2).map(|ends| (ends[1] - ends[0]) as usize);
                        let later = probes[index + 1..].iter_mut().zip(lens).filter(|(_, len)| *len <= SHORT);
                        later.for_each(|(probe, _)| probe.place = self.cache.place(probe.key));
                    }
                } else {
                    let (word, hash) = (&text[start..end], probe.place as u64);
                    if word.len() > LONGEST {
                        len = self.encode_giant(tables, word, out, len)?;
                        out.resize(len + (BATCH - index) * INLINE, T::default());
                        start = end;
                        continue;
                    }
                    if let Some((ids, count)) = self.long.get(word, hash) {
                        len = put(ids, count, u32::from_le_bytes, out, len, BATCH - index);
                        start = end;
                        continue;
                    }
                    self.encode_long(tables, word, hash)?;
                }
                len = put(&self.ids, self.ids.len(), |id| id, out, len, BATCH - index);
                start = end;
            }
            batch_start = start;
        }
        out.truncate(len);
        Ok(())
    }

    /// Puts the ids of a short word into `self.ids`.
    #[inline(never)]
    fn look_up_short(&mut self, tables: &Tables, word: &[u8], key: Key) -> Result<Lines, TokenizeError> {
        self.ids.clear();
        match self.cache.get(key) {
            Found::Inline(ids, count) => self.ids.extend_from_slice(&ids[..count]),
            Found::Spilled(ids, count) => self.ids.extend_from_slice(&ids[..count]),
            Found::Missing => {
                encode_word(tables, word, &mut self.scratch, &mut self.ids)?;
                return Ok(self.cache.insert(key, &self.ids));
            }
        }
        Ok(Lines::Stay)
    }

    /// Puts the ids of a word of at most [`LONGEST`] bytes that is not in the cache into `self.ids`.
    #[inline(never)]
    fn encode_long(&mut self, tables: &Tables, word: &[u8], hash: u64) -> Result<(), TokenizeError> {
        self.ids.clear();
        encode_word(tables, word, &mut self.scratch, &mut self.ids)?;
        self.long.insert(word, hash, &self.ids);
        Ok(())
    }

    /// Writes the ids of a word that no cache keeps at `len`, and returns the place behind them, which is the end of `out`.
    #[inline(never)]
    fn encode_giant<T: TokenId>(
        &mut self,
        tables: &Tables,
        word: &[u8],
        out: &mut Vec<T>,
        len: usize,
    ) -> Result<usize, TokenizeError> {
        out.truncate(len);
        if let Some(ids) = T::as_ids(out) {
            encode_word(tables, word, &mut self.scratch, ids)?;
        } else {
            self.ids.clear();
            encode_word(tables, word, &mut self.scratch, &mut self.ids)?;
            out.extend(self.ids.iter().map(|&id| T::from_id(id)));
        }
        Ok(out.len())
    }
}

/// Writes `count` ids at `len` and returns the place behind them; leaves room for as many words as are still to come.
/// `ids` may go on behind them: whole steps are copied, so that most words take one, whatever their count.
#[inline]
fn put<T: TokenId, I: Copy>(
    ids: &[I],
    count: usize,
    id: impl Fn(I) -> u32,
    out: &mut Vec<T>,
    len: usize,
    words: usize,
) -> usize {
    let needed = len + count + words * INLINE + STEP;
    if needed > out.len() {
        simd::make_room(out, needed + BATCH * INLINE - out.len());
        out.resize(needed + BATCH * INLINE, T::default());
    }
    let steps = ids.chunks_exact(STEP);
    for (slot, &rest) in out[len + ids.len() / STEP * STEP..].iter_mut().zip(steps.remainder()) {
        *slot = T::from_id(id(rest));
    }
    let to = out[len..].chunks_exact_mut(STEP);
    for (to, from) in to.zip(steps) {
        to.iter_mut().zip(from).for_each(|(slot, &from)| *slot = T::from_id(id(from)));
    }
    len + count
}

fn encode_word(tables: &Tables, word: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) -> Result<(), TokenizeError> {
    if tables.encode_word(word, scratch, ids) {
        return Ok(());
    }
    Err(TokenizeError::Encode { bytes: word.len(), detail: "no tokens spell a part of it".to_owned() })
}

/// Key of the word at `start`; reads the 16 bytes there where the text has them.
#[inline]
fn key(text: &[u8], start: usize, len: usize) -> Key {
    match text.get(start..).and_then(|rest| rest.first_chunk::<16>()) {
        Some(bytes) => Key::new(bytes, len),
        None => {
            let mut bytes = [0; 16];
            bytes[..len].copy_from_slice(&text[start..start + len]);
            Key::new(&bytes, len)
        }
    }
}
