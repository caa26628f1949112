//! What a loader waited and what it made.

use std::time::Duration;

/// Sums over all batches handed out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Batches handed out.
    pub batches: u64,
    /// Samples handed out.
    pub samples: u64,
    /// Batches that lay ready when they were asked for.
    pub ready_when_asked: u64,
    /// Sum over the batches of the ready batches found when one was asked for.
    pub queue_depth: u64,
    /// Time that the consumer was blocked.
    pub wait: Duration,
    /// Time that threads spent gathering, added over the threads.
    pub gather: Duration,
    /// Time from the moment a batch could be gathered (a place in the queue was free) until it was ready.
    pub request_to_ready: Duration,
    /// The longest time for which the consumer was blocked for one batch.
    pub max_wait: Duration,
    /// Bytes of tokens handed out.
    pub token_bytes: u64,
    /// Page faults for which a gathering thread had to wait for the disk; 0 where the system does not tell.
    pub cache_misses: u64,
    /// Bytes read from the disk for gathering threads; 0 where the system does not tell.
    pub disk_bytes: u64,
}
