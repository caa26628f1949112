//! Whether two tokens can stand side by side in an encoding.

use super::pairs::{MAX_TOKENS, PairTable};
use crate::simd::Fixed;

/// Bits of the half of a token, the lower ones of an entry.
const HALF_BITS: u32 = MAX_TOKENS.trailing_zeros();
const HALF_MASK: u64 = MAX_TOKENS as u64 - 1;
/// A symbol has no halves.
const NO_HALF: u64 = HALF_MASK;
/// Classes of tokens, one bit each, in the rest of an entry.
const CLASSES: u64 = 64 - HALF_BITS as u64;

/// The merges of a vocabulary, seen from the border between two tokens. Tokens are numbered by age.
///
/// A walk along the border changes one side at a time and asks only for what that side shows to the other, so each side
/// has a table of its own of 8 bytes a token: the tables of 100,000 tokens fit into the second-level cache.
pub(crate) struct Borders {
    /// Right half of a token, and the classes of tokens that merge behind it.
    as_left: Fixed<u64>,
    /// Left half of a token, and the classes of tokens that merge before it.
    as_right: Fixed<u64>,
    /// Tokens so far.
    len: u32,
    pairs: PairTable,
}

/// Place of the bit of a token's class in an entry.
#[inline]
fn class_place(token: u32) -> u32 {
    HALF_BITS + ((u64::from(token.wrapping_mul(0x9E37_79B1)) * CLASSES) >> 32) as u32
}

impl Borders {
    /// Without tokens; room for `count`, of which `merged` are made by merges.
    pub(crate) fn with_room(count: usize, merged: usize) -> Self {
        let symbols = || Fixed::from(vec![NO_HALF; count]);
        Self { as_left: symbols(), as_right: symbols(), len: 0, pairs: PairTable::with_capacity(merged) }
    }

    /// Adds a symbol, older than all tokens that are made by merges.
    pub(crate) fn push_symbol(&mut self) {
        self.len += 1;
    }

    /// Adds the token that two others merge into, younger than all there are.
    pub(crate) fn push_merge(&mut self, left: u32, right: u32) {
        let product = self.len;
        self.pairs.insert(left, right, product);
        self.as_left[left as usize] |= 1 << class_place(right);
        self.as_right[right as usize] |= 1 << class_place(left);
        self.as_left[product as usize] = u64::from(right);
        self.as_right[product as usize] = u64::from(left);
        self.len += 1;
    }

    /// The token that two others merge into, or [`super::trie::NONE`].
    #[inline]
    pub(crate) fn product(&self, left: u32, right: u32) -> u32 {
        self.pairs.get(left, right)
    }

    /// As [`Self::product`], for pairs most of which have none.
    #[inline]
    pub(crate) fn rare_product(&self, left: u32, right: u32) -> u32 {
        self.pairs.get_rare(left, right)
    }

    /// Whether the encoding of the two tokens' texts together is these two tokens.
    ///
    /// Goes back in time along their border. At each moment one token of each side touches it; had the two merged, that
    /// would have been before either was used up by its own side. Of equal ages (the same pair on both sides) the left
    /// one is older: equal pairs merge from left to right.
    #[inline]
    pub(crate) fn are_neighbours(&self, mut left: u32, mut right: u32) -> bool {
        let (mut left_used, mut right_used) = (u32::MAX, u32::MAX);
        let (mut left_entry, mut right_entry) = (self.as_left[left as usize], self.as_right[right as usize]);
        loop {
            if (left_entry >> class_place(right)) & (right_entry >> class_place(left)) & 1 != 0 {
                let product = self.pairs.get(left, right);
                if product < left_used && product <= right_used {
                    return false;
                }
            }
            // The younger one is undone. Symbols are older than all others: if it is one, so are both.
            if left > right {
                if left_entry & HALF_MASK == NO_HALF {
                    return true;
                }
                left_used = left;
                left = (left_entry & HALF_MASK) as u32;
                left_entry = self.as_left[left as usize];
            } else {
                if right_entry & HALF_MASK == NO_HALF {
                    return true;
                }
                right_used = right;
                right = (right_entry & HALF_MASK) as u32;
                right_entry = self.as_right[right as usize];
            }
        }
    }
}
