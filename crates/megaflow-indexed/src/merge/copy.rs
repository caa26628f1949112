//! Index and tokens of the parts, piece by piece, to those of the merged pair.

use std::fs::File;
use std::path::{Path, PathBuf};

use megaflow_core::TokenDtype;

use super::dtypes::widen_bytes;
use super::{MergeError, Meter, Part};
use crate::checksummed::ChecksummedFile;
use crate::error::IndexError;
use crate::layout::{HEADER_BYTES, MAGIC, VERSION};
use crate::prefix::{data_path, index_path};
use crate::section::{PIECE_BYTES, ReadFile};
use crate::writer::PairCounts;

/// Bytes of tokens that are hashed and copied at a time.
const COPY_BYTES: usize = 4 << 20;

/// Writes the `.idx` of all parts, and checks theirs on the way.
pub(super) fn write_index(
    parts: &[Part],
    path: PathBuf,
    dtype: TokenDtype,
    meter: &mut Meter<'_>,
) -> Result<(crate::FileRecord, PairCounts), MergeError> {
    let mut counts = PairCounts {
        documents: parts.iter().map(|part| part.num_documents).sum(),
        sequences: parts.iter().map(Part::num_sequences).sum(),
        tokens: parts.iter().map(Part::num_tokens).sum(),
        empty_documents: 0,
    };
    let mut index = ChecksummedFile::create(path)?;
    let mut header = Vec::with_capacity(HEADER_BYTES);
    header.extend_from_slice(MAGIC);
    header.extend_from_slice(&VERSION.to_le_bytes());
    header.push(dtype.code());
    header.extend_from_slice(&counts.sequences.to_le_bytes());
    header.extend_from_slice(&(counts.documents + 1).to_le_bytes());
    index.write(&header)?;
    for part in parts {
        copy_lengths(part, &mut index, meter)?;
    }
    let mut first_byte = 0;
    for part in parts {
        copy_offsets(part, first_byte, dtype, &mut index, meter)?;
        first_byte += part.num_tokens() * dtype.size_bytes() as u64;
    }
    index.write(&0_i64.to_le_bytes())?;
    let mut first_sequence = 0;
    for part in parts {
        counts.empty_documents += copy_boundaries(part, first_sequence, &mut index, meter)?;
        first_sequence += part.num_sequences();
    }
    Ok((index.finish()?, counts))
}

fn copy_lengths(part: &Part, index: &mut ChecksummedFile, meter: &mut Meter<'_>) -> Result<(), MergeError> {
    let file = ReadFile::open(index_path(&part.prefix))?;
    let mut num_tokens = 0_u64;
    file.pieces(HEADER_BYTES, part.layout.offsets_at, PIECE_BYTES, |at, bytes| {
        for (entry, length) in bytes.chunks_exact(4).enumerate() {
            let length = i32::from_le_bytes([length[0], length[1], length[2], length[3]]);
            let Ok(tokens) = u64::try_from(length) else {
                let place = at + 4 * entry;
                let name = format!("length of sequence {}", (place - HEADER_BYTES) / 4);
                return Err(damage(file.path(), name, place, "0 or more".to_owned(), length.into()));
            };
            num_tokens += tokens;
        }
        index.write(bytes)?;
        meter.add(bytes.len())
    })?;
    let expected = num_tokens * part.layout.dtype.size_bytes() as u64;
    if expected != part.bin_bytes {
        let (path, dtype, found) = (data_path(&part.prefix), part.layout.dtype, part.bin_bytes);
        return Err(IndexError::DataSize { path, dtype, expected, found }.into());
    }
    Ok(())
}

