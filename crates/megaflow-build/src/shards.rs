//! Cutting the inputs of a job into shards that can run anywhere, each with a result of its own.
//!
//! Shards are runs of the inputs in reading order, so their results, merged in order, are the result of one job.

use std::ops::Range;

use megaflow_source::{Format, HASH_BLOCK_BYTES, Source};

use crate::{BuildError, JobInput};

/// Pieces that a shard is made of at least, so that shards are about equal.
const PIECES_PER_SHARD: u64 = 16;

/// A part of one input.
struct Piece {
    source: usize,
    range: Option<Range<u64>>,
    bytes: u64,
}

/// The inputs of each of `num_shards` shards: about equal in bytes; some are empty if there is little to share.
///
/// # Errors
/// [`BuildError::Source`] if an input cannot be opened.
pub fn plan_shards(
    sources: &[Source],
    format: Option<Format>,
    num_shards: usize,
) -> Result<Vec<Vec<JobInput>>, BuildError> {
    let mut total = 0;
    for source in sources {
        total += source.size_bytes()?.unwrap_or(0);
    }
    let pieces = pieces(sources, format, step(total, num_shards as u64))?;
    let total: u64 = pieces.iter().map(|piece| piece.bytes).sum();
    let mut shards: Vec<Vec<JobInput>> = (0..num_shards).map(|_| Vec::new()).collect();
    let mut before = 0_u64;
    for piece in pieces {
        // The shard in which the middle of the piece lies.
        let middle = u128::from(before) + u128::from(piece.bytes / 2);
        let shard = (middle * num_shards as u128 / u128::from(total.max(1))).min(num_shards as u128 - 1) as usize;
        before += piece.bytes;
        add(&mut shards[shard], &sources[piece.source], piece.range);
    }
    for input in shards.iter_mut().flatten() {
        input.range = input.range.take().filter(|range| *range != (0..u64::MAX)); // the whole input after all
    }
    Ok(shards)
}

/// Bytes between two cuts of a text: whole hash blocks if the input is large enough, so that hashes of ranges are hashes of the
/// file.
fn step(total: u64, num_shards: u64) -> u64 {
    let wanted = total / (num_shards * PIECES_PER_SHARD).max(1);
    if wanted >= HASH_BLOCK_BYTES / 4 { wanted.div_ceil(HASH_BLOCK_BYTES) * HASH_BLOCK_BYTES } else { wanted.max(1) }
}

fn pieces(sources: &[Source], format: Option<Format>, step: u64) -> Result<Vec<Piece>, BuildError> {
    let mut pieces = Vec::new();
    for (index, source) in sources.iter().enumerate() {
        let size = source.size_bytes()?.unwrap_or(0);
        let cuts = source.cuts(format, step)?;
        if cuts.is_empty() {
            pieces.push(Piece { source: index, range: None, bytes: size });
            continue;
        }
        let (mut at, mut before) = (0, 0);
        for cut in cuts {
            pieces.push(Piece { source: index, range: Some(at..cut.at), bytes: cut.bytes_before - before });
            (at, before) = (cut.at, cut.bytes_before);
        }
        pieces.push(Piece { source: index, range: Some(at..u64::MAX), bytes: size.saturating_sub(before) });
    }
    Ok(pieces)
}

/// Adds a piece, joined with the one before if it follows it.
fn add(shard: &mut Vec<JobInput>, source: &Source, range: Option<Range<u64>>) {
    if let (Some(last), Some(range)) = (shard.last_mut(), &range) {
        let follows = last.range.as_ref().is_some_and(|before| before.end == range.start);
        if follows && last.source.name() == source.name() {
            last.range = last.range.as_ref().map(|before| before.start..range.end);
            return;
        }
    }
    shard.push(JobInput { source: source.clone(), range });
}
