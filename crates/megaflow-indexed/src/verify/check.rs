//! The pieces of work that a check is made of, and what each of them compares.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use megaflow_core::TokenDtype;
use xxhash_rust::xxh3::Xxh3;

use super::faults::{FAULTS_SHOWN, Faults};
use crate::checksummed::CHECKSUM_BLOCK_BYTES;
use crate::error::IndexError;
use crate::layout::{HEADER_BYTES, Layout, array_at};
use crate::section::{PIECE_BYTES, ReadFile};
use crate::sidecar::FileRecord;

/// Sequences or boundaries that are checked as one piece of work. Their lengths and offsets take 12 MiB.
const ENTRIES: usize = 1 << 20;

/// Checksums of a file, and the blocks that they cover.
pub(super) struct Blocks {
    block_bytes: u64,
    expected: Vec<String>,
}

impl Blocks {
    pub(super) fn of(record: Option<&FileRecord>) -> Self {
        match record {
            // A block of a few bytes cannot be meant, and would take for ever.
            Some(record) if record.block_bytes >= 4096 && record.block_bytes % 8 == 0 => {
                Self { block_bytes: record.block_bytes, expected: record.xxh3_64.clone() }
            }
            _ => Self { block_bytes: CHECKSUM_BLOCK_BYTES as u64, expected: Vec::new() },
        }
    }
}

/// One piece of work.
#[derive(Debug)]
pub(super) enum Work {
    /// Bytes of the `.bin`: checksum and ids.
    Data(Range<u64>),
    /// Bytes of the `.idx`: checksum.
    Index(Range<u64>),
    /// Sequences: lengths and offsets.
    Sequences(Range<usize>),
    /// Document boundaries, each compared with the one before it.
    Boundaries(Range<usize>),
}

impl Work {
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Data(range) | Self::Index(range) => range.end - range.start,
            Self::Sequences(range) => 12 * range.len() as u64,
            Self::Boundaries(range) => 8 * range.len() as u64,
        }
    }
}

/// `bytes` in blocks, the last one short.
pub(super) fn cut(bytes: u64, block_bytes: u64) -> impl Iterator<Item = Range<u64>> {
    (0..bytes.div_ceil(block_bytes)).map(move |block| block * block_bytes..bytes.min((block + 1) * block_bytes))
}

/// What all threads share.
pub(super) struct Check {
    pub(super) index: ReadFile,
    pub(super) data: ReadFile,
    /// `None` if the header or the sizes are wrong: then the checksums alone tell where.
    pub(super) layout: Option<Layout>,
    pub(super) vocab_size: Option<u64>,
    pub(super) index_blocks: Blocks,
    pub(super) data_blocks: Blocks,
    pub(super) num_empty_documents: AtomicU64,
}

impl Check {
    pub(super) fn work(&self, index_bytes: u64, data_bytes: u64) -> VecDeque<Work> {
        let mut work: VecDeque<Work> = VecDeque::new();
        work.extend(cut(index_bytes, self.index_blocks.block_bytes).map(Work::Index));
        if let Some(layout) = self.layout {
            let entries =
                |count: usize| cut(count as u64, ENTRIES as u64).map(|range| range.start as usize..range.end as usize);
            work.extend(entries(layout.num_sequences).map(Work::Sequences));
            work.extend(entries(layout.num_boundaries - 1).map(Work::Boundaries));
        }
        work.extend(cut(data_bytes, self.data_blocks.block_bytes).map(Work::Data));
        work
    }

