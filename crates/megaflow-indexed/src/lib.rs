//! Megatron's `.bin/.idx` pairs.
//!
//! [`IndexedDataset`] opens a pair with checks that take the same time at any size, maps both files, and reads tokens
//! without copying them. Sizes and positions found in a file are compared with the length of that file before they are
//! used.
#![deny(unsafe_code)]

mod checksummed;
mod dataset;
mod error;
mod guard;
mod layout;
mod merge;
mod mmap;
mod prefix;
mod section;
mod sidecar;
mod staging;
mod verify;
mod widen;
mod writer;

pub use dataset::{IndexedDataset, OpenOptions};
pub use error::IndexError;
pub use merge::{MergeError, MergeOptions, MergeProgress, MergeReport, merge};
pub use mmap::FileMap;
pub use prefix::resolve_prefix;
pub use sidecar::{
    FileRecord, HASHED_ALL, SIDECAR_FORMAT_VERSION, Sidecar, SourceRecord, TokenizerFile, TokenizerRecord,
};
pub use staging::{JOURNAL, StagingFolder, WriteError, publish_file};
pub use verify::{Fault, VerifyError, VerifyOptions, VerifyProgress, VerifyReport, checksum_file, verify};
pub use widen::{copy_tokens, widen_tokens};
pub use writer::{
    EncodedDocuments, IndexedWriter, PairCounts, PairState, StagedPair, publish_pairs, resume_publication,
};
