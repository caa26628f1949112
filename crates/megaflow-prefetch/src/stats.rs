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
}
