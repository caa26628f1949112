//! Which samples each batch of a rank holds.

use std::ops::Range;

use crate::error::PrefetchError;

/// What determines the batches of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanConfig {
    /// Samples in a batch.
    pub micro_batch_size: usize,
    /// This data-parallel rank.
    pub dp_rank: usize,
    /// Data-parallel ranks.
    pub dp_size: usize,
    /// Samples that all ranks together have consumed before.
    pub consumed_samples: u64,
}

/// Megatron's sampler `single`: all ranks walk the samples in order, each taking its slice of `micro_batch_size *
/// dp_size` samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchPlan {
    config: PlanConfig,
    num_batches: u64,
}

impl BatchPlan {
    /// Plans the batches of `num_samples` samples. A last part that does not fill a batch of every rank is dropped.
    ///
    /// # Errors
    /// [`PrefetchError::BadSetting`] if a size is 0, the rank is none of `dp_size`, or more was consumed than there is.
    pub fn new(num_samples: u64, config: PlanConfig) -> Result<Self, PrefetchError> {
        let bad = |setting, expected: String, found| Err(PrefetchError::BadSetting { setting, expected, found });
        if config.micro_batch_size == 0 {
            return bad("micro_batch_size", "1 or more".to_owned(), 0);
        }
        if config.dp_size == 0 {
            return bad("dp_size", "1 or more".to_owned(), 0);
        }
        if config.dp_rank >= config.dp_size {
            return bad("dp_rank", format!("below dp_size = {}", config.dp_size), config.dp_rank as u64);
        }
        if config.consumed_samples > num_samples {
            let expected = format!("at most {num_samples}, the samples of the dataset");
            return bad("consumed_samples", expected, config.consumed_samples);
        }
        let Some(step) = (config.micro_batch_size as u64).checked_mul(config.dp_size as u64) else {
            return bad(
                "micro_batch_size",
                "a product with dp_size below 2^64".to_owned(),
                config.micro_batch_size as u64,
            );
        };
        Ok(Self { config, num_batches: (num_samples - config.consumed_samples) / step })
    }

    /// Batches of this rank.
    pub fn num_batches(&self) -> u64 {
        self.num_batches
    }

    /// Samples of batch `batch`, which is below [`num_batches`](Self::num_batches).
    pub fn samples(&self, batch: u64) -> Range<u64> {
        let (size, config) = (self.config.micro_batch_size as u64, &self.config);
        let first = self.consumed_samples(batch) + size * config.dp_rank as u64;
        first..first + size
    }

    /// Samples that all ranks together have consumed once each has taken `batches` batches.
    pub fn consumed_samples(&self, batches: u64) -> u64 {
        self.config.consumed_samples + batches * self.config.micro_batch_size as u64 * self.config.dp_size as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(
        num_samples: u64,
        micro_batch_size: usize,
        dp_rank: usize,
        dp_size: usize,
        consumed_samples: u64,
    ) -> BatchPlan {
        BatchPlan::new(num_samples, PlanConfig { micro_batch_size, dp_rank, dp_size, consumed_samples }).unwrap()
    }

    #[test]
    fn ranks_take_slices_and_the_partial_end_is_dropped() {
        let slices = |rank| -> Vec<_> {
            let plan = plan(21, 2, rank, 3, 4);
            (0..plan.num_batches()).map(|batch| plan.samples(batch)).collect()
        };
        assert_eq!([slices(0), slices(1), slices(2)], [[4..6, 10..12], [6..8, 12..14], [8..10, 14..16]]);
        assert_eq!(plan(21, 2, 0, 3, 4).consumed_samples(2), 16);
        assert_eq!(plan(5, 2, 0, 3, 0).num_batches(), 0);
    }

    #[test]
    fn settings_without_meaning_are_refused() {
        for (size, rank, ranks, consumed, word) in [
            (0, 0, 1, 0, "micro_batch_size = 0"),
            (1, 0, 0, 0, "dp_size = 0"),
            (1, 2, 2, 0, "dp_rank = 2: expected below dp_size = 2"),
            (1, 0, 1, 11, "consumed_samples = 11: expected at most 10"),
            (usize::MAX, 0, usize::MAX, 0, "micro_batch_size"),
        ] {
            let config =
                PlanConfig { micro_batch_size: size, dp_rank: rank, dp_size: ranks, consumed_samples: consumed };
            let message = BatchPlan::new(10, config).unwrap_err().to_string();
            assert!(message.contains(word), "{message}");
        }
    }
}
