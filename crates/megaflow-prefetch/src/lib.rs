//! Batches of one data-parallel rank, gathered ahead of need.
//!
//! [`Prefetcher`] reads any [`SampleSource`](megaflow_core::SampleSource) with threads that each gather whole
//! micro-batches, and hands the batches out in order. Which samples a batch holds depends on the plan alone, never on
//! the number of threads.
#![deny(unsafe_code)] // `usage` alone has any: a call of C

mod error;
mod gather;
mod plan;
mod pool;
mod prefetcher;
mod queue;
mod stats;
mod usage;

pub use error::PrefetchError;
pub use plan::{BatchPlan, PlanConfig};
pub use pool::{BatchTokens, BufferPool, Tokens};
pub use prefetcher::{Batch, Next, PrefetchOptions, Prefetcher};
pub use stats::Totals;
