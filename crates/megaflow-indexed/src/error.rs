//! Why a pair could not be opened or read.

use std::io;
use std::path::PathBuf;

use megaflow_core::TokenDtype;

/// Why a `.bin/.idx` pair could not be opened or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IndexError {
    /// Neither the prefix nor the prefix with `_text_document` names a pair.
    #[error("{}: no dataset under this prefix: {missing} {found}", .prefix.display())]
    Missing {
        /// Prefix that was asked for.
        prefix: PathBuf,
        /// The files that were looked for.
        missing: String,
        /// What lies beside them, and the remedy.
        found: String,
    },
    /// The operating system refused.
    #[error("{}: cannot {action}: {source}", .path.display())]
    Io {
        /// File.
        path: PathBuf,
        /// What was tried: `open`, `map`, `read the size`.
        action: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// The file became shorter, or unreadable, while it was open.
    #[error(
        "{}: was cut short or cannot be read any more: expected {expected} bytes as when it was opened, found {found}; \
         put the file back and start again",
        .path.display()
    )]
    Shrunk {
        /// File.
        path: PathBuf,
        /// Bytes when it was opened.
        expected: u64,
        /// Bytes now.
        found: String,
    },
    /// The file is shorter than a header.
    #[error(
        "{}: truncated at byte {found}: the header of an index takes {needed} bytes; write the pair anew, or copy it \
         again",
        .path.display()
    )]
    Truncated {
        /// The `.idx`.
        path: PathBuf,
        /// Bytes that are needed.
        needed: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// The file does not begin with the index magic.
    #[error(
        "{}: not an index: expected {:?} at byte 0, found {found:?}; is this the `.idx` of a Megatron mmap dataset?",
        .path.display(),
        crate::layout::MAGIC.escape_ascii().to_string()
    )]
    BadMagic {
        /// The `.idx`.
        path: PathBuf,
        /// The first bytes, escaped.
        found: String,
    },
    /// The version is not 1.
    #[error(
        "{}: expected version 1 at byte 9, found {found}; the file is damaged, or newer than this program",
        .path.display()
    )]
    BadVersion {
        /// The `.idx`.
        path: PathBuf,
        /// Version in the header.
        found: u64,
    },
    /// The dtype code names no integer type.
    #[error(
        "{}: expected a token dtype code at byte 17 (1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16), found \
         {found}{}; the file is damaged or holds no tokens",
        .path.display(),
        match .found { 6 => " (float64)", 7 => " (float32)", _ => "" }
    )]
    BadDtype {
        /// The `.idx`.
        path: PathBuf,
        /// Code in the header.
        found: u8,
    },
    /// The size of the `.idx` contradicts the counts in its header.
    #[error(
        "{}: the header counts {num_sequences} sequences and {num_boundaries} document boundaries (bytes 18 and 26), \
         which take {expected} bytes, but the file has {found}; it is truncated, or carries bytes that do not belong \
         to it: write or copy it again",
        .path.display()
    )]
    IndexSize {
        /// The `.idx`.
        path: PathBuf,
        /// Sequences that the header counts.
        num_sequences: u64,
        /// Document boundaries that the header counts.
        num_boundaries: u64,
        /// Bytes these take; saturated if no file can be so large.
        expected: u64,
        /// Bytes of the file.
        found: u64,
    },
    /// The `.idx` has room for one mode a sequence, as multimodal files do.
    #[error(
        "{}: the file has {num_sequences} bytes more than its header counts, one for each sequence, as the modes of \
         a multimodal dataset take; open it with modes if that is what it is, else write or copy it again",
        .path.display()
    )]
    UnexpectedModes {
        /// The `.idx`.
        path: PathBuf,
        /// Sequences that the header counts.
        num_sequences: u64,
    },
    /// The size of the `.bin` contradicts the `.idx`.
    #[error(
        "{}: expected {expected} bytes (end of the last sequence in the index, dtype {dtype}), found {found}; the \
         file is truncated or belongs to another `.idx`: write or copy both again",
        .path.display()
    )]
    DataSize {
        /// The `.bin`.
        path: PathBuf,
        /// Type of a token.
        dtype: TokenDtype,
        /// Bytes that the index needs.
        expected: u64,
        /// Bytes of the file.
        found: u64,
    },
    /// An entry of the index contradicts the rest.
    #[error(
        "{}: {entry} (byte {place}): expected {expected}, found {found}; the file is damaged: write or copy it again",
        .path.display()
    )]
    BadEntry {
        /// The `.idx`.
        path: PathBuf,
        /// Which entry, in words.
        entry: String,
        /// Its byte offset.
        place: u64,
        /// What it should be.
        expected: String,
        /// What it is.
        found: i64,
    },
    /// The sidecar cannot be read, or contradicts its pair.
    #[error("{}: {problem}", .path.display())]
    BadSidecar {
        /// The `.json`.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The sequence does not exist.
    #[error(
        "{}: sequence {index} does not exist: the dataset has {num_sequences} sequences, counted from 0",
        .prefix.display()
    )]
    NoSuchSequence {
        /// Prefix of the pair.
        prefix: PathBuf,
        /// Sequence asked for.
        index: u64,
        /// Sequences of the pair.
        num_sequences: u64,
    },
    /// The document does not exist.
    #[error(
        "{}: document {index} does not exist: the dataset has {num_documents} documents, counted from 0",
        .prefix.display()
    )]
    NoSuchDocument {
        /// Prefix of the pair.
        prefix: PathBuf,
        /// Document asked for.
        index: u64,
        /// Documents of the pair.
        num_documents: u64,
    },
    /// The tokens lie outside their sequence.
    #[error(
        "{}: tokens {begin}..{end} of sequence {index} do not exist: the sequence has {length} tokens",
        .prefix.display()
    )]
    NoSuchTokens {
        /// Prefix of the pair.
        prefix: PathBuf,
        /// Sequence asked for.
        index: u64,
        /// First token asked for.
        begin: u64,
        /// Behind the last token asked for.
        end: u64,
        /// Tokens of the sequence.
        length: u64,
    },
}

impl IndexError {
    pub(crate) fn io(path: &std::path::Path, action: &'static str, source: io::Error) -> Self {
        Self::Io { path: path.to_path_buf(), action, source }
    }
}
