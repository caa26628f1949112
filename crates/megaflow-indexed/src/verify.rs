//! Everything that can be checked about a pair: its structure, its sizes, its ids, its checksums.
//!
//! The `.bin` is read once. Work is cut into blocks that do not depend on one another, so any number of threads finds the
//! same faults.

use std::collections::VecDeque;
use std::fmt;
use std::ops::{ControlFlow, Range};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use megaflow_core::TokenDtype;
use xxhash_rust::xxh3::Xxh3;

use crate::checksummed::CHECKSUM_BLOCK_BYTES;
use crate::dataset::IndexedDataset;
use crate::error::IndexError;
use crate::layout::{HEADER_BYTES, Layout, array_at};
use crate::prefix::{data_path, index_path, resolve_prefix, with_suffix};
use crate::section::{PIECE_BYTES, ReadFile};
use crate::sidecar::{FileRecord, Sidecar};

/// Faults that are described; beyond, they are counted.
const FAULTS_SHOWN: usize = 20;
/// Sequences or boundaries that are checked as one piece of work. Their lengths and offsets take 12 MiB.
const ENTRIES: usize = 1 << 20;

/// Called with the bytes checked and the bytes to check; `Break` stops the work.
pub type VerifyProgress<'a> = &'a mut dyn FnMut(u64, u64) -> ControlFlow<()>;

/// Why a pair could not be checked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// The pair does not exist, or a file cannot be opened.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// The caller asked to stop.
    #[error("stopped before everything was checked")]
    Stopped,
}

/// How a pair is checked.
#[derive(Debug, Clone, Copy, Default)]
pub struct VerifyOptions {
    /// Threads that read; 0 counts as 1.
    pub threads: usize,
    /// Every id must be below this. By default the vocabulary size that the sidecar names, if it names one.
    pub vocab_size: Option<u64>,
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fault {
    /// The file.
    pub path: PathBuf,
    /// Byte in the file at which it shows itself; `None` if it concerns the file as a whole.
    pub place: Option<u64>,
    /// What was expected and what was found.
    pub problem: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.path.display())?;
        if let Some(place) = self.place {
            write!(formatter, ": byte {place}")?;
        }
        write!(formatter, ": {}", self.problem)
    }
}

/// What was checked, and what is wrong.
#[derive(Debug, Clone)]
pub struct VerifyReport {
    /// Prefix of the pair.
    pub prefix: PathBuf,
    /// The first faults, by file and place.
    pub faults: Vec<Fault>,
    /// Number of all faults.
    pub num_faults: u64,
    /// Whether the bytes were compared with checksums.
    pub has_checksums: bool,
    /// The limit that the ids were compared with, if there was one.
    pub vocab_size: Option<u64>,
    /// Smallest and largest id; `None` if there is no token or the token type is not known.
    pub ids: Option<(i64, i64)>,
    /// Bytes that were checked.
    pub bytes: u64,
    /// Documents, empty ones included.
    pub num_documents: u64,
    /// Documents without a sequence.
    pub num_empty_documents: u64,
    /// Sequences.
    pub num_sequences: u64,
    /// Tokens.
    pub num_tokens: u64,
}

/// Checks the pair that `prefix` names.
///
/// # Errors
/// [`VerifyError`] if there is no such pair, or if it cannot be checked at all. What is wrong with the pair is no error: it
/// is in the report.
pub fn verify(
    prefix: &Path,
    options: VerifyOptions,
    progress: VerifyProgress<'_>,
) -> Result<VerifyReport, VerifyError> {
    let prefix = resolve_prefix(prefix)?;
    let mut faults = Faults::default();
    let sidecar = match Sidecar::read(&prefix) {
        Ok(sidecar) => sidecar,
        Err(IndexError::BadSidecar { path, problem }) => {
            faults.add(&path, None, problem);
            None
        }
        Err(error) => return Err(error.into()),
    };
    let dataset = match IndexedDataset::open(&prefix) {
        Ok(dataset) => Some(dataset),
        Err(error @ (IndexError::Missing { .. } | IndexError::Io { .. })) => return Err(error.into()),
        Err(error) => {
            faults.add_open_error(&prefix, &error);
            None
        }
    };
    let known = sidecar.as_ref().and_then(|sidecar| sidecar.tokenizer.as_ref()).map(|tokenizer| tokenizer.vocab_size);
    let check = Check {
        index: ReadFile::open(index_path(&prefix))?,
        data: ReadFile::open(data_path(&prefix))?,
        layout: dataset.as_ref().map(IndexedDataset::layout),
        vocab_size: options.vocab_size.or(known),
        index_blocks: Blocks::of(sidecar.as_ref().map(|sidecar| &sidecar.idx)),
        data_blocks: Blocks::of(sidecar.as_ref().map(|sidecar| &sidecar.bin)),
        num_empty_documents: AtomicU64::new(0),
    };
    let json = with_suffix(&prefix, ".json");
    let (index_bytes, data_bytes) = (check.index.size_bytes()?, check.data.size_bytes()?);
    if let Some(sidecar) = &sidecar {
        for (record, file, size) in [(&sidecar.idx, &check.index, index_bytes), (&sidecar.bin, &check.data, data_bytes)]
        {
            check_record(record, &json, file.path(), size, &mut faults);
        }
    }
    let work = check.work(index_bytes, data_bytes);
    let bytes = work.iter().map(Work::bytes).sum();
    let ids = run(&check, work, options.threads.max(1), bytes, progress, &mut faults)?;
    let report = VerifyReport {
        num_documents: dataset.as_ref().map_or(0, IndexedDataset::num_documents) as u64,
        num_empty_documents: check.num_empty_documents.load(Ordering::Relaxed),
        num_sequences: dataset.as_ref().map_or(0, IndexedDataset::num_sequences) as u64,
        num_tokens: dataset.as_ref().map_or(0, IndexedDataset::num_tokens),
        has_checksums: sidecar.is_some(),
        vocab_size: check.vocab_size,
        ids,
        bytes,
        prefix,
        faults: Vec::new(),
        num_faults: 0,
    };
    if let (Some(sidecar), Some(dataset)) = (&sidecar, &dataset) {
        check_counts(sidecar, &report, dataset.dtype(), &json, &mut faults);
    }
    Ok(faults.finish(report))
}