fn copy_offsets(
    part: &Part,
    first_byte: u64,
    dtype: TokenDtype,
    index: &mut ChecksummedFile,
    meter: &mut Meter<'_>,
) -> Result<(), MergeError> {
    let file = ReadFile::open(index_path(&part.prefix))?;
    let (item_bytes, new_item_bytes) = (part.layout.dtype.size_bytes() as u64, dtype.size_bytes() as u64);
    let (mut stored, mut shifted) = (vec![0; 2 * PIECE_BYTES], Vec::with_capacity(2 * PIECE_BYTES));
    let mut num_tokens = 0_u64;
    file.pieces(HEADER_BYTES, part.layout.offsets_at, PIECE_BYTES, |at, lengths| {
        let first = (at - HEADER_BYTES) / 4;
        let stored = &mut stored[..2 * lengths.len()];
        file.read_at((part.layout.offsets_at + 8 * first) as u64, stored)?;
        shifted.clear();
        for (entry, (length, offset)) in lengths.chunks_exact(4).zip(stored.chunks_exact(8)).enumerate() {
            let offset = i64::from_le_bytes(crate::layout::array_at(offset, 0));
            if u64::try_from(offset) != Ok(num_tokens * item_bytes) {
                let sequence = first + entry;
                let (name, place) = (format!("offset of sequence {sequence}"), part.layout.offsets_at + 8 * sequence);
                let expected = format!("{}, where the sequence before it ends", num_tokens * item_bytes);
                return Err(damage(file.path(), name, place, expected, offset));
            }
            shifted.extend_from_slice(&(first_byte + num_tokens * new_item_bytes).to_le_bytes());
            // Lengths were found to be 0 or more when they were copied.
            num_tokens += u64::from(u32::from_le_bytes([length[0], length[1], length[2], length[3]]));
        }
        index.write(&shifted)?;
        meter.add(shifted.len())
    })
}

/// Returns the number of documents without a sequence.
fn copy_boundaries(
    part: &Part,
    first_sequence: u64,
    index: &mut ChecksummedFile,
    meter: &mut Meter<'_>,
) -> Result<u64, MergeError> {
    let file = ReadFile::open(index_path(&part.prefix))?;
    let (mut before, mut num_empty, mut shifted) = (0_i64, 0, Vec::with_capacity(PIECE_BYTES));
    // The first boundary is 0, as was checked on opening, and the merged index has it already.
    file.pieces(part.layout.boundaries_at + 8, part.layout.boundaries_end, PIECE_BYTES, |at, bytes| {
        shifted.clear();
        for (entry, boundary) in bytes.chunks_exact(8).enumerate() {
            let boundary = i64::from_le_bytes(crate::layout::array_at(boundary, 0));
            if boundary < before || boundary as u64 > part.num_sequences() {
                let place = at + 8 * entry;
                let name = format!("document boundary {}", (place - part.layout.boundaries_at) / 8);
                let expected = format!("from {before} to {}, the number of sequences", part.num_sequences());
                return Err(damage(file.path(), name, place, expected, boundary));
            }
            num_empty += u64::from(boundary == before);
            before = boundary;
            shifted.extend_from_slice(&(first_sequence + boundary as u64).to_le_bytes());
        }
        index.write(&shifted)?;
        meter.add(shifted.len())
    })?;
    Ok(num_empty)
}

fn damage(path: &Path, entry: String, place: usize, expected: String, found: i64) -> MergeError {
    IndexError::BadEntry { path: path.to_owned(), entry, place: place as u64, expected, found }.into()
}

pub(super) fn copy_tokens(
    part: &Part,
    dtype: TokenDtype,
    bin: &mut ChecksummedFile,
    meter: &mut Meter<'_>,
) -> Result<(), MergeError> {
    let source = ReadFile::open(data_path(&part.prefix))?;
    let is_same = part.layout.dtype == dtype;
    let (mut ids, mut widened) = (Vec::new(), Vec::new());
    let mut in_kernel = true;
    source.pieces(0, part.bin_bytes as usize, COPY_BYTES, |at, bytes| {
        if !is_same {
            widen_bytes(part.layout.dtype, bytes, dtype, &mut ids, &mut widened);
            bin.write(&widened)?;
            return meter.add(widened.len());
        }
        in_kernel = in_kernel && write_from(bin, &source.file, at, bytes)?;
        if !in_kernel {
            bin.write(bytes)?;
        }
        meter.add(bytes.len())
    })
}

fn write_from(bin: &mut ChecksummedFile, source: &File, at: usize, bytes: &[u8]) -> Result<bool, MergeError> {
    Ok(bin.write_from(source, at as u64, bytes)?)
}
