//! One preprocessing job: inputs of any kind in, `.bin/.idx` pairs with their sidecars out.
//!
//! One thread reads blocks of whole records, some parse and tokenize them, and the calling thread writes them in input order.
//! A text of more than a megabyte is cut where that changes no id, and free threads help with it. The number of blocks in
//! flight is bounded, so memory does not grow with the input, and the result does not depend on the number of threads. A
//! journal says what is durable; a job that was killed goes on from there and ends with the same bytes.
#![forbid(unsafe_code)]

mod encode;
mod error;
mod job;
mod journal;
mod long_text;
mod options;
mod output;
mod rejects;
mod report;
mod shards;

pub use error::BuildError;
pub use job::preprocess;
pub use options::{EmptyDocuments, JobInput, JobOptions, MAX_THREADS, OnBadRecord, Provenance, SplitSentences};
pub use report::{Progress, Report};
pub use shards::plan_shards;
