//! Documents shuffled within a window of tokens.

use std::ops::Range;

use megaflow_core::{SampleError, mix};

use crate::flat::FlatTokens;

/// A part of a sequence inside a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WindowPart {
    /// First token, in the turn.
    pub(crate) begin: u64,
    /// Tokens.
    pub(crate) tokens: u64,
    /// Whether the sequence goes on behind the window.
    pub(crate) is_cut: bool,
}

/// The parts of sequences in the tokens `window` (which may reach across the end of the turn), shuffled by `key`.
pub(crate) fn shuffled_parts(
    flat: &FlatTokens,
    index: u64,
    window: Range<u64>,
    key: u64,
) -> Result<Vec<WindowPart>, SampleError> {
    let mut parts = Vec::new();
    let mut at = window.start;
    flat.pieces(index, window.start, window.end - window.start, |piece| {
        if piece.length > 0 {
            let begin = at % flat.len();
            at += piece.length;
            parts.push(WindowPart { begin, tokens: piece.length, is_cut: false });
        }
    })?;
    if let Some(last) = parts.last_mut() {
        last.is_cut = last.begin + last.tokens < flat.len() && continues(flat, index, last)?;
    }
    let mut state = key;
    for left in (1..parts.len()).rev() {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        // A product instead of a remainder: off by less than one part in 2^32 for so few parts.
        let partner = (u128::from(mix(state)) * (left as u128 + 1)) >> 64;
        parts.swap(left, partner as usize);
    }
    Ok(parts)
}

/// Whether the token behind a part belongs to the same sequence.
fn continues(flat: &FlatTokens, index: u64, part: &WindowPart) -> Result<bool, SampleError> {
    let last = part.begin + part.tokens - 1;
    Ok(flat.sequence_at(index, last)? == flat.sequence_at(index, last + 1)?)
}
