//! Windows of documents: taken from the lanes in turns, shuffled together.

use std::sync::Arc;

use crate::documents::{DocumentPlace, EncodedBlock};
use crate::feed::{Feed, Item};
use crate::shuffle::{WINDOW, shuffle};
use crate::state::WindowState;
use crate::{OnBadRecord, StreamError};

/// Documents taken from a lane before the next one has its turn.
const TURN_DOCUMENTS: usize = 16;

/// The tokens of one document, in the block that it came with.
#[derive(Debug)]
pub(crate) struct WindowDocument {
    block: Arc<EncodedBlock>,
    begin: usize,
    end: usize,
    pub(crate) place: DocumentPlace,
}

impl WindowDocument {
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.block.tokens[self.begin..self.end]
    }
}

/// Documents that are shuffled together.
#[derive(Debug)]
pub(crate) struct Window {
    /// Where it begins.
    pub(crate) start: Arc<WindowState>,
    /// In shuffled order.
    pub(crate) documents: Vec<WindowDocument>,
}

/// Takes documents from the lanes.
pub(crate) struct Gatherer {
    /// Where the next window begins.
    next: WindowState,
    /// Documents of each lane's front block that were taken.
    taken: Vec<usize>,
    /// Documents of the epoch so far.
    epoch_documents: u64,
}

/// What a window ended with.
pub(crate) enum Gathered {
    Window(Window),
    /// All epochs were read.
    End,
    /// The feed was stopped.
    Stopped,
}

enum Turn {
    Taken,
    Stopped,
}

impl Gatherer {
    /// Goes on where `start` says; the feed was opened there too.
    pub(crate) fn new(start: WindowState) -> Self {
        let taken = vec![0; start.lanes.len()];
        // A window that begins inside an epoch shows that the epoch has documents.
        let epoch_documents = u64::from(start.number > 0);
        Self { next: start, taken, epoch_documents }
    }

    /// The next window. It ends with a turn, as soon as it has `window_tokens` tokens or the epoch is over.
    pub(crate) fn gather(&mut self, feed: &Feed) -> Result<Gathered, StreamError> {
        loop {
            if feed.options.epochs.is_some_and(|epochs| self.next.epoch >= epochs) {
                return Ok(Gathered::End);
            }
            let start = Arc::new(self.next.clone());
            let (mut documents, mut tokens) = (Vec::new(), 0);
            let is_full = |tokens| tokens >= feed.options.window_tokens;
            while !is_full(tokens) && self.next.lanes.iter().any(|lane| !lane.is_done) {
                let lane = self.next.turn;
                self.next.turn = (lane + 1) % self.next.lanes.len();
                if self.next.lanes[lane].is_done {
                    continue;
                }
                if let Turn::Stopped = self.take_turn(feed, lane, &mut documents, &mut tokens)? {
                    return Ok(Gathered::Stopped);
                }
            }
            self.epoch_documents += documents.len() as u64;
            self.next.documents += documents.len() as u64;
            self.next.number += 1;
            if self.next.lanes.iter().all(|lane| lane.is_done) {
                self.begin_epoch(feed)?;
            }
            if documents.is_empty() {
                continue; // the epoch ended with its last window
            }
            if feed.options.shuffle {
                shuffle(&mut documents, &[WINDOW, feed.options.seed, start.epoch, start.number]);
            }
            return Ok(Gathered::Window(Window { start, documents }));
        }
    }

    /// Bad records skipped before the next window, of all epochs.
    pub(crate) fn bad_records(&self) -> u64 {
        self.next.bad_records
    }

    fn begin_epoch(&mut self, feed: &Feed) -> Result<(), StreamError> {
        if self.epoch_documents == 0 {
            let num_sources = feed.sources.len();
            let is_part = feed.options.part.is_some();
            return Err(StreamError::NoDocuments { num_sources, is_part, bad_records: self.next.bad_records });
        }
        self.epoch_documents = 0;
        let fresh = WindowState::start(self.next.lanes.len());
        self.next = WindowState {
            epoch: self.next.epoch + 1,
            documents: self.next.documents,
            bad_records: self.next.bad_records,
            ..fresh
        };
        Ok(())
    }

    /// Up to [`TURN_DOCUMENTS`] documents of one lane.
    fn take_turn(
        &mut self,
        feed: &Feed,
        lane: usize,
        documents: &mut Vec<WindowDocument>,
        tokens: &mut usize,
    ) -> Result<Turn, StreamError> {
        let mut left = TURN_DOCUMENTS;
        while left > 0 {
            let (shard, source, block, behind) = match feed.front(lane) {
                None => return Ok(Turn::Stopped),
                Some(Item::Failed(error)) => return Err(error),
                Some(Item::EpochEnd) => {
                    self.next.lanes[lane].is_done = true;
                    feed.pop(lane);
                    return Ok(Turn::Taken);
                }
                Some(Item::Block { shard, source, block, behind }) => (shard, source, block, behind),
            };
            let first = self.taken[lane];
            let count = (block.documents.len() - first).min(left);
            left -= count;
            for index in first..first + count {
                let document = &block.documents[index];
                let begin = if index == 0 { 0 } else { block.documents[index - 1].end };
                *tokens += document.end - begin;
                self.count_bad(feed, document.bad_before, document.place.source, &block)?;
                let (block, end, place) = (Arc::clone(&block), document.end, document.place);
                documents.push(WindowDocument { block, begin, end, place });
            }
            self.taken[lane] += count;
            let last = (first + count).checked_sub(1).map(|last| block.documents[last].next);
            let mut next = last.unwrap_or(behind);
            if self.taken[lane] == block.documents.len() {
                if let Some(failure) = &block.failure {
                    return Err(failure.clone());
                }
                self.count_bad(feed, block.bad_behind, source, &block)?;
                next = behind;
                self.taken[lane] = 0;
                feed.pop(lane);
            }
            let state = &mut self.next.lanes[lane];
            (state.shard, state.offset, state.record) = (shard, next.offset, next.record);
        }
        Ok(Turn::Taken)
    }

    fn count_bad(&mut self, feed: &Feed, count: u64, source: usize, block: &EncodedBlock) -> Result<(), StreamError> {
        self.next.bad_records += count;
        let OnBadRecord::Skip { limit: Some(limit) } = feed.options.on_bad_record else { return Ok(()) };
        match &block.last_bad {
            Some((place, reason)) if count > 0 && self.next.bad_records > limit => {
                Err(StreamError::TooManyBadRecords {
                    bad_records: self.next.bad_records,
                    limit,
                    path: feed.sources[source].name().to_owned(),
                    place: place.clone(),
                    reason: reason.clone(),
                })
            }
            _ => Ok(()),
        }
    }
}
