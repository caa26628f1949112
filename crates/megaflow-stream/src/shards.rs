//! Inputs cut into shards, and the order of the shards in an epoch.

use std::ops::Range;

use megaflow_source::Source;

use crate::shuffle::{SHARDS, shuffle};
use crate::{StreamError, StreamOptions};

/// A part of one input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shard {
    /// Which input.
    pub(crate) source: usize,
    /// Bytes of text, or rows of a table.
    pub(crate) range: Range<u64>,
}

/// Cuts every input at its natural places into shards of at least `shard_bytes`.
pub(crate) fn plan(sources: &[Source], options: &StreamOptions) -> Result<Vec<Shard>, StreamError> {
    if sources.is_empty() {
        return Err(StreamError::NoSources);
    }
    let mut shards = Vec::with_capacity(sources.len());
    for (source, input) in sources.iter().enumerate() {
        let (mut start, mut bytes_at_start) = (0, 0);
        for cut in input.cuts(options.format, options.shard_bytes)? {
            if cut.bytes_before - bytes_at_start >= options.shard_bytes {
                shards.push(Shard { source, range: start..cut.at });
                (start, bytes_at_start) = (cut.at, cut.bytes_before);
            }
        }
        shards.push(Shard { source, range: start..u64::MAX });
    }
    Ok(shards)
}

/// Number of shards that are read side by side.
pub(crate) fn num_lanes(num_shards: usize, options: &StreamOptions) -> usize {
    if options.shuffle { options.interleave.min(num_shards) } else { 1 }
}

/// The shards of one lane in an epoch, in the order of reading.
pub(crate) fn lane_shards(num_shards: usize, options: &StreamOptions, epoch: u64, lane: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..num_shards).collect();
    if options.shuffle {
        shuffle(&mut order, &[SHARDS, options.seed, epoch]);
    }
    order.into_iter().skip(lane).step_by(num_lanes(num_shards, options)).collect()
}
