//! Why batches could not be planned or gathered.

use megaflow_core::SampleError;

/// Why batches could not be planned or gathered.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum PrefetchError {
    /// A setting has no meaning.
    #[error("{setting} = {found}: expected {expected}")]
    BadSetting {
        /// Name of the setting.
        setting: &'static str,
        /// What would be right.
        expected: String,
        /// What was given.
        found: u64,
    },
    /// A sample of the batch could not be read.
    #[error("batch {batch} of this rank: {source}")]
    Sample {
        /// Number of the batch, counted from where the loader started.
        batch: u64,
        /// What happened to the sample.
        source: SampleError,
    },
    /// The source panicked.
    #[error(
        "batch {batch} of this rank: the dataset panicked while it was read: {message}; this is a bug, please report \
         it"
    )]
    Panicked {
        /// Number of the batch, counted from where the loader started.
        batch: u64,
        /// What the panic said.
        message: String,
    },
    /// The system gave no thread.
    #[error("cannot start loader thread {thread} of {num_threads}: {reason}; ask for fewer threads")]
    NoThread {
        /// Which thread, counted from 1.
        thread: usize,
        /// Threads asked for.
        num_threads: usize,
        /// The system's reason.
        reason: String,
    },
    /// The batches were asked for in a forked child.
    #[error(
        "the loader was made in process {parent}, but this is process {child}, forked from it: its threads do not \
         exist here; make the loader in the process that uses it"
    )]
    Forked {
        /// Process that made the loader.
        parent: u32,
        /// Process that asks.
        child: u32,
    },
}
