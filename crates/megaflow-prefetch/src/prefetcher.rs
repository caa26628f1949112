//! The threads that gather batches ahead, and the consumer's end of the queue.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use megaflow_core::{SampleSource, TokenDtype};

use crate::error::PrefetchError;
use crate::gather::{COLD_BATCHES, Fault, GatherFault, Gathered};
use crate::plan::{BatchPlan, PlanConfig};
use crate::pool::{BatchTokens, BufferPool};
use crate::queue::{Queue, Shared};
use crate::stats::Totals;

/// Buffers that a consumer may hold back, beside those in the queue, before the pool has to make new ones.
const SPARE_BUFFERS: usize = 4;
/// Batches that may be gathered ahead.
const MAX_DEPTH: usize = 1 << 16;
/// How batches are gathered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefetchOptions {
    /// Which samples make which batch.
    pub plan: PlanConfig,
    /// Threads that gather. With 0 the consumer gathers each batch itself when it asks for it.
    pub num_threads: usize,
    /// Batches gathered ahead of the consumer.
    pub depth: usize,
    /// Type of the tokens: `U16`, `I32` or `I64`.
    pub dtype: TokenDtype,
    /// Whether batches tell where documents begin.
    pub with_starts: bool,
}

/// One micro-batch.
#[derive(Debug)]
pub struct Batch {
    /// Samples of the batch, each of the source's `sample_len` tokens, one after the other.
    pub tokens: BatchTokens,
    /// Positions of the samples in the source.
    pub sample_ids: Vec<i64>,
    /// Time that the consumer was blocked for this batch.
    pub wait: Duration,
    /// Time that gathering it took.
    pub gather: Duration,
    /// Time from the moment it could be gathered until it was ready.
    pub request_to_ready: Duration,
    /// Batches that lay ready when this one was asked for.
    pub queue_depth: usize,
    /// Page faults for which its gathering had to wait for the disk; 0 where the system does not tell.
    pub cache_misses: u64,
    /// Bytes read from the disk for it; 0 where the system does not tell.
    pub disk_bytes: u64,
    /// Rows that end in padding, and their tokens before it.
    pub short_rows: Vec<(usize, usize)>,
    /// Where documents begin in each row, as [`SampleLayout`](megaflow_core::SampleLayout) tells; empty unless asked for.
    pub starts: Vec<Vec<u32>>,
}

/// Answer to a request for a batch.
#[derive(Debug)]
pub enum Next {
    /// The next batch.
    Batch(Batch),
    /// All batches were handed out.
    End,
    /// The time was up before the batch was ready. Ask again: the batch is not lost, and the time is counted.
    Pending,
}

/// Gathers the batches of one rank ahead of need and hands them out in order.
///
/// Dropping it stops the threads and waits for them; each ends at the next sample.
pub struct Prefetcher {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    process: u32,
    totals: Totals,
    has_ended: bool,
    /// Time spent in calls that ended with [`Next::Pending`], and the depth found by the first of them.
    pending: Option<(Duration, usize)>,
}

