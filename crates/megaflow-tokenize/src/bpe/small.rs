//! Merging as BPE is defined, for short words of which little merges.
//!
//! The search of [`super::vocab`] pays for each token that it finds, this for each merge that happens: words of random
//! letters, rare characters and the like are left almost as they are.

use super::borders::Borders;
use super::trie::NONE;

/// Longest word that is merged here.
pub(super) const SMALL: usize = 32;

/// What single bytes and two of them are, in a vocabulary whose symbols are the 256 bytes.
pub(super) struct Bytes {
    symbols: [u32; 256],
    /// What two bytes merge into, or [`NONE`].
    pairs: Box<[u32]>,
}

impl Bytes {
    /// `symbols` has the token of each byte.
    pub(super) fn new(symbols: [u32; 256], borders: &Borders) -> Self {
        let pairs = (0..1usize << 16).map(|pair| borders.product(symbols[pair & 0xFF], symbols[pair >> 8])).collect();
        Self { symbols, pairs }
    }

    #[inline]
    fn pair(&self, left: u8, right: u8) -> u32 {
        self.pairs[usize::from(left) | usize::from(right) << 8]
    }

    /// Appends the ids of a word of at most [`SMALL`] bytes. The pair of the oldest product merges first, the leftmost of
    /// equal ones.
    pub(super) fn encode(&self, word: &[u8], borders: &Borders, ids: &[u32], out: &mut Vec<u32>) {
        let (mut tokens, mut products) = ([NONE; SMALL], [NONE; SMALL]);
        let mut count = word.len();
        for (place, &byte) in word.iter().enumerate() {
            tokens[place] = self.symbols[usize::from(byte)];
        }
        for (place, pair) in word.windows(2).enumerate() {
            products[place] = self.pair(pair[0], pair[1]);
        }
        loop {
            let (mut product, mut place) = (NONE, 0);
            for (other, &found) in products[..count].iter().enumerate() {
                (product, place) = if found < product { (found, other) } else { (product, place) };
            }
            if product == NONE {
                break;
            }
            tokens[place] = product;
            tokens.copy_within(place + 2..count, place + 1);
            products.copy_within(place + 1..count, place);
            count -= 1;
            if place > 0 {
                products[place - 1] = borders.likely_product(tokens[place - 1], product);
            }
            if place + 1 < count {
                products[place] = borders.likely_product(product, tokens[place + 1]);
            }
        }
        out.extend(tokens[..count].iter().map(|&token| ids[token as usize]));
    }
}
