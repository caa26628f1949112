//! The vocabulary of a BPE model, in the form in which words are encoded.
//!
//! Two facts carry the fast path, both consequences of the determinism of BPE (the lowest-ranked, then leftmost pair
//! merges first):
//!
//! 1. *A token has one history.* When a token appears over some bytes, no merge has crossed their ends, so these bytes
//!    went through what encoding them alone does. Each token that can appear at all therefore has exactly one last merge,
//!    and all other pairs of the same product never come to merge.
//! 2. *Neighbours decide.* A row of tokens is the encoding of its text if and only if each two neighbours are the
//!    encoding of theirs: the first merge across a border needs only the two tokens beside it.
//!    (Known from the `bpe` crate's description by van Antwerpen and Neubeck, 2024.)
//!
//! If, beyond that, each merge has a higher rank than those that made its halves (true of everything that BPE training
//! writes), the merges happen in order of rank, and whether two tokens are good neighbours is found by undoing the
//! youngest merge along their border until nothing is left ([`Borders::are_neighbours`]). Tokens are numbered by age here,
//! so that "younger" is a comparison of numbers. Some vocabularies break that property with a few tokens (Llama 3 has 107,
//! whose halves came later): words that spell one of these are encoded with a heap of pairs, all others are not affected.

use std::collections::HashMap;

use aho_corasick::AhoCorasick;

use super::borders::Borders;
use super::heap::HeapMerges;
use super::pairs::MAX_TOKENS;
use super::small::{Bytes, SMALL};
use super::trie::{NONE, Trie};
use crate::TokenizeError;
use crate::scan::run_of_one_byte;
use crate::simd::make_room;

/// A merge, by the ids of the vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Merge {
    /// Lower ranks merge first; equal ranks (of the same product) from left to right.
    pub(crate) rank: u32,
    pub(crate) left: u32,
    pub(crate) right: u32,
    pub(crate) product: u32,
}

/// What becomes of characters that no token begins with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Unknown {
    /// There are none: the vocabulary has all bytes.
    Never,
    /// The ids of their bytes.
    Bytes(Box<[u32; 256]>),
    /// One id for each, or for all in a row.
    Token {
        /// The id.
        id: u32,
        /// Whether a row of such characters is one id.
        fused: bool,
    },
}

/// The lengths that tokens have: a token is cut in two only where both halves can be tokens.
pub(crate) struct Lengths {
    has: Vec<bool>,
    all: Vec<usize>,
}

impl Lengths {
    /// Of tokens.
    pub(crate) fn of(lengths: impl Iterator<Item = usize>) -> Self {
        let mut all: Vec<usize> = lengths.collect();
        all.sort_unstable();
        all.dedup();
        let mut has = vec![false; all.last().map_or(0, |&longest| longest + 1)];
        all.iter().for_each(|&length| has[length] = true);
        Self { has, all }
    }

    /// Places at which a token of one of these lengths may be cut, in rising order.
    pub(crate) fn cuts(&self, len: usize) -> impl Iterator<Item = usize> + '_ {
        let shorter = self.all.iter().copied().skip_while(|&cut| cut == 0).take_while(move |&cut| cut < len);
        shorter.filter(move |&cut| self.has[len - cut])
    }
}

/// What [`Tables`] are made from.
pub(crate) struct VocabSource {
    /// Text and id of each entry; texts are bytes as they stand in the input.
    pub(crate) tokens: Vec<(Vec<u8>, u32)>,
    /// Entries that a text is first cut into.
    pub(crate) symbols: Vec<u32>,
    /// In order of rank.
    pub(crate) merges: Vec<Merge>,
    /// Whether a word that is an entry as a whole is that entry, whatever the merges say.
    pub(crate) whole_words_first: bool,
    /// What becomes of other characters.
    pub(crate) unknown: Unknown,
}

