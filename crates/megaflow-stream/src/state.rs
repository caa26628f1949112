//! A position in a stream, in plain numbers.

use serde::{Deserialize, Serialize};

/// Version of [`StreamState`].
pub const STREAM_STATE_VERSION: u32 = 1;

/// Where one of the shards read side by side stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaneState {
    /// Shard, counted in the lane's order of this epoch.
    pub shard: usize,
    /// Byte of the next record in the unpacked input.
    pub offset: u64,
    /// Number of the next record, from 1; 0 where the shard was not begun.
    pub record: u64,
    /// Whether the lane has given all its documents of this epoch.
    pub is_done: bool,
}

/// Where a window of documents begins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowState {
    /// The epoch that its documents belong to.
    pub epoch: u64,
    /// Windows of the epoch before it.
    pub number: u64,
    /// The lane whose turn is next.
    pub turn: usize,
    /// Where each lane stands.
    pub lanes: Vec<LaneState>,
    /// Documents before it, of all epochs.
    pub documents: u64,
    /// Bad records skipped before it, of all epochs.
    pub bad_records: u64,
}

/// The position behind a number of samples.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamState {
    /// [`STREAM_STATE_VERSION`].
    pub version: u32,
    /// Samples before it.
    pub sample: u64,
    /// Where the window begins that holds the next sample's first token.
    pub window: WindowState,
    /// Document of that token, in the shuffled order of the window.
    pub document: usize,
    /// The token in the document.
    pub token: usize,
}

impl WindowState {
    /// The start of a stream.
    pub(crate) fn start(num_lanes: usize) -> Self {
        let lane = LaneState { shard: 0, offset: 0, record: 0, is_done: false };
        Self { epoch: 0, number: 0, turn: 0, lanes: vec![lane; num_lanes], documents: 0, bad_records: 0 }
    }
}

impl StreamState {
    /// The start of a stream.
    pub(crate) fn start(num_lanes: usize) -> Self {
        let window = WindowState::start(num_lanes);
        Self { version: STREAM_STATE_VERSION, sample: 0, window, document: 0, token: 0 }
    }
}
