//! The tokens at the two ends of a document: which ones a tokenizer has, and what may not be asked for together.
//!
//! What is declared counts: by a `tokenizer_config.json` beside the tokenizer's file, else by the file itself (SentencePiece,
//! tekken). Where nobody says anything, a few known names count that nothing but the token itself can mean.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::Value;

use crate::post::Surround;
use crate::spec::MergeSpec;
use crate::{EncodeOptions, TokenizeError, Tokenizer, TokenizerSpec};

/// One of the two ends of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DocumentEnd {
    /// Its begin, where a BOS stands.
    Bos,
    /// Its end, where an EOS stands.
    Eos,
}

use DocumentEnd::{Bos, Eos};

impl DocumentEnd {
    /// `BOS` or `EOS`.
    pub(crate) fn name(self) -> &'static str {
        if self == Bos { "BOS" } else { "EOS" }
    }

    /// The setting that asks for it.
    pub(crate) fn setting(self) -> &'static str {
        if self == Bos { "add_bos" } else { "add_eos" }
    }

    /// Its key in a `tokenizer_config.json`.
    pub(crate) fn key(self) -> &'static str {
        if self == Bos { "bos_token" } else { "eos_token" }
    }

    /// Where it goes.
    pub(crate) fn side(self) -> &'static str {
        if self == Bos { "before" } else { "behind" }
    }

    /// Names that mean such a token wherever one of them is a token of its own.
    pub(crate) fn known_names(self) -> &'static [&'static str] {
        match self {
            Bos => &[
                "<|begin_of_text|>",
                "<s>",
                "<bos>",
                "<|startoftext|>",
                "<\u{FF5C}begin\u{2581}of\u{2581}sentence\u{FF5C}>",
            ],
            Eos => &[
                "<|end_of_text|>",
                "</s>",
                "<eos>",
                "<|endoftext|>",
                "<\u{FF5C}end\u{2581}of\u{2581}sentence\u{FF5C}>",
            ],
        }
    }
}

/// Ids that go around each document: those that were asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ends {
    /// Before its first token.
    pub bos: Option<u32>,
    /// Behind its last token.
    pub eos: Option<u32>,
}

/// What somebody says of one end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum Declaration {
    /// Nothing.
    #[default]
    Unsaid,
    /// That there is no such token.
    Absent,
    /// That this is it.
    Token(String),
}

impl Declaration {
    /// What a JSON object says under a key: a token, an object that holds one, or null.
    fn of(object: &Value, key: &str) -> Self {
        match object.get(key) {
            None => Self::Unsaid,
            Some(value) => value
                .as_str()
                .or_else(|| value["content"].as_str())
                .filter(|token| !token.is_empty())
                .map_or(Self::Absent, |token| Self::Token(token.to_owned())),
        }
    }

    /// The other one, where this one is none.
    fn or(self, other: Self) -> Self {
        if self == Self::Unsaid { other } else { self }
    }
}

/// What is declared of the ends, and by which tokenizer.
#[derive(Debug, Clone, Default)]
pub(crate) struct Declared {
    /// The tokenizer's file, for messages.
    pub(crate) file: Option<PathBuf>,
    pub(crate) bos: Declaration,
    pub(crate) eos: Declaration,
}

impl Declared {
    /// What the `tokenizer_config.json` beside a tokenizer's file says, if there is one.
    pub(crate) fn beside(file: &Path) -> Result<Self, TokenizeError> {
        let path = file.with_file_name("tokenizer_config.json");
        let declared = Self { file: Some(file.to_owned()), ..Self::default() };
        if !path.is_file() {
            return Ok(declared);
        }
        let bytes = fs::read(&path).map_err(|source| TokenizeError::Io { path: path.clone(), source })?;
        let config: Value = serde_json::from_slice(&bytes)
            .map_err(|error| TokenizeError::NotATokenizer { path, detail: format!("is not JSON: {error}") })?;
        let (bos, eos) = (Declaration::of(&config, Bos.key()), Declaration::of(&config, Eos.key()));
        Ok(Self { bos, eos, ..declared })
    }

    /// Without tokens that are not in the vocabulary. Where a vocabulary is all there is (`vocab.json`, a `.model`, ranks), a
    /// configuration beside it may well speak of tokens that further files add.
    pub(crate) fn within(mut self, spec: &TokenizerSpec) -> Self {
        for declaration in [&mut self.bos, &mut self.eos] {
            if matches!(declaration, Declaration::Token(token) if spec.token_id(token).is_none()) {
                *declaration = Declaration::Unsaid;
            }
        }
        self
    }

    /// What the tokenizer's file says itself counts where the configuration says nothing.
    pub(crate) fn or(self, bos: Declaration, eos: Declaration) -> Self {
        Self { bos: self.bos.or(bos), eos: self.eos.or(eos), file: self.file }
    }

    pub(crate) fn of(&self, end: DocumentEnd) -> &Declaration {
        if end == Bos { &self.bos } else { &self.eos }
    }

    /// The tokenizer in a message.
    pub(crate) fn subject(&self) -> String {
        self.file.as_ref().map_or_else(|| "the tokenizer".to_owned(), |file| file.display().to_string())
    }

    fn find(&self, end: DocumentEnd, spec: &TokenizerSpec) -> Result<Option<(String, u32)>, TokenizeError> {
        let with_id = |token: &str| Some((token.to_owned(), spec.token_id(token)?));
        match self.of(end) {
            Declaration::Absent => Ok(None),
            Declaration::Token(token) => with_id(token).map(Some).ok_or_else(|| TokenizeError::DeclaredUnknown {
                tokenizer: self.subject(),
                key: end.key(),
                token: token.clone(),
                vocab_size: spec.vocab_size(),
            }),
            Declaration::Unsaid => {
                let mut names = end.known_names().iter().filter(|name| is_no_text(spec, name));
                Ok(names.find_map(|name| with_id(name)))
            }
        }
    }
}