    pub(super) fn run(&self, work: &Work, ids: &mut Option<(i64, i64)>, faults: &mut Faults, stop: &AtomicBool) {
        let done = match work {
            Work::Index(bytes) => self.blocks(&self.index, &self.index_blocks, bytes, stop, faults, |_, _, _| ()),
            Work::Data(bytes) => {
                self.blocks(&self.data, &self.data_blocks, bytes, stop, faults, |at, piece, faults| {
                    if let Some(layout) = self.layout {
                        self.check_ids(layout, at, piece, ids, faults);
                    }
                })
            }
            Work::Sequences(entries) => self.sequences(entries, faults),
            Work::Boundaries(entries) => self.boundaries(entries, faults),
        };
        if let Err(IndexError::Io { path, action, source }) = done {
            let place = match work {
                Work::Data(range) | Work::Index(range) => Some(range.start),
                _ => None,
            };
            faults.add(&path, place, format!("cannot {action} from here on: {source}"));
        }
    }

    /// Reads one block, shows its pieces, compares its checksum.
    fn blocks(
        &self,
        file: &ReadFile,
        blocks: &Blocks,
        bytes: &Range<u64>,
        stop: &AtomicBool,
        faults: &mut Faults,
        mut show: impl FnMut(usize, &[u8], &mut Faults),
    ) -> Result<(), IndexError> {
        let expected = blocks.expected.get((bytes.start / blocks.block_bytes) as usize);
        let mut hash = Xxh3::new();
        file.pieces(bytes.start as usize, bytes.end as usize, PIECE_BYTES, |at, piece| {
            if !stop.load(Ordering::Relaxed) {
                if expected.is_some() {
                    hash.update(piece);
                }
                show(at, piece, faults);
            }
            Ok::<(), IndexError>(())
        })?;
        let found = format!("{:016x}", hash.digest());
        if let Some(expected) = expected.filter(|expected| **expected != found && !stop.load(Ordering::Relaxed)) {
            let end = bytes.end;
            let problem = format!("the bytes from here to {end} have checksum {found}, the sidecar says {expected}");
            faults.add(file.path(), Some(bytes.start), problem);
        }
        Ok(())
    }

    fn check_ids(&self, layout: Layout, at: usize, piece: &[u8], ids: &mut Option<(i64, i64)>, faults: &mut Faults) {
        let Some((low, high)) = extremes(layout.dtype, piece) else { return };
        *ids = Some(ids.map_or((low, high), |(lowest, highest)| (lowest.min(low), highest.max(high))));
        let Some(vocab_size) = self.vocab_size else { return };
        let is_fine = |id: i64| u64::try_from(id).is_ok_and(|id| id < vocab_size);
        if is_fine(low) && is_fine(high) {
            return;
        }
        let item_bytes = layout.dtype.size_bytes();
        let mut decoded = vec![0; piece.len() / item_bytes];
        crate::widen::widen_tokens(layout.dtype, piece, &mut decoded);
        let mut wrong = decoded.into_iter().enumerate().filter(|(_, id)| !is_fine(*id));
        for (entry, id) in wrong.by_ref().take(FAULTS_SHOWN) {
            let place = at + entry * item_bytes;
            let token = place / item_bytes;
            let problem = format!("token {token} is id {id}, outside the vocabulary of {vocab_size} ids");
            faults.add(self.data.path(), Some(place as u64), problem);
        }
        faults.num_more += wrong.count() as u64;
    }

