//! Samples between the packer and whoever reads them, and the position behind each.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use megaflow_core::SampleError;

use crate::packer::Sample;
use crate::state::{STREAM_STATE_VERSION, StreamState, WindowState};
use crate::{StreamError, StreamPiece};

/// Samples that are made ahead of what was announced.
const AHEAD: u64 = 256;
/// How long a reader waits before it says that the sample is not ready.
const PATIENCE: Duration = Duration::from_millis(50);

/// The place of a token: the document in its window, and the token in the document.
#[derive(Debug, Clone)]
pub(crate) struct Cursor {
    pub(crate) window: Arc<WindowState>,
    pub(crate) document: usize,
    pub(crate) token: usize,
}

/// What a stream has made so far, since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StreamCounts {
    /// Samples made.
    pub samples: u64,
    /// Tokens of documents packed.
    pub tokens: u64,
    /// Documents packed, of all epochs, since the start of the stream.
    pub documents: u64,
    /// Bad records skipped, since the start of the stream.
    pub bad_records: u64,
    /// Epoch that is being packed, from 0.
    pub epoch: u64,
}

pub(crate) struct Output {
    state: Mutex<State>,
    /// Readers wait here.
    made: Condvar,
    /// The packer waits here.
    room: Condvar,
}

struct State {
    /// Samples before it were handed out, or will never be read.
    received: u64,
    /// The last sample that was announced, plus one.
    frontier: u64,
    announced: BTreeSet<u64>,
    samples: BTreeMap<u64, Arc<Sample>>,
    /// The next sample to be made.
    next: u64,
    /// The place behind `first_cursor`, `first_cursor + 1`, ... samples.
    cursors: VecDeque<Cursor>,
    first_cursor: u64,
    ended_at: Option<u64>,
    failure: Option<StreamError>,
    counts: StreamCounts,
    is_stopped: bool,
}

impl Output {
    pub(crate) fn new(sample: u64, start: Cursor) -> Self {
        let state = State {
            received: sample,
            frontier: sample,
            announced: BTreeSet::new(),
            samples: BTreeMap::new(),
            next: sample,
            cursors: VecDeque::from([start]),
            first_cursor: sample,
            ended_at: None,
            failure: None,
            counts: StreamCounts::default(),
            is_stopped: false,
        };
        Self { state: Mutex::new(state), made: Condvar::new(), room: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn stop(&self) {
        self.lock().is_stopped = true;
        self.made.notify_all();
        self.room.notify_all();
    }

    /// Takes a sample from the packer once there is room; `false` if the stream was stopped.
    pub(crate) fn put(&self, sample: Sample, behind: Cursor, counts: StreamCounts) -> bool {
        let mut state = self.lock();
        while !state.is_stopped && state.next >= state.frontier.max(state.received) + AHEAD {
            state = self.room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.is_stopped {
            return false;
        }
        let number = state.next;
        // Of the samples up to the frontier only the announced ones will be read: the others belong to other ranks.
        if number >= state.received && (number >= state.frontier || state.announced.contains(&number)) {
            state.samples.insert(number, Arc::new(sample));
        }
        state.next += 1;
        state.cursors.push_back(behind);
        state.counts = StreamCounts { samples: state.counts.samples + 1, ..counts };
        state.forget_cursors();
        drop(state);
        self.made.notify_all();
        true
    }

    /// Nothing more will be made.
    pub(crate) fn end(&self, failure: Option<StreamError>) {
        let mut state = self.lock();
        if failure.is_none() {
            state.ended_at = Some(state.next);
        }
        state.failure = failure;
        drop(state);
        self.made.notify_all();
    }

    pub(crate) fn announce(&self, index: u64) {
        let mut state = self.lock();
        if index >= state.frontier {
            // What was made beyond the old frontier, and was passed over, is another rank's.
            let skipped: Vec<u64> = state.samples.range(state.frontier..index).map(|(&number, _)| number).collect();
            for number in skipped {
                state.samples.remove(&number);
            }
            state.frontier = index + 1;
            state.announced.insert(index);
            drop(state);
            self.room.notify_one();
        }
    }

    pub(crate) fn received(&self, count: u64) {
        let mut state = self.lock();
        if count > state.received {
            state.received = count;
            state.samples = state.samples.split_off(&count);
            state.announced = state.announced.split_off(&count);
            state.forget_cursors();
            drop(state);
            self.room.notify_one();
        }
    }

    pub(crate) fn sample(&self, index: u64) -> Result<Arc<Sample>, SampleError> {
        let mut state = self.lock();
        for is_last_look in [false, true] {
            if let Some(sample) = state.samples.get(&index) {
                return Ok(Arc::clone(sample));
            }
            state.check_ahead(index)?;
            if state.next > index {
                let detail = format!("a stream goes forward only, and stands at sample {}", state.next);
                return Err(SampleError::Damaged { index, detail });
            }
            if !is_last_look {
                state = self.made.wait_timeout(state, PATIENCE).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        Err(SampleError::NotReady { index })
    }

    pub(crate) fn has_sample(&self, index: u64) -> Result<bool, SampleError> {
        let mut state = self.lock();
        for is_last_look in [false, true] {
            if index < state.next {
                return Ok(true);
            }
            match state.check_ahead(index) {
                Err(SampleError::OutOfRange { .. }) => return Ok(false),
                checked => checked?,
            }
            // Whoever asks for a sample wants it made, whatever rank it belongs to.
            if index >= state.frontier {
                state.frontier = index + 1;
                self.room.notify_one();
            }
            if !is_last_look {
                state = self.made.wait_timeout(state, PATIENCE).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        Err(SampleError::NotReady { index })
    }

    /// The position behind `count` samples.
    pub(crate) fn position(&self, count: u64) -> Result<StreamState, StreamError> {
        let state = self.lock();
        let cursor = count.checked_sub(state.first_cursor).and_then(|at| state.cursors.get(at as usize));
        let last = state.first_cursor + state.cursors.len() as u64 - 1;
        let cursor = cursor.ok_or(StreamError::NoSuchPosition { count, first: state.first_cursor, last })?;
        Ok(StreamState {
            version: STREAM_STATE_VERSION,
            sample: count,
            window: WindowState::clone(&cursor.window),
            document: cursor.document,
            token: cursor.token,
        })
    }

    pub(crate) fn pieces(&self, index: u64) -> Result<Vec<StreamPiece>, SampleError> {
        self.sample(index).map(|sample| sample.pieces.clone())
    }

    pub(crate) fn counts(&self) -> StreamCounts {
        self.lock().counts
    }
}

impl State {
    fn check_ahead(&self, index: u64) -> Result<(), SampleError> {
        if let Some(failure) = self.failure.as_ref().filter(|_| index >= self.next) {
            let detail = failure.to_string();
            return Err(match failure {
                StreamError::NoDocuments { .. } => SampleError::Empty { detail },
                _ => SampleError::Damaged { index, detail },
            });
        }
        match self.ended_at {
            Some(num_samples) if index >= num_samples => Err(SampleError::OutOfRange { index, num_samples }),
            _ if self.is_stopped => {
                Err(SampleError::Damaged { index, detail: "the stream was closed while it was read".to_owned() })
            }
            _ => Ok(()),
        }
    }

    /// Positions before the one behind the last sample handed out are not asked for any more.
    fn forget_cursors(&mut self) {
        while self.first_cursor < self.received && self.cursors.len() > 1 {
            self.cursors.pop_front();
            self.first_cursor += 1;
        }
    }
}
