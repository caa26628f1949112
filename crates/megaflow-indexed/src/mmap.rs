//! Mapping a file: a call that the compiler cannot check.
#![expect(unsafe_code, reason = "memmap2 cannot promise that nobody changes the file")]

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;

use crate::error::IndexError;

/// A file mapped for reading. An empty file has no map and no bytes.
#[derive(Debug)]
pub struct FileMap {
    map: Option<Mmap>,
    /// Which file it was when it was mapped: device and number.
    identity: Option<(u64, u64)>,
}

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
            return Ok(Self { map: None, identity: None });
        }
        // SAFETY: the map is read-only and private to this struct. A finished pair is never changed in place: writers
        // make a temporary file and rename it. A program that changes a pair under its readers breaks the format's
        // contract; every value read from the map is checked before it is used as a position, so changed bytes give
        // wrong tokens, no more; for a file that becomes shorter see `guard`.
        let map = unsafe { Mmap::map(&file) }.map_err(|source| IndexError::io(path, "map it", source))?;
        crate::guard::install();
        Ok(Self { map: Some(map), identity: identity_of(&metadata) })
    }

    /// The size of the file now, if it is still the same file and has become shorter than its map. A file that was removed
    /// or replaced by another one lives on in the map.
    pub(crate) fn cut_to(&self, path: &Path) -> Option<u64> {
        let metadata = std::fs::metadata(path).ok()?;
        let is_same = self.identity.is_some() && identity_of(&metadata) == self.identity;
        (is_same && metadata.len() < self.bytes().len() as u64).then_some(metadata.len())
    }

    /// Whether an address lies in the map.
    pub(crate) fn holds(&self, address: usize) -> bool {
        let bytes = self.bytes().as_ptr_range();
        // The page that was missing may begin before the map's last byte and end behind it.
        (bytes.start as usize..=bytes.end as usize).contains(&address)
    }

    /// Asks the system to fetch bytes of the file, without waiting for them. A request that it refuses costs nothing.
    pub(crate) fn fetch(&self, begin: usize, len: usize) {
        if let Some(map) = &self.map {
            let _ = map.advise_range(memmap2::Advice::WillNeed, begin, len);
        }
    }

    /// The bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }
}

#[cfg(unix)]
fn identity_of(metadata: &std::fs::Metadata) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    Some((metadata.dev(), metadata.ino()))
}

#[cfg(not(unix))]
fn identity_of(_: &std::fs::Metadata) -> Option<(u64, u64)> {
    None
}
