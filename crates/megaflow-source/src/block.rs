//! Records of one input, a block at a time: what one thread reads so that many can parse.

use std::sync::Arc;

use crate::columns::TextColumn;

/// Records that follow one another in one input.
pub struct Block {
    /// Where the block begins.
    pub position: Position,
    /// The records.
    pub body: BlockBody,
    /// Bytes of the file that were read for it.
    pub input_bytes: u64,
}

/// The records of a block, in the form of their format.
pub enum BlockBody {
    /// Whole lines of JSON, with their ends; the last line of a file may have none.
    JsonLines(Vec<u8>),
    /// Whole lines of text, a document each.
    TextLines(Vec<u8>),
    /// One document.
    Text(Vec<u8>),
    /// Rows, one column for each key.
    Rows {
        /// The columns, in the order of the keys.
        columns: Vec<TextColumn>,
        /// Number of rows.
        num_rows: usize,
    },
}

/// A place between two records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// Byte offset in the unpacked input; 0 for rows, which have none.
    pub offset: u64,
    /// Number of the next line or row, from 1.
    pub record: u64,
    /// Byte offset at which counting began: 0 but for a range of a file.
    pub counted_from: u64,
}

impl Position {
    /// The start of an input.
    pub const START: Self = Self { offset: 0, record: 1, counted_from: 0 };
}

/// Where a record is, in words that lead a person to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A line of text.
    Line {
        /// Its number, from 1.
        number: u64,
        /// Byte offset of its start in the unpacked input.
        offset: u64,
        /// Byte offset at which counting began.
        counted_from: u64,
    },
    /// A row of a table.
    Row {
        /// Its number, from 1.
        number: u64,
    },
}

impl Place {
    /// Number of the line or row, from 1.
    pub fn number(&self) -> u64 {
        match *self {
            Self::Line { number, .. } | Self::Row { number } => number,
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Line { number, offset, counted_from: 0 } => write!(formatter, "line {number} (byte {offset})"),
            Self::Line { number, offset, counted_from } => {
                write!(formatter, "byte {offset} (line {number} counted from byte {counted_from})")
            }
            Self::Row { number } => write!(formatter, "row {number}"),
        }
    }
}

/// The keys of the records that hold text, shared by all blocks of a job.
pub type Keys = Arc<[String]>;
