//! One open pair.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use megaflow_core::TokenDtype;
use sha2::{Digest, Sha256};

use crate::error::IndexError;
use crate::guard;
use crate::layout::{HEADER_BYTES, Layout, array_at};
use crate::mmap::FileMap;
use crate::prefix::{data_path, index_path, resolve_prefix};
use crate::widen::widen_tokens;

/// Bytes of one block, and number of blocks, that the content key looks at in each file.
const KEY_BLOCK_BYTES: usize = 4096;
const KEY_BLOCKS: usize = 16;

/// How to open a pair.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OpenOptions {
    /// The `.idx` ends with one mode a sequence, as multimodal sets do. Nothing in its header says so.
    pub with_modes: bool,
}

/// A `.bin/.idx` pair, mapped into memory and checked.
///
/// Opening takes the same time at any size, and only the pages that are read take memory. All methods check their
/// positions; none panics, whatever the files hold.
#[derive(Debug)]
pub struct IndexedDataset {
    prefix: PathBuf,
    layout: Layout,
    index: FileMap,
    data: FileMap,
    /// Set for good once a page of either file was missing: it holds zeros now.
    is_damaged: AtomicBool,
    watched_reads: AtomicU32,
    content_key: OnceLock<String>,
}

/// Reads between two looks at the files' sizes. The rest of the last page of a file that was cut short reads as zeros, and
/// no signal tells.
const READS_A_LOOK: u32 = 32;

impl IndexedDataset {
    /// Opens the pair that `prefix` names, by the rules of [`resolve_prefix`].
    ///
    /// Checks magic, version, token type, the exact size of both files, the first and last entry of each array.
    ///
    /// # Errors
    /// [`IndexError`] if the pair does not exist, cannot be mapped or fails a check.
    pub fn open(prefix: impl AsRef<Path>) -> Result<Self, IndexError> {
        Self::open_with(prefix, OpenOptions::default())
    }