/// What is asked of a token when a shorter one is tried in its place.
#[derive(Clone, Copy)]
struct Shorter {
    /// Longest token that begins it, other than itself, or `NONE`.
    prefix: u32,
    /// Bytes of that one.
    len: u32,
}

/// A vocabulary ready to encode.
pub(crate) struct Tables {
    shorter: Vec<Shorter>,
    /// Bytes of each token.
    lens: Vec<u32>,
    /// Ids as the vocabulary writes them, by age.
    ids: Vec<u32>,
    borders: Borders,
    trie: Trie,
    /// Set if the symbols are the 256 bytes.
    bytes: Option<Bytes>,
    /// Used for words in which merges may not be in order of age.
    late: Option<Late>,
    /// Entries that no merges make, for `whole_words_first`.
    unmade: HashMap<Vec<u8>, u32>,
    unknown: Unknown,
}

/// Tokens whose halves are younger than their rank, and what encodes words that spell one.
struct Late {
    heap: HeapMerges,
    /// `None`: all words are such.
    texts: Option<AhoCorasick>,
}

impl Late {
    fn concerns(&self, word: &[u8]) -> bool {
        self.texts.as_ref().is_none_or(|texts| texts.is_match(word))
    }
}

/// Most late tokens that are searched for.
const MAX_LATE: usize = 4096;

/// A word that begins with a token of at most these bytes is taken for one of which little merges.
const FEW: usize = 2;

/// The same of a piece of a word: characters whose neighbours are rare, of which a longer row merges a lot.
const TINY: usize = 8;

/// Shortest word that is looked at for being a run of one byte.
const LONG_RUN: usize = 64;

/// Memory that encoding reuses.
#[derive(Default)]
pub(crate) struct Scratch {
    /// Places from which there is no way on, one bit each.
    dead: Vec<u64>,
    pub(super) heap: super::heap::HeapScratch,
}

impl Tables {
    /// Builds the tables.
    ///
    /// # Errors
    /// [`TokenizeError::Invalid`] if entries contradict one another or are too many.
    pub(crate) fn build(source: &VocabSource) -> Result<Self, TokenizeError> {
        let max_id = source.tokens.iter().map(|&(_, id)| id).max().unwrap_or(0) as usize;
        if max_id >= MAX_TOKENS - 1 {
            return Err(TokenizeError::invalid(format!("token ids reach {max_id}, at most {MAX_TOKENS} are handled")));
        }
        let mut text_of: Vec<&[u8]> = vec![&[]; max_id + 1];
        for (text, id) in &source.tokens {
            text_of[*id as usize] = text;
        }
        let mut age_of = vec![NONE; max_id + 1];
        let mut tables = Self {
            shorter: Vec::new(),
            lens: Vec::new(),
            ids: Vec::with_capacity(source.tokens.len()),
            borders: Borders::with_room(max_id + 1, source.tokens.len()),
            trie: Trie::build(&[]).ok_or_else(|| TokenizeError::invalid("empty trie"))?,
            bytes: None,
            late: None,
            unmade: HashMap::new(),
            unknown: source.unknown.clone(),
        };
        for &id in &source.symbols {
            if age_of[id as usize] == NONE {
                age_of[id as usize] = tables.ids.len() as u32;
                tables.ids.push(id);
                tables.borders.push_symbol();
            }
        }
        let (mut too_early, mut repeated) = (Vec::new(), false);
        for merge in &source.merges {
            let [left, right, product] = [merge.left, merge.right, merge.product].map(|id| age_of[id as usize]);
            if left == NONE || right == NONE {
                too_early.push(*merge);
            } else if product != NONE && tables.borders.product(left, right) == product {
                repeated = true;
            } else if product == NONE && tables.borders.are_neighbours(left, right) {
                age_of[merge.product as usize] = tables.ids.len() as u32;
                tables.ids.push(merge.product);
                tables.borders.push_merge(left, right);
            }
        }
        tables.link_prefixes(&text_of)?;
        tables.bytes = tables.find_bytes(source, &age_of, &text_of);
        tables.late = if repeated {
            // Of a pair that is listed twice the later rank counts.
            Some(Late { heap: HeapMerges::new(source), texts: None })
        } else {
            tables.find_late(source, &too_early, &age_of, &text_of)?
        };
        if source.whole_words_first {
            let is_late = |text: &[u8]| tables.late.as_ref().is_some_and(|late| late.concerns(text));
            let unmade = source.tokens.iter().filter(|(text, id)| age_of[*id as usize] == NONE || is_late(text));
            tables.unmade = unmade.map(|(text, id)| (text.clone(), *id)).collect();
        }
        Ok(tables)
    }

