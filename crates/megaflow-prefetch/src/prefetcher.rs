//! The threads and the queue between them and the consumer.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use megaflow_core::{SampleError, SampleSource, TokenDtype, UNKNOWN_LEN};

use crate::error::PrefetchError;
use crate::plan::{BatchPlan, PlanConfig};
use crate::pool::{BatchTokens, BufferPool, Tokens};
use crate::stats::Totals;
use crate::usage::DiskUse;

/// Buffers that a consumer may hold back, beside those in the queue, before the pool has to make new ones.
const SPARE_BUFFERS: usize = 4;
/// Batches that may be gathered ahead.
const MAX_DEPTH: usize = 1 << 16;
/// A consumer that would have to wait gathers a batch itself while that takes less than this. Going to sleep and being
/// woken costs as much as gathering a small batch; where gathering is slow, the batch at the front should not wait for
/// another.
const HELP_BELOW: Duration = Duration::from_micros(500);

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
            is_stopped: AtomicBool::new(false),
            is_cold: AtomicBool::new(false),
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

struct Shared {
    source: Arc<dyn SampleSource>,
    plan: BatchPlan,
    pool: Arc<BufferPool>,
    depth: u64,
    is_stopped: AtomicBool,
    /// Whether the page cache lacked something lately, so that it pays to ask for pages before they are read.
    is_cold: AtomicBool,
    /// Batches that there are, once a source without a known end has told.
    end: AtomicU64,
    queue: Mutex<Queue>,
    /// The consumer waits here for the next batch.
    ready: Condvar,
    /// The workers wait here for a place in the queue.
    room: Condvar,
}

struct Queue {
    /// The next batch that a worker takes up.
    next_claimed: u64,
    /// The next batch that the consumer gets: the one at the front of `places`.
    next_received: u64,
    places: VecDeque<Place>,
    consumer_waits: bool,
    idle_workers: usize,
    /// Time that the latest batch took to gather.
    last_gather: Option<Duration>,
}

struct Place {
    requested: Instant,
    result: Option<Result<Gathered, Fault>>,
}

/// Why a batch will never be there.
#[derive(Clone)]
enum Fault {
    /// A source without a known end has ended before it.
    End,
    Error(PrefetchError),
}

/// Why a batch is not there.
enum GatherFault {
    Fault(Fault),
    /// The source is still making it.
    TimeIsUp,
}

impl From<PrefetchError> for GatherFault {
    fn from(error: PrefetchError) -> Self {
        Self::Fault(Fault::Error(error))
    }
}

struct Gathered {
    tokens: Tokens,
    gather: Duration,
    request_to_ready: Duration,
    disk: DiskUse,
    short_rows: Vec<(usize, usize)>,
}

impl Queue {
    fn new(depth: usize, now: Instant) -> Self {
        Self {
            next_claimed: 0,
            next_received: 0,
            places: (0..depth).map(|_| Place { requested: now, result: None }).collect(),
            consumer_waits: false,
            idle_workers: 0,
            last_gather: None,
        }
    }

    fn ready_batches(&self) -> usize {
        self.places.iter().take_while(|place| place.result.is_some()).count()
    }
}

impl Gathered {
    fn into_batch(self, shared: &Shared, batch: u64, wait: Duration, queue_depth: usize) -> Batch {
        Batch {
            tokens: BatchTokens::new(self.tokens, Arc::clone(&shared.pool)),
            sample_ids: shared.plan.samples(batch).map(|sample| sample as i64).collect(),
            wait,
            gather: self.gather,
            request_to_ready: self.request_to_ready,
            queue_depth,
            cache_misses: self.disk.misses,
            disk_bytes: self.disk.bytes,
            short_rows: self.short_rows,
        }
    }
}

