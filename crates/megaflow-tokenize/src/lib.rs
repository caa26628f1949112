//! Documents to token ids: one [`Tokenizer`], whatever file it came from, and one [`Encoder`] for each thread.
//!
//! ```
//! use megaflow_tokenize::{EncodeOptions, Tokenizer};
//!
//! let json = br#"{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"},
//!     "pre_tokenizer": {"type": "Whitespace"}}"#;
//! let tokenizer = Tokenizer::from_tokenizer_json(json)?;
//! let mut ids = Vec::new();
//! tokenizer.encoder(EncodeOptions::default())?.encode("a b a", &mut ids)?;
//! assert_eq!(ids, [0, 1, 0]);
//! # Ok::<(), megaflow_tokenize::TokenizeError>(())
//! ```
#![deny(unsafe_code)]

mod added;
mod batch;
mod bpe;
mod ends;
mod error;
mod fallback;
mod idle;
mod load;
mod normalize;
mod post;
mod room;
mod scan;
mod sentencepiece;
#[expect(unsafe_code, reason = "vector instructions")]
mod simd;
mod spec;
mod special;
mod tokenizer;
mod unicode;

pub use batch::EncodedBatch;
pub use ends::{DocumentEnd, Ends};
pub use error::TokenizeError;
pub use load::TokenizerFiles;
pub use room::UsedIds;
pub use spec::{AddedTokenSpec, ModelSpec, TokenizerSpec};
pub use special::SpecialTokensInText;
pub use tokenizer::{EncodeOptions, Encoder, Engine, EngineEncoder, EngineKind, Tokenizer};
