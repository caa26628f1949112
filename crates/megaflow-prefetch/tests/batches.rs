//! Order, errors, waiting and stopping, on sources made for the purpose.
#![expect(clippy::unwrap_used, reason = "a test ends where its set-up fails")]

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use megaflow_core::{SampleError, SampleLayout, SampleSource, TokenDtype, UNKNOWN_LEN};
use megaflow_prefetch::{Batch, Next, PlanConfig, PrefetchError, PrefetchOptions, Prefetcher, Tokens};

const SAMPLE_LEN: usize = 3;

/// Sample `i` is `i, i + 1, i + 2`; reading may take time, fail or panic.
#[derive(Default)]
struct Source {
    num_samples: u64,
    delay: Duration,
    fails_at: Option<u64>,
    panics_at: Option<u64>,
    reads: AtomicU64,
}

impl SampleSource for Source {
    fn num_samples(&self) -> u64 {
        self.num_samples
    }

    fn sample_len(&self) -> usize {
        SAMPLE_LEN
    }

    fn read_sample(&self, index: u64, out: &mut [i64]) -> Result<(), SampleError> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        // Uneven delays, so that threads finish out of order.
        std::thread::sleep(self.delay * (1 + (index * 7 % 3) as u32));
        assert_ne!(Some(index), self.panics_at, "made to panic");
        if Some(index) == self.fails_at {
            return Err(SampleError::Damaged { index, detail: "made to fail".to_owned() });
        }
        out.iter_mut().zip(index as i64..).for_each(|(token, value)| *token = value);
        Ok(())
    }

    fn layout(&self, index: u64, layout: &mut SampleLayout) -> Result<(), SampleError> {
        layout.clear();
        layout.starts.extend([0, 100 + index as u32]);
        Ok(())
    }
}

fn source(num_samples: u64) -> Source {
    Source { num_samples, ..Source::default() }
}

fn options(micro_batch_size: usize, dp: (usize, usize), num_threads: usize, depth: usize) -> PrefetchOptions {
    let plan = PlanConfig { micro_batch_size, dp_rank: dp.0, dp_size: dp.1, consumed_samples: 0 };
    PrefetchOptions { plan, num_threads, depth, dtype: TokenDtype::I64, with_starts: false }
}

fn drain(source: Source, options: PrefetchOptions) -> Vec<(Vec<i64>, Vec<i64>)> {
    let mut prefetcher = Prefetcher::new(Arc::new(source), options).unwrap();
    let mut batches = Vec::new();
    while let Some(batch) = prefetcher.next_batch().unwrap() {
        batches.push((batch.sample_ids, batch.tokens.tokens().to_i64()));
    }
    assert!(prefetcher.next_batch().unwrap().is_none(), "the end stays the end");
    assert_eq!(prefetcher.totals().batches, batches.len() as u64);
    batches
}

#[test]
fn batches_do_not_depend_on_threads_or_depth() {
    let slow = || Source { delay: Duration::from_micros(100), ..source(50) };
    let expected = drain(source(50), options(2, (1, 3), 0, 1));
    assert_eq!(expected.len(), 8);
    assert_eq!(expected[1], (vec![8, 9], vec![8, 9, 10, 9, 10, 11]));
    for (num_threads, depth) in [(1, 1), (1, 4), (2, 1), (2, 3), (4, 4), (4, 100), (9, 9)] {
        assert_eq!(
            drain(slow(), options(2, (1, 3), num_threads, depth)),
            expected,
            "{num_threads} threads, depth {depth}"
        );
    }
}

#[test]
fn global_batches_do_not_depend_on_dp_size() {
    let global = |dp: usize, size: usize| -> Vec<i64> {
        let ranks: Vec<_> = (0..dp).map(|rank| drain(source(48), options(size, (rank, dp), 2, 2))).collect();
        (0..ranks[0].len()).flat_map(|batch| ranks.iter().flat_map(move |rank| rank[batch].0.clone())).collect()
    };
    for (dp, size) in [(1, 1), (1, 4), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4)] {
        assert!(global(dp, size).into_iter().eq(0..48), "dp {dp}, micro batch {size}");
    }
}

