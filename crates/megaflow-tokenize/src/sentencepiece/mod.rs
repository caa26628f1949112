//! SentencePiece models: BPE on the fast path, unigram by its own algorithm, the rest step by step.

mod build;
mod engine;
mod normalize;
mod proto;
mod stepwise;
mod unigram;

pub(crate) use engine::SentencePiece;
pub(crate) use proto::Model;
