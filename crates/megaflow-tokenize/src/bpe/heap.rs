//! BPE by definition, with a heap of pairs: for vocabularies whose merges are not in order of age, and for tests.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

use super::trie::{NONE, Trie};
use super::vocab::VocabSource;

/// All merges of a vocabulary, by id.
pub(crate) struct HeapMerges {
    merges: HashMap<u64, (u32, u32), BuildHasherDefault<PairHasher>>,
    is_symbol: Vec<bool>,
    len_of: Vec<u32>,
}

/// A hasher of two ids packed into one number.
#[derive(Default)]
struct PairHasher(u64);

impl Hasher for PairHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(self.0 << 8 | u64::from(byte)));
    }

    fn write_u64(&mut self, number: u64) {
        let product = u128::from(number ^ 0x2D35_8DCC_AA6C_78A5) * u128::from(0x8BB8_4B93_962E_ACC9u64);
        self.0 = product as u64 ^ (product >> 64) as u64;
    }
}

fn pair_key(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

/// Memory that encoding reuses.
#[derive(Default)]
pub(crate) struct HeapScratch {
    symbols: Vec<Symbol>,
    heap: BinaryHeap<Reverse<(u32, u32, u32, u32)>>,
}

#[derive(Clone, Copy)]
struct Symbol {
    id: u32,
    previous: u32,
    next: u32,
}

impl HeapMerges {
    /// From all merges; of a pair that occurs twice the later rank counts, as in Hugging Face's loader.
    pub(crate) fn new(source: &VocabSource) -> Self {
        let count = source.tokens.iter().map(|&(_, id)| id as usize + 1).max().unwrap_or(0);
        let (mut is_symbol, mut len_of) = (vec![false; count], vec![0; count]);
        source.symbols.iter().for_each(|&id| is_symbol[id as usize] = true);
        source.tokens.iter().for_each(|(text, id)| len_of[*id as usize] = text.len() as u32);
        let merges = source.merges.iter().map(|m| (pair_key(m.left, m.right), (m.rank, m.product))).collect();
        Self { merges, is_symbol, len_of }
    }

    /// Appends the ids of a word; `false` if a part of it is no symbol and `unknown` has no ids for it.
    pub(crate) fn encode_word(
        &self,
        word: &[u8],
        trie: &Trie,
        ids: &[u32],
        scratch: &mut HeapScratch,
        out: &mut Vec<u32>,
        unknown: impl Fn(&[u8], &mut Vec<u32>) -> usize,
    ) -> bool {
        scratch.symbols.clear();
        let mut at = 0;
        while at < word.len() {
            // Symbols are single bytes or single characters: the shortest token here that is one.
            let found = (1..=4.min(word.len() - at)).find_map(|len| {
                let (age, _) = trie.longest(&word[at..at + len]);
                let id = if age == NONE { return None } else { ids[age as usize] };
                (self.len_of[id as usize] as usize == len && self.is_symbol[id as usize]).then_some((id, len))
            });
            if let Some((id, len)) = found {
                let index = scratch.symbols.len() as u32;
                scratch.symbols.push(Symbol { id, previous: index.wrapping_sub(1), next: index + 1 });
                at += len;
                continue;
            }
            self.merge_all(scratch, out);
            match unknown(&word[at..], out) {
                0 => return false,
                len => at += len,
            }
        }
        self.merge_all(scratch, out);
        true
    }

    /// Merges the symbols, appends their ids and leaves none.
    fn merge_all(&self, scratch: &mut HeapScratch, out: &mut Vec<u32>) {
        let HeapScratch { symbols, heap } = scratch;
        heap.clear();
        let count = symbols.len() as u32;
        let offer = |heap: &mut BinaryHeap<_>, symbols: &[Symbol], left: u32| {
            let right = symbols[left as usize].next;
            if right < count {
                let pair = (symbols[left as usize].id, symbols[right as usize].id);
                if let Some(&(rank, _)) = self.merges.get(&pair_key(pair.0, pair.1)) {
                    heap.push(Reverse((rank, left, pair.0, pair.1)));
                }
            }
        };
        for left in 0..count {
            offer(heap, symbols, left);
        }
        while let Some(Reverse((_, left, left_id, right_id))) = heap.pop() {
            let right = symbols[left as usize].next;
            if symbols[left as usize].id != left_id || right >= count || symbols[right as usize].id != right_id {
                continue; // the pair has changed since
            }
            let Some(&(_, product)) = self.merges.get(&pair_key(left_id, right_id)) else { continue };
            let after = symbols[right as usize].next;
            symbols[left as usize].id = product;
            symbols[left as usize].next = after;
            symbols[right as usize].id = NONE;
            if after < count {
                symbols[after as usize].previous = left;
                offer(heap, symbols, left);
            }
            let before = symbols[left as usize].previous;
            if before < count {
                offer(heap, symbols, before);
            }
        }
        out.extend(symbols.drain(..).map(|symbol| symbol.id).filter(|&id| id != NONE));
    }
}
