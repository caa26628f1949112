//! Everything that can be checked about a pair: its structure, its sizes, its ids, its checksums.
//!
//! The `.bin` is read once. Work is cut into blocks that do not depend on one another, so any number of threads finds the
//! same faults.

use std::collections::VecDeque;
use std::ops::ControlFlow;
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
use crate::prefix::{data_path, index_path, resolve_prefix, with_suffix};
use crate::section::{PIECE_BYTES, ReadFile};
use crate::sidecar::{FileRecord, Sidecar};

mod check;
mod faults;

use check::{Blocks, Check, Work, cut};
pub use faults::Fault;
use faults::Faults;

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
