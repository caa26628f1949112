//! Merging as BPE is defined, for short words of which little merges.
//!
//! The search of [`super::vocab`] pays for each token that it finds, this for each merge that happens: words of random
//! letters, rare characters and the like are left almost as they are.

use super::borders::Borders;
use super::trie::NONE;

/// Longest word that is merged here.
pub(super) const SMALL: usize = 32;

/// In place of a product: no token has these two bytes beside each other, so that no merge crosses their border.
const CUT: u32 = NONE - 1;

/// What single bytes and two of them are, in a vocabulary whose symbols are the 256 bytes.
pub(super) struct Bytes {
    symbols: [u32; 256],
    /// What two bytes merge into, [`NONE`], or [`CUT`].
    pairs: Box<[u32]>,
}

#[inline]
fn pair_place(left: u8, right: u8) -> usize {
    usize::from(left) | usize::from(right) << 8
}

impl Bytes {
    /// `symbols` has the token of each byte, `texts` are those of all tokens.
    pub(super) fn new<'t>(symbols: [u32; 256], borders: &Borders, texts: impl Iterator<Item = &'t [u8]>) -> Self {
        let mut pairs: Box<[u32]> = vec![CUT; 1 << 16].into();
        for pair in texts.flat_map(|text| text.windows(2)) {
            let slot = &mut pairs[pair_place(pair[0], pair[1])];
            if *slot == CUT {
                *slot = borders.product(symbols[usize::from(pair[0])], symbols[usize::from(pair[1])]);
            }
        }
        Self { symbols, pairs }
    }

    /// Length of the piece that a text begins with: no merge joins it to what follows.
    #[inline]
    pub(super) fn first_cut(&self, text: &[u8]) -> usize {
        let is_cut = |pair: &[u8]| self.pairs[pair_place(pair[0], pair[1])] == CUT;
        text.windows(2).position(is_cut).map_or(text.len(), |place| place + 1)
    }

    /// Calls `each` with the pieces of a word; stops where it says `false`, and returns what it said last.
    #[inline]
    pub(super) fn pieces(&self, word: &[u8], mut each: impl FnMut(&[u8]) -> bool) -> bool {
        let mut rest = word;
        while !rest.is_empty() {
            let (piece, behind) = rest.split_at(self.first_cut(rest));
            if !each(piece) {
                return false;
            }
            rest = behind;
        }
        true
    }

    /// Appends the ids of one byte or two; `false` if the piece is longer.
    #[inline]
    pub(super) fn encode_tiny(&self, piece: &[u8], ids: &[u32], out: &mut Vec<u32>) -> bool {
        match *piece {
            [byte] => out.push(ids[self.symbols[usize::from(byte)] as usize]),
            [left, right] => match self.pairs[pair_place(left, right)] {
                NONE | CUT => out.extend([left, right].map(|byte| ids[self.symbols[usize::from(byte)] as usize])),
                product => out.push(ids[product as usize]),
            },
            _ => return false,
        }
        true
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
            products[place] = self.pairs[pair_place(pair[0], pair[1])];
        }
        loop {
            let (mut product, mut place) = (CUT, 0);
            for (other, &found) in products[..count].iter().enumerate() {
                (product, place) = if found < product { (found, other) } else { (product, place) };
            }
            if product == CUT {
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
