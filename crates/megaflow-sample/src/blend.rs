//! Several datasets as one.

use std::sync::Arc;

use megaflow_core::{SampleError, SampleLayout, SampleSource, TokensMut};

use crate::error::BuildError;
use crate::greedy::GreedyIndex;
use crate::shares::{Phases, Place};

/// Which dataset gives which sample of a blend.
#[derive(Debug, Clone, PartialEq)]
pub enum BlendOrder {
    /// Megatron's table.
    Greedy(GreedyIndex),
    /// Exact shares, computed on the fly; the number of samples is what was asked for.
    Shares {
        /// Weights, and where they change.
        phases: Phases,
        /// Samples of the blend.
        num_samples: u64,
    },
}

impl BlendOrder {
    /// Number of samples.
    pub fn num_samples(&self) -> u64 {
        match self {
            Self::Greedy(index) => index.len() as u64,
            Self::Shares { num_samples, .. } => *num_samples,
        }
    }

    /// Where sample `index` comes from, if it exists.
    #[inline]
    pub fn locate(&self, index: u64) -> Option<Place> {
        match self {
            Self::Greedy(table) => table.locate(index),
            Self::Shares { phases, num_samples } => (index < *num_samples).then(|| phases.locate(index)),
        }
    }
}

/// Samples of several datasets, in the order of a [`BlendOrder`].
pub struct Blend {
    datasets: Vec<Arc<dyn SampleSource>>,
    order: BlendOrder,
    sample_len: usize,
}

impl Blend {
    /// Joins datasets.
    ///
    /// # Errors
    /// [`BuildError::BadDataset`] if their samples differ in length, or the order draws more of one than it has.
    pub fn new(datasets: Vec<Arc<dyn SampleSource>>, order: BlendOrder) -> Result<Self, BuildError> {
        let sample_len = datasets.first().map_or(0, |dataset| dataset.sample_len());
        let blend = Self { datasets, order, sample_len };
        let counts = blend.counts(blend.order.num_samples());
        if counts.len() > blend.datasets.len() {
            let reason = "it has a weight, but there is no such dataset".to_owned();
            return Err(BuildError::BadDataset { dataset: blend.datasets.len() + 1, reason });
        }
        for (number, dataset) in blend.datasets.iter().enumerate() {
            let bad = |reason| Err(BuildError::BadDataset { dataset: number + 1, reason });
            if dataset.sample_len() != sample_len {
                return bad(format!(
                    "its samples have {} tokens, those of the first {sample_len}",
                    dataset.sample_len()
                ));
            }
            let (drawn, has) = (counts.get(number).copied().unwrap_or(0), dataset.num_samples());
            if drawn > has {
                return bad(format!("the blend draws {drawn} samples of it, and it has {has}"));
            }
        }
        Ok(blend)
    }

    /// The datasets.
    pub fn datasets(&self) -> &[Arc<dyn SampleSource>] {
        &self.datasets
    }

    /// The order.
    pub fn order(&self) -> &BlendOrder {
        &self.order
    }

    /// Where sample `index` comes from.
    ///
    /// # Errors
    /// [`SampleError::OutOfRange`] if there is no such sample.
    #[inline]
    pub fn locate(&self, index: u64) -> Result<Place, SampleError> {
        let num_samples = self.order.num_samples();
        self.order.locate(index).ok_or(SampleError::OutOfRange { index, num_samples })
    }

    /// Samples that each dataset gives to the first `count` of the blend. Megatron's table is counted through.
    pub fn counts(&self, count: u64) -> Vec<u64> {
        match &self.order {
            BlendOrder::Shares { phases, num_samples } => phases.counts(count.min(*num_samples)),
            BlendOrder::Greedy(index) => {
                let mut counts = vec![0; self.datasets.len()];
                let count = usize::try_from(count).unwrap_or(usize::MAX).min(index.len());
                for dataset in index.dataset_index.iter().take(count) {
                    if counts.len() <= dataset as usize {
                        counts.resize(dataset as usize + 1, 0);
                    }
                    counts[dataset as usize] += 1;
                }
                counts
            }
        }
    }

    fn read<T>(
        &self,
        index: u64,
        read: impl FnOnce(&dyn SampleSource, u64) -> Result<T, SampleError>,
    ) -> Result<T, SampleError> {
        let place = self.locate(index)?;
        read(&*self.datasets[place.dataset], place.sample).map_err(|error| of_dataset(index, place.dataset, error))
    }
}

/// The error of a dataset, told of the blend.
#[cold]
fn of_dataset(index: u64, dataset: usize, error: SampleError) -> SampleError {
    match error {
        SampleError::NotReady { .. } => SampleError::NotReady { index },
        SampleError::IdTooLarge { id, dtype, .. } => SampleError::IdTooLarge { index, id, dtype },
        other => SampleError::Damaged { index, detail: format!("dataset {} of the blend: {other}", dataset + 1) },
    }
}

impl SampleSource for Blend {
    fn num_samples(&self) -> u64 {
        self.order.num_samples()
    }

    fn sample_len(&self) -> usize {
        self.sample_len
    }

    fn read_sample(&self, index: u64, out: &mut [i64]) -> Result<(), SampleError> {
        self.read(index, |dataset, sample| dataset.read_sample(sample, out))
    }

    fn read_into(&self, index: u64, out: TokensMut<'_>) -> Result<(), SampleError> {
        self.read(index, |dataset, sample| dataset.read_into(sample, out))
    }

    fn read_counted(&self, index: u64, out: TokensMut<'_>) -> Result<usize, SampleError> {
        self.read(index, |dataset, sample| dataset.read_counted(sample, out))
    }

    fn read_ahead(&self, index: u64) {
        if let Some(place) = self.order.locate(index) {
            self.datasets[place.dataset].read_ahead(place.sample);
        }
    }

    fn sample_tokens(&self, index: u64) -> Result<usize, SampleError> {
        self.read(index, |dataset, sample| dataset.sample_tokens(sample))
    }

    fn layout(&self, index: u64, layout: &mut SampleLayout) -> Result<(), SampleError> {
        let number = self.locate(index)?.dataset as u32;
        self.read(index, |dataset, sample| dataset.layout(sample, layout))?;
        layout.pieces.iter_mut().for_each(|piece| piece.dataset = number);
        Ok(())
    }

    fn has_sample(&self, index: u64) -> Result<bool, SampleError> {
        if index >= self.order.num_samples() {
            return Ok(false);
        }
        self.read(index, |dataset, sample| dataset.has_sample(sample))
    }

    fn announce(&self, index: u64) {
        if let Some(place) = self.order.locate(index) {
            self.datasets[place.dataset].announce(place.sample);
        }
    }

    fn received(&self, count: u64) {
        // Megatron's table holds stored sets only, which keep nothing for those that were handed out.
        if let BlendOrder::Shares { .. } = self.order {
            for (dataset, count) in self.datasets.iter().zip(self.counts(count)) {
                dataset.received(count);
            }
        }
    }
}
