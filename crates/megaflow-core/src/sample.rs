//! The trait through which indexed, blended and streamed sets reach the loader alike.

use crate::{TokenDtype, TokensMut};

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
    /// The inputs hold nothing from which a sample could be made.
    #[error("{detail}")]
    Empty {
        /// Inputs, and what was found in them.
        detail: String,
    },
    /// The sample is being made. Ask again: nothing is lost.
    #[error("sample {index} is not made yet")]
    NotReady {
        /// Position asked for.
        index: u64,
    },
    /// A token does not fit into the type that was asked for.
    #[error(
        "sample {index} holds token {id}, which {dtype} cannot hold (largest: {}); ask for int32 or int64",
        .dtype.max_id()
    )]
    IdTooLarge {
        /// Position asked for.
        index: u64,
        /// The token.
        id: i64,
        /// The type.
        dtype: TokenDtype,
    },
}

/// A run of stored tokens that is part of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Dataset of a blend; 0 where there is one dataset only.
    pub dataset: u32,
    /// Sequence of the dataset (a document has one sequence or several).
    pub sequence: u64,
    /// First token in that sequence.
    pub offset: u64,
    /// Tokens.
    pub length: u64,
}

/// What a sample is made of.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SampleLayout {
    /// Stored runs that the sample is made of, in the order in which they stand in it, none of them empty. Their
    /// lengths add up to the sample without its padding, unless tokens were put in between (fill in the middle).
    pub pieces: Vec<Piece>,
    /// Positions in the sample where attention and position ids may start again: the first token of every piece, and
    /// of the padding. They ascend, from 0.
    pub starts: Vec<u32>,
}

impl SampleLayout {
    /// Forgets everything, keeping the memory.
    pub fn clear(&mut self) {
        self.pieces.clear();
        self.starts.clear();
    }
}

/// Samples of equal length that can be read in any order, from any thread.
///
/// A sample is a pure function of its position: reading it changes nothing and does not depend on what was read before.
/// A stream makes its samples in order and lets go of those that were handed out; the loader tells it what it will
/// [read](Self::announce) and what it has [handed out](Self::received).
pub trait SampleSource: Send + Sync {
    /// Number of samples; of a stream without a known end, [`UNKNOWN_LEN`].
    fn num_samples(&self) -> u64;

    /// Tokens of one sample, with the extra token whose shift makes the labels.
    fn sample_len(&self) -> usize;

    /// Writes sample `index` into `out`, which holds exactly `sample_len` ids.
    ///
    /// # Errors
    /// [`SampleError`] if the position does not exist or the data is damaged; `out` is then undefined.
    fn read_sample(&self, index: u64, out: &mut [i64]) -> Result<(), SampleError>;

    /// As [`read_sample`](Self::read_sample), into tokens of another type.
    ///
    /// # Errors
    /// As [`read_sample`](Self::read_sample), and [`SampleError::IdTooLarge`] for a token that the type cannot hold.
    fn read_into(&self, index: u64, mut out: TokensMut<'_>) -> Result<(), SampleError> {
        if let TokensMut::I64(out) = out {
            return self.read_sample(index, out);
        }
        let mut wide = vec![0; out.len()];
        self.read_sample(index, &mut wide)?;
        let tokens = self.sample_tokens(index)?.min(wide.len());
        out.pad(wide.get(tokens).copied().unwrap_or(0));
        out.write_i64(index, &wide[..tokens])
    }

    /// As [`read_into`](Self::read_into); tells how many tokens are not padding, as [`sample_tokens`](Self::sample_tokens)
    /// does. A source that learns that while it reads does it in one go.
    ///
    /// # Errors
    /// As [`read_into`](Self::read_into).
    fn read_counted(&self, index: u64, out: TokensMut<'_>) -> Result<usize, SampleError> {
        self.read_into(index, out)?;
        self.sample_tokens(index)
    }

    /// Tokens of sample `index` that are not padding; padding lies at the end only.
    ///
    /// # Errors
    /// As [`read_sample`](Self::read_sample).
    fn sample_tokens(&self, _index: u64) -> Result<usize, SampleError> {
        Ok(self.sample_len())
    }

    /// Tells what sample `index` is made of, without reading its tokens. What `layout` held before is forgotten. A
    /// source that does not know leaves it empty.
    ///
    /// # Errors
    /// As [`read_sample`](Self::read_sample).
    fn layout(&self, _index: u64, layout: &mut SampleLayout) -> Result<(), SampleError> {
        layout.clear();
        Ok(())
    }

    /// Whether there is a sample `index`. A stream may have to make it first.
    ///
    /// # Errors
    /// As [`read_sample`](Self::read_sample); [`SampleError::NotReady`] if it is not known yet.
    fn has_sample(&self, index: u64) -> Result<bool, SampleError> {
        Ok(index < self.num_samples())
    }

    /// Tells that sample `index` will be read soon. Called with rising positions.
    fn announce(&self, _index: u64) {}

    /// Asks the system to fetch what sample `index` lies in, without waiting for it.
    fn read_ahead(&self, _index: u64) {}

    /// Tells that every sample before `count` that will ever be read was handed out.
    fn received(&self, _count: u64) {}
}

/// Number of samples of a stream that does not know its end.
pub const UNKNOWN_LEN: u64 = i64::MAX as u64;
