//! Parts of a file, read in pieces. Unlike a map, a read that fails is an error and not a signal.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::error::IndexError;

/// Bytes of one piece. A multiple of 8, so that no entry is cut.
pub(crate) const PIECE_BYTES: usize = 1 << 20;

/// A file for reading at positions.
#[derive(Debug)]
pub(crate) struct ReadFile {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
}

impl ReadFile {
    pub(crate) fn open(path: PathBuf) -> Result<Self, IndexError> {
        let file = File::open(&path).map_err(|source| IndexError::io(&path, "open it", source))?;
        Ok(Self { path, file })
    }

    pub(crate) fn size_bytes(&self) -> Result<u64, IndexError> {
        let metadata = self.file.metadata().map_err(|source| IndexError::io(&self.path, "read its size", source))?;
        Ok(metadata.len())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Fills `buffer` with the bytes from `at` on.
    pub(crate) fn read_at(&self, at: u64, buffer: &mut [u8]) -> Result<(), IndexError> {
        self.file.read_exact_at(buffer, at).map_err(|source| IndexError::io(&self.path, "read it", source))
    }

    /// Calls `each` with the position and the bytes of one piece after the other, from byte `at` to `end`.
    pub(crate) fn pieces<E: From<IndexError>>(
        &self,
        at: usize,
        end: usize,
        piece_bytes: usize,
        mut each: impl FnMut(usize, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut buffer = vec![0; piece_bytes.min(end.saturating_sub(at))];
        let mut place = at;
        while place < end {
            let piece = &mut buffer[..piece_bytes.min(end - place)];
            self.read_at(place as u64, piece)?;
            each(place, piece)?;
            place += piece.len();
        }
        Ok(())
    }
}