#[test]
fn error_arrives_at_its_batch_and_stays() {
    for num_threads in [0, 1, 3] {
        let source = Source { fails_at: Some(5), ..source(20) };
        let mut prefetcher = Prefetcher::new(Arc::new(source), options(2, (0, 1), num_threads, 4)).unwrap();
        assert_eq!(prefetcher.next_batch().unwrap().unwrap().sample_ids, [0, 1]);
        assert_eq!(prefetcher.next_batch().unwrap().unwrap().sample_ids, [2, 3]);
        for _ in 0..2 {
            let message = prefetcher.next_batch().unwrap_err().to_string();
            assert!(
                message.contains("batch 2") && message.contains("sample 5 cannot be read: made to fail"),
                "{message}"
            );
        }
        assert_eq!(prefetcher.totals().batches, 2);
    }
}

#[test]
fn panic_of_a_source_is_an_error_not_a_hang() {
    for num_threads in [0, 1] {
        let source = Source { panics_at: Some(1), ..source(4) };
        let mut prefetcher = Prefetcher::new(Arc::new(source), options(1, (0, 1), num_threads, 2)).unwrap();
        prefetcher.next_batch().unwrap();
        let error = prefetcher.next_batch().unwrap_err();
        assert!(
            matches!(&error, PrefetchError::Panicked { batch: 1, message } if message.contains("made to panic")),
            "{error}"
        );
    }
}

#[test]
fn depth_bounds_what_is_read_ahead() {
    // Of quick batches idle threads gather more once none is left, of others as soon as there is room.
    for (delay, received) in [(Duration::ZERO, 3), (Duration::from_millis(1), 2)] {
        let source = Arc::new(Source { delay, ..source(1000) });
        let mut prefetcher =
            Prefetcher::new(Arc::clone(&source) as Arc<dyn SampleSource>, options(2, (0, 1), 2, 3)).unwrap();
        let most = 2 * received + 2 * 3;
        for _ in 0..received {
            prefetcher.next_batch().unwrap();
        }
        let started = Instant::now();
        while source.reads.load(Ordering::Relaxed) < most && started.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(source.reads.load(Ordering::Relaxed), most);
    }
}

/// Samples that are ready only once `NUM_THREADS` of them are being read, as those of a disk that needs many requests.
struct Together {
    inside: Mutex<(usize, u64)>,
    changed: Condvar,
}

const NUM_THREADS: usize = 4;

impl SampleSource for Together {
    fn num_samples(&self) -> u64 {
        80
    }

    fn sample_len(&self) -> usize {
        1
    }

    fn read_sample(&self, index: u64, out: &mut [i64]) -> Result<(), SampleError> {
        out.fill(index as i64);
        std::thread::sleep(Duration::from_millis(1));
        let mut inside = self.inside.lock().unwrap();
        inside.0 += 1;
        let round = inside.1;
        if inside.0 == NUM_THREADS {
            *inside = (0, round + 1);
            self.changed.notify_all();
            return Ok(());
        }
        let limit = Duration::from_secs(20);
        let (_inside, time) = self.changed.wait_timeout_while(inside, limit, |inside| inside.1 == round).unwrap();
        assert!(!time.timed_out(), "fewer than {NUM_THREADS} threads read a slow source");
        Ok(())
    }
}

#[test]
fn all_threads_read_a_slow_source() {
    let source = Arc::new(Together { inside: Mutex::new((0, 0)), changed: Condvar::new() });
    let mut prefetcher = Prefetcher::new(source, options(1, (0, 1), NUM_THREADS, 8)).unwrap();
    for sample in 0..80 {
        let batch = prefetcher.next_batch().unwrap().unwrap();
        assert_eq!(batch.tokens.tokens().to_i64(), [sample]);
    }
}

