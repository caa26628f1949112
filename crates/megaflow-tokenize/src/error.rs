use std::path::PathBuf;

use crate::DocumentEnd;

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
    /// Asked for a BOS or EOS, and there is none.
    #[error(
        "{tokenizer}: asked for {a} {name} {side} each document ({setting}), but this tokenizer has none: nothing declares one, and \
         none of {known} is a token of its own; leave {setting} off, or name the token as \"{key}\" in a tokenizer_config.json \
         beside the tokenizer's file",
        a = if *.end == DocumentEnd::Bos { "a" } else { "an" }, name = .end.name(), side = .end.side(),
        setting = .end.setting(), key = .end.key(), known = .end.known_names().join(", ")
    )]
    NoEndToken {
        /// The tokenizer's file, or that it has none.
        tokenizer: String,
        /// Which end.
        end: DocumentEnd,
    },
    /// The declared BOS or EOS does not exist.
    #[error(
        "{tokenizer}: the tokenizer_config.json beside it declares {token:?} as {key}, which is none of the {vocab_size} tokens; \
         mend one of the two files"
    )]
    DeclaredUnknown {
        /// The tokenizer's file.
        tokenizer: String,
        /// `bos_token` or `eos_token`.
        key: &'static str,
        /// What is declared.
        token: String,
        /// Entries of the vocabulary.
        vocab_size: u64,
    },
    /// A BOS or EOS would be put there twice.
    #[error(
        "{tokenizer}: {setting} and add_special_tokens would both put the {name} {token:?} (id {id}) {side} each text, since the \
         tokenizer's post_processor adds it; leave one of the two off",
        setting = .end.setting(), name = .end.name(), side = .end.side()
    )]
    AddedTwice {
        /// The tokenizer's file, or that it has none.
        tokenizer: String,
        /// Which end.
        end: DocumentEnd,
        /// The token.
        token: String,
        /// Its id.
        id: u32,
    },
    /// The EOS is the end-of-document token.
    #[error(
        "{tokenizer}: add_eos and append_eod would both end each document with {token:?} (id {id}), which is its EOS and its \
         end of document; leave one of the two off, or name another end of document with eod_token"
    )]
    EndsTwice {
        /// The tokenizer's file, or that it has none.
        tokenizer: String,
        /// The token.
        token: String,
        /// Its id.
        id: u32,
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
