//! Megatron's order of the samples of a blend.

use crate::cache::{CacheOutcome, CachePlace, CacheWriter, Cached};
use crate::column::Column;
use crate::error::BuildError;
use crate::shares::{Place, check_weights};

/// Megatron counts datasets in `i16`.
const MAX_DATASETS: usize = 32_766;

/// For each sample of a blend its dataset and its number in it, bit for bit Megatron's.
///
/// Each step draws the dataset that lags most behind its share, the first of several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GreedyIndex {
    /// Dataset of each sample.
    pub dataset_index: Column<i16>,
    /// Number of each sample in its dataset.
    pub dataset_sample_index: Column<i64>,
}

impl GreedyIndex {
    /// `size` samples in the ratio of `weights`, which are divided by their sum.
    ///
    /// # Errors
    /// [`BuildError`] if weights mean nothing, there are too many, or memory does not suffice.
    pub fn weighted(weights: &[f64], size: u64) -> Result<Self, BuildError> {
        check_weights(weights)?;
        let mut greedy = Greedy::new(&normalized(weights), size)?;
        while !greedy.is_full() {
            // A weight of 0 stays at error 0 and is drawn only if all others are ahead, which never holds: the errors
            // add up to 0 or more, and one of them is above 0 or all are 0, where the first of a positive weight wins.
            greedy.draw();
        }
        Ok(greedy.into_index())
    }

    /// Every sample of datasets of these sizes once.
    ///
    /// # Errors
    /// As [`weighted`](Self::weighted).
    pub fn exhaustive(sizes: &[u64]) -> Result<Self, BuildError> {
        let weights: Vec<f64> = sizes.iter().map(|&size| size as f64).collect();
        if !sizes.is_empty() && sizes.iter().all(|&size| size == 0) {
            return Ok(Greedy::new(&weights, 0)?.into_index());
        }
        check_weights(&weights)?;
        let total = sizes.iter().try_fold(0u64, |total, &size| total.checked_add(size));
        let total = total.ok_or(BuildError::TooManySamples { num_samples: u64::MAX })?;
        // Megatron divides by the whole number, which differs from the sum of the floats only above 2^53.
        let weights: Vec<f64> = weights.iter().map(|weight| weight / total as f64).collect();
        let mut greedy = Greedy::new(&weights, total)?;
        for (error, &size) in greedy.open.iter_mut().zip(sizes) {
            *error = size > 0;
        }
        while !greedy.is_full() {
            let dataset = greedy.draw();
            if greedy.counts[dataset] == sizes[dataset] as f64 {
                greedy.open[dataset] = false;
            }
        }
        Ok(greedy.into_index())
    }

    /// As [`weighted`](Self::weighted), kept in `cache`.
    ///
    /// # Errors
    /// As [`weighted`](Self::weighted). A cache that cannot be used is no error.
    pub fn weighted_with(weights: &[f64], size: u64, cache: &CachePlace) -> Result<(Self, CacheOutcome), BuildError> {
        check_weights(weights)?;
        let is_right = |index: &Self| index.check(weights.len(), |_| size);
        cache.open_or_build(&|| Self::open(cache, size), &is_right, &|| Self::weighted(weights, size))
    }

    /// As [`exhaustive`](Self::exhaustive), kept in `cache`.
    ///
    /// # Errors
    /// As [`exhaustive`](Self::exhaustive). A cache that cannot be used is no error.
    pub fn exhaustive_with(sizes: &[u64], cache: &CachePlace) -> Result<(Self, CacheOutcome), BuildError> {
        let total = sizes.iter().fold(0u64, |total, &size| total.saturating_add(size));
        let is_right = |index: &Self| index.check(sizes.len(), |dataset| sizes[dataset]);
        cache.open_or_build(&|| Self::open(cache, total), &is_right, &|| Self::exhaustive(sizes))
    }

    fn open(cache: &CachePlace, size: u64) -> Result<Self, String> {
        let len = usize::try_from(size).map_err(|_| "too large for this machine".to_owned())?;
        Ok(Self {
            dataset_index: Column::open_npy(&cache.file("dataset_index.npy"), len, 1)?,
            dataset_sample_index: Column::open_npy(&cache.file("dataset_sample_index.npy"), len, 1)?,
        })
    }

    /// Whether the samples of every dataset come in their order, and no more of them than `limit` says.
    fn check(&self, num_datasets: usize, limit: impl Fn(usize) -> u64) -> Result<(), String> {
        let mut counts = vec![0u64; num_datasets];
        for (dataset, sample) in self.dataset_index.iter().zip(self.dataset_sample_index.iter()) {
            match usize::try_from(dataset).ok().filter(|&dataset| dataset < num_datasets) {
                Some(dataset) if sample as u64 == counts[dataset] && counts[dataset] < limit(dataset) => {
                    counts[dataset] += 1;
                }
                _ => return Err(format!("its order names sample {sample} of dataset {dataset} out of turn")),
            }
        }
        Ok(())
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.dataset_index.len()
    }

    /// Whether there is no sample.
    pub fn is_empty(&self) -> bool {
        self.dataset_index.is_empty()
    }

    /// Where sample `index` comes from, if it exists.
    #[inline]
    pub fn locate(&self, index: u64) -> Option<Place> {
        let index = usize::try_from(index).ok()?;
        let (dataset, sample) = (self.dataset_index.get(index)?, self.dataset_sample_index.get(index)?);
        Some(Place { dataset: dataset as usize, sample: sample as u64 })
    }
}

