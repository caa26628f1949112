//! Writing a `.bin/.idx` pair: everything into a staging folder, final names only for what is complete.
//!
//! Lengths and boundaries go to files of their own while the job runs and are joined into the `.idx` at the end, so memory
//! does not depend on the number of documents. Publishing removes an old `.idx` first and renames the new one last: whatever
//! moment a job is killed at, an `.idx` under its final name belongs to the `.bin` beside it.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};
use std::path::{Path, PathBuf};

use megaflow_core::TokenDtype;
use xxhash_rust::xxh3::Xxh3;

use crate::layout::{HEADER_BYTES, MAGIC, VERSION};
use crate::sidecar::{FileRecord, Sidecar};

/// Bytes of one checksummed block.
pub(crate) const CHECKSUM_BLOCK_BYTES: usize = 64 << 20;

/// Why a pair could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The system refused.
    #[error("{}: cannot {action}: {source}", .path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// What was being done.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// Another job writes the same output.
    #[error("{}: another job is writing this output; wait for it, or choose another --output-prefix", .path.display())]
    Busy {
        /// The staging folder.
        path: PathBuf,
    },
    /// The name of the staging folder is taken by something else.
    #[error("{}: exists and was not made by megaflow; remove it, or choose another --output-prefix", .path.display())]
    NotOurs {
        /// The staging folder.
        path: PathBuf,
    },
    /// A sequence has more tokens than the index can say.
    #[error("a sequence of {tokens} tokens is longer than the {} that an .idx can hold; split the document", i32::MAX)]
    SequenceTooLong {
        /// Its tokens.
        tokens: usize,
    },
    /// An id does not fit the type of the file.
    #[error("token id {id} does not fit {dtype}; the tokenizer gives ids above its own vocabulary size")]
    IdTooLarge {
        /// The id.
        id: u32,
        /// Type of the file.
        dtype: TokenDtype,
    },
}

pub(crate) fn io_error(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> WriteError {
    let path = path.to_owned();
    move |source| WriteError::Io { path, action, source }
}

/// Folder beside the output in which a job keeps everything that is not complete. Removed when dropped.
///
/// It holds a lock file, so that two jobs on one output cannot mix; the system frees the lock of a killed job.
#[derive(Debug)]
pub struct StagingFolder {
    path: PathBuf,
    _lock: File,
}

impl StagingFolder {
    /// Makes and locks `PREFIX.partial`, and empties what a killed job left there.
    ///
    /// # Errors
    /// [`WriteError::Busy`] if another job holds it, [`WriteError::NotOurs`] if it is something else, [`WriteError::Io`]
    /// if the folder of the output cannot be written.
    pub fn create(prefix: &Path) -> Result<Self, WriteError> {
        let mut name = prefix.as_os_str().to_owned();
        name.push(".partial");
        let path = PathBuf::from(name);
        if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            fs::create_dir_all(parent).map_err(io_error(parent, "make the folder of the output"))?;
        }
        let lock_path = path.join("lock");
        match fs::create_dir(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let is_empty = fs::read_dir(&path).is_ok_and(|mut entries| entries.next().is_none());
                if !lock_path.is_file() && !is_empty {
                    return Err(WriteError::NotOurs { path });
                }
            }
            Err(source) => return Err(io_error(&path, "write the output's folder")(source)),
        }
        let lock = File::create(&lock_path).map_err(io_error(&lock_path, "make the lock"))?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).map_err(|error| {
            if error == rustix::io::Errno::WOULDBLOCK {
                WriteError::Busy { path: path.clone() }
            } else {
                io_error(&lock_path, "lock")(error.into())
            }
        })?;
        let staging = Self { path, _lock: lock };
        for entry in fs::read_dir(&staging.path).map_err(io_error(&staging.path, "list"))? {
            let left_over = entry.map_err(io_error(&staging.path, "list"))?.path();
            if left_over != lock_path {
                fs::remove_file(&left_over).map_err(io_error(&left_over, "remove what a killed job left"))?;
            }
        }
        Ok(staging)
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for StagingFolder {
    fn drop(&mut self) {
        // What cannot be removed is emptied by the next job with this output.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Tokens of whole documents, ready to be appended.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct EncodedDocuments {
    /// The tokens, in the type of the file, little-endian.
    pub tokens: Vec<u8>,
    /// Tokens of each sequence.
    pub sequence_lengths: Vec<i32>,
    /// Sequences of each document; 0 for an empty one, which is a boundary and nothing else.
    pub sequences_per_document: Vec<u32>,
}

impl EncodedDocuments {
    /// Appends one sequence to the document that is being made.
    ///
    /// # Errors
    /// [`WriteError::IdTooLarge`], [`WriteError::SequenceTooLong`].
    pub fn push_sequence(&mut self, ids: &[u32], dtype: TokenDtype) -> Result<(), WriteError> {
        let length = i32::try_from(ids.len()).map_err(|_| WriteError::SequenceTooLong { tokens: ids.len() })?;
        if let Some(&id) = ids.iter().find(|&&id| u64::from(id) > dtype.max_id()) {
            return Err(WriteError::IdTooLarge { id, dtype });
        }
        match dtype.size_bytes() {
            1 => self.tokens.extend(ids.iter().map(|&id| id as u8)),
            2 => self.tokens.extend(ids.iter().flat_map(|&id| (id as u16).to_le_bytes())),
            4 => self.tokens.extend(ids.iter().flat_map(|&id| id.to_le_bytes())),
            _ => self.tokens.extend(ids.iter().flat_map(|&id| u64::from(id).to_le_bytes())),
        }
        self.sequence_lengths.push(length);
        Ok(())
    }

    /// Ends the document of the last `num_sequences` sequences.
    pub fn end_document(&mut self, num_sequences: u32) {
        self.sequences_per_document.push(num_sequences);
    }
}

/// Counts of a pair.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct PairCounts {
    /// Documents, empty ones included.
    pub documents: u64,
    /// Documents without a sequence.
    pub empty_documents: u64,
    /// Sequences.
    pub sequences: u64,
    /// Tokens.
    pub tokens: u64,
}

