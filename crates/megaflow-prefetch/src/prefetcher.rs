//! The threads and the queue between them and the consumer.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use megaflow_core::SampleSource;

use crate::error::PrefetchError;
use crate::plan::{BatchPlan, PlanConfig};
use crate::pool::{BatchTokens, BufferPool};
use crate::stats::Totals;

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
        let depth = options.depth.min(usize::try_from(plan.num_batches()).unwrap_or(usize::MAX).max(1));
        // A thread more than places in the queue would only wait.
        let num_threads = options.num_threads.min(depth);
        let pool = BufferPool::new(buffer_len, depth.saturating_add(num_threads).saturating_add(SPARE_BUFFERS));
        let shared = Arc::new(Shared {
            source,
            plan,
            pool,
            depth: depth as u64,
            is_stopped: AtomicBool::new(false),
            queue: Mutex::new(Queue::new(depth, Instant::now())),
            ready: Condvar::new(),
            room: Condvar::new(),
        });
        let mut prefetcher = Self {
            shared,
            workers: Vec::with_capacity(num_threads),
            process: std::process::id(),
            totals: Totals::default(),
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
        if self.totals.batches == self.shared.plan.num_batches() {
            return Ok(Next::End);
        }
        let asked = Instant::now();
        let (found, queue_depth) = if self.workers.is_empty() {
            if patience.is_zero() {
                return Ok(Next::Pending);
            }
            (Some(self.gather_here(asked)?), 0)
        } else {
            self.shared.receive(patience)?
        };
        let (before, queue_depth) = self.pending.take().unwrap_or((Duration::ZERO, queue_depth));
        let wait = before + asked.elapsed();
        let Some(gathered) = found else {
            self.pending = Some((wait, queue_depth));
            return Ok(Next::Pending);
        };
        let batch = gathered.into_batch(&self.shared, self.totals.batches, wait, queue_depth);
        self.count(&batch);
        Ok(Next::Batch(batch))
    }

    fn gather_here(&self, asked: Instant) -> Result<Gathered, PrefetchError> {
        let mut gathered = self.shared.gather(self.totals.batches)?;
        gathered.request_to_ready = asked.elapsed();
        Ok(gathered)
    }

    fn count(&mut self, batch: &Batch) {
        self.totals.batches += 1;
        self.totals.samples += batch.sample_ids.len() as u64;
        self.totals.ready_when_asked += u64::from(batch.queue_depth > 0);
        self.totals.queue_depth += batch.queue_depth as u64;
        self.totals.wait += batch.wait;
        self.totals.gather += batch.gather;
        self.totals.request_to_ready += batch.request_to_ready;
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
    result: Option<Result<Gathered, PrefetchError>>,
}

struct Gathered {
    tokens: Vec<i64>,
    gather: Duration,
    request_to_ready: Duration,
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
        }
    }
}

impl Shared {
    /// No code panics while it holds the lock, so a poisoned queue is still whole.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_room(&self, queue: &Queue) -> bool {
        queue.next_claimed < self.plan.num_batches().min(queue.next_received + self.depth)
    }

    /// A worker's life: claim the next batch that has a place, gather it, put it there.
    fn work(&self) {
        let mut queue = self.lock();
        loop {
            if self.is_stopped.load(Ordering::Relaxed) || queue.next_claimed == self.plan.num_batches() {
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
        drop(queue);
        let result = self.gather(batch);
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
    fn receive(&self, patience: Duration) -> Result<(Option<Gathered>, usize), PrefetchError> {
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
        let wake = queue.idle_workers > 0;
        drop(queue);
        if wake {
            self.room.notify_one();
        }
        place.transpose().map(|gathered| (gathered, queue_depth))
    }

    fn gather(&self, batch: u64) -> Result<Gathered, PrefetchError> {
        let started = Instant::now();
        let mut tokens = self.pool.take();
        let read = AssertUnwindSafe(|| {
            for (sample, out) in self.plan.samples(batch).zip(tokens.chunks_exact_mut(self.source.sample_len().max(1)))
            {
                if self.is_stopped.load(Ordering::Relaxed) {
                    break; // Nobody will receive this batch.
                }
                self.source.read_sample(sample, out)?;
            }
            Ok(())
        });
        match catch_unwind(read) {
            Ok(Ok(())) => Ok(Gathered { tokens, gather: started.elapsed(), request_to_ready: Duration::ZERO }),
            Ok(Err(source)) => Err(PrefetchError::Sample { batch, source }),
            Err(panic) => Err(PrefetchError::Panicked { batch, message: panic_message(&*panic) }),
        }
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}
