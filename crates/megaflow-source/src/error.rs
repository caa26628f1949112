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
    /// A folder or pattern matches nothing.
    #[error("{what}: no input files; {detail}")]
    NothingFound {
        /// Folder, pattern or list.
        what: String,
        /// What was looked for.
        detail: String,
    },
    /// The compressed stream is damaged or cut short.
    #[error("{}: damaged compressed data after {offset} bytes of text: {detail}; get the file again", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Unpacked bytes read before.
        offset: u64,
        /// What the decoder said.
        detail: String,
    },
    /// The system refused to read on.
    #[error("{}: reading failed after {offset} bytes: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Bytes of text or of file read before.
        offset: u64,
        /// What the system or the decoder said.
        source: std::io::Error,
    },
    /// A Parquet or Arrow file is damaged.
    #[error("{}: damaged {format} data after {rows} rows: {detail}", .path.display())]
    Columnar {
        /// The file.
        path: PathBuf,
        /// Parquet, Arrow file, Arrow stream.
        format: &'static str,
        /// Rows read before.
        rows: u64,
        /// What the reader said.
        detail: String,
    },
    /// A column is missing.
    #[error("{}: no column {key:?}; the columns are {columns}; name the column of the text with --json-keys", .path.display())]
    MissingColumn {
        /// The file.
        path: PathBuf,
        /// What was asked for.
        key: String,
        /// What there is.
        columns: String,
    },
    /// A column does not hold text.
    #[error("{}: column {key:?} is {found}; expected strings or lists of strings", .path.display())]
    ColumnKind {
        /// The file.
        path: PathBuf,
        /// The column.
        key: String,
        /// Its type.
        found: String,
    },
    /// The input must be read out of order, and cannot be.
    #[error("{}: {format} data cannot be read from a pipe or a compressed file; give the plain file", .path.display())]
    NotSeekable {
        /// The input.
        path: PathBuf,
        /// Format.
        format: &'static str,
    },
    /// A line is longer than the limit.
    #[error(
        "{}: line {line} (byte {offset}) is longer than the limit of {limit} bytes; split the document",
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
    /// The input is not what it was when the job began.
    #[error("{}: the input changed while the job was interrupted ({detail}); start again without the journal", .path.display())]
    Changed {
        /// The input.
        path: PathBuf,
        /// What differs.
        detail: String,
    },
}

impl SourceError {
    /// For an error that came through a decoder: the system's, or the data's.
    pub(crate) fn of_read(path: &std::path::Path, offset: u64, error: std::io::Error) -> Self {
        match crate::access::system_error(error) {
            Ok(source) => Self::Io { path: path.to_owned(), offset, source },
            Err(error) => Self::Damaged { path: path.to_owned(), offset, detail: error.to_string() },
        }
    }
}