#[test]
fn dropping_stops_at_the_next_sample() {
    let source = Source { delay: Duration::from_millis(20), ..source(100_000) };
    let prefetcher = Prefetcher::new(Arc::new(source), options(1000, (0, 1), 2, 4)).unwrap();
    std::thread::sleep(Duration::from_millis(10));
    let started = Instant::now();
    drop(prefetcher);
    assert!(started.elapsed() < Duration::from_secs(5), "a whole batch takes 40 s");
    // Idle workers, full queue.
    let prefetcher = Prefetcher::new(Arc::new(self::source(100)), options(1, (0, 1), 3, 2)).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    drop(prefetcher);
}

#[test]
fn waiting_is_counted_and_split_over_calls() {
    let source = Source { delay: Duration::from_millis(20), ..source(2) };
    let mut prefetcher = Prefetcher::new(Arc::new(source), options(1, (0, 1), 1, 2)).unwrap();
    let mut calls = 0;
    let first = loop {
        calls += 1;
        match prefetcher.next_within(Duration::from_millis(2)).unwrap() {
            Next::Batch(batch) => break batch,
            Next::Pending => {}
            Next::End => panic!("two batches"),
        }
    };
    assert!(calls > 1 && first.wait >= Duration::from_millis(10), "{calls} calls, {:?}", first.wait);
    assert!(first.gather >= Duration::from_millis(20) && first.request_to_ready >= first.gather);
    assert_eq!(first.queue_depth, 0);
    std::thread::sleep(Duration::from_millis(200));
    let second = prefetcher.next_batch().unwrap().unwrap();
    assert_eq!(second.queue_depth, 1);
    assert!(second.wait < second.gather);
    let totals = prefetcher.totals();
    assert_eq!((totals.batches, totals.samples, totals.ready_when_asked), (2, 2, 1));
    assert_eq!(totals.wait, first.wait + second.wait);
}

fn address(batch: &Batch) -> *const i64 {
    let Tokens::I64(tokens) = batch.tokens.tokens() else { panic!("int64 was asked for") };
    tokens.as_ptr()
}

#[test]
fn buffers_go_around() {
    let mut prefetcher = Prefetcher::new(Arc::new(source(200)), options(1, (0, 1), 0, 1)).unwrap();
    let first = prefetcher.next_batch().unwrap().unwrap();
    let place = address(&first);
    let second = prefetcher.next_batch().unwrap().unwrap();
    assert_ne!(address(&second), place, "a batch that is held keeps its buffer");
    assert_eq!(first.tokens.tokens().to_i64(), [0, 1, 2]);
    drop(first);
    let third = prefetcher.next_batch().unwrap().unwrap();
    assert_eq!((address(&third), third.tokens.tokens().to_i64()), (place, vec![2, 3, 4]));
}

#[test]
fn batches_tell_where_documents_begin_where_that_is_asked_for() {
    for num_threads in [0, 2] {
        let asked = PrefetchOptions { with_starts: true, ..options(2, (0, 1), num_threads, 2) };
        let mut prefetcher = Prefetcher::new(Arc::new(source(4)), asked).unwrap();
        assert_eq!(prefetcher.next_batch().unwrap().unwrap().starts, [vec![0, 100], vec![0, 101]]);
        assert_eq!(prefetcher.next_batch().unwrap().unwrap().starts, [vec![0, 102], vec![0, 103]]);
        let mut without = Prefetcher::new(Arc::new(source(4)), options(2, (0, 1), num_threads, 2)).unwrap();
        assert!(without.next_batch().unwrap().unwrap().starts.is_empty());
    }
}