impl Prefetcher {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`PrefetchError`] if the plan has no meaning, `depth` is 0, or the system gives no thread.
    pub fn new(source: Arc<dyn SampleSource>, options: PrefetchOptions) -> Result<Self, PrefetchError> {
        let plan = BatchPlan::new(source.num_samples(), options.plan)?;
        if !(1..=MAX_DEPTH).contains(&options.depth) {
            let (expected, found) = (format!("1 to {MAX_DEPTH}"), options.depth as u64);
            return Err(PrefetchError::BadSetting { setting: "prefetch", expected, found });
        }
        let micro_batch_size = options.plan.micro_batch_size;
        let Some(buffer_len) = micro_batch_size.checked_mul(source.sample_len()).filter(|len| *len < 1 << 40) else {
            let expected = "a batch of fewer than 2^40 tokens".to_owned();
            return Err(PrefetchError::BadSetting {
                setting: "micro_batch_size",
                expected,
                found: micro_batch_size as u64,
            });
        };
        if !matches!(options.dtype, TokenDtype::U16 | TokenDtype::I32 | TokenDtype::I64) {
            let expected = format!("uint16, int32 or int64, not {}", options.dtype);
            return Err(PrefetchError::BadSetting { setting: "dtype", expected, found: options.dtype.code().into() });
        }
        let depth = options.depth.min(usize::try_from(plan.num_batches()).unwrap_or(usize::MAX).max(1));
        // A thread more than places in the queue would only wait.
        let num_threads = options.num_threads.min(depth);
        let places = depth.saturating_add(num_threads).saturating_add(SPARE_BUFFERS);
        let pool = BufferPool::new(options.dtype, buffer_len, places);
        let shared = Arc::new(Shared {
            source,
            plan,
            pool,
            depth: depth as u64,
            with_starts: options.with_starts,
            quick_workers: std::thread::available_parallelism().map_or(1, |cores| cores.get().saturating_sub(1)).max(1),
            is_stopped: AtomicBool::new(false),
            cold_batches: AtomicU32::new(COLD_BATCHES),
            end: AtomicU64::new(u64::MAX),
            queue: Mutex::new(Queue::new(depth, Instant::now())),
            ready: Condvar::new(),
            room: Condvar::new(),
        });
        shared.source.received(plan.consumed_samples(0));
        let mut prefetcher = Self {
            shared,
            workers: Vec::with_capacity(num_threads),
            process: std::process::id(),
            totals: Totals::default(),
            has_ended: false,
            pending: None,
        };
        for thread in 1..=num_threads {
            let shared = Arc::clone(&prefetcher.shared);
            let builder = std::thread::Builder::new().name(format!("megaflow-load-{thread}"));
            let worker = builder.spawn(move || shared.work()).map_err(|error| PrefetchError::NoThread {
                thread,
                num_threads,
                reason: error.to_string(),
            })?;
            prefetcher.workers.push(worker);
        }
        Ok(prefetcher)
    }

    /// Which samples make which batch.
    pub fn plan(&self) -> &BatchPlan {
        &self.shared.plan
    }

    /// Sums over all batches handed out so far.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// The next batch, or `None` behind the last. Blocks until it is ready.
    ///
    /// # Errors
    /// [`PrefetchError`] if the batch could not be gathered. The position stays on that batch: asking again gives the
    /// same error.
    pub fn next_batch(&mut self) -> Result<Option<Batch>, PrefetchError> {
        loop {
            match self.next_within(Duration::MAX)? {
                Next::Batch(batch) => return Ok(Some(batch)),
                Next::End => return Ok(None),
                Next::Pending => {}
            }
        }
    }

    /// As [`next_batch`](Self::next_batch), but returns [`Next::Pending`] if the batch is not ready within `patience`.
    /// Without threads a patience of zero never gathers.
    ///
    /// # Errors
    /// As [`next_batch`](Self::next_batch).
    pub fn next_within(&mut self, patience: Duration) -> Result<Next, PrefetchError> {
        let child = std::process::id();
        if child != self.process {
            return Err(PrefetchError::Forked { parent: self.process, child });
        }
        if self.has_ended || self.totals.batches == self.shared.plan.num_batches() {
            return Ok(Next::End);
        }
        let asked = Instant::now();
        let received = if !self.workers.is_empty() {
            self.shared.receive(patience)
        } else if patience.is_zero() {
            return Ok(Next::Pending);
        } else {
            self.gather_here(asked, patience)
        };
        let (found, queue_depth) = match received {
            Err(Fault::End) => {
                self.has_ended = true;
                return Ok(Next::End);
            }
            Err(Fault::Error(error)) => return Err(error),
            Ok(received) => received,
        };
        let (before, queue_depth) = self.pending.take().unwrap_or((Duration::ZERO, queue_depth));
        let wait = before + asked.elapsed();
        let Some(gathered) = found else {
            self.pending = Some((wait, queue_depth));
            return Ok(Next::Pending);
        };
        let batch = gathered.into_batch(&self.shared, self.totals.batches, wait, queue_depth);
        self.count(&batch);
        self.shared.source.received(self.shared.plan.consumed_samples(self.totals.batches));
        Ok(Next::Batch(batch))
    }

    fn gather_here(&self, asked: Instant, patience: Duration) -> Result<(Option<Gathered>, usize), Fault> {
        let batch = self.totals.batches;
        self.shared.announce(batch);
        match self.shared.gather(batch, asked.checked_add(patience)) {
            Ok(gathered) => Ok((Some(Gathered { request_to_ready: asked.elapsed(), ..gathered }), 0)),
            Err(GatherFault::TimeIsUp) => Ok((None, 0)),
            Err(GatherFault::Fault(fault)) => Err(fault),
        }
    }

    fn count(&mut self, batch: &Batch) {
        self.totals.batches += 1;
        self.totals.samples += batch.sample_ids.len() as u64;
        self.totals.ready_when_asked += u64::from(batch.queue_depth > 0);
        self.totals.queue_depth += batch.queue_depth as u64;
        self.totals.wait += batch.wait;
        self.totals.gather += batch.gather;
        self.totals.request_to_ready += batch.request_to_ready;
        self.totals.max_wait = self.totals.max_wait.max(batch.wait);
        let tokens = batch.tokens.tokens();
        self.totals.token_bytes += (tokens.len() * tokens.dtype().size_bytes()) as u64;
        self.totals.cache_misses += batch.cache_misses;
        self.totals.disk_bytes += batch.disk_bytes;
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        if std::process::id() != self.process {
            // A forked child has none of the threads, and one of them may have held the lock at the fork: touch
            // neither.
            self.workers.drain(..).for_each(std::mem::forget);
            return;
        }
        self.shared.is_stopped.store(true, Ordering::Relaxed);
        // A worker looks at the flag with the lock held before it waits, so with the lock held here none misses the
        // call.
        drop(self.shared.lock());
        self.shared.room.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its source, so that there is nothing to pass on.
            let _ = worker.join();
        }
    }
}
