//! Which tokens make which sample, in Megatron's order.
//!
//! A split gives a dataset its sequences; from their lengths [`GptIndex::build`] makes the document, sample and shuffle
//! index, bit for bit as Megatron-LM does; [`GptDataset`] reads the samples.
#![forbid(unsafe_code)]

mod error;
mod gather;
mod gpt;
mod index;
mod mt19937;
mod split;

pub use error::BuildError;
pub use gpt::{GptConfig, GptDataset};
pub use index::{GptIndex, IndexConfig, SampleIndex, SequenceLengths, ShuffleIndex};
pub use mt19937::Mt19937;
pub use split::{SplitMatrix, SplitName};
