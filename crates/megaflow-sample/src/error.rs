//! Why samples could not be laid out.

use megaflow_indexed::IndexError;

use crate::split::SplitName;

/// Why the samples of a dataset could not be laid out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The split string names no three shares.
    #[error(
        "split {split:?}: {reason}; expected up to three shares of train, valid and test, for example \"969,30,1\""
    )]
    BadSplit {
        /// The string as given.
        split: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A setting has no meaning.
    #[error("{setting} = {found}: expected {expected}")]
    BadSetting {
        /// Name of the setting.
        setting: &'static str,
        /// What would be right.
        expected: &'static str,
        /// What was given.
        found: i128,
    },
    /// Samples were asked of a split without sequences.
    #[error(
        "{dataset}: the {split} split rounds to none of the {num_sequences} sequences, so it cannot give the \
         {num_samples} samples asked of it; give the split a larger share, or ask for 0 samples"
    )]
    EmptySplit {
        /// Which dataset.
        dataset: String,
        /// Which split.
        split: SplitName,
        /// Sequences of the dataset.
        num_sequences: usize,
        /// Samples asked for.
        num_samples: u64,
    },
    /// Samples were asked of sequences without tokens.
    #[error("all {num_sequences} sequences are empty, so they cannot give the {num_samples} samples asked of them")]
    NoTokens {
        /// Sequences of the split.
        num_sequences: usize,
        /// Samples asked for.
        num_samples: u64,
    },
    /// A sequence has a negative length.
    #[error(
        "sequence {sequence}: expected a length of 0 or more, found {found}; the .idx is damaged: write or copy it \
         again"
    )]
    BadLength {
        /// Which sequence.
        sequence: usize,
        /// Its length.
        found: i32,
    },
    /// Megatron's order names sequences by `i32`.
    #[error(
        "the split has sequences up to number {last}, but the megatron order counts them in int32, up to {}; split \
         the dataset",
        i32::MAX
    )]
    TooManySequences {
        /// Largest sequence number.
        last: usize,
    },
    /// The index does not fit into memory, or into 64 bits.
    #[error(
        "{num_samples} samples of {seq_len} tokens repeat the {tokens_per_epoch} tokens of this split {num_epochs} \
         times: the {array} index is too large for this machine; ask for fewer samples"
    )]
    TooLarge {
        /// `document`, `sample` or `shuffle`.
        array: &'static str,
        /// Samples asked for.
        num_samples: u64,
        /// Tokens of a sample.
        seq_len: u64,
        /// Tokens of the split.
        tokens_per_epoch: u64,
        /// Times that the split would be repeated.
        num_epochs: u128,
    },
    /// The weights of a blend mean nothing.
    #[error("weights of the blend: {reason}; expected one finite weight of 0 or more for each dataset, one above 0")]
    BadWeights {
        /// What is wrong with them.
        reason: String,
    },
    /// A table of samples does not fit into memory.
    #[error("a blend of {num_samples} samples has an order too large for this machine; use the instant order")]
    TooManySamples {
        /// Samples asked for.
        num_samples: u64,
    },
    /// The datasets of a blend cannot be handed out together.
    #[error("dataset {dataset} of the blend: {reason}")]
    BadDataset {
        /// Which, counted from 1.
        dataset: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// The dataset could not be opened or read.
    #[error(transparent)]
    Index(#[from] IndexError),
}
