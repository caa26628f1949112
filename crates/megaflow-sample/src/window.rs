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

/// The parts of sequences in a window, in an order that a key chooses. They are drawn one by one, so that a sample at the
/// front of the window does not pay for all.
pub(crate) struct Window {
    parts: Vec<WindowPart>,
    drawn: usize,
    state: u64,
}

impl Window {
    /// The parts in `tokens`, which may reach across the end of the turn.
    pub(crate) fn new(flat: &FlatTokens, index: u64, tokens: Range<u64>, key: u64) -> Result<Self, SampleError> {
        let mut parts = Vec::with_capacity(512);
        flat.parts(index, tokens.start, tokens.end - tokens.start, |begin, tokens, is_cut| {
            parts.push(WindowPart { begin, tokens, is_cut });
        })?;
        Ok(Self { parts, drawn: 0, state: key })
    }

    /// The next part.
    #[inline]
    pub(crate) fn draw(&mut self) -> Option<WindowPart> {
        let left = self.parts.len() - self.drawn;
        if left == 0 {
            return None;
        }
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        // A product instead of a remainder: off by less than one part in 2^32 for so few parts.
        let partner = (u128::from(mix(self.state)) * left as u128) >> 64;
        self.parts.swap(self.drawn, self.drawn + partner as usize);
        self.drawn += 1;
        Some(self.parts[self.drawn - 1])
    }

    /// The parts drawn so far, in their order.
    pub(crate) fn drawn(&self) -> &[WindowPart] {
        &self.parts[..self.drawn]
    }
}
