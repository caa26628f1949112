//! From stored pieces to the ids of a sample.

use megaflow_core::{Piece, SampleError, SampleLayout, TokenDtype, TokensMut};
use megaflow_indexed::{IndexError, IndexedDataset, copy_tokens};

/// Pieces of a sample that are looked up before the first is copied, so that their cache misses overlap.
const PIECES_AHEAD: usize = 16;
const CACHE_LINE_BYTES: usize = 64;

/// Writes stored pieces one after the other into the memory of one sample.
pub(crate) struct Gather<'a, 'o> {
    index: u64,
    dtype: TokenDtype,
    room: usize,
    rest: TokensMut<'o>,
    ahead: [&'a [u8]; PIECES_AHEAD],
    count: usize,
}

impl<'a, 'o> Gather<'a, 'o> {
    pub(crate) fn new(index: u64, dtype: TokenDtype, out: TokensMut<'o>) -> Self {
        Self { index, dtype, room: out.len(), rest: out, ahead: [&[]; PIECES_AHEAD], count: 0 }
    }

    /// Adds the tokens that lie in `bytes`.
    #[inline]
    pub(crate) fn push(&mut self, bytes: &'a [u8]) -> Result<(), SampleError> {
        if self.count == PIECES_AHEAD {
            self.copy()?;
        }
        // Fetches every cache line now: these loads do not wait for each other, those of the copy would.
        for byte in bytes.iter().step_by(CACHE_LINE_BYTES) {
            std::hint::black_box(*byte);
        }
        self.ahead[self.count] = bytes;
        self.count += 1;
        Ok(())
    }

    /// Adds a piece of a pair.
    #[inline]
    pub(crate) fn push_piece(&mut self, indexed: &'a IndexedDataset, piece: Piece) -> Result<(), SampleError> {
        let (sequence, begin) = (piece.sequence as usize, piece.offset as usize);
        let bytes = indexed.token_bytes(sequence, begin..begin.saturating_add(piece.length as usize));
        self.push(bytes.map_err(|error| damaged(self.index, error))?)
    }

    fn copy(&mut self) -> Result<(), SampleError> {
        for bytes in &self.ahead[..self.count] {
            let tokens = self.rest.take_front(bytes.len() / self.dtype.size_bytes());
            copy_tokens(self.dtype, bytes, self.index, tokens)?;
        }
        self.count = 0;
        Ok(())
    }

    /// Copies what is left and fills up with padding; returns the tokens before it.
    pub(crate) fn finish(mut self, pad_id: i64) -> Result<usize, SampleError> {
        self.copy()?;
        let tokens = self.room - self.rest.len();
        self.rest.pad(pad_id);
        Ok(tokens)
    }
}

#[cold]
pub(crate) fn damaged(index: u64, error: IndexError) -> SampleError {
    SampleError::Damaged { index, detail: error.to_string() }
}

/// Adds a piece to a layout, with the place where it starts; an empty one leaves no trace.
pub(crate) fn add_piece(layout: &mut SampleLayout, begin: &mut u64, piece: Piece) {
    if piece.length > 0 {
        layout.starts.push(*begin as u32);
        layout.pieces.push(piece);
        *begin += piece.length;
    }
}

/// Marks the padding behind the last piece.
pub(crate) fn mark_padding(layout: &mut SampleLayout, begin: u64, sample_len: usize) {
    if begin < sample_len as u64 {
        layout.starts.push(begin as u32);
    }
}

/// Runs a read of the samples of a pair; a file that was cut short under it is an error of sample `index`.
#[inline]
pub(crate) fn watched<T>(
    indexed: &IndexedDataset,
    index: u64,
    read: impl FnOnce() -> Result<T, SampleError>,
) -> Result<T, SampleError> {
    indexed.watched(read).map_err(|error| damaged(index, error))?
}

/// Asks the system to fetch a piece, without waiting for it.
pub(crate) fn fetch(indexed: &IndexedDataset, index: u64, piece: Piece) -> Result<(), SampleError> {
    let (begin, end) = (piece.offset as usize, (piece.offset + piece.length) as usize);
    indexed.fetch_tokens(piece.sequence as usize, begin..end).map_err(|error| damaged(index, error))
}
