//! Writing a `.bin/.idx` pair: everything into a staging folder, final names only for what is complete.
//!
//! Lengths and boundaries go to files of their own while the job runs and are joined into the `.idx` at the end, so memory
//! does not depend on the number of documents. Publishing removes an old `.idx` first and renames the new one last: whatever
//! moment a job is killed at, an `.idx` under its final name belongs to the `.bin` beside it.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};
use std::path::{Path, PathBuf};

use megaflow_core::TokenDtype;
use serde::{Deserialize, Serialize};

use crate::checksummed::{ChecksummedFile, cut_to};
use crate::layout::{HEADER_BYTES, MAGIC, VERSION};
use crate::sidecar::{FileRecord, Sidecar};
use crate::staging::{StagingFolder, WriteError, io_error, publish_file, with_suffix};

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
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
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

/// How much of a pair is durable: enough to go on after the job that wrote it was killed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairState {
    /// What it holds.
    pub counts: PairCounts,
    /// Checksums of the whole blocks of the `.bin`.
    pub bin_xxh3_64: Vec<String>,
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
        let staged = staged_path(staging, prefix);
        let bin = ChecksummedFile::create(with_suffix(&staged, ".bin"))?;
        let mut writer = Self::with_files(&staged, prefix, dtype, bin, &PairState::default())?;
        writer.boundaries.write_all(&0_i64.to_le_bytes()).map_err(io_error(&staged, "write"))?;
        Ok(writer)
    }

    /// Goes on with a pair from its last durable state; what was written behind it is cut off.
    ///
    /// # Errors
    /// [`WriteError::Io`], also if a file is shorter than the state says.
    pub fn resume(
        staging: &StagingFolder,
        prefix: &Path,
        dtype: TokenDtype,
        state: &PairState,
    ) -> Result<Self, WriteError> {
        if *state == PairState::default() {
            return Self::create(staging, prefix, dtype);
        }
        let staged = staged_path(staging, prefix);
        let bytes = state.counts.tokens * dtype.size_bytes() as u64;
        let bin = ChecksummedFile::resume(with_suffix(&staged, ".bin"), bytes, &state.bin_xxh3_64)?;
        let mut writer = Self::with_files(&staged, prefix, dtype, bin, state)?;
        let sizes = [4 * state.counts.sequences, 8 * (state.counts.documents + 1)];
        for (file, size) in [&mut writer.lengths, &mut writer.boundaries].into_iter().zip(sizes) {
            cut_to(file.get_mut(), size).map_err(io_error(&staged, "go on with the index"))?;
        }
        Ok(writer)
    }

    fn with_files(
        staged: &Path,
        prefix: &Path,
        dtype: TokenDtype,
        bin: ChecksummedFile,
        state: &PairState,
    ) -> Result<Self, WriteError> {
        let is_new = *state == PairState::default();
        let scratch = |suffix: &str| {
            let path = with_suffix(staged, suffix);
            let file = File::options().read(true).write(true).create(true).truncate(is_new).open(&path);
            file.map(BufWriter::new).map_err(io_error(&path, "make the file"))
        };
        Ok(Self {
            dtype,
            prefix: prefix.to_owned(),
            bin,
            lengths: scratch(".lengths")?,
            boundaries: scratch(".boundaries")?,
            staged: staged.to_owned(),
            counts: state.counts,
        })
    }

    /// Makes everything appended so far durable.
    ///
    /// # Errors
    /// [`WriteError::Io`].
    pub fn checkpoint(&mut self) -> Result<PairState, WriteError> {
        let synced = [&mut self.lengths, &mut self.boundaries].into_iter().try_for_each(|file| {
            file.flush()?;
            file.get_ref().sync_data()
        });
        synced.map_err(io_error(&self.staged, "make the index durable"))?;
        self.bin.sync()?;
        Ok(PairState { counts: self.counts, bin_xxh3_64: self.bin.whole_blocks().to_vec() })
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
        Ok(StagedPair {
            bin: self.bin.finish()?,
            idx: index.finish()?,
            staged: self.staged,
            prefix: self.prefix,
            dtype: self.dtype,
            counts: self.counts,
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
}

impl StagedPair {
    /// Prefix of the final names.
    pub fn prefix(&self) -> &Path {
        &self.prefix
    }

    /// A pair whose files were written and made durable as `staged.bin` and `staged.idx`.
    pub(crate) fn new(
        files: (FileRecord, FileRecord),
        dtype: TokenDtype,
        counts: PairCounts,
        staged: PathBuf,
        prefix: PathBuf,
    ) -> Self {
        let (bin, idx) = files;
        Self { bin, idx, dtype, counts, staged, prefix }
    }

    /// Adds the sidecar.
    ///
    /// # Errors
    /// [`WriteError::Io`].
    pub fn write_sidecar(&self, sidecar: &Sidecar) -> Result<(), WriteError> {
        self.write_sidecar_text(&sidecar.to_json())
    }

    /// Adds the sidecar that `text` is.
    ///
    /// # Errors
    /// [`WriteError::Io`].
    pub fn write_sidecar_text(&self, text: &str) -> Result<(), WriteError> {
        let mut file = ChecksummedFile::create(with_suffix(&self.staged, ".json"))?;
        file.write(text.as_bytes())?;
        file.finish()?;
        Ok(())
    }

    /// Gives the files their final names; see [`publish_pairs`].
    ///
    /// # Errors
    /// [`WriteError::Io`].
    pub fn publish(self) -> Result<PathBuf, WriteError> {
        let prefix = self.prefix.clone();
        publish_pairs(vec![self])?;
        Ok(prefix)
    }
}

/// Gives the files of several pairs their final names together: old `.idx` files go first, new ones come last, when everything
/// that they describe is in place.
///
/// # Errors
/// [`WriteError::Io`].
pub fn publish_pairs(pairs: Vec<StagedPair>) -> Result<(), WriteError> {
    let places: Vec<(PathBuf, PathBuf)> = pairs.into_iter().map(|pair| (pair.staged, pair.prefix)).collect();
    for (_, prefix) in &places {
        for suffix in [".idx", ".json"] {
            remove_old(&with_suffix(prefix, suffix))?;
        }
    }
    publish_places(&places)
}

/// Goes on with a publication that was interrupted: files that have their final names already are left alone.
///
/// # Errors
/// [`WriteError::Io`].
pub fn resume_publication(staging: &StagingFolder, prefixes: &[PathBuf]) -> Result<(), WriteError> {
    let places: Vec<_> = prefixes.iter().map(|prefix| (staged_path(staging, prefix), prefix.clone())).collect();
    for (staged, prefix) in &places {
        if with_suffix(staged, ".idx").exists() {
            remove_old(&with_suffix(prefix, ".idx"))?; // an older job's: ours is not published yet
        }
    }
    publish_places(&places)
}

fn remove_old(path: &Path) -> Result<(), WriteError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io_error(path, "replace the old file")(error)),
        _ => Ok(()),
    }
}