/// Writes one pair into a staging folder.
pub struct IndexedWriter {
    dtype: TokenDtype,
    prefix: PathBuf,
    bin: ChecksummedFile,
    lengths: BufWriter<File>,
    boundaries: BufWriter<File>,
    staged: PathBuf,
    counts: PairCounts,
}

impl IndexedWriter {
    /// Starts the pair `prefix.bin`, `prefix.idx` in `staging`.
    ///
    /// # Errors
    /// [`WriteError::Io`].
    pub fn create(staging: &StagingFolder, prefix: &Path, dtype: TokenDtype) -> Result<Self, WriteError> {
        let name = prefix.file_name().unwrap_or_default();
        let staged = staging.path.join(name);
        let scratch = |suffix: &str| {
            let path = with_suffix(&staged, suffix);
            let file = File::options().read(true).write(true).create(true).truncate(true).open(&path);
            file.map_err(io_error(&path, "make the file"))
        };
        let mut boundaries = BufWriter::new(scratch(".boundaries")?);
        boundaries.write_all(&0_i64.to_le_bytes()).map_err(io_error(&staged, "write"))?;
        Ok(Self {
            dtype,
            prefix: prefix.to_owned(),
            bin: ChecksummedFile::create(with_suffix(&staged, ".bin"))?,
            lengths: BufWriter::new(scratch(".lengths")?),
            boundaries,
            staged,
            counts: PairCounts::default(),
        })
    }

    /// Appends documents.
    ///
    /// # Errors
    /// [`WriteError::Io`]: the disk is full, or failed.
    pub fn append(&mut self, documents: &EncodedDocuments) -> Result<(), WriteError> {
        self.bin.write(&documents.tokens)?;
        let path = &self.staged;
        for length in &documents.sequence_lengths {
            self.lengths.write_all(&length.to_le_bytes()).map_err(io_error(path, "write the lengths"))?;
        }
        for &num_sequences in &documents.sequences_per_document {
            self.counts.sequences += u64::from(num_sequences);
            self.counts.empty_documents += u64::from(num_sequences == 0);
            let boundary = self.counts.sequences.to_le_bytes();
            self.boundaries.write_all(&boundary).map_err(io_error(path, "write the boundaries"))?;
        }
        self.counts.documents += documents.sequences_per_document.len() as u64;
        self.counts.tokens += (documents.tokens.len() / self.dtype.size_bytes()) as u64;
        Ok(())
    }