/// Size and XXH3-64 of the blocks of a file, as a sidecar has them.
///
/// # Errors
/// [`IndexError::Io`].
pub fn checksum_file(path: &Path) -> Result<FileRecord, IndexError> {
    let file = ReadFile::open(path.to_owned())?;
    let (bytes, block_bytes) = (file.size_bytes()?, CHECKSUM_BLOCK_BYTES as u64);
    let mut record = FileRecord { bytes, block_bytes, xxh3_64: Vec::new() };
    for block in cut(bytes, block_bytes) {
        let mut hash = Xxh3::new();
        file.pieces(block.start as usize, block.end as usize, PIECE_BYTES, |_, piece| {
            hash.update(piece);
            Ok::<(), IndexError>(())
        })?;
        record.xxh3_64.push(format!("{:016x}", hash.digest()));
    }
    Ok(record)
}

/// Faults of one thread, or of all.
#[derive(Debug, Default)]
struct Faults {
    found: Vec<Fault>,
    num_more: u64,
}

impl Faults {
    fn add(&mut self, path: &Path, place: Option<u64>, problem: String) {
        self.found.push(Fault { path: path.to_owned(), place, problem });
        self.shorten();
    }

    /// Drops the last ones by place, so that what remains does not depend on the order in which they were found.
    fn shorten(&mut self) {
        if self.found.len() > 2 * FAULTS_SHOWN {
            self.found.sort();
            self.num_more += (self.found.len() - FAULTS_SHOWN) as u64;
            self.found.truncate(FAULTS_SHOWN);
        }
    }

    fn extend(&mut self, more: Self) {
        self.found.extend(more.found);
        self.num_more += more.num_more;
        self.shorten();
    }

    /// The error that stopped the opening. Its words begin with the path.
    fn add_open_error(&mut self, prefix: &Path, error: &IndexError) {
        let words = error.to_string();
        for path in [index_path(prefix), data_path(prefix)] {
            if let Some(problem) = words.strip_prefix(&format!("{}: ", path.display())) {
                return self.add(&path, None, problem.to_owned());
            }
        }
        self.add(&index_path(prefix), None, words);
    }

    fn finish(mut self, report: VerifyReport) -> VerifyReport {
        self.found.sort();
        let num_faults = self.found.len() as u64 + self.num_more;
        self.found.truncate(FAULTS_SHOWN);
        VerifyReport { faults: self.found, num_faults, ..report }
    }
}

/// Checksums of a file, and the blocks that they cover.
struct Blocks {
    block_bytes: u64,
    expected: Vec<String>,
}

impl Blocks {
    fn of(record: Option<&FileRecord>) -> Self {
        match record {
            // A block of a few bytes cannot be meant, and would take for ever.
            Some(record) if record.block_bytes >= 4096 && record.block_bytes % 8 == 0 => {
                Self { block_bytes: record.block_bytes, expected: record.xxh3_64.clone() }
            }
            _ => Self { block_bytes: CHECKSUM_BLOCK_BYTES as u64, expected: Vec::new() },
        }
    }
}

