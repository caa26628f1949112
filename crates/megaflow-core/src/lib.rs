//! What every crate of megaflow shares: token types, and the trait through which samples reach the loader.
//!
//! No I/O and no threads live here.
#![forbid(unsafe_code)]

mod dtype;
mod permutation;
mod sample;
mod tokens;

pub use dtype::{TokenDtype, U16_VOCAB_LIMIT};
pub use permutation::{KeyedPermutation, mix};
pub use sample::{Piece, SampleError, SampleLayout, SampleSource, UNKNOWN_LEN};
pub use tokens::TokensMut;