    /// What was appended so far.
    pub fn counts(&self) -> PairCounts {
        self.counts
    }

    /// Writes the `.idx` and makes both files durable, still under staging names.
    ///
    /// # Errors
    /// [`WriteError::Io`].
    pub fn finish(mut self) -> Result<StagedPair, WriteError> {
        let index_path = with_suffix(&self.staged, ".idx");
        let mut index = ChecksummedFile::create(index_path.clone())?;
        let mut header = Vec::with_capacity(HEADER_BYTES);
        header.extend_from_slice(MAGIC);
        header.extend_from_slice(&VERSION.to_le_bytes());
        header.push(self.dtype.code());
        header.extend_from_slice(&self.counts.sequences.to_le_bytes());
        header.extend_from_slice(&(self.counts.documents + 1).to_le_bytes());
        index.write(&header)?;
        let copied = (|| {
            let mut lengths = rewind(&mut self.lengths)?;
            copy_chunks(&mut lengths, 4, |bytes| index.write(bytes).map_err(into_io))?;
            lengths.rewind()?;
            let (mut offset, mut offsets) = (0_u64, Vec::new());
            copy_chunks(&mut lengths, 4, |bytes| {
                offsets.clear();
                for length in bytes.chunks_exact(4) {
                    offsets.extend_from_slice(&offset.to_le_bytes());
                    let length = u32::from_le_bytes([length[0], length[1], length[2], length[3]]);
                    offset += u64::from(length) * self.dtype.size_bytes() as u64;
                }
                index.write(&offsets).map_err(into_io)
            })?;
            let mut boundaries = rewind(&mut self.boundaries)?;
            copy_chunks(&mut boundaries, 8, |bytes| index.write(bytes).map_err(into_io))
        })();
        copied.map_err(io_error(&index_path, "write the index"))?;
        for scratch in [".lengths", ".boundaries"] {
            let path = with_suffix(&self.staged, scratch);
            fs::remove_file(&path).map_err(io_error(&path, "remove"))?;
        }
        Ok(StagedPair {
            bin: self.bin.finish()?,
            idx: index.finish()?,
            staged: self.staged,
            prefix: self.prefix,
            dtype: self.dtype,
            counts: self.counts,
            has_sidecar: false,
        })
    }
}

/// A complete pair under staging names.
#[derive(Debug)]
pub struct StagedPair {
    /// Size and checksums of the `.bin`.
    pub bin: FileRecord,
    /// Size and checksums of the `.idx`.
    pub idx: FileRecord,
    /// Type of the tokens.
    pub dtype: TokenDtype,
    /// What it holds.
    pub counts: PairCounts,
    staged: PathBuf,
    prefix: PathBuf,
    has_sidecar: bool,
}

impl StagedPair {
    /// A pair whose files were written and made durable as `staged.bin` and `staged.idx`.
    pub(crate) fn new(
        files: (FileRecord, FileRecord),
        dtype: TokenDtype,
        counts: PairCounts,
        staged: PathBuf,
        prefix: PathBuf,
    ) -> Self {
        let (bin, idx) = files;
        Self { bin, idx, dtype, counts, staged, prefix, has_sidecar: false }
    }

    /// Adds the sidecar.
    ///
    /// # Errors
    /// [`WriteError::Io`].
    pub fn write_sidecar(&mut self, sidecar: &Sidecar) -> Result<(), WriteError> {
        self.write_sidecar_text(&sidecar.to_json())
    }

    /// Adds the sidecar that `text` is.
    ///
    /// # Errors
    /// [`WriteError::Io`].
    pub fn write_sidecar_text(&mut self, text: &str) -> Result<(), WriteError> {
        let mut file = ChecksummedFile::create(with_suffix(&self.staged, ".json"))?;
        file.write(text.as_bytes())?;
        file.finish()?;
        self.has_sidecar = true;
        Ok(())
    }

