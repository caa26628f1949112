//! Why a stream ends before its data do.

use std::path::PathBuf;
use std::sync::Arc;

use megaflow_source::{RejectReason, SourceError};
use megaflow_tokenize::TokenizeError;

/// Why a stream cannot be opened, or ends before its data do.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// A setting has no meaning.
    #[error("{setting} = {found}: expected {expected}")]
    BadSetting {
        /// Name of the setting.
        setting: &'static str,
        /// What would be right.
        expected: &'static str,
        /// What was given.
        found: u64,
    },
    /// No input was named.
    #[error("no input: name at least one file, URL or table")]
    NoSources,
    /// The inputs hold no document.
    #[error(
        "the {num_sources} inputs hold no document{} ({bad_records} bad records were skipped); is the key of the text right?",
        if *.is_part { " of the part that was asked for" } else { "" }
    )]
    NoDocuments {
        /// Inputs of the stream.
        num_sources: usize,
        /// Whether a part of the documents was asked for.
        is_part: bool,
        /// Records that were skipped.
        bad_records: u64,
    },
    /// A record is no document.
    #[error("{}, {place}: {reason}", .path.display())]
    BadRecord {
        /// The input.
        path: PathBuf,
        /// Line or row.
        place: String,
        /// What is wrong.
        reason: RejectReason,
    },
    /// Too many records are no documents.
    #[error("{bad_records} bad records, and {limit} are allowed; the last: {}, {place}: {reason}", .path.display())]
    TooManyBadRecords {
        /// Bad records so far.
        bad_records: u64,
        /// How many are allowed.
        limit: u64,
        /// The input of the last one.
        path: PathBuf,
        /// Its line or row.
        place: String,
        /// What is wrong with it.
        reason: RejectReason,
    },
    /// The position does not fit the inputs.
    #[error("the saved position does not fit these inputs: {detail}; they were changed, or are others")]
    StateMismatch {
        /// What does not fit.
        detail: String,
    },
    /// A position was asked for that the stream has left behind, or not reached.
    #[error("the position behind {count} samples is not known: the stream stands between {first} and {last}")]
    NoSuchPosition {
        /// Samples asked for.
        count: u64,
        /// First position that is known.
        first: u64,
        /// Last position that is known.
        last: u64,
    },
    /// The system gave no thread.
    #[error("cannot start a thread of the stream: {reason}; ask for fewer threads")]
    NoThread {
        /// The system's reason.
        reason: String,
    },
    /// A thread panicked.
    #[error("the stream panicked in {}: {detail}; this is a bug, please report it", .path.display())]
    Panicked {
        /// The input.
        path: PathBuf,
        /// What the panic said.
        detail: String,
    },
    /// An input cannot be read.
    #[error(transparent)]
    Source(Arc<SourceError>),
    /// The tokenizer cannot be used.
    #[error("{0}")]
    Tokenize(Arc<TokenizeError>),
}

impl From<SourceError> for StreamError {
    fn from(error: SourceError) -> Self {
        Self::Source(Arc::new(error))
    }
}

impl From<TokenizeError> for StreamError {
    fn from(error: TokenizeError) -> Self {
        Self::Tokenize(Arc::new(error))
    }
}