impl Cached for GreedyIndex {
    fn save(&self, writer: &CacheWriter<'_>) -> std::io::Result<()> {
        writer.array("dataset_index", &self.dataset_index, 1)?;
        writer.array("dataset_sample_index", &self.dataset_sample_index, 1)
    }
}

/// Weights divided by their sum, added in numpy's order.
pub fn normalized(weights: &[f64]) -> Vec<f64> {
    let total = numpy_sum(weights);
    weights.iter().map(|weight| weight / total).collect()
}

/// numpy's sum of a contiguous array: pairs of halves above 128 entries, eight running sums below. The last bits of the
/// weights depend on it.
fn numpy_sum(values: &[f64]) -> f64 {
    match values.len() {
        0..8 => values.iter().sum::<f64>() + 0.0,
        8..=128 => {
            let mut sums: [f64; 8] = std::array::from_fn(|lane| values[lane]);
            let chunks = values[8..].chunks_exact(8);
            let rest = chunks.remainder();
            for chunk in chunks {
                sums.iter_mut().zip(chunk).for_each(|(sum, value)| *sum += value);
            }
            let sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
            rest.iter().fold(sum, |sum, value| sum + value)
        }
        len => {
            let half = len / 2 - len / 2 % 8;
            numpy_sum(&values[..half]) + numpy_sum(&values[half..])
        }
    }
}

struct Greedy {
    weights: Vec<f64>,
    counts: Vec<f64>,
    open: Vec<bool>,
    drawn: u64,
    size: u64,
    datasets: Vec<i16>,
    samples: Vec<i64>,
}

impl Greedy {
    fn new(weights: &[f64], size: u64) -> Result<Self, BuildError> {
        if weights.len() > MAX_DATASETS {
            let (expected, found) = ("at most 32766 datasets", weights.len() as i128);
            return Err(BuildError::BadSetting { setting: "number of datasets", expected, found });
        }
        let len = usize::try_from(size).map_err(|_| BuildError::TooManySamples { num_samples: size })?;
        let (mut datasets, mut samples) = (Vec::new(), Vec::new());
        if datasets.try_reserve_exact(len).is_err() || samples.try_reserve_exact(len).is_err() {
            return Err(BuildError::TooManySamples { num_samples: size });
        }
        let count = weights.len();
        let open = weights.iter().map(|&weight| weight > 0.0).collect();
        Ok(Self { weights: weights.to_vec(), counts: vec![0.0; count], open, drawn: 0, size, datasets, samples })
    }

    fn into_index(self) -> GreedyIndex {
        GreedyIndex { dataset_index: Column::Owned(self.datasets), dataset_sample_index: Column::Owned(self.samples) }
    }

    fn is_full(&self) -> bool {
        self.drawn == self.size
    }

    /// Draws the dataset whose share most exceeds what it gave. Counts are whole numbers below 2^53, so doubles hold
    /// them exactly, and every step is the arithmetic of Megatron's helper.
    #[inline]
    fn draw(&mut self) -> usize {
        let scale = (self.drawn as f64).max(1.0);
        let (mut best, mut largest) = (0, f64::NEG_INFINITY);
        for (dataset, ((&weight, &count), &open)) in self.weights.iter().zip(&self.counts).zip(&self.open).enumerate() {
            let error = if open { weight * scale - count } else { f64::NEG_INFINITY };
            if error > largest {
                (best, largest) = (dataset, error);
            }
        }
        self.datasets.push(best as i16);
        self.samples.push(self.counts[best] as i64);
        self.counts[best] += 1.0;
        self.drawn += 1;
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_steps_are_megatrons() {
        // Step 0 and step 1 both weigh with 1; ties go to the first.
        let index = GreedyIndex::weighted(&[1.0, 1.0], 6).unwrap();
        assert!(index.dataset_index.iter().eq([0, 1, 0, 1, 0, 1]));
        assert!(index.dataset_sample_index.iter().eq([0, 0, 1, 1, 2, 2]));
    }

    #[test]
    fn weight_zero_is_never_drawn() {
        let index = GreedyIndex::weighted(&[0.0, 3.0, 0.0, 1.0], 5000).unwrap();
        assert!(index.dataset_index.iter().all(|dataset| matches!(dataset, 1 | 3)));
    }

    #[test]
    fn exhaustive_blend_delivers_every_sample_once() {
        assert!(GreedyIndex::exhaustive(&[0, 0]).unwrap().is_empty());
        let sizes = [0, 7, 100, 1, 33];
        let index = GreedyIndex::exhaustive(&sizes).unwrap();
        assert_eq!(index.len() as u64, sizes.iter().sum::<u64>());
        for (dataset, &size) in sizes.iter().enumerate() {
            let own = index.dataset_index.iter().zip(index.dataset_sample_index.iter());
            let samples: Vec<i64> = own.filter(|(of, _)| *of as usize == dataset).map(|(_, sample)| sample).collect();
            assert!(samples.into_iter().eq(0..size as i64));
        }
    }

    #[test]
    fn sums_are_those_of_numpy() {
        // numpy.sum(1.0 / numpy.arange(1, n + 1)) for n of each branch.
        let harmonic = |n: u32| numpy_sum(&(1..=n).map(|i| 1.0 / f64::from(i)).collect::<Vec<_>>());
        for (n, expected) in [(7, 2.5928571428571425), (100, 5.187377517639621), (1000, 7.485470860550345)] {
            assert_eq!(harmonic(n), expected, "{n}");
        }
    }
}