    /// Gives the files their final names: an old `.idx` goes first, the new one comes last.
    ///
    /// # Errors
    /// [`WriteError::Io`].
    pub fn publish(self) -> Result<PathBuf, WriteError> {
        for suffix in [".idx", ".json"] {
            let old = with_suffix(&self.prefix, suffix);
            match fs::remove_file(&old) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(io_error(&old, "replace the old file")(error));
                }
                _ => {}
            }
        }
        let suffixes = [".bin", ".json", ".idx"];
        for suffix in suffixes.into_iter().filter(|suffix| *suffix != ".json" || self.has_sidecar) {
            publish_file(&with_suffix(&self.staged, suffix), &with_suffix(&self.prefix, suffix))?;
        }
        Ok(self.prefix)
    }
}

/// Renames a durable file, then makes the new name durable.
///
/// # Errors
/// [`WriteError::Io`].
pub fn publish_file(from: &Path, to: &Path) -> Result<(), WriteError> {
    fs::rename(from, to).map_err(io_error(to, "give the file its final name"))?;
    let folder = to.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(io_error(folder, "make durable"))
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

fn into_io(error: WriteError) -> io::Error {
    io::Error::other(error)
}

fn rewind(writer: &mut BufWriter<File>) -> io::Result<BufReader<&File>> {
    writer.flush()?;
    let mut file = writer.get_ref();
    file.rewind()?;
    Ok(BufReader::with_capacity(1 << 20, file))
}

/// Calls `each` with chunks that are multiples of `unit` bytes, to the end.
fn copy_chunks(reader: &mut impl Read, unit: usize, mut each: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
    let mut chunk = vec![0; unit << 16];
    loop {
        let mut filled = 0;
        while filled < chunk.len() {
            match reader.read(&mut chunk[filled..])? {
                0 => break,
                got => filled += got,
            }
        }
        each(&chunk[..filled])?;
        if filled < chunk.len() {
            return Ok(());
        }
    }
}

/// A file whose blocks are checksummed while they are written.
pub(crate) struct ChecksummedFile {
    path: PathBuf,
    file: File,
    hash: Box<Xxh3>,
    hashed_bytes: usize,
    record: FileRecord,
}

impl ChecksummedFile {
    pub(crate) fn create(path: PathBuf) -> Result<Self, WriteError> {
        let file = File::create(&path).map_err(io_error(&path, "make the file"))?;
        let record = FileRecord { bytes: 0, block_bytes: CHECKSUM_BLOCK_BYTES as u64, xxh3_64: Vec::new() };
        Ok(Self { path, file, hash: Box::new(Xxh3::new()), hashed_bytes: 0, record })
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        self.file.write_all(bytes).map_err(io_error(&self.path, "write"))?;
        self.account(bytes);
        Ok(())
    }

    /// Appends `bytes`, which are those of `source` from `at` on, inside the kernel: file systems that can share blocks need
    /// not copy them. Returns false if it did nothing because the kernel or the file system cannot.
    pub(crate) fn write_from(&mut self, source: &File, at: u64, bytes: &[u8]) -> Result<bool, WriteError> {
        let copied = copy_inside_kernel(source, at, &self.file, bytes.len());
        let copied = copied.map_err(io_error(&self.path, "write"))?;
        if copied == 0 {
            return Ok(false);
        }
        self.file.write_all(&bytes[copied..]).map_err(io_error(&self.path, "write"))?;
        self.account(bytes);
        Ok(true)
    }

    /// Counts and hashes bytes that were written.
    fn account(&mut self, bytes: &[u8]) {
        self.record.bytes += bytes.len() as u64;
        let mut rest = bytes;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(CHECKSUM_BLOCK_BYTES - self.hashed_bytes));
            self.hash.update(now);
            self.hashed_bytes += now.len();
            if self.hashed_bytes == CHECKSUM_BLOCK_BYTES {
                self.end_block();
            }
            rest = later;
        }
    }

    fn end_block(&mut self) {
        self.record.xxh3_64.push(format!("{:016x}", self.hash.digest()));
        self.hash.reset();
        self.hashed_bytes = 0;
    }

    pub(crate) fn finish(mut self) -> Result<FileRecord, WriteError> {
        if self.hashed_bytes > 0 {
            self.end_block();
        }
        self.file.sync_all().map_err(io_error(&self.path, "make durable"))?;
        Ok(self.record)
    }
}

