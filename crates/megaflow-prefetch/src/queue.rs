//! The places of batches between the threads that gather and the consumer.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
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
/// While gathering takes less than this, no more workers are awake than there are processors beside the consumer's, which
/// gathers too: more would only take turns on them, and fetch each other's memory. Slow batches wait for something else.
const QUICK: Duration = HELP_BELOW;
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
    pub(crate) with_starts: bool,
    /// Workers that are awake at most while batches are quick to gather.
    pub(crate) quick_workers: usize,
    pub(crate) is_stopped: AtomicBool,
    /// Batches for which the page cache is taken to be cold.
    pub(crate) cold_batches: AtomicU32,
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
    /// Workers that gather, or were called to.
    awake_workers: usize,
    /// Of the awake workers those that were called and have not noticed yet.
    called_workers: usize,
    /// Times that the latest batches took to gather; one alone may be a thread that had to wait for a processor.
    last_gathers: [Option<Duration>; 2],
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
            awake_workers: 0,
            called_workers: 0,
            last_gathers: [None; 2],
        }
    }

    /// Time that a batch takes to gather; unknown before the first.
    fn gather_time(&self) -> Option<Duration> {
        self.last_gathers.iter().flatten().min().copied()
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
        queue.awake_workers += 1;
        while !self.is_stopped.load(Ordering::Relaxed) && queue.next_claimed < self.num_batches() {
            let is_crowded = queue.awake_workers > self.quick_workers && self.is_quick(&queue);
            queue = if is_crowded || !self.has_room(&queue) { self.rest(queue) } else { self.gather_next(queue) };
        }
        queue.awake_workers -= 1;
    }

    /// Sleeps until the consumer calls.
    fn rest<'a>(&'a self, mut queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        queue.awake_workers -= 1;
        queue.idle_workers += 1;
        queue = self.room.wait(queue).unwrap_or_else(PoisonError::into_inner);
        if queue.called_workers > 0 {
            queue.called_workers -= 1; // the call has counted it as awake
        } else {
            queue.idle_workers -= 1;
            queue.awake_workers += 1;
        }
        queue
    }

    /// Whether gathering a batch is work alone, with no waiting in it.
    fn is_quick(&self, queue: &Queue) -> bool {
        !self.is_cold() && queue.gather_time().is_some_and(|took| took < QUICK)
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
        let took = result.as_ref().ok().map(|gathered| gathered.gather);
        place.result = Some(result.map(|gathered| Gathered { request_to_ready: requested.elapsed(), ..gathered }));
        if took.is_some() {
            queue.last_gathers = [queue.last_gathers[1], took];
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
                && queue.gather_time().is_some_and(|took| took < HELP_BELOW)
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
        let wake = self.is_worth_waking(&queue, queue_depth == 0);
        if wake {
            queue.idle_workers -= 1;
            queue.awake_workers += 1;
            queue.called_workers += 1;
        }
        drop(queue);
        if wake {
            self.room.notify_one();
        }
        place.transpose().map(|gathered| (gathered, queue_depth))
    }

    /// Whether to call an idle worker. Of quick batches it needs enough to do, because waking it costs about as much as
    /// gathering a small one; and beside another that is awake there must be a processor for it and a consumer that waits.
    fn is_worth_waking(&self, queue: &Queue, has_waited: bool) -> bool {
        let room = queue.next_received + self.depth - queue.next_claimed;
        let work = queue.gather_time().map(|took| took.saturating_mul(room as u32));
        let is_enough = room == self.depth || work.is_none_or(|work| work >= WORTH_WAKING);
        let is_wanted = match queue.awake_workers {
            0 => true,
            awake => !self.is_quick(queue) || (has_waited && awake < self.quick_workers),
        };
        queue.idle_workers > 0 && is_enough && is_wanted
    }

    /// Waits a moment for the batch at the front without sleeping, where it will be there sooner than that takes.
    fn spin<'a>(&'a self, mut queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        if queue.gather_time().is_none_or(|took| took > SPIN_BELOW) {
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

#[cfg(test)]
mod tests {
    use megaflow_core::{SampleError, TokenDtype};

    use super::*;
    use crate::gather::COLD_BATCHES;
    use crate::plan::PlanConfig;
    use crate::usage::DiskUse;

    struct Zeros;

    impl SampleSource for Zeros {
        fn num_samples(&self) -> u64 {
            100
        }

        fn sample_len(&self) -> usize {
            1
        }

        fn read_sample(&self, _index: u64, out: &mut [i64]) -> Result<(), SampleError> {
            out.fill(0);
            Ok(())
        }
    }

    const DEPTH: u64 = 8;
    const SHORT: Duration = Duration::from_micros(20);
    const LONG: Duration = Duration::from_millis(2);

    /// With two processors beside the consumer's.
    fn shared() -> Shared {
        let config = PlanConfig { micro_batch_size: 1, dp_rank: 0, dp_size: 1, consumed_samples: 0 };
        Shared {
            source: Arc::new(Zeros),
            plan: BatchPlan::new(100, config).unwrap(),
            pool: BufferPool::new(TokenDtype::I64, 1, 1),
            depth: DEPTH,
            with_starts: false,
            quick_workers: 2,
            is_stopped: AtomicBool::new(false),
            cold_batches: AtomicU32::new(0),
            end: AtomicU64::new(u64::MAX),
            queue: Mutex::new(Queue::new(DEPTH as usize, Instant::now())),
            ready: Condvar::new(),
            room: Condvar::new(),
        }
    }

    /// Whether an idle worker of four is called.
    fn calls(took: Duration, room: u64, awake: usize, has_waited: bool) -> bool {
        let shared = shared();
        let mut queue = shared.lock();
        queue.last_gathers = [Some(took); 2];
        queue.next_claimed = DEPTH - room;
        (queue.awake_workers, queue.idle_workers) = (awake, 4 - awake);
        shared.is_worth_waking(&queue, has_waited)
    }

    #[test]
    fn a_worker_is_called_for_enough_work() {
        assert!(!calls(SHORT, 7, 0, true), "140 microseconds");
        assert!(calls(SHORT, DEPTH, 0, false), "nothing is left");
        assert!(calls(SHORT * 2, 5, 0, false), "200 microseconds");
        assert!(calls(LONG, 1, 0, false));
        assert!(!calls(LONG, 1, 4, true), "none is idle");
    }

    #[test]
    fn of_quick_batches_another_is_called_only_for_a_consumer_that_waits_and_a_processor() {
        assert!(calls(SHORT * 2, 5, 1, true));
        assert!(!calls(SHORT * 2, 5, 1, false), "one keeps up");
        assert!(!calls(SHORT * 2, 5, 2, true), "no processor is left");
        assert!(calls(LONG, 1, 2, false) && calls(LONG, 1, 3, false), "slow batches wait for something else");
    }

    #[test]
    fn one_long_batch_makes_no_slow_source_and_a_cold_cache_does() {
        let shared = shared();
        let mut queue = shared.lock();
        assert!(!shared.is_quick(&queue), "unknown");
        queue.last_gathers = [Some(SHORT), Some(LONG)];
        assert!(shared.is_quick(&queue));
        queue.last_gathers = [Some(LONG); 2];
        assert!(!shared.is_quick(&queue));
        queue.last_gathers = [Some(SHORT); 2];
        shared.cold_batches.store(1, Ordering::Relaxed);
        assert!(!shared.is_quick(&queue));
    }

    #[test]
    fn a_cold_cache_is_cold_until_enough_batches_came_without_the_disk() {
        let shared = shared();
        let (none, read) = (DiskUse::default(), DiskUse { misses: 0, bytes: 4096 });
        shared.note_disk(none);
        assert!(!shared.is_cold());
        for disk in [read, DiskUse { misses: 1, bytes: 0 }] {
            shared.note_disk(disk);
            for _ in 0..COLD_BATCHES {
                assert!(shared.is_cold());
                shared.note_disk(none);
            }
            assert!(!shared.is_cold());
        }
    }
}
