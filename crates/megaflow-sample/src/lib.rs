//! Which tokens make which sample.
//!
//! A split gives a dataset its sequences. In Megatron's order [`GptIndex::build`] makes the document, sample and shuffle
//! index from their lengths, bit for bit as Megatron-LM does, and [`GptDataset`] reads the samples. [`InstantDataset`]
//! needs no index: it cuts in file order and hands out by a computed permutation. [`BestFitDataset`] packs documents
//! without cutting them. [`Blend`] joins datasets, by Megatron's table or at exact shares.
#![forbid(unsafe_code)]

mod best_fit;
mod blend;
mod cache;
mod capacity;
mod column;
mod cyclic;
mod error;
mod fim;
mod flat;
mod gather;
mod gpt;
mod greedy;
mod index;
mod instant;
mod mock;
mod mt19937;
mod shares;
mod split;
mod window;

pub use best_fit::{BestFitConfig, BestFitDataset};
pub use blend::{Blend, BlendOrder};
pub use cache::{CacheOutcome, CachePlace};
pub use column::{Column, Item, MappedColumn};
pub use cyclic::CyclicSource;
pub use error::BuildError;
pub use fim::{FimConfig, FimSource, TextCodec};
pub use gpt::{GptConfig, GptDataset};
pub use greedy::{GreedyIndex, normalized};
pub use index::{GptIndex, IndexConfig, SampleIndex, SequenceLengths, ShuffleIndex};
pub use instant::{InstantConfig, InstantDataset, Shuffle};
pub use mock::MockDataset;
pub use mt19937::Mt19937;
pub use shares::{Phases, Place, Shares};
pub use split::{SplitMatrix, SplitName};
