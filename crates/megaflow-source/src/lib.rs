//! Input files to records, each with its origin.
//!
//! A [`SourceReader`] turns an input of any kind into blocks of whole records; [`parse_block`] turns a block into records.
//! The two steps are apart so that one thread reads while many parse.
#![forbid(unsafe_code)]

mod access;
mod arrow_batches;
mod arrow_messages;
mod block;
mod columns;
mod content;
mod decode;
mod discover;
mod error;
mod json;
mod lines;
mod record;
mod rows;
mod source;
mod strings_as_bytes;

pub use access::{ContentHash, HASH_BLOCK_BYTES, RandomAccess};
pub use block::{Block, BlockBody, Keys, Place, Position};
pub use columns::TextColumn;
pub use content::{Compression, Format};
pub use discover::discover;
pub use error::SourceError;
pub use record::{Field, Outcome, ParseOptions, Reject, RejectReason, parse_block};
pub use source::{Cut, OpenTable, ReadOptions, Resume, Source, SourceReader};
