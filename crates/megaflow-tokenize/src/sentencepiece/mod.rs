//! SentencePiece models: BPE on the fast path, unigram by its own algorithm.

mod build;
mod engine;
mod normalize;
mod proto;
mod unigram;

pub(crate) use engine::SentencePiece;
pub(crate) use proto::Model;