/// Bytes that the kernel appended to `target`, at most `bytes`; 0 if it cannot copy between these files.
#[cfg(target_os = "linux")]
fn copy_inside_kernel(source: &File, mut at: u64, target: &File, bytes: usize) -> io::Result<usize> {
    use rustix::io::Errno;
    let mut done = 0;
    while done < bytes {
        match rustix::fs::copy_file_range(source, Some(&mut at), target, None, bytes - done) {
            Ok(0) => break,
            Ok(now) => done += now,
            Err(Errno::INTR) => {}
            // Each of these says that another way of copying will do; what is wrong with the disk has other names.
            Err(Errno::XDEV | Errno::NOSYS | Errno::INVAL | Errno::OPNOTSUPP | Errno::PERM) => break,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(done)
}

#[cfg(not(target_os = "linux"))]
fn copy_inside_kernel(_: &File, _: u64, _: &File, _: usize) -> io::Result<usize> {
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::IndexedDataset;

    fn documents(lists: &[&[&[u32]]], dtype: TokenDtype) -> EncodedDocuments {
        let mut documents = EncodedDocuments::default();
        for sequences in lists {
            for ids in *sequences {
                documents.push_sequence(ids, dtype).unwrap();
            }
            documents.end_document(sequences.len() as u32);
        }
        documents
    }

    #[test]
    fn what_is_written_is_what_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = folder.path().join("set_text_document");
        let staging = StagingFolder::create(&folder.path().join("set")).unwrap();
        let mut writer = IndexedWriter::create(&staging, &prefix, TokenDtype::U16).unwrap();
        writer.append(&documents(&[&[&[1, 2, 3]], &[]], TokenDtype::U16)).unwrap();
        writer.append(&documents(&[&[&[65_535], &[4, 5]]], TokenDtype::U16)).unwrap();
        let pair = writer.finish().unwrap();
        assert_eq!(pair.counts, PairCounts { documents: 3, empty_documents: 1, sequences: 3, tokens: 6 });
        assert_eq!((pair.bin.bytes, pair.idx.bytes), (12, 34 + 12 * 3 + 8 * 4));
        assert!(!prefix.with_extension("idx").exists());
        pair.publish().unwrap();
        drop(staging);
        let names: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names.len(), 2, "{names:?}");
        let dataset = IndexedDataset::open(&prefix).unwrap();
        assert_eq!((dataset.num_sequences(), dataset.num_documents()), (3, 3));
        assert_eq!(fs::read(with_suffix(&prefix, ".bin")).unwrap(), [1, 0, 2, 0, 3, 0, 255, 255, 4, 0, 5, 0]);
    }

    #[test]
    fn an_empty_pair_has_the_42_bytes_of_megatrons() {
        let folder = tempfile::tempdir().unwrap();
        let staging = StagingFolder::create(&folder.path().join("set")).unwrap();
        let writer =
            IndexedWriter::create(&staging, &folder.path().join("set_text_document"), TokenDtype::I32).unwrap();
        let pair = writer.finish().unwrap();
        assert_eq!((pair.bin.bytes, pair.idx.bytes), (0, 42));
    }

    #[test]
    fn a_staging_folder_is_locked_cleaned_and_never_taken_from_others() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = folder.path().join("set");
        let staging = StagingFolder::create(&prefix).unwrap();
        assert!(matches!(StagingFolder::create(&prefix), Err(WriteError::Busy { .. })));
        fs::write(staging.path().join("left.bin"), b"x").unwrap();
        let path = staging.path().to_owned();
        std::mem::forget(staging); // as after a kill, but that this process still holds the lock
        assert!(matches!(StagingFolder::create(&prefix), Err(WriteError::Busy { .. })));
        fs::remove_file(path.join("lock")).unwrap();
        assert!(matches!(StagingFolder::create(&prefix), Err(WriteError::NotOurs { .. })));
        fs::write(path.join("lock"), b"").unwrap();
        let staging = StagingFolder::create(&prefix).unwrap();
        assert_eq!(fs::read_dir(staging.path()).unwrap().count(), 1);
        drop(staging);
        assert!(!path.exists());
    }

    #[test]
    fn an_id_above_the_type_is_refused() {
        let mut documents = EncodedDocuments::default();
        let error = documents.push_sequence(&[65_536], TokenDtype::U16).unwrap_err();
        assert!(error.to_string().contains("token id 65536 does not fit uint16"));
        assert!(documents.tokens.is_empty());
    }
}
