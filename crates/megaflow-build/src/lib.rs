//! One preprocessing job: files of records in, `.bin/.idx` pairs with their sidecars out.
//!
//! One thread reads blocks of whole lines, some parse and tokenize them, and the calling thread writes them in input order.
//! The number of blocks in flight is bounded, so memory does not grow with the input, and the result does not depend on the
//! number of threads.
#![forbid(unsafe_code)]

mod encode;
mod error;
mod job;
mod options;
mod rejects;
mod report;

pub use error::BuildError;
pub use job::preprocess;
pub use options::{EmptyDocuments, JobOptions, OnBadRecord, Provenance};
pub use report::{Progress, Report};
