//! Input files to records, each with its origin.
//!
//! A [`BlockReader`] cuts a file into blocks that end at a line end; [`parse_block`] turns a block into records. The
//! two steps are apart so that one thread reads while many parse.
#![forbid(unsafe_code)]

mod block;
mod error;
mod record;

pub use block::{Block, BlockReader, ContentHash};
pub use error::SourceError;
pub use record::{Field, LineOutcome, Reject, RejectReason, parse_block};
