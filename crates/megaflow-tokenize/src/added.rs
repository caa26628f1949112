//! Added tokens: found in the text before the model runs, as the `tokenizers` crate does it.

use aho_corasick::{AhoCorasick, MatchKind};

use crate::normalize::Normalizer;
use crate::{AddedTokenSpec, TokenizeError, TokenizerSpec};

/// A stretch of text, or an added token in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Piece<'a> {
    /// Text for the model.
    Text(&'a str),
    /// Id of an added token.
    Token(u32),
}

#[derive(Clone, Copy)]
struct Flags {
    id: u32,
    special: bool,
    lstrip: bool,
    rstrip: bool,
}

/// Tokens that are searched together.
struct Finder {
    automaton: AhoCorasick,
    flags: Vec<Flags>,
}

/// The added tokens of a tokenizer.
pub(crate) struct AddedTokens {
    /// Looked for in the text as it stands.
    raw: Option<Finder>,
    /// Looked for in the normalised text.
    normalized: Option<Finder>,
    all_special: bool,
    reaches_over_blanks: bool,
}

impl AddedTokens {
    /// From a description. `None` where the `tokenizers` crate does something that this does not: tokens that match
    /// whole words only, ids other than written.
    pub(crate) fn new(spec: &TokenizerSpec, normalizer: Normalizer) -> Result<Option<Self>, TokenizeError> {
        let tokens = &spec.added_tokens;
        if !ids_are_those_given(spec) || tokens.iter().any(|token| token.single_word || token.content.is_empty()) {
            return Ok(None);
        }
        let (mut ids, mut texts) = (std::collections::HashSet::new(), std::collections::HashSet::new());
        if !tokens.iter().all(|token| ids.insert(token.id) && texts.insert(&token.content)) {
            return Ok(None);
        }
        let normalized_text = |token: &AddedTokenSpec| normalizer.apply(&token.content).into_owned();
        let raw: Vec<_> = tokens.iter().filter(|t| !t.normalized).map(|t| (t.content.clone(), t)).collect();
        let normalized: Vec<_> = tokens.iter().filter(|t| t.normalized).map(|t| (normalized_text(t), t)).collect();
        let distinct: std::collections::HashSet<_> = normalized.iter().map(|(text, _)| text).collect();
        if distinct.len() != normalized.len() || distinct.iter().any(|text| text.is_empty()) {
            return Ok(None);
        }
        Ok(Some(Self {
            raw: Finder::new(&raw)?,
            normalized: Finder::new(&normalized)?,
            all_special: tokens.iter().all(|token| token.special),
            reaches_over_blanks: reaches_over_blanks(tokens),
        }))
    }

    /// From a description whose ids are as written and whose tokens have no flags.
    pub(crate) fn with_given_ids(spec: &TokenizerSpec) -> Result<Self, TokenizeError> {
        let raw: Vec<_> = spec.added_tokens.iter().map(|token| (token.content.clone(), token)).collect();
        let all_special = spec.added_tokens.iter().all(|token| token.special);
        Ok(Self {
            raw: Finder::new(&raw)?,
            normalized: None,
            all_special,
            reaches_over_blanks: reaches_over_blanks(&spec.added_tokens),
        })
    }

    /// Whether no token is found when special ones are text.
    pub(crate) fn all_special(&self) -> bool {
        self.all_special
    }

    /// Whether a token may hold or swallow a blank.
    pub(crate) fn reaches_over_blanks(&self) -> bool {
        self.reaches_over_blanks
    }

    /// Calls `each` for the pieces of `text` in order; texts are normalised. `special_as_text`: special tokens are not
    /// found.
    pub(crate) fn pieces(
        &self,
        text: &str,
        special_as_text: bool,
        normalizer: Normalizer,
        each: &mut dyn FnMut(Piece<'_>) -> Result<(), TokenizeError>,
    ) -> Result<(), TokenizeError> {
        split(self.raw.as_ref(), text, special_as_text, &mut |piece| match piece {
            Piece::Text(text) => split(self.normalized.as_ref(), &normalizer.apply(text), special_as_text, each),
            token => each(token),
        })
    }
}

fn reaches_over_blanks(tokens: &[AddedTokenSpec]) -> bool {
    tokens.iter().any(|token| token.lstrip || token.rstrip || token.content.contains(char::is_whitespace))
}

/// Whether the crate would give the added tokens the ids that the file names: those of the model's entries of the same
/// text, and consecutive ones behind the model's.
fn ids_are_those_given(spec: &TokenizerSpec) -> bool {
    let model_size = spec.model.vocab.len() as u32;
    let mut next = model_size;
    spec.added_tokens.iter().all(|token| {
        let id = spec.model.vocab.id(&token.content).unwrap_or_else(|| {
            next += 1;
            next - 1
        });
        id == token.id
    })
}

impl Finder {
    fn new(tokens: &[(String, &AddedTokenSpec)]) -> Result<Option<Self>, TokenizeError> {
        if tokens.is_empty() {
            return Ok(None);
        }
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens.iter().map(|(text, _)| text))
            .map_err(|error| TokenizeError::invalid(format!("added tokens: {error}")))?;
        let flags = tokens
            .iter()
            .map(|(_, t)| Flags { id: t.id, special: t.special, lstrip: t.lstrip, rstrip: t.rstrip })
            .collect();
        Ok(Some(Self { automaton, flags }))
    }
}

fn split(
    finder: Option<&Finder>,
    text: &str,
    special_as_text: bool,
    each: &mut dyn FnMut(Piece<'_>) -> Result<(), TokenizeError>,
) -> Result<(), TokenizeError> {
    let mut done = 0;
    if let Some(finder) = finder {
        for found in finder.automaton.find_iter(text) {
            let flags = finder.flags[found.pattern().as_usize()];
            if flags.special && special_as_text {
                continue;
            }
            let (mut start, mut end) = (found.start(), found.end());
            if flags.lstrip {
                start = text[..start].trim_end().len().max(done);
            }
            if flags.rstrip {
                end = text.len() - text[end..].trim_start().len();
            }
            if done < start {
                each(Piece::Text(&text[done..start]))?;
            }
            each(Piece::Token(flags.id))?;
            done = end;
        }
    }
    if done < text.len() { each(Piece::Text(&text[done..])) } else { Ok(()) }
}
