//! Threads that read and tokenize the lanes ahead of the packer.
//!
//! A lane is a row of shards, of all epochs one after the other, read in order. Any thread may take up any lane; blocks of a
//! lane are numbered as they are read, so that the packer gets them in order whatever thread was faster.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use megaflow_source::{
    Block, ContentHash, HASH_BLOCK_BYTES, Keys, Position, ReadOptions, Resume, Source, SourceReader,
};
use megaflow_tokenize::Tokenizer;

use crate::documents::{BlockEncoder, EncodedBlock};
use crate::shards::{Shard, lane_shards};
use crate::state::WindowState;
use crate::{StreamError, StreamOptions};

/// What a lane gives, in order.
#[derive(Debug, Clone)]
pub(crate) enum Item {
    /// Documents of the shard with this number in the lane's order; the place behind them.
    Block { shard: usize, source: usize, block: Arc<EncodedBlock>, behind: Position },
    /// All shards of the epoch were read.
    EpochEnd,
    /// The lane cannot go on.
    Failed(StreamError),
}

/// Inputs, options and the lanes that threads and packer share.
pub(crate) struct Feed {
    pub(crate) sources: Vec<Source>,
    pub(crate) shards: Vec<Shard>,
    pub(crate) options: StreamOptions,
    tokenizer: Tokenizer,
    state: Mutex<State>,
    /// Threads wait here for a lane with room.
    room: Condvar,
    /// The packer waits here for the front of a lane.
    arrived: Condvar,
    /// Blocks that a lane may hold or have under way.
    ahead: usize,
}

struct State {
    lanes: Vec<Lane>,
    is_stopped: bool,
}

struct Lane {
    /// The lane's reader, while no thread has it.
    reader: Option<LaneReader>,
    /// Blocks in order, `None` while one is under way.
    items: VecDeque<Option<Item>>,
    /// Number of the front of `items`.
    first: u64,
}

/// Reads a lane's shards one after the other.
struct LaneReader {
    lane: usize,
    epoch: u64,
    order: Vec<usize>,
    /// Place in `order`.
    place: usize,
    open: Option<SourceReader>,
    resume: Option<Position>,
    /// Whether all epochs were read, or something went wrong.
    is_ended: bool,
}

/// What a reader hands to the encoder.
enum Read {
    Block { shard: usize, source: usize, block: Block, behind: Position },
    EpochEnd,
    End,
}

impl Feed {
    /// Lanes that begin where a window begins.
    pub(crate) fn new(
        sources: Vec<Source>,
        shards: Vec<Shard>,
        options: StreamOptions,
        tokenizer: Tokenizer,
        start: &WindowState,
    ) -> Self {
        let lanes = start.lanes.iter().enumerate().map(|(lane, at)| {
            // The end of a lane that is done was taken already: it goes on with the next epoch.
            let epoch = start.epoch + u64::from(at.is_done);
            let order = lane_shards(shards.len(), &options, epoch, lane);
            let position = Position { offset: at.offset, record: at.record, counted_from: 0 };
            let resume = (at.record > 0 && !at.is_done).then_some(position);
            let place = if at.is_done { 0 } else { at.shard };
            let reader = LaneReader { lane, epoch, order, place, open: None, resume, is_ended: false };
            Lane { reader: Some(reader), items: VecDeque::new(), first: 0 }
        });
        let ahead = (2 * options.num_threads + 2).div_ceil(start.lanes.len()).max(2);
        let state = State { lanes: lanes.collect(), is_stopped: false };
        Self {
            sources,
            shards,
            options,
            tokenizer,
            state: Mutex::new(state),
            room: Condvar::new(),
            arrived: Condvar::new(),
            ahead,
        }
    }

    /// No code panics while it holds the lock, so a poisoned state is still whole.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the threads; each stops at its next block.
    pub(crate) fn stop(&self) {
        self.lock().is_stopped = true;
        self.room.notify_all();
        self.arrived.notify_all();
    }