/// All `.bin` and `.json` first, all `.idx` last; a staged file that is not there has its final name already, or never was.
fn publish_places(places: &[(PathBuf, PathBuf)]) -> Result<(), WriteError> {
    for suffixes in [&[".bin", ".json"][..], &[".idx"]] {
        for (staged, prefix) in places {
            for suffix in suffixes {
                let from = with_suffix(staged, suffix);
                if from.exists() {
                    publish_file(&from, &with_suffix(prefix, suffix))?;
                }
            }
        }
    }
    Ok(())
}

fn staged_path(staging: &StagingFolder, prefix: &Path) -> PathBuf {
    staging.path().join(prefix.file_name().unwrap_or_default())
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
    fn a_publication_stopped_anywhere_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let prefixes = ["a_text_document", "b_text_document"].map(|name| folder.path().join(name));
        for renamed in 0..=4 {
            let staging = StagingFolder::create(&folder.path().join("set")).unwrap();
            for prefix in &prefixes {
                fs::write(with_suffix(prefix, ".idx"), "old").unwrap();
                let mut writer = IndexedWriter::create(&staging, prefix, TokenDtype::U16).unwrap();
                writer.append(&documents(&[&[&[1, 2]]], TokenDtype::U16)).unwrap();
                writer.finish().unwrap();
            }
            if renamed > 0 {
                prefixes.iter().for_each(|prefix| fs::remove_file(with_suffix(prefix, ".idx")).unwrap());
            }
            let order = [(".bin", 0), (".bin", 1), (".idx", 0), (".idx", 1)];
            for (suffix, pair) in &order[..renamed] {
                let from = with_suffix(&staged_path(&staging, &prefixes[*pair]), suffix);
                fs::rename(from, with_suffix(&prefixes[*pair], suffix)).unwrap();
            }
            resume_publication(&staging, &prefixes).unwrap();
            for prefix in &prefixes {
                assert_eq!(IndexedDataset::open(prefix).unwrap().num_tokens(), 2, "stopped after {renamed}");
            }
        }
    }

    #[test]
    fn an_id_above_the_type_is_refused() {
        let mut documents = EncodedDocuments::default();
        let error = documents.push_sequence(&[65_536], TokenDtype::U16).unwrap_err();
        assert!(error.to_string().contains("token id 65536 does not fit uint16"));
        assert!(documents.tokens.is_empty());
    }
}
