//! Text that spells a special token.

use aho_corasick::{AhoCorasick, MatchKind};

use crate::TokenizeError;

/// What to do with text that spells a special token, such as `<|endoftext|>`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SpecialTokensInText {
    /// It is ordinary text; it is counted.
    #[default]
    Text,
    /// It becomes the token, as in Hugging Face's and Megatron's tools.
    Encode,
    /// It is an error.
    Error,
}

/// Finds the special tokens of a tokenizer in text.
#[derive(Debug)]
pub(crate) struct SpecialFinder {
    automaton: Option<AhoCorasick>,
    tokens: Vec<String>,
}

impl SpecialFinder {
    /// A finder of these texts; empty ones are left out.
    pub(crate) fn new(tokens: &[&str]) -> Result<Self, TokenizeError> {
        let tokens: Vec<String> =
            tokens.iter().filter(|text| !text.is_empty()).map(|text| (*text).to_owned()).collect();
        let automaton = (!tokens.is_empty())
            .then(|| AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(&tokens))
            .transpose()
            .map_err(|error| TokenizeError::invalid(format!("special tokens: {error}")))?;
        Ok(Self { automaton, tokens })
    }

    /// Number of places where `text` spells a special token.
    pub(crate) fn count(&self, text: &str) -> u64 {
        self.automaton.as_ref().map_or(0, |automaton| automaton.find_iter(text).count() as u64)
    }

    /// Fails on the first place where `text` spells a special token.
    pub(crate) fn refuse(&self, text: &str) -> Result<(), TokenizeError> {
        match self.automaton.as_ref().and_then(|automaton| automaton.find(text)) {
            None => Ok(()),
            Some(hit) => Err(TokenizeError::SpecialInText {
                token: self.tokens[hit.pattern().as_usize()].clone(),
                offset: hit.start(),
            }),
        }
    }
}
