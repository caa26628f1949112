//! The stream as the loader sees it.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use megaflow_core::{SampleError, SampleLayout, SampleSource, TokensMut, UNKNOWN_LEN};
use megaflow_source::Source;
use megaflow_tokenize::Tokenizer;

use crate::feed::Feed;
use crate::output::{Cursor, Output};
use crate::packer::pack;
use crate::shards::{num_lanes, plan};
use crate::state::{STREAM_STATE_VERSION, StreamState};
use crate::{StreamCounts, StreamError, StreamOptions, StreamPiece};

/// How long the end of a stream waits for its threads. Each ends at its next block, but a source may keep one for ever: a pipe that
/// nobody writes to. Such a thread is left behind, and ends by itself once its source comes back.
const PATIENCE: Duration = Duration::from_secs(1);

/// Samples made of text on the fly, in order, from a position on. Dropping it ends its threads.
pub struct StreamSource {
    feed: Arc<Feed>,
    output: Arc<Output>,
    threads: Vec<JoinHandle<()>>,
    /// Each thread holds a sender: it is disconnected once all have ended.
    ended: Mutex<Receiver<()>>,
    process: u32,
    num_samples: Option<u64>,
}

impl StreamSource {
    /// Opens a stream at its start, or at a position that [`position`](Self::position) told, and starts its threads.
    ///
    /// # Errors
    /// [`StreamError`] if a setting makes no sense, an input cannot be opened, or the position does not fit.
    pub fn open(
        sources: Vec<Source>,
        tokenizer: Tokenizer,
        options: StreamOptions,
        num_samples: Option<u64>,
        start: Option<StreamState>,
    ) -> Result<Self, StreamError> {
        options.check()?;
        tokenizer.check_documents(options.encode, options.append_eod)?;
        let shards = plan(&sources, &options)?;
        let lanes = num_lanes(shards.len(), &options);
        let start = start.unwrap_or_else(|| StreamState::start(lanes));
        let mismatch = |detail: String| Err(StreamError::StateMismatch { detail });
        if start.version != STREAM_STATE_VERSION {
            return mismatch(format!("it is of version {}, not {STREAM_STATE_VERSION}", start.version));
        }
        if start.window.lanes.len() != lanes || start.window.turn >= lanes {
            return mismatch(format!(
                "it has {} shards side by side, the inputs have {lanes}",
                start.window.lanes.len()
            ));
        }
        let num_threads = options.num_threads;
        let feed = Arc::new(Feed::new(sources, shards, options, tokenizer, &start.window));
        let window = Arc::new(start.window.clone());
        let cursor = Cursor { window, document: start.document, token: start.token };
        let output = Arc::new(Output::new(start.sample, cursor));
        let process = std::process::id();
        let (alive, ended) = channel();
        let ended = Mutex::new(ended);
        let mut stream = Self { feed, output, threads: Vec::new(), ended, process, num_samples };
        let (feed, output) = (Arc::clone(&stream.feed), Arc::clone(&stream.output));
        stream.spawn("megaflow-pack".to_owned(), &alive, move || pack(&feed, &output, &start))?;
        for thread in 1..=num_threads {
            let feed = Arc::clone(&stream.feed);
            stream.spawn(format!("megaflow-text-{thread}"), &alive, move || feed.work())?;
        }
        Ok(stream)
    }

    /// Tells the threads to end, each at its next block, and waits for none. Nothing more is made.
    pub fn stop(&self) {
        self.feed.stop();
        self.output.stop();
    }

    fn spawn(
        &mut self,
        name: String,
        alive: &Sender<()>,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<(), StreamError> {
        let alive = alive.clone();
        let work = move || {
            work();
            drop(alive);
        };
        let spawned = std::thread::Builder::new().name(name).spawn(work);
        let thread = spawned.map_err(|error| StreamError::NoThread { reason: error.to_string() })?;
        self.threads.push(thread);
        Ok(())
    }

    /// The position behind `count` samples, which were handed out and not more.
    ///
    /// # Errors
    /// [`StreamError::NoSuchPosition`] for a number that the stream has left behind or not reached.
    pub fn position(&self, count: u64) -> Result<StreamState, StreamError> {
        self.output.position(count)
    }

    /// Where the tokens of a sample come from, while it is held.
    ///
    /// # Errors
    /// [`SampleError`] if it is not held.
    pub fn pieces(&self, index: u64) -> Result<Vec<StreamPiece>, SampleError> {
        self.output.pieces(index)
    }

    /// What was made so far.
    pub fn counts(&self) -> StreamCounts {
        self.output.counts()
    }

    /// Names of the inputs, as [`StreamPiece`] counts them.
    pub fn names(&self) -> Vec<PathBuf> {
        self.feed.sources.iter().map(|source| source.name().to_owned()).collect()
    }
}

impl SampleSource for StreamSource {
    fn num_samples(&self) -> u64 {
        self.num_samples.unwrap_or(UNKNOWN_LEN)
    }

    fn sample_len(&self) -> usize {
        self.feed.options.seq_len + 1
    }

    fn read_sample(&self, index: u64, out: &mut [i64]) -> Result<(), SampleError> {
        self.read_into(index, TokensMut::I64(out))
    }

    fn read_into(&self, index: u64, mut out: TokensMut<'_>) -> Result<(), SampleError> {
        let sample = self.output.sample(index)?;
        if sample.tokens.len() < out.len() {
            out.reborrow().from(sample.tokens.len()).pad(self.feed.options.pad_id);
        }
        out.write_u32(index, &sample.tokens)
    }

    fn sample_tokens(&self, index: u64) -> Result<usize, SampleError> {
        self.output.sample(index).map(|sample| sample.tokens.len())
    }

    /// Where attention and position ids may start again. A stream has no stored sequences to name; see `pieces`.
    fn layout(&self, index: u64, layout: &mut SampleLayout) -> Result<(), SampleError> {
        layout.clear();
        let sample = self.output.sample(index)?;
        let mut begin = 0;
        for piece in &sample.pieces {
            layout.starts.push(begin as u32);
            begin += piece.length;
        }
        if begin < self.sample_len() {
            layout.starts.push(begin as u32);
        }
        Ok(())
    }

    fn has_sample(&self, index: u64) -> Result<bool, SampleError> {
        if self.num_samples.is_some_and(|num_samples| index >= num_samples) {
            return Ok(false);
        }
        self.output.has_sample(index)
    }

    fn announce(&self, index: u64) {
        self.output.announce(index);
    }

    fn received(&self, count: u64) {
        self.output.received(count);
    }
}

impl Drop for StreamSource {
    fn drop(&mut self) {
        if std::process::id() != self.process {
            // A forked child has none of the threads, and one of them may have held a lock at the fork: touch neither.
            self.threads.drain(..).for_each(std::mem::forget);
            return;
        }
        self.stop();
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        if ended.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            return;
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join(); // a thread that panicked has told the reader
        }
    }
}