#[test]
fn tokens_come_in_the_type_asked_for_or_not_at_all() {
    for dtype in [TokenDtype::U16, TokenDtype::I32, TokenDtype::I64] {
        let mut prefetcher =
            Prefetcher::new(Arc::new(source(4)), PrefetchOptions { dtype, ..options(2, (0, 1), 1, 2) }).unwrap();
        let batch = prefetcher.next_batch().unwrap().unwrap();
        assert_eq!((batch.tokens.tokens().dtype(), batch.tokens.tokens().to_i64()), (dtype, vec![0, 1, 2, 1, 2, 3]));
        assert_eq!(prefetcher.totals().token_bytes, 6 * dtype.size_bytes() as u64);
    }
    let narrow = PrefetchOptions { dtype: TokenDtype::U16, ..options(1, (0, 1), 1, 2) };
    let plan = PlanConfig { consumed_samples: 65_534, ..narrow.plan };
    let mut prefetcher = Prefetcher::new(Arc::new(source(70_000)), PrefetchOptions { plan, ..narrow }).unwrap();
    let message = prefetcher.next_batch().unwrap_err().to_string();
    assert!(message.contains("token 65536, which uint16 cannot hold"), "{message}");
    let float = PrefetchOptions { dtype: TokenDtype::I8, ..narrow };
    assert!(Prefetcher::new(Arc::new(source(1)), float).is_err());
}

/// Makes its samples when asked a second time, and tells its end only then.
struct Stream {
    asked: Mutex<HashSet<u64>>,
    announced: Mutex<Vec<u64>>,
    received: AtomicU64,
    len: u64,
}

impl SampleSource for Stream {
    fn num_samples(&self) -> u64 {
        UNKNOWN_LEN
    }

    fn sample_len(&self) -> usize {
        1
    }

    fn read_sample(&self, index: u64, out: &mut [i64]) -> Result<(), SampleError> {
        assert!(self.announced.lock().unwrap().contains(&index), "announced before it is read");
        if self.asked.lock().unwrap().insert(index) {
            return Err(SampleError::NotReady { index });
        }
        out.fill(index as i64);
        Ok(())
    }

    fn has_sample(&self, index: u64) -> Result<bool, SampleError> {
        Ok(index < self.len)
    }

    fn announce(&self, index: u64) {
        self.announced.lock().unwrap().push(index);
    }

    fn received(&self, count: u64) {
        self.received.store(count, Ordering::Relaxed);
    }
}

#[test]
fn a_stream_is_asked_again_and_ends_for_all_ranks_at_the_same_batch() {
    for (num_threads, depth) in [(0, 1), (1, 2), (3, 5)] {
        for rank in 0..2 {
            let stream = Arc::new(Stream {
                asked: Mutex::default(),
                announced: Mutex::default(),
                received: AtomicU64::new(0),
                len: 23,
            });
            let source = Arc::clone(&stream) as Arc<dyn SampleSource>;
            let mut prefetcher = Prefetcher::new(source, options(3, (rank, 2), num_threads, depth)).unwrap();
            let mut samples = Vec::new();
            while let Some(batch) = prefetcher.next_batch().unwrap() {
                assert_eq!(batch.tokens.tokens().to_i64(), batch.sample_ids);
                samples.extend(batch.sample_ids);
                assert_eq!(stream.received.load(Ordering::Relaxed), 6 * prefetcher.totals().batches);
            }
            // 23 samples fill three batches of 2 x 3; rank 0 of the fourth would have its three, rank 1 only two.
            let first = 3 * rank as i64;
            let expected: Vec<i64> = [0, 6, 12].iter().flat_map(|&at| at + first..at + first + 3).collect();
            assert_eq!(samples, expected, "{num_threads} threads");
            assert!(prefetcher.next_batch().unwrap().is_none());
            let announced = stream.announced.lock().unwrap();
            assert!(announced.is_sorted(), "{announced:?}");
        }
    }
}

#[test]
fn settings_without_meaning_are_refused() {
    for (options, word) in
        [(options(0, (0, 1), 1, 1), "micro_batch_size = 0"), (options(1, (0, 1), 1, 0), "prefetch = 0")]
    {
        let message = Prefetcher::new(Arc::new(source(10)), options).err().unwrap().to_string();
        assert!(message.contains(word), "{message}");
    }
    let huge = options(1 << 50, (0, 1), 1, 1);
    assert!(Prefetcher::new(Arc::new(source(1 << 60)), huge).is_err());
}