    /// Single bytes and pairs of them, if the symbols are all bytes and nothing else.
    fn find_bytes(&self, source: &VocabSource, age_of: &[u32], text_of: &[&[u8]]) -> Option<Bytes> {
        let mut symbols = [NONE; 256];
        for &id in &source.symbols {
            let [byte] = text_of[id as usize] else { return None };
            symbols[usize::from(*byte)] = age_of[id as usize];
        }
        let texts = self.ids.iter().map(|&id| text_of[id as usize]);
        (!symbols.contains(&NONE)).then(|| Bytes::new(symbols, &self.borders, texts))
    }

    /// The tokens that appear by a merge whose halves are younger than its rank.
    ///
    /// Only a token without another history can (see above). Whether it does is tried out on its own text: if it does not
    /// appear there, it appears nowhere. A word that spells none of them is encoded as if their merges did not exist.
    fn find_late(
        &self,
        source: &VocabSource,
        too_early: &[Merge],
        age_of: &[u32],
        text_of: &[&[u8]],
    ) -> Result<Option<Late>, TokenizeError> {
        let mut late = std::collections::HashSet::new();
        loop {
            let before = late.len();
            for merge in too_early {
                let exists = |id: u32| age_of[id as usize] != NONE || late.contains(&id);
                if age_of[merge.product as usize] == NONE && exists(merge.left) && exists(merge.right) {
                    late.insert(merge.product);
                }
            }
            if late.len() == before {
                break;
            }
        }
        if late.is_empty() {
            return Ok(None);
        }
        let (heap, mut scratch, mut ids) = (HeapMerges::new(source), Default::default(), Vec::new());
        let appears = |id: &u32| {
            ids.clear();
            let text = text_of[*id as usize];
            !heap.encode_word(text, &self.trie, &self.ids, &mut scratch, &mut ids, |_, _| 0) || ids == [*id]
        };
        let texts: Vec<&[u8]> = late.into_iter().filter(appears).map(|id| text_of[id as usize]).collect();
        match texts.len() {
            0 => Ok(None),
            1..=MAX_LATE => {
                let texts = AhoCorasick::new(texts);
                let texts = texts.map_err(|error| TokenizeError::invalid(format!("late tokens: {error}")))?;
                Ok(Some(Late { heap, texts: Some(texts) }))
            }
            _ => Ok(Some(Late { heap, texts: None })),
        }
    }

    /// Builds the trie of all made tokens, and for each the longest token that begins it.
    fn link_prefixes(&mut self, text_of: &[&[u8]]) -> Result<(), TokenizeError> {
        let mut entries: Vec<(&[u8], u32)> =
            (0..).zip(&self.ids).map(|(age, &id)| (text_of[id as usize], age)).collect();
        entries.sort_unstable();
        self.lens = self.ids.iter().map(|&id| text_of[id as usize].len() as u32).collect();
        self.shorter = vec![Shorter { prefix: NONE, len: 0 }; entries.len()];
        let mut open: Vec<(&[u8], u32)> = Vec::new();
        for &(text, age) in &entries {
            while open.last().is_some_and(|(prefix, _)| !text.starts_with(prefix)) {
                open.pop();
            }
            if text.is_empty() || open.last().is_some_and(|&(prefix, _)| prefix == text) {
                return Err(TokenizeError::invalid(format!(
                    "two tokens have the same text, one has id {}",
                    self.ids[age as usize]
                )));
            }
            if let Some(&(prefix, shorter)) = open.last() {
                self.shorter[age as usize] = Shorter { prefix: shorter, len: prefix.len() as u32 };
            }
            open.push((text, age));
        }
        self.trie =
            Trie::build(&entries).ok_or_else(|| TokenizeError::invalid("the vocabulary has too many tokens"))?;
        Ok(())
    }

