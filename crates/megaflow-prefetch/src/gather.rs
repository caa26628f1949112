//! Gathering one batch from the source.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use megaflow_core::{SampleError, SampleLayout, UNKNOWN_LEN};

use crate::error::PrefetchError;
use crate::pool::{BatchTokens, Tokens};
use crate::prefetcher::Batch;
use crate::queue::Shared;
use crate::usage::DiskUse;

/// Batches without a read from the disk after which the page cache is taken to hold the rest too. Every source begins so.
pub(crate) const COLD_BATCHES: u32 = 64;

/// Why a batch will never be there.
#[derive(Clone)]
pub(crate) enum Fault {
    /// A source without a known end has ended before it.
    End,
    Error(PrefetchError),
}

/// Why a batch is not there.
pub(crate) enum GatherFault {
    Fault(Fault),
    /// The source is still making it.
    TimeIsUp,
}

impl From<PrefetchError> for GatherFault {
    fn from(error: PrefetchError) -> Self {
        Self::Fault(Fault::Error(error))
    }
}

pub(crate) struct Gathered {
    pub(crate) tokens: Tokens,
    pub(crate) gather: Duration,
    pub(crate) request_to_ready: Duration,
    pub(crate) disk: DiskUse,
    pub(crate) rows: Rows,
}

/// What there is to say of the samples of a batch.
#[derive(Default)]
pub(crate) struct Rows {
    /// Rows that end in padding, and their tokens before it.
    pub(crate) short: Vec<(usize, usize)>,
    /// Where documents begin in each row, if that was asked for.
    pub(crate) starts: Vec<Vec<u32>>,
}

impl Gathered {
    pub(crate) fn into_batch(self, shared: &Shared, batch: u64, wait: Duration, queue_depth: usize) -> Batch {
        Batch {
            tokens: BatchTokens::new(self.tokens, Arc::clone(&shared.pool)),
            sample_ids: shared.plan.samples(batch).map(|sample| sample as i64).collect(),
            wait,
            gather: self.gather,
            request_to_ready: self.request_to_ready,
            queue_depth,
            cache_misses: self.disk.misses,
            disk_bytes: self.disk.bytes,
            short_rows: self.rows.short,
            starts: self.rows.starts,
        }
    }
}

impl Shared {
    /// Gathers a batch; gives up at `deadline`, or when the threads are to stop.
    pub(crate) fn gather(&self, batch: u64, deadline: Option<Instant>) -> Result<Gathered, GatherFault> {
        let (started, disk_before) = (Instant::now(), DiskUse::of_thread());
        let mut tokens = self.pool.take();
        let read = catch_unwind(AssertUnwindSafe(|| self.fill(batch, &mut tokens, deadline)));
        match read {
            Ok(Ok(rows)) => {
                let disk = DiskUse::of_thread().since(disk_before);
                self.note_disk(disk);
                Ok(Gathered { tokens, gather: started.elapsed(), request_to_ready: Duration::ZERO, disk, rows })
            }
            Ok(Err(fault)) => {
                self.pool.put(tokens);
                Err(fault)
            }
            Err(panic) => Err(PrefetchError::Panicked { batch, message: panic_message(&*panic) }.into()),
        }
    }

    /// Whether the page cache lacked something lately, so that it pays to ask for pages before they are read.
    pub(crate) fn is_cold(&self) -> bool {
        self.cold_batches.load(Ordering::Relaxed) > 0
    }

    /// Once pages are asked for in time, reading them meets no fault: what was fetched says that the cache is cold still.
    pub(crate) fn note_disk(&self, disk: DiskUse) {
        if disk.misses > 0 || disk.bytes > 0 {
            self.cold_batches.store(COLD_BATCHES, Ordering::Relaxed);
        } else if self.is_cold() {
            let _ = self.cold_batches.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        }
    }

    /// Reads the samples of a batch.
    fn fill(&self, batch: u64, tokens: &mut Tokens, deadline: Option<Instant>) -> Result<Rows, GatherFault> {
        if self.source.num_samples() == UNKNOWN_LEN {
            // A batch is for all ranks or for none, so it is there if the last rank's last sample is.
            let last = self.plan.consumed_samples(batch + 1) - 1;
            if !self.ask(batch, deadline, || self.source.has_sample(last))? {
                return Err(GatherFault::Fault(Fault::End));
            }
        }
        if self.is_cold() {
            // Whole samples at once: a fault alone fetches one page at a time, and with it a great deal around that page.
            let ahead = (batch + self.depth).min(self.num_batches().saturating_sub(1));
            self.plan.samples(batch).chain(self.plan.samples(ahead)).for_each(|sample| self.source.read_ahead(sample));
        }
        let sample_len = self.source.sample_len();
        let (mut rows, mut layout) = (Rows::default(), SampleLayout::default());
        for (place, sample) in self.plan.samples(batch).enumerate() {
            if self.is_stopped.load(Ordering::Relaxed) {
                return Err(GatherFault::TimeIsUp); // nobody will receive this batch
            }
            let mut out = tokens.slice_mut(place * sample_len, (place + 1) * sample_len);
            let filled = self.ask(batch, deadline, || self.source.read_counted(sample, out.reborrow()))?;
            if filled < sample_len {
                rows.short.push((place, filled));
            }
            if self.with_starts {
                self.ask(batch, deadline, || self.source.layout(sample, &mut layout))?;
                rows.starts.push(layout.starts.clone());
            }
        }
        Ok(rows)
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
