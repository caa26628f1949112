use std::path::PathBuf;

/// Why an input could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// The input does not exist.
    #[error("{}: no such input file", .path.display())]
    Missing {
        /// What was asked for.
        path: PathBuf,
    },
    /// The input is a folder or another thing that is not a file.
    #[error("{}: expected a file of JSON lines, found a folder; name its files", .path.display())]
    Folder {
        /// What was asked for.
        path: PathBuf,
    },
    /// The system refused to read on.
    #[error("{}: reading failed at byte {offset}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Bytes read before.
        offset: u64,
        /// What the system said.
        source: std::io::Error,
    },
    /// The content is of a kind that is not read.
    #[error("{}: expected JSON lines, found {kind}; convert it to JSON lines first", .path.display())]
    UnsupportedContent {
        /// The file.
        path: PathBuf,
        /// What its first bytes say.
        kind: &'static str,
    },
    /// A line is longer than the limit.
    #[error(
        "{}: line {line} (byte {offset}) is longer than the limit of {limit} bytes; raise the limit or split the document",
        .path.display()
    )]
    LineTooLong {
        /// The file.
        path: PathBuf,
        /// Its number, from 1.
        line: u64,
        /// Byte offset of its start.
        offset: u64,
        /// Bytes that a line may have.
        limit: usize,
    },
}