/// What the sidecar says about a file against the file's size.
fn check_record(record: &FileRecord, json: &Path, path: &Path, size: u64, faults: &mut Faults) {
    let name = path.extension().unwrap_or_default().to_string_lossy();
    if record.bytes != size {
        let problem = format!("expected {} bytes, as the sidecar says, found {size}", record.bytes);
        faults.add(path, Some(record.bytes.min(size)), problem);
    }
    if record.block_bytes < 4096 || record.block_bytes % 8 != 0 {
        let problem = format!(
            "the checksums of the .{name} cover blocks of {} bytes: expected a multiple of 8 from 4096 on; they were not compared",
            record.block_bytes
        );
        faults.add(json, None, problem);
    } else if record.xxh3_64.len() as u64 != record.bytes.div_ceil(record.block_bytes) {
        let (found, blocks) = (record.xxh3_64.len(), record.bytes.div_ceil(record.block_bytes));
        faults.add(json, None, format!("the .{name} has {blocks} blocks, the sidecar has {found} checksums of it"));
    }
}

fn check_counts(sidecar: &Sidecar, report: &VerifyReport, dtype: TokenDtype, json: &Path, faults: &mut Faults) {
    if sidecar.dtype != dtype.name() {
        faults.add(json, None, format!("dtype: the sidecar says {}, the pair has {dtype}", sidecar.dtype));
    }
    let counts = [
        ("num_documents", sidecar.num_documents, report.num_documents),
        ("num_empty_documents", sidecar.num_empty_documents, report.num_empty_documents),
        ("num_sequences", sidecar.num_sequences, report.num_sequences),
        ("num_tokens", sidecar.num_tokens, report.num_tokens),
    ];
    for (name, said, found) in counts.into_iter().filter(|(_, said, found)| said != found) {
        faults.add(json, None, format!("{name}: the sidecar says {said}, the pair has {found}"));
    }
    let mut next = 0;
    for source in &sidecar.sources {
        if source.first_document != next {
            let problem = format!(
                "the source {} begins at document {}; expected {next}, behind the sources before it",
                source.path, source.first_document
            );
            faults.add(json, None, problem);
        }
        next = source.first_document.saturating_add(source.num_documents);
    }
    if !sidecar.sources.is_empty() && next != report.num_documents {
        let found = report.num_documents;
        faults.add(json, None, format!("the sources end at document {next}, the pair has {found} documents"));
    }
}

/// One piece of work.
#[derive(Debug)]
enum Work {
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
    fn bytes(&self) -> u64 {
        match self {
            Self::Data(range) | Self::Index(range) => range.end - range.start,
            Self::Sequences(range) => 12 * range.len() as u64,
            Self::Boundaries(range) => 8 * range.len() as u64,
        }
    }
}

/// `bytes` in blocks, the last one short.
fn cut(bytes: u64, block_bytes: u64) -> impl Iterator<Item = Range<u64>> {
    (0..bytes.div_ceil(block_bytes)).map(move |block| block * block_bytes..bytes.min((block + 1) * block_bytes))
}

/// What all threads share.
struct Check {
    index: ReadFile,
    data: ReadFile,
    /// `None` if the header or the sizes are wrong: then the checksums alone tell where.
    layout: Option<Layout>,
    vocab_size: Option<u64>,
    index_blocks: Blocks,
    data_blocks: Blocks,
    num_empty_documents: AtomicU64,
}

impl Check {
    fn work(&self, index_bytes: u64, data_bytes: u64) -> VecDeque<Work> {
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

    fn run(&self, work: &Work, ids: &mut Option<(i64, i64)>, faults: &mut Faults, stop: &AtomicBool) {
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

/// Does the work on `threads` threads, and tells the calling one how far it is.
fn run(
    check: &Check,
    work: VecDeque<Work>,
    threads: usize,
    total: u64,
    progress: VerifyProgress<'_>,
    faults: &mut Faults,
) -> Result<Option<(i64, i64)>, VerifyError> {
    let threads = threads.min(work.len().max(1));
    let queue = Mutex::new(work);
    let stop = AtomicBool::new(false);
    let (sender, results) = mpsc::channel::<(u64, Faults, Option<(i64, i64)>)>();
    let mut ids: Option<(i64, i64)> = None;
    thread::scope(|scope| {
        for _ in 0..threads {
            let (sender, queue, stop) = (sender.clone(), &queue, &stop);
            scope.spawn(move || {
                loop {
                    let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                    let Some(work) = next.filter(|_| !stop.load(Ordering::Relaxed)) else { return };
                    let (mut found, mut extremes) = (Faults::default(), None);
                    check.run(&work, &mut extremes, &mut found, stop);
                    if sender.send((work.bytes(), found, extremes)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        let mut done = 0;
        loop {
            match results.recv_timeout(Duration::from_millis(100)) {
                Ok((bytes, found, extremes)) => {
                    done += bytes;
                    faults.extend(found);
                    if let Some((low, high)) = extremes {
                        ids = Some(ids.map_or((low, high), |(lowest, highest)| (lowest.min(low), highest.max(high))));
                    }
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(()),
            }
            if progress(done, total).is_break() {
                stop.store(true, Ordering::Relaxed);
                return Err(VerifyError::Stopped);
            }
        }
    })?;
    Ok(ids)
}