    /// Calls `each` with the text of each token that can appear. `text_of` as given to [`Self::build`].
    pub(crate) fn each_made<'a>(&self, source: &'a VocabSource, mut each: impl FnMut(&'a [u8])) {
        let made: std::collections::HashSet<u32> = self.ids.iter().copied().collect();
        // With late tokens any entry might appear.
        source
            .tokens
            .iter()
            .filter(|(_, id)| self.late.is_some() || made.contains(id))
            .for_each(|(text, _)| each(text));
    }

    /// Appends the ids of a word. `false` if it holds bytes that no token begins with and that the vocabulary has no ids
    /// for.
    pub(crate) fn encode_word(&self, word: &[u8], scratch: &mut Scratch, out: &mut Vec<u32>) -> bool {
        if !self.unmade.is_empty() {
            if let Some(&id) = self.unmade.get(word) {
                out.push(id);
                return true;
            }
        }
        let begin = out.len();
        if let Some(late) = self.late.as_ref().filter(|late| late.concerns(word)) {
            return late.heap.encode_word(word, &self.trie, &self.ids, &mut scratch.heap, out, |word, out| {
                self.push_unknown(word, begin, out)
            });
        }
        let first = self.trie.longest(word);
        if first.0 != NONE && first.1 == word.len() {
            out.push(self.ids[first.0 as usize]);
            return true;
        }
        if word.len() >= LONG_RUN && self.ids_of_run(word, out) {
            return true;
        }
        // Tokens of ASCII alone join almost all pairs of its bytes: there is nothing to be cut.
        let bytes = self.bytes.as_ref().filter(|_| word.last().is_some_and(|byte| !byte.is_ascii()));
        if let Some(bytes) = bytes.filter(|bytes| bytes.first_cut(word) < word.len()) {
            return bytes.pieces(word, |piece| {
                bytes.encode_tiny(piece, &self.ids, out)
                    || self.merge_or_search(piece, TINY, self.trie.longest(piece), scratch, out)
            });
        }
        self.merge_or_search(word, SMALL, first, scratch, out)
    }

    /// Appends the ids of a word that `first` begins, by the way that suits it: up to `small` bytes with little to merge by
    /// the definition, else by the search.
    #[inline]
    fn merge_or_search(
        &self,
        word: &[u8],
        small: usize,
        first: (u32, usize),
        scratch: &mut Scratch,
        out: &mut Vec<u32>,
    ) -> bool {
        match &self.bytes {
            Some(bytes) if word.len() <= small && first.1 <= FEW => {
                bytes.encode(word, &self.borders, &self.ids, out);
                true
            }
            _ => self.search(word, first, scratch, out),
        }
    }