    /// [`open`](Self::open) with options.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(prefix: impl AsRef<Path>, options: OpenOptions) -> Result<Self, IndexError> {
        let prefix = resolve_prefix(prefix)?;
        let path = index_path(&prefix);
        let index = FileMap::open(&path)?;
        let layout = Layout::parse(&path, index.bytes(), options.with_modes)?;
        let data = FileMap::open(&data_path(&prefix))?;
        let (is_damaged, watched_reads) = (AtomicBool::new(false), AtomicU32::new(0));
        let dataset = Self { prefix, layout, index, data, is_damaged, watched_reads, content_key: OnceLock::new() };
        dataset.check_boundaries()?;
        dataset.check_data_size()?;
        Ok(dataset)
    }

    fn check_boundaries(&self) -> Result<(), IndexError> {
        if self.layout.num_boundaries == 0 {
            return Err(self.bad_entry("number of document boundaries", 26, "at least 1", 0));
        }
        let last = self.layout.num_boundaries - 1;
        for (entry, expected) in [(0, 0), (last, self.layout.num_sequences as i64)] {
            let found = self.boundary(entry);
            if found != expected {
                let which = if entry == 0 { "first document boundary" } else { "last document boundary" };
                let expected = format!("{expected}{}", if entry == 0 { "" } else { ", the number of sequences" });
                return Err(self.bad_entry(which, self.layout.boundaries_at + 8 * entry, expected, found));
            }
        }
        Ok(())
    }

    fn check_data_size(&self) -> Result<(), IndexError> {
        let expected = match self.layout.num_sequences {
            0 => 0,
            count => {
                let first = self.raw_offset(0);
                if first != 0 {
                    return Err(self.bad_entry("offset of sequence 0", self.layout.offsets_at, "0", first));
                }
                let (length, offset) = (self.raw_length(count - 1), self.raw_offset(count - 1));
                let item_bytes = self.layout.dtype.size_bytes() as i64;
                let end = i64::from(length).checked_mul(item_bytes).and_then(|bytes| offset.checked_add(bytes));
                match end {
                    Some(end) if length >= 0 && offset >= 0 => end as u64,
                    _ if length < 0 => return Err(self.bad_length(count - 1, length)),
                    _ => return Err(self.bad_offset(count - 1, offset)),
                }
            }
        };
        let found = self.data.bytes().len() as u64;
        if found != expected {
            let path = data_path(&self.prefix);
            return Err(IndexError::DataSize { path, dtype: self.layout.dtype, expected, found });
        }
        Ok(())
    }

    /// Runs something that reads the maps. If a file was cut short under them, or cannot be fetched, that is an error, and
    /// what was read is thrown away; without this such a read ends the process.
    ///
    /// # Errors
    /// [`IndexError::Shrunk`].
    #[inline]
    pub fn watched<T>(&self, read: impl FnOnce() -> T) -> Result<T, IndexError> {
        // Threads may lose a count to each other: the look then comes a little later.
        let reads = self.watched_reads.load(Ordering::Relaxed).wrapping_add(1);
        self.watched_reads.store(reads, Ordering::Relaxed);
        if self.is_damaged.load(Ordering::Acquire) {
            return Err(self.shrunk());
        }
        let (value, seen) = guard::watched(read);
        let is_damaged = match seen {
            guard::Seen::Whole => reads % READS_A_LOOK == 0 && self.cut_file().is_some(),
            guard::Seen::Missing(None) => true,
            guard::Seen::Missing(Some(at)) => self.index.holds(at) || self.data.holds(at),
        };
        if is_damaged {
            self.is_damaged.store(true, Ordering::Release);
            return Err(self.shrunk());
        }
        Ok(value)
    }

    /// The file that is shorter than its map: path, size of the map, size now.
    fn cut_file(&self) -> Option<(PathBuf, u64, String)> {
        [(self.data_path(), &self.data), (self.index_path(), &self.index)]
            .into_iter()
            .find_map(|(path, map)| map.cut_to(&path).map(|len| (path, map.bytes().len() as u64, len.to_string())))
    }

    #[cold]
    fn shrunk(&self) -> IndexError {
        let unreadable = || (self.data_path(), self.data.bytes().len() as u64, "a page that cannot be read".to_owned());
        let (path, expected, found) = self.cut_file().unwrap_or_else(unreadable);
        IndexError::Shrunk { path, expected, found }
    }

    /// Asks the system to fetch tokens of sequence `index`, without waiting for them.
    ///
    /// # Errors
    /// As [`token_bytes`](Self::token_bytes).
    pub fn fetch_tokens(&self, index: usize, range: Range<usize>) -> Result<(), IndexError> {
        self.fetch_bytes(self.token_bytes(index, range)?);
        Ok(())
    }

    /// The same for bytes of the `.bin` that a method of this dataset gave; others are passed over.
    pub fn fetch_bytes(&self, bytes: &[u8]) {
        let data = self.data.bytes();
        let begin = (bytes.as_ptr() as usize).wrapping_sub(data.as_ptr() as usize);
        if begin < data.len() && bytes.len() <= data.len() - begin {
            self.data.fetch(begin, bytes.len());
        }
    }

    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    /// Prefix of the pair: the path of either file without its extension.
    pub fn prefix(&self) -> &Path {
        &self.prefix
    }

    /// Path of the `.idx`.
    pub fn index_path(&self) -> PathBuf {
        index_path(&self.prefix)
    }

    /// Path of the `.bin`.
    pub fn data_path(&self) -> PathBuf {
        data_path(&self.prefix)
    }

    /// Type of the stored tokens.
    pub fn dtype(&self) -> TokenDtype {
        self.layout.dtype
    }

    /// Number of sequences.
    pub fn num_sequences(&self) -> usize {
        self.layout.num_sequences
    }

    /// Number of documents, empty ones included.
    pub fn num_documents(&self) -> usize {
        self.layout.num_boundaries.saturating_sub(1)
    }

    /// Number of tokens in the `.bin`.
    pub fn num_tokens(&self) -> u64 {
        (self.data.bytes().len() / self.layout.dtype.size_bytes()) as u64
    }

    /// Tokens in sequence `index`.
    ///
    /// # Errors
    /// [`IndexError`] if the sequence does not exist or its entry is damaged.
    pub fn sequence_len(&self, index: usize) -> Result<usize, IndexError> {
        self.check_sequence(index)?;
        let length = self.raw_length(index);
        usize::try_from(length).map_err(|_| self.bad_length(index, length))
    }

    /// Position of the first token of sequence `index` in the `.bin`, in tokens.
    ///
    /// # Errors
    /// [`IndexError`] if the sequence does not exist or its entry is damaged.
    pub fn sequence_offset(&self, index: usize) -> Result<usize, IndexError> {
        self.check_sequence(index)?;
        let offset = self.raw_offset(index);
        let item_bytes = self.layout.dtype.size_bytes();
        match usize::try_from(offset) {
            Ok(bytes) if bytes <= self.data.bytes().len() && bytes % item_bytes == 0 => Ok(bytes / item_bytes),
            _ => Err(self.bad_offset(index, offset)),
        }
    }

    /// Tokens of sequence `index`, as positions in the `.bin`.
    ///
    /// # Errors
    /// [`IndexError`] if the sequence does not exist or its entry is damaged.
    pub fn sequence_tokens(&self, index: usize) -> Result<Range<usize>, IndexError> {
        let begin = self.sequence_offset(index)?;
        let length = self.sequence_len(index)?;
        let end = begin.checked_add(length).filter(|&end| end as u64 <= self.num_tokens());
        end.map(|end| begin..end).ok_or_else(|| self.bad_length(index, self.raw_length(index)))
    }

    /// Sequences of document `index`.
    ///
    /// # Errors
    /// [`IndexError`] if the document does not exist or its boundaries are damaged.
    pub fn document_bounds(&self, index: usize) -> Result<Range<usize>, IndexError> {
        if index >= self.num_documents() {
            let (index, num_documents) = (index as u64, self.num_documents() as u64);
            return Err(IndexError::NoSuchDocument { prefix: self.prefix.clone(), index, num_documents });
        }
        let (begin, end) = (self.boundary(index), self.boundary(index + 1));
        match (usize::try_from(begin), usize::try_from(end)) {
            (Ok(first), Ok(behind)) if first <= behind && behind <= self.num_sequences() => Ok(first..behind),
            _ => {
                let expected = format!("from {} to {}, the number of sequences", begin.max(0), self.num_sequences());
                let place = self.layout.boundaries_at + 8 * (index + 1);
                Err(self.bad_entry(format!("document boundary {}", index + 1), place, expected, end))
            }
        }
    }

    /// Tokens of document `index`, as positions in the `.bin`. Its sequences lie back to back.
    ///
    /// # Errors
    /// [`IndexError`] if the document does not exist, or the index is damaged where it describes it.
    pub fn document_tokens(&self, index: usize) -> Result<Range<usize>, IndexError> {
        let sequences = self.document_bounds(index)?;
        if sequences.is_empty() {
            return Ok(0..0);
        }
        let first = self.sequence_tokens(sequences.start)?;
        let last = self.sequence_tokens(sequences.end - 1)?;
        if last.end < first.start {
            return Err(self.bad_offset(sequences.end - 1, self.raw_offset(sequences.end - 1)));
        }
        Ok(first.start..last.end)
    }

    /// Bytes of the tokens `range` of sequence `index`, without a copy. `range` counts from the start of the sequence.
    ///
    /// # Errors
    /// [`IndexError`] if the sequence has no such tokens, or its entry is damaged.
    #[inline]
    pub fn token_bytes(&self, index: usize, range: Range<usize>) -> Result<&[u8], IndexError> {
        let tokens = self.sequence_tokens(index)?;
        if range.start > range.end || range.end > tokens.len() {
            let (begin, end) = (range.start as u64, range.end as u64);
            let (index, length) = (index as u64, tokens.len() as u64);
            return Err(IndexError::NoSuchTokens { prefix: self.prefix.clone(), index, begin, end, length });
        }
        let item_bytes = self.layout.dtype.size_bytes();
        let begin = (tokens.start + range.start) * item_bytes;
        Ok(&self.data.bytes()[begin..begin + range.len() * item_bytes])
    }

    /// Copies tokens of sequence `index` into `out`, from position `begin` of the sequence on, until `out` is full.
    ///
    /// # Errors
    /// [`IndexError`] if the sequence has no such tokens, or its entry is damaged.
    #[inline]
    pub fn read_tokens(&self, index: usize, begin: usize, out: &mut [i64]) -> Result<(), IndexError> {
        let bytes = self.token_bytes(index, begin..begin.saturating_add(out.len()))?;
        widen_tokens(self.layout.dtype, bytes, out);
        Ok(())
    }

    /// All of the `.bin`: little-endian tokens of [`dtype`](Self::dtype).
    pub fn data_bytes(&self) -> &[u8] {
        self.data.bytes()
    }

    /// Lengths of all sequences in tokens: little-endian `i32`, unaligned.
    pub fn length_bytes(&self) -> &[u8] {
        &self.index.bytes()[HEADER_BYTES..self.layout.offsets_at]
    }

    /// Offsets of all sequences in the `.bin` in bytes: little-endian `i64`, unaligned.
    pub fn offset_bytes(&self) -> &[u8] {
        &self.index.bytes()[self.layout.offsets_at..self.layout.boundaries_at]
    }

    /// Document boundaries as sequence numbers: little-endian `i64`, unaligned, one more than documents.
    pub fn boundary_bytes(&self) -> &[u8] {
        &self.index.bytes()[self.layout.boundaries_at..self.layout.boundaries_end]
    }

    /// Modes of all sequences, one `i8` each; empty unless the pair was opened with modes.
    pub fn mode_bytes(&self) -> &[u8] {
        &self.index.bytes()[self.layout.boundaries_end..]
    }

    /// Length of sequence `index` as stored: not checked against the `.bin`, and negative in a damaged file.
    ///
    /// # Panics
    /// If `index` is not below [`num_sequences`](Self::num_sequences).
    #[inline]
    pub fn raw_length(&self, index: usize) -> i32 {
        i32::from_le_bytes(array_at(self.length_bytes(), 4 * index))
    }

    /// A key of the content that survives copying and renaming: SHA-256 over both sizes and 16 evenly spaced blocks of
    /// 4 KiB of each file, the first and last included. It takes the same time at any size, so a change between the
    /// blocks that leaves the sizes as they are goes unseen. It is made once.
    ///
    /// # Errors
    /// [`IndexError::Shrunk`], if it was not made before a file was cut short.
    pub fn content_key(&self) -> Result<&str, IndexError> {
        if let Some(key) = self.content_key.get() {
            return Ok(key);
        }
        let key = self.watched(|| self.hash_blocks())?;
        Ok(self.content_key.get_or_init(|| key))
    }

    fn hash_blocks(&self) -> String {
        let files = [&self.index, &self.data];
        let blocks = files.map(|file| {
            let len = file.bytes().len();
            let last_start = len.saturating_sub(KEY_BLOCK_BYTES) as u128;
            (0..KEY_BLOCKS as u128).map(move |block| {
                let start = (last_start * block / (KEY_BLOCKS as u128 - 1)) as usize;
                start..len.min(start + KEY_BLOCK_BYTES)
            })
        });
        // All at once: a fault alone would wait for each, and fetch megabytes around it.
        for (file, blocks) in files.iter().zip(blocks.clone()) {
            blocks.for_each(|block| file.fetch(block.start, block.len()));
        }
        let mut hasher = Sha256::new();
        for (file, blocks) in files.iter().zip(blocks) {
            hasher.update((file.bytes().len() as u64).to_le_bytes());
            blocks.for_each(|block| hasher.update(&file.bytes()[block]));
        }
        hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[inline]
    fn raw_offset(&self, index: usize) -> i64 {
        i64::from_le_bytes(array_at(self.offset_bytes(), 8 * index))
    }

    fn boundary(&self, index: usize) -> i64 {
        i64::from_le_bytes(array_at(self.boundary_bytes(), 8 * index))
    }

    #[inline]
    fn check_sequence(&self, index: usize) -> Result<(), IndexError> {
        if index < self.num_sequences() {
            return Ok(());
        }
        let (index, num_sequences) = (index as u64, self.num_sequences() as u64);
        Err(IndexError::NoSuchSequence { prefix: self.prefix.clone(), index, num_sequences })
    }

    #[cold]
    fn bad_length(&self, sequence: usize, found: i32) -> IndexError {
        let expected = format!("0 or more tokens, all inside the {} tokens of the .bin", self.num_tokens());
        let entry = format!("length of sequence {sequence}");
        self.bad_entry(entry, HEADER_BYTES + 4 * sequence, expected, i64::from(found))
    }

    #[cold]
    fn bad_offset(&self, sequence: usize, found: i64) -> IndexError {
        let (item_bytes, size) = (self.layout.dtype.size_bytes(), self.data.bytes().len());
        let expected = format!("a multiple of {item_bytes} from 0 to {size}, the bytes of the .bin");
        let place = self.layout.offsets_at + 8 * sequence;
        self.bad_entry(format!("offset of sequence {sequence}"), place, expected, found)
    }

    #[cold]
    fn bad_entry(&self, entry: impl Into<String>, place: usize, expected: impl Into<String>, found: i64) -> IndexError {
        IndexError::BadEntry {
            path: self.index_path(),
            entry: entry.into(),
            place: place as u64,
            expected: expected.into(),
            found,
        }
    }
}