    /// Each length is 0 or more, and each sequence begins where the one before it ends.
    fn sequences(&self, entries: &Range<usize>, faults: &mut Faults) -> Result<(), IndexError> {
        let Some(layout) = self.layout else { return Ok(()) };
        let item_bytes = layout.dtype.size_bytes() as i64;
        let is_last = entries.end == layout.num_sequences;
        let mut lengths = vec![0; 4 * entries.len()];
        let mut offsets = vec![0; 8 * (entries.len() + usize::from(!is_last))];
        self.index.read_at((HEADER_BYTES + 4 * entries.start) as u64, &mut lengths)?;
        self.index.read_at((layout.offsets_at + 8 * entries.start) as u64, &mut offsets)?;
        let offset_at = |entry: usize| i64::from_le_bytes(array_at(&offsets, 8 * entry));
        let data_bytes = self.data.size_bytes()? as i64;
        for entry in 0..entries.len() {
            let sequence = entries.start + entry;
            let length = i32::from_le_bytes(array_at(&lengths, 4 * entry));
            let length_at = HEADER_BYTES + 4 * sequence;
            if length < 0 {
                let problem = format!("length of sequence {sequence}: expected 0 or more tokens, found {length}");
                faults.add(self.index.path(), Some(length_at as u64), problem);
            }
            let begin = offset_at(entry);
            let end = i64::from(length).checked_mul(item_bytes).and_then(|bytes| begin.checked_add(bytes));
            let is_behind = entry + 1 == entries.len() && is_last;
            let next = if is_behind { data_bytes } else { offset_at(entry + 1) };
            if end != Some(next) {
                let what = if is_behind {
                    "the end of the .bin".to_owned()
                } else {
                    format!("the offset of sequence {}", sequence + 1)
                };
                let problem = format!(
                    "{what} is byte {next}, but sequence {sequence} begins at byte {begin} and has {length} tokens of \
                     {item_bytes} bytes (its length is at byte {length_at})"
                );
                let place = layout.offsets_at + 8 * (sequence + usize::from(!is_behind));
                faults.add(self.index.path(), Some(place as u64), problem);
            }
        }
        Ok(())
    }

    /// Boundaries do not fall, and lie between 0 and the number of sequences.
    fn boundaries(&self, entries: &Range<usize>, faults: &mut Faults) -> Result<(), IndexError> {
        let Some(layout) = self.layout else { return Ok(()) };
        let mut bytes = vec![0; 8 * (entries.len() + 1)];
        self.index.read_at((layout.boundaries_at + 8 * entries.start) as u64, &mut bytes)?;
        let mut num_empty = 0;
        for entry in 0..entries.len() {
            let (begin, end): (i64, i64) = (
                i64::from_le_bytes(array_at(&bytes, 8 * entry)),
                i64::from_le_bytes(array_at(&bytes, 8 * (entry + 1))),
            );
            num_empty += u64::from(begin == end);
            if end < begin || end > layout.num_sequences as i64 {
                let document = entries.start + entry;
                let problem = format!(
                    "document {document} ends at sequence {end}: expected from {begin}, where it begins, to {}, the \
                     number of sequences",
                    layout.num_sequences
                );
                faults.add(self.index.path(), Some((layout.boundaries_at + 8 * (document + 1)) as u64), problem);
            }
        }
        self.num_empty_documents.fetch_add(num_empty, Ordering::Relaxed);
        Ok(())
    }
}

/// Smallest and largest token.
fn extremes(dtype: TokenDtype, bytes: &[u8]) -> Option<(i64, i64)> {
    fn of<const N: usize, T: Ord + Copy>(bytes: &[u8], convert: impl Fn([u8; N]) -> T) -> Option<(T, T)> {
        let mut tokens = bytes.chunks_exact(N).map(|token| convert(array_at(token, 0)));
        let first = tokens.next()?;
        Some(tokens.fold((first, first), |(low, high), token| (low.min(token), high.max(token))))
    }
    let wide = |(low, high): (i32, i32)| (i64::from(low), i64::from(high));
    match dtype {
        TokenDtype::U8 => of(bytes, |[byte]: [u8; 1]| i32::from(byte)).map(wide),
        TokenDtype::I8 => of(bytes, |token| i32::from(i8::from_le_bytes(token))).map(wide),
        TokenDtype::I16 => of(bytes, |token| i32::from(i16::from_le_bytes(token))).map(wide),
        TokenDtype::U16 => of(bytes, |token| i32::from(u16::from_le_bytes(token))).map(wide),
        TokenDtype::I32 => of(bytes, i32::from_le_bytes).map(wide),
        TokenDtype::I64 => of(bytes, i64::from_le_bytes),
    }
}