    /// Appends the ids of one byte many times; `false` if the word is something else.
    ///
    /// The definition of BPE is followed on counted symbols: merges happen in order of age, and all pairs of a run of
    /// equal symbols merge from left to right before anything else does. That takes logarithmic time.
    fn ids_of_run(&self, word: &[u8], out: &mut Vec<u32>) -> bool {
        let (symbol, _) = self.trie.longest(&word[..1]);
        if symbol == NONE || word[0] != word[word.len() - 1] || run_of_one_byte(word) < word.len() {
            return false;
        }
        let mut runs = vec![(symbol, word.len())];
        loop {
            let within = runs.iter().enumerate().filter(|(_, (_, count))| *count > 1);
            let within = within.map(|(place, &(token, _))| (self.borders.product(token, token), place, true));
            let across = runs
                .windows(2)
                .enumerate()
                .map(|(place, pair)| (self.borders.product(pair[0].0, pair[1].0), place, false));
            let Some((product, place, is_within)) = within.chain(across).min().filter(|&(product, ..)| product != NONE)
            else {
                break;
            };
            let mut next: Vec<(u32, usize)> = Vec::with_capacity(runs.len() + 2);
            let mut push = |token: u32, count: usize| match next.last_mut() {
                _ if count == 0 => {}
                Some(last) if last.0 == token => last.1 += count,
                _ => next.push((token, count)),
            };
            let mut skip = 0;
            for (index, &(token, count)) in runs.iter().enumerate() {
                if index == place && is_within {
                    push(product, count / 2);
                    push(token, count % 2);
                } else if index == place {
                    push(token, count - 1);
                    push(product, 1);
                    skip = 1;
                } else {
                    push(token, count - std::mem::take(&mut skip));
                }
            }
            runs = next;
        }
        make_room(out, runs.iter().map(|(_, count)| count).sum());
        for (token, count) in runs {
            out.resize(out.len() + count, self.ids[token as usize]);
        }
        true
    }

    /// Appends the ids of the unknown character that begins `rest` of a word whose ids begin at `begin`, and returns its
    /// length; 0 if it has no ids.
    fn push_unknown(&self, rest: &[u8], begin: usize, out: &mut Vec<u32>) -> usize {
        let len = 1 + rest[1..].iter().take_while(|&&byte| byte & 0xC0 == 0x80).count();
        match &self.unknown {
            Unknown::Never => return 0,
            Unknown::Bytes(ids) => out.extend(rest[..len].iter().map(|&byte| ids[usize::from(byte)])),
            Unknown::Token { id, fused } if *fused && out[begin..].last() == Some(id) => {}
            Unknown::Token { id, .. } => out.push(*id),
        }
        len
    }

    /// Finds the one row of tokens in which all neighbours fit, longest tokens first; a place from which there is no way
    /// on is tried once only, which makes the search linear in the word's length. Tokens stand in `out` until they are final.
    fn search(&self, word: &[u8], first: (u32, usize), scratch: &mut Scratch, out: &mut Vec<u32>) -> bool {
        let dead = &mut scratch.dead;
        dead.clear();
        dead.resize(word.len() / 64 + 1, 0);
        let (mut at, begin) = (0, out.len());
        let mut open = begin;
        let (mut token, mut len) = first;
        loop {
            if token == NONE {
                // Nothing merges with an unknown character: what stands before it is done.
                out[open..].iter_mut().for_each(|token| *token = self.ids[*token as usize]);
                if at == word.len() {
                    return true;
                }
                match self.push_unknown(&word[at..], begin, out) {
                    0 => return false,
                    len => at += len,
                }
                open = out.len();
                (token, len) = self.trie.longest(&word[at..]);
                continue;
            }
            let last = out[open..].last().copied();
            let found = loop {
                let end = at + len;
                let alive = dead[end / 64] >> (end % 64) & 1 == 0;
                if alive && last.is_none_or(|last| self.borders.are_neighbours(last, token)) {
                    break Some(end);
                }
                let shorter = self.shorter[token as usize];
                if shorter.prefix == NONE {
                    break None;
                }
                (token, len) = (shorter.prefix, shorter.len as usize);
            };
            match found {
                Some(end) => {
                    make_room(out, 1);
                    out.push(token);
                    at = end;
                    (token, len) = self.trie.longest(&word[at..]);
                }
                None => {
                    dead[at / 64] |= 1 << (at % 64);
                    let Some(last) = last else { return false };
                    out.pop();
                    (token, len) = (last, self.lens[last as usize] as usize);
                    at -= len;
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "vocab_tests.rs"]
mod tests;
