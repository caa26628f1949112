//! The trait through which indexed, blended and streamed sets reach the loader alike.

/// Why a sample could not be read.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// The position lies behind the last sample.
    #[error("sample {index} does not exist: the dataset has {num_samples} samples")]
    OutOfRange {
        /// Position asked for.
        index: u64,
        /// Samples of the set.
        num_samples: u64,
    },
    /// The stored data contradicts itself, or is gone.
    #[error("sample {index} cannot be read: {detail}")]
    Damaged {
        /// Position asked for.
        index: u64,
        /// File, place, what was expected and what was found.
        detail: String,
    },
}

/// Samples of equal length that can be read in any order, from any thread.
///
/// A sample is a pure function of its position: reading it changes nothing and does not depend on what was read before.
pub trait SampleSource: Send + Sync {
    /// Number of samples.
    fn num_samples(&self) -> u64;

    /// Tokens of one sample, with the extra token whose shift makes the labels.
    fn sample_len(&self) -> usize;

    /// Writes sample `index` into `out`, which holds exactly `sample_len` ids.
    ///
    /// # Errors
    /// [`SampleError`] if the position does not exist or the data is damaged; `out` is then undefined.
    fn read_sample(&self, index: u64, out: &mut [i64]) -> Result<(), SampleError>;
}