/// Whether a token stands for itself alone: it is special, or in a BPE vocabulary that no merge leads to. (A corpus with mark-up
/// may well make `<s>` a word like any other.)
fn is_no_text(spec: &TokenizerSpec, name: &str) -> bool {
    let has_merges = spec.model_kind() == "BPE" && !spec.model.merges.is_empty();
    spec.special_tokens().contains(&name)
        || (has_merges && spec.model.vocab.id(name).is_some() && !is_made_by_merges(spec, name))
}

/// Whether merges of a vocabulary make a token that is not special out of text.
pub(crate) fn is_made_by_merges(spec: &TokenizerSpec, name: &str) -> bool {
    let makes = |merge: &MergeSpec| {
        merge.halves().is_some_and(|(left, right)| name.strip_prefix(left).is_some_and(|rest| rest == right))
    };
    !spec.special_tokens().contains(&name) && spec.model_kind() == "BPE" && spec.model.merges.iter().any(makes)
}

/// What was found out once somebody asked.
#[derive(Default)]
pub(crate) struct FoundEnds {
    ends: [OnceLock<Option<(String, u32)>>; 2],
    /// What the post-processor puts on each side of a text.
    around: OnceLock<Surround>,
}

impl Tokenizer {
    /// Text and id of the BOS or EOS, if the tokenizer has one: what is declared (by a `tokenizer_config.json` beside its file,
    /// else by the file itself), else the first known name that is a token of its own.
    ///
    /// # Errors
    /// [`TokenizeError::DeclaredUnknown`] if the declared one is not in the vocabulary.
    pub fn end_token(&self, end: DocumentEnd) -> Result<Option<&(String, u32)>, TokenizeError> {
        let place = &self.found_ends().ends[usize::from(end == Eos)];
        if place.get().is_none() {
            let _ = place.set(self.declared().find(end, self.spec())?); // another thread has set the same
        }
        Ok(place.get().and_then(Option::as_ref))
    }

    /// The ids that the options put around each document.
    ///
    /// # Errors
    /// [`TokenizeError::NoEndToken`] if one of them is asked for and the tokenizer has none, [`TokenizeError::AddedTwice`] if the
    /// post-processor, which is asked for too, adds it already; [`TokenizeError::DeclaredUnknown`].
    pub fn ends(&self, options: EncodeOptions) -> Result<Ends, TokenizeError> {
        let asked = |end: DocumentEnd, is_asked: bool| -> Result<Option<u32>, TokenizeError> {
            if !is_asked {
                return Ok(None);
            }
            let tokenizer = || self.declared().subject();
            let Some((token, id)) = self.end_token(end)? else {
                return Err(TokenizeError::NoEndToken { tokenizer: tokenizer(), end });
            };
            if options.add_special_tokens {
                let around = self.around()?;
                let side = if end == Bos { &around.before } else { &around.after };
                if side.contains(id) {
                    return Err(TokenizeError::AddedTwice {
                        tokenizer: tokenizer(),
                        end,
                        token: token.clone(),
                        id: *id,
                    });
                }
            }
            Ok(Some(*id))
        };
        Ok(Ends { bos: asked(Bos, options.add_bos)?, eos: asked(Eos, options.add_eos)? })
    }

    /// As [`Self::check`], for documents that get an end-of-document token as well.
    ///
    /// # Errors
    /// As [`Self::check`], and [`TokenizeError::EndsTwice`] if the EOS that is asked for is that token.
    pub fn check_documents(&self, options: EncodeOptions, append_eod: Option<u32>) -> Result<(), TokenizeError> {
        self.check(options)?;
        if !options.add_eos {
            return Ok(());
        }
        match self.end_token(Eos)? {
            Some((token, id)) if append_eod == Some(*id) => {
                Err(TokenizeError::EndsTwice { tokenizer: self.declared().subject(), token: token.clone(), id: *id })
            }
            _ => Ok(()),
        }
    }

    /// Ids that the post-processor puts before and behind a text. Where a text does not show which is which, all count for both.
    fn around(&self) -> Result<&Surround, TokenizeError> {
        if let Some(known) = self.found_ends().around.get() {
            return Ok(known);
        }
        let ids = self.added_special_tokens()?;
        let plain = EncodeOptions { cache_bytes: 0, ..EncodeOptions::default() };
        let encode = |options| {
            let mut ids = Vec::new();
            self.encoder(options).and_then(|mut encoder| encoder.encode("a", &mut ids)).map(|()| ids).ok()
        };
        let with = encode(EncodeOptions { add_special_tokens: true, ..plain });
        let texts =
            encode(plain).zip(with).filter(|(bare, with)| !bare.is_empty() && with.len() == bare.len() + ids.len());
        let split = texts.and_then(|(bare, with)| with.windows(bare.len()).position(|window| window == bare));
        let (before, after) = split.map_or((ids, ids), |place| ids.split_at(place));
        let around = Surround { before: before.to_vec(), after: after.to_vec() };
        Ok(self.found_ends().around.get_or_init(|| around))
    }
}

/// What a tekken file means by its special tokens: the library that reads it goes by these names.
pub(crate) fn of_tekken(special_tokens: &HashMap<String, u32>) -> (Declaration, Declaration) {
    let declared = |name: &str| {
        if special_tokens.contains_key(name) { Declaration::Token(name.to_owned()) } else { Declaration::Absent }
    };
    (declared("<s>"), declared("</s>"))
}

#[cfg(test)]
#[path = "ends_tests.rs"]
mod tests;
