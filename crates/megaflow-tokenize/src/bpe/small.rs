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
        // A product with the token behind, and below it the token: equal products have equal halves, so that entries are
        // compared by their products.
        let mut entries = [0; SMALL + SHIFTED];
        let mut count = word.len();
        for (entry, pair) in entries.iter_mut().zip(word.windows(2)) {
            *entry = join(self.pairs[pair_place(pair[0], pair[1])], self.symbols[usize::from(pair[0])]);
        }
        if let (Some(entry), Some(&last)) = (entries.get_mut(count.wrapping_sub(1)), word.last()) {
            *entry = join(NONE, self.symbols[usize::from(last)]);
        }
        loop {
            let (mut least, mut place) = (join(CUT, 0), 0);
            for (other, &entry) in entries[..count].iter().enumerate() {
                (least, place) = if entry < least { (entry, other) } else { (least, place) };
            }
            if least == join(CUT, 0) {
                break;
            }
            let product = (least >> 32) as u32;
            // Those behind the two move up, some at once: a call to move so few bytes costs more than moving them.
            let mut at = place + 1;
            while at + 1 < count {
                let moved: [u64; SHIFTED] = *entries[at + 1..].first_chunk().expect("room behind the word");
                entries[at..at + SHIFTED].copy_from_slice(&moved);
                at += SHIFTED;
            }
            count -= 1;
            let behind =
                if place + 1 < count { borders.rare_product(product, entries[place + 1] as u32) } else { NONE };
            entries[place] = join(behind, product);
            if place > 0 {
                let before = entries[place - 1] as u32;
                entries[place - 1] = join(borders.rare_product(before, product), before);
            }
        }
        out.extend(entries[..count].iter().map(|&entry| ids[entry as u32 as usize]));
    }
}

/// Entries that move at once.
const SHIFTED: usize = 4;

#[inline]
fn join(product: u32, token: u32) -> u64 {
    u64::from(product) << 32 | u64::from(token)
}
