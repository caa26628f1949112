//! The places of batches between the threads that gather and the consumer.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use megaflow_core::SampleSource;

use crate::gather::{Fault, GatherFault, Gathered};
use crate::plan::BatchPlan;
use crate::pool::BufferPool;

/// A consumer that would have to wait gathers a batch itself while that takes less than this. Going to sleep and being
/// woken costs as much as gathering a small batch; where gathering is slow, the batch at the front should not wait for
/// another.
const HELP_BELOW: Duration = Duration::from_micros(500);
/// An idle worker is woken for this much work, or once nothing is left that lies ready or under way.
const WORTH_WAKING: Duration = Duration::from_micros(200);
/// A consumer that waits for a batch that another thread gathers looks again and again while gathering takes less than
/// this, and sleeps otherwise: a sleep and a wake-up cost some ten microseconds of both.
const SPIN_BELOW: Duration = Duration::from_micros(50);

pub(crate) struct Shared {
    pub(crate) source: Arc<dyn SampleSource>,
    pub(crate) plan: BatchPlan,
    pub(crate) pool: Arc<BufferPool>,
    pub(crate) depth: u64,
    pub(crate) is_stopped: AtomicBool,
    /// Whether the page cache lacked something lately, so that it pays to ask for pages before they are read.
    pub(crate) is_cold: AtomicBool,
    /// Batches that there are, once a source without a known end has told.
    pub(crate) end: AtomicU64,
    pub(crate) queue: Mutex<Queue>,
    /// The consumer waits here for the next batch.
    pub(crate) ready: Condvar,
    /// The workers wait here for a place in the queue.
    pub(crate) room: Condvar,
}

pub(crate) struct Queue {
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

pub(crate) struct Place {
    requested: Instant,
    result: Option<Result<Gathered, Fault>>,
}

impl Queue {
    pub(crate) fn new(depth: usize, now: Instant) -> Self {
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

impl Shared {
    /// No code panics while it holds the lock, so a poisoned queue is still whole.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn num_batches(&self) -> u64 {
        self.plan.num_batches().min(self.end.load(Ordering::Relaxed))
    }

    /// Tells the source of the samples of a batch. Batches are announced in order.
    pub(crate) fn announce(&self, batch: u64) {
        self.plan.samples(batch).for_each(|sample| self.source.announce(sample));
    }

    fn has_room(&self, queue: &Queue) -> bool {
        queue.next_claimed < self.num_batches().min(queue.next_received + self.depth)
    }

    /// A worker's life: claim the next batch that has a place, gather it, put it there.
    pub(crate) fn work(&self) {
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
    pub(crate) fn receive(&self, patience: Duration) -> Result<(Option<Gathered>, usize), Fault> {
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
            queue = self.spin(queue);
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
        let wake = queue.idle_workers > 0 && self.is_worth_waking(&queue);
        drop(queue);
        if wake {
            self.room.notify_one();
        }
        place.transpose().map(|gathered| (gathered, queue_depth))
    }

    /// Whether a worker would have enough to do: waking it costs about as much as gathering a small batch.
    fn is_worth_waking(&self, queue: &Queue) -> bool {
        let room = queue.next_received + self.depth - queue.next_claimed;
        let work = queue.last_gather.map(|took| took.saturating_mul(room as u32));
        room == self.depth || work.is_none_or(|work| work >= WORTH_WAKING)
    }

    /// Waits a moment for the batch at the front without sleeping, where it will be there sooner than that takes.
    fn spin<'a>(&'a self, mut queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        if queue.last_gather.is_none_or(|took| took > SPIN_BELOW) {
            return queue;
        }
        let started = Instant::now();
        while queue.places[0].result.is_none() && started.elapsed() < SPIN_BELOW {
            drop(queue);
            (0..100).for_each(|_| std::hint::spin_loop());
            queue = self.lock();
        }
        queue
    }
}
