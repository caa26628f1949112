use std::path::PathBuf;

/// Why a tokenizer could not be loaded, or a text not be encoded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizeError {
    /// A named file or folder does not exist.
    #[error("{}: no such tokenizer file or folder", .path.display())]
    Missing {
        /// What was asked for.
        path: PathBuf,
    },
    /// A file exists but cannot be read.
    #[error("{}: cannot be read: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The content is none of the kinds that are known.
    #[error("{}: {detail}", .path.display())]
    NotATokenizer {
        /// The file or folder.
        path: PathBuf,
        /// What was expected and what was found.
        detail: String,
    },
    /// The description of the tokenizer contradicts itself.
    #[error("tokenizer: {detail}")]
    Invalid {
        /// Expected and found.
        detail: String,
    },
    /// Asked for a token that the vocabulary lacks.
    #[error("the tokenizer has no token {token:?}; name one of its {vocab_size} tokens")]
    UnknownToken {
        /// Name asked for.
        token: String,
        /// Entries of the vocabulary.
        vocab_size: u64,
    },
    /// Asked for the tokens around a text, and there are none.
    #[error(
        "asked to add special tokens (a BOS or the like) to each text, but this tokenizer has no rule that adds any; leave \
         add_special_tokens off, or take a tokenizer.json whose post_processor adds them"
    )]
    NothingToAdd,
    /// The rule that adds tokens names one that does not exist.
    #[error(
        "the tokenizer's post_processor adds the id {id}, which is outside the vocabulary of {vocab_size} ids; mend its file"
    )]
    AddsUnknownId {
        /// The id.
        id: u32,
        /// Entries of the vocabulary.
        vocab_size: u64,
    },
    /// An id outside the vocabulary.
    #[error("token id {id} is outside the vocabulary of {vocab_size} ids")]
    UnknownId {
        /// The id.
        id: u32,
        /// Entries of the vocabulary.
        vocab_size: u64,
    },
    /// The text spells a special token, and the policy is to refuse that.
    #[error(
        "the text spells the special token {token:?} at byte {offset}; \
         use --special-tokens-in-text text (keep it as text) or encode (make it the token)"
    )]
    SpecialInText {
        /// The token's text.
        token: String,
        /// Byte offset in the document.
        offset: usize,
    },
    /// The engine refused the text.
    #[error("text of {bytes} bytes cannot be encoded: {detail}")]
    Encode {
        /// Length of the text.
        bytes: usize,
        /// What the engine said.
        detail: String,
    },
}

impl TokenizeError {
    /// For descriptions that contradict themselves.
    pub(crate) fn invalid(detail: impl Into<String>) -> Self {
        Self::Invalid { detail: detail.into() }
    }
}
