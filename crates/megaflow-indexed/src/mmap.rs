//! The one call of this crate that the compiler cannot check: mapping a file.
#![expect(unsafe_code, reason = "memmap2 cannot promise that nobody changes the file")]

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;

use crate::error::IndexError;

/// A file mapped for reading. An empty file has no map and no bytes.
#[derive(Debug)]
pub struct FileMap(Option<Mmap>);

impl FileMap {
    /// Maps all of the file.
    ///
    /// # Errors
    /// [`IndexError::Io`] if it cannot be opened or mapped.
    pub fn open(path: &Path) -> Result<Self, IndexError> {
        let file = File::open(path).map_err(|source| IndexError::io(path, "open it", source))?;
        let metadata = file.metadata().map_err(|source| IndexError::io(path, "read its size", source))?;
        if metadata.is_dir() {
            return Err(IndexError::io(path, "open it", std::io::ErrorKind::IsADirectory.into()));
        }
        if metadata.len() == 0 {
            return Ok(Self(None));
        }
        // SAFETY: the map is read-only and private to this struct. A finished pair is never changed in place: writers
        // make a temporary file and rename it. A program that changes a pair under its readers breaks the format's
        // contract; every value read from the map is checked before it is used as a position, so changed bytes give
        // wrong tokens, no more.
        let map = unsafe { Mmap::map(&file) }.map_err(|source| IndexError::io(path, "map it", source))?;
        Ok(Self(Some(map)))
    }

    /// The bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}
