use std::path::PathBuf;

use megaflow_indexed::WriteError;
use megaflow_source::{Place, RejectReason, SourceError};
use megaflow_tokenize::TokenizeError;

/// Why a job stopped. Nothing is then left under a final name.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// An input could not be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The output could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The tokenizer cannot do what the job asks.
    #[error(transparent)]
    Tokenize(#[from] TokenizeError),
    /// A record is not a document, and the policy is to stop.
    #[error("{}: {place}: {reason}. Mend the record, or skip and count such records with --on-bad-record skip", .path.display())]
    BadRecord {
        /// The input.
        path: PathBuf,
        /// Its line or row.
        place: Place,
        /// What is wrong.
        reason: RejectReason,
    },
    /// More bad records than allowed.
    #[error("{}: {place}: {limit} bad records were allowed by --max-bad-records, and this is one more: {reason}",
            .path.display())]
    TooManyBadRecords {
        /// The input of the last one.
        path: PathBuf,
        /// Its line or row.
        place: Place,
        /// How many were allowed.
        limit: u64,
        /// What is wrong with the last one.
        reason: RejectReason,
    },
    /// A journal of another job lies where this one wants to write.
    #[error("{}: holds what an interrupted job has done, but that job differs from this one: {difference}. \
             Repeat that job's command to go on, or give --restart to start again", .path.display())]
    OtherJob {
        /// The staging folder.
        path: PathBuf,
        /// What differs.
        difference: String,
    },
    /// The inputs hold no document.
    #[error("no documents: the input has {records} records, {rejected} of them bad{by_reason}; nothing was written")]
    NoDocuments {
        /// Lines that are not blank.
        records: u64,
        /// Records that are not documents.
        rejected: u64,
        /// Counts by reason, in words.
        by_reason: String,
    },
    /// A setting makes no sense.
    #[error("{0}")]
    Options(String),
    /// What splits texts into sentences failed.
    #[error("texts cannot be split into sentences: {detail}")]
    Sentences {
        /// What it said.
        detail: String,
    },
    /// A thread of the job panicked: a fault of megaflow.
    #[error("{}: block at record {record}: the tokenizer thread failed: {detail}; this is a fault of megaflow, please report it",
            .path.display())]
    Panicked {
        /// The input.
        path: PathBuf,
        /// First record of the block.
        record: u64,
        /// The panic's message.
        detail: String,
    },
    /// The caller asked to stop.
    #[error("stopped on request")]
    Interrupted,
}

impl BuildError {
    /// Whether a command can go on where the job stopped: the cause lay outside of data and settings, or is a bad record, which
    /// the policy `Skip` passes over.
    pub(crate) fn is_resumable(&self) -> bool {
        matches!(
            self,
            Self::Interrupted
                | Self::Source(SourceError::Io { .. } | SourceError::Missing { .. })
                | Self::Write(WriteError::Io { .. } | WriteError::Busy { .. } | WriteError::NotOurs { .. })
                | Self::BadRecord { .. }
                | Self::OtherJob { .. }
                | Self::Sentences { .. }
        )
    }

    /// Whether it came between two blocks, so that what is written is what was counted.
    pub(crate) fn is_between_blocks(&self) -> bool {
        matches!(self, Self::Interrupted | Self::Source(_) | Self::Sentences { .. })
    }
}