impl Shared {
    /// No code panics while it holds the lock, so a poisoned queue is still whole.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn num_batches(&self) -> u64 {
        self.plan.num_batches().min(self.end.load(Ordering::Relaxed))
    }

    /// Tells the source of the samples of a batch. Batches are announced in order.
    fn announce(&self, batch: u64) {
        self.plan.samples(batch).for_each(|sample| self.source.announce(sample));
    }

    fn has_room(&self, queue: &Queue) -> bool {
        queue.next_claimed < self.num_batches().min(queue.next_received + self.depth)
    }

    /// A worker's life: claim the next batch that has a place, gather it, put it there.
    fn work(&self) {
        let mut queue = self.lock();
        loop {
            if self.is_stopped.load(Ordering::Relaxed) || queue.next_claimed >= self.num_batches() {
                return;
            }
            if !self.has_room(&queue) {
                queue.idle_workers += 1;
                queue = self.room.wait(queue).unwrap_or_else(PoisonError::into_inner);
                queue.idle_workers -= 1;
                continue;
            }
            queue = self.gather_next(queue);
        }
    }

    /// Claims the next batch, gathers it without the lock, and puts it into its place.
    fn gather_next<'a>(&'a self, mut queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        let batch = queue.next_claimed;
        queue.next_claimed += 1;
        self.announce(batch);
        drop(queue);
        let result = self.gather(batch, None).map_err(|fault| match fault {
            GatherFault::Fault(fault) => fault,
            GatherFault::TimeIsUp => Fault::End, // only while the threads are being stopped: nobody will see it
        });
        if let Err(Fault::End) = result {
            self.end.fetch_min(batch, Ordering::Relaxed);
        }
        let mut queue = self.lock();
        // The consumer cannot have passed a batch that is not there yet.
        let place = (batch - queue.next_received) as usize;
        let place = &mut queue.places[place];
        let requested = place.requested;
        place.result = Some(result.map(|gathered| Gathered { request_to_ready: requested.elapsed(), ..gathered }));
        if let Some(Ok(gathered)) = &place.result {
            queue.last_gather = Some(gathered.gather);
        }
        if queue.consumer_waits && batch == queue.next_received {
            queue.consumer_waits = false;
            self.ready.notify_one();
        }
        queue
    }

    /// Takes the batch at the front, and says how many lay ready when it was asked for.
    fn receive(&self, patience: Duration) -> Result<(Option<Gathered>, usize), Fault> {
        let mut queue = self.lock();
        let queue_depth = queue.ready_batches();
        if queue_depth == 0 {
            if patience.is_zero() {
                return Ok((None, 0));
            }
            let asked = Instant::now();
            while queue.places[0].result.is_none()
                && self.has_room(&queue)
                && queue.last_gather.is_some_and(|took| took < HELP_BELOW)
                && asked.elapsed() < patience
            {
                queue = self.gather_next(queue);
            }
            queue.consumer_waits = true;
            let is_missing = |queue: &mut Queue| queue.places[0].result.is_none();
            queue = match self.ready.wait_timeout_while(queue, patience, is_missing) {
                Ok((queue, _)) => queue,
                Err(poisoned) => poisoned.into_inner().0,
            };
            queue.consumer_waits = false;
        }
        match &queue.places[0].result {
            None => return Ok((None, 0)),
            Some(Err(error)) => return Err(error.clone()),
            Some(Ok(_)) => {}
        }
        let place = queue.places.pop_front().and_then(|place| place.result);
        queue.places.push_back(Place { requested: Instant::now(), result: None });
        queue.next_received += 1;
        // Waking a worker costs about as much as gathering a small batch, so it is woken for several.
        let room = queue.next_received + self.depth - queue.next_claimed;
        let wake = queue.idle_workers > 0 && 2 * room >= self.depth;
        drop(queue);
        if wake {
            self.room.notify_one();
        }
        place.transpose().map(|gathered| (gathered, queue_depth))
    }

    /// Gathers a batch; gives up at `deadline`, or when the threads are to stop.
    fn gather(&self, batch: u64, deadline: Option<Instant>) -> Result<Gathered, GatherFault> {
        let (started, disk_before) = (Instant::now(), DiskUse::of_thread());
        let mut tokens = self.pool.take();
        let read = catch_unwind(AssertUnwindSafe(|| self.fill(batch, &mut tokens, deadline)));
        match read {
            Ok(Ok(short_rows)) => {
                let disk = DiskUse::of_thread().since(disk_before);
                let is_cold = disk.misses > 0;
                if is_cold != self.is_cold.load(Ordering::Relaxed) {
                    self.is_cold.store(is_cold, Ordering::Relaxed);
                }
                Ok(Gathered { tokens, gather: started.elapsed(), request_to_ready: Duration::ZERO, disk, short_rows })
            }
            Ok(Err(fault)) => {
                self.pool.put(tokens);
                Err(fault)
            }
            Err(panic) => Err(PrefetchError::Panicked { batch, message: panic_message(&*panic) }.into()),
        }
    }

    /// Reads the samples of a batch; returns the rows that end in padding, and their tokens before it.
    fn fill(
        &self,
        batch: u64,
        tokens: &mut Tokens,
        deadline: Option<Instant>,
    ) -> Result<Vec<(usize, usize)>, GatherFault> {
        if self.source.num_samples() == UNKNOWN_LEN {
            // A batch is for all ranks or for none, so it is there if the last rank's last sample is.
            let last = self.plan.consumed_samples(batch + 1) - 1;
            if !self.ask(batch, deadline, || self.source.has_sample(last))? {
                return Err(GatherFault::Fault(Fault::End));
            }
        }
        if self.is_cold.load(Ordering::Relaxed) {
            let ahead = (batch + self.depth).min(self.num_batches().saturating_sub(1));
            self.plan.samples(batch).chain(self.plan.samples(ahead)).for_each(|sample| self.source.read_ahead(sample));
        }
        let sample_len = self.source.sample_len();
        let mut short_rows = Vec::new();
        for (place, sample) in self.plan.samples(batch).enumerate() {
            if self.is_stopped.load(Ordering::Relaxed) {
                return Err(GatherFault::TimeIsUp); // nobody will receive this batch
            }
            let mut out = tokens.slice_mut(place * sample_len, (place + 1) * sample_len);
            let filled = self.ask(batch, deadline, || self.source.read_counted(sample, out.reborrow()))?;
            if filled < sample_len {
                short_rows.push((place, filled));
            }
        }
        Ok(short_rows)
    }

    /// Asks a source until it has an answer.
    fn ask<T>(
        &self,
        batch: u64,
        deadline: Option<Instant>,
        mut question: impl FnMut() -> Result<T, SampleError>,
    ) -> Result<T, GatherFault> {
        loop {
            match question() {
                Ok(answer) => return Ok(answer),
                Err(SampleError::NotReady { .. }) => {}
                Err(source) => return Err(PrefetchError::Sample { batch, source }.into()),
            }
            let is_late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if is_late || self.is_stopped.load(Ordering::Relaxed) {
                return Err(GatherFault::TimeIsUp);
            }
        }
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}