    /// The item at the front of a lane, which stays there; `None` once the feed was stopped.
    pub(crate) fn front(&self, lane: usize) -> Option<Item> {
        let mut state = self.lock();
        loop {
            if state.is_stopped {
                return None;
            }
            if let Some(Some(item)) = state.lanes[lane].items.front() {
                return Some(item.clone());
            }
            state = self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Lets go of the item at the front of a lane.
    pub(crate) fn pop(&self, lane: usize) {
        let mut state = self.lock();
        state.lanes[lane].items.pop_front();
        state.lanes[lane].first += 1;
        drop(state);
        self.room.notify_one();
    }

    /// A thread's life: take up the lane with the fewest blocks, read one, tokenize it, put it there.
    pub(crate) fn work(&self) {
        let mut encoder = match BlockEncoder::new(&self.options, &self.tokenizer) {
            Ok(encoder) => encoder,
            Err(error) => return self.fail_all(&error),
        };
        let mut state = self.lock();
        loop {
            if state.is_stopped {
                return;
            }
            let Some(lane) = self.hungriest(&state) else {
                state = self.room.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let Some(mut reader) = state.lanes[lane].reader.take() else { continue };
            let number = state.lanes[lane].first + state.lanes[lane].items.len() as u64;
            state.lanes[lane].items.push_back(None);
            drop(state);
            let read = catch_unwind(AssertUnwindSafe(|| reader.next(self)))
                .unwrap_or_else(|panic| Err(self.panicked(&reader, panic.as_ref())));
            reader.is_ended |= !matches!(read, Ok(Read::Block { .. } | Read::EpochEnd));
            state = self.lock();
            state.lanes[lane].reader = Some(reader);
            if matches!(read, Ok(Read::End)) {
                state.lanes[lane].items.pop_back(); // nothing was behind it: the reader was away
                continue;
            }
            drop(state);
            self.room.notify_one(); // another thread may read on while this one encodes
            let item = match read {
                Ok(Read::Block { shard, source, block, behind }) => {
                    let path = self.sources[source].name();
                    let encode = AssertUnwindSafe(|| encoder.encode(source, path, &block, behind));
                    match catch_unwind(encode) {
                        Ok(block) => Item::Block { shard, source, block: Arc::new(block), behind },
                        Err(panic) => {
                            let detail = panic_message(panic.as_ref());
                            Item::Failed(StreamError::Panicked { path: path.to_owned(), detail })
                        }
                    }
                }
                Ok(_) => Item::EpochEnd,
                Err(error) => Item::Failed(error),
            };
            state = self.lock();
            // Nobody lets go of an item that has not arrived.
            let at = (number - state.lanes[lane].first) as usize;
            state.lanes[lane].items[at] = Some(item);
            self.arrived.notify_all();
        }
    }

    /// The lane that is to be read next: the one with the fewest blocks, if it has room and nobody reads it.
    fn hungriest(&self, state: &State) -> Option<usize> {
        let has_room =
            |lane: &Lane| lane.items.len() < self.ahead && lane.reader.as_ref().is_some_and(|reader| !reader.is_ended);
        let lanes = state.lanes.iter().enumerate().filter(|(_, lane)| has_room(lane));
        lanes.min_by_key(|(_, lane)| lane.items.len()).map(|(number, _)| number)
    }

    fn fail_all(&self, error: &StreamError) {
        let mut state = self.lock();
        for lane in &mut state.lanes {
            lane.items.push_back(Some(Item::Failed(error.clone())));
        }
        drop(state);
        self.arrived.notify_all();
    }

    fn panicked(&self, reader: &LaneReader, panic: &(dyn std::any::Any + Send)) -> StreamError {
        let path = reader.order.get(reader.place).map(|&shard| self.sources[self.shards[shard].source].name());
        let path = path.map_or_else(PathBuf::new, Path::to_owned);
        StreamError::Panicked { path, detail: panic_message(panic) }
    }
}

impl LaneReader {
    fn next(&mut self, feed: &Feed) -> Result<Read, StreamError> {
        loop {
            if feed.options.epochs == Some(self.epoch) {
                return Ok(Read::End);
            }
            let Some(&number) = self.order.get(self.place) else {
                self.epoch += 1;
                self.place = 0;
                self.order = lane_shards(feed.shards.len(), &feed.options, self.epoch, self.lane);
                return Ok(Read::EpochEnd);
            };
            let shard = &feed.shards[number];
            let mut reader = match self.open.take() {
                Some(reader) => reader,
                None => self.open_shard(feed, shard)?,
            };
            if let Some(block) = reader.next_block()? {
                let behind = reader.position();
                self.open = Some(reader);
                return Ok(Read::Block { shard: self.place, source: shard.source, block, behind });
            }
            self.place += 1;
        }
    }

    fn open_shard(&mut self, feed: &Feed, shard: &Shard) -> Result<SourceReader, StreamError> {
        let read = ReadOptions {
            keys: Keys::from([feed.options.key.clone()]),
            format: feed.options.format,
            block_bytes: feed.options.block_bytes,
        };
        let resume = self.resume.take().map(|position| {
            // Nobody asks for the hashes: those of whole blocks count as known, so that the blocks are not read again.
            let start = if position.offset >= shard.range.start { shard.range.start } else { 0 };
            let blocks = (position.offset - start) / HASH_BLOCK_BYTES;
            let content = ContentHash { bytes: blocks * HASH_BLOCK_BYTES, xxh3_64: vec![0; blocks as usize] };
            Resume { position: Position { counted_from: start, ..position }, content }
        });
        let source = &feed.sources[shard.source];
        Ok(SourceReader::open_range(source, &read, resume.as_ref(), shard.range.clone())?)
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}
