//! Where things lie in an `.idx`, and the checks that a header must pass before any of it is trusted.

use std::path::Path;

use megaflow_core::TokenDtype;

use crate::error::IndexError;

pub(crate) const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
pub(crate) const VERSION: u64 = 1;
/// Bytes before the first array. The arrays of `i64` start at any multiple of 4 plus 2, so they are never aligned.
pub(crate) const HEADER_BYTES: usize = 34;

/// Byte positions of the arrays of one `.idx`, checked against the length of the file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    pub(crate) dtype: TokenDtype,
    pub(crate) num_sequences: usize,
    pub(crate) num_boundaries: usize,
    pub(crate) offsets_at: usize,
    pub(crate) boundaries_at: usize,
    /// End of the boundaries: where the modes of a multimodal file start.
    pub(crate) boundaries_end: usize,
}

impl Layout {
    /// Reads and checks the header, and the size of the file against its counts.
    pub(crate) fn parse(path: &Path, bytes: &[u8], with_modes: bool) -> Result<Self, IndexError> {
        let found = bytes.len() as u64;
        let Some(header) = bytes.get(..HEADER_BYTES) else {
            let shown = &bytes[..bytes.len().min(MAGIC.len())];
            if !MAGIC.starts_with(shown) {
                return Err(bad_magic(path, shown));
            }
            return Err(IndexError::Truncated { path: path.to_path_buf(), needed: HEADER_BYTES as u64, found });
        };
        if !header.starts_with(MAGIC) {
            return Err(bad_magic(path, &header[..MAGIC.len()]));
        }
        let version = read_u64(header, 9);
        if version != VERSION {
            return Err(IndexError::BadVersion { path: path.to_path_buf(), found: version });
        }
        let dtype = TokenDtype::from_code(header[17])
            .ok_or_else(|| IndexError::BadDtype { path: path.to_path_buf(), found: header[17] })?;
        let (num_sequences, num_boundaries) = (read_u64(header, 18), read_u64(header, 26));
        let expected = size_bytes(num_sequences, num_boundaries);
        let with_modes_expected = expected.and_then(|size| size.checked_add(num_sequences));
        let wanted = if with_modes { with_modes_expected } else { expected };
        if wanted != Some(found) {
            if !with_modes && num_sequences > 0 && with_modes_expected == Some(found) {
                return Err(IndexError::UnexpectedModes { path: path.to_path_buf(), num_sequences });
            }
            let expected = wanted.unwrap_or(u64::MAX);
            return Err(IndexError::IndexSize {
                path: path.to_path_buf(),
                num_sequences,
                num_boundaries,
                expected,
                found,
            });
        }
        // The file is as long as the counts say, and it is mapped: all positions below fit in usize.
        let (num_sequences, num_boundaries) = (num_sequences as usize, num_boundaries as usize);
        let offsets_at = HEADER_BYTES + 4 * num_sequences;
        let boundaries_at = offsets_at + 8 * num_sequences;
        let boundaries_end = boundaries_at + 8 * num_boundaries;
        Ok(Self { dtype, num_sequences, num_boundaries, offsets_at, boundaries_at, boundaries_end })
    }
}

/// Bytes of an `.idx` without modes, or `None` if no file can be so large.
fn size_bytes(num_sequences: u64, num_boundaries: u64) -> Option<u64> {
    let sequences = num_sequences.checked_mul(12)?;
    let boundaries = num_boundaries.checked_mul(8)?;
    sequences.checked_add(boundaries)?.checked_add(HEADER_BYTES as u64)
}

fn bad_magic(path: &Path, found: &[u8]) -> IndexError {
    IndexError::BadMagic { path: path.to_path_buf(), found: found.escape_ascii().to_string() }
}

fn read_u64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

/// The `N` bytes at `at`. Panics if they are not there: callers have compared `at` with the length.
pub(crate) fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}
