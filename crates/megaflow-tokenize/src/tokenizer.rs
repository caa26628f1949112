//! The tokenizer that many threads share, and the encoder that one thread owns.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use crate::bpe::{ByteLevel, Ranks, TiktokenConfig, read_ranks};
use crate::ends::{Declaration, Declared, FoundEnds, is_made_by_merges};
use crate::fallback::Fallback;
use crate::idle::IdleEncoders;
use crate::room::{IdRoom, UsedIds};
use crate::sentencepiece::SentencePiece;
use crate::special::SpecialFinder;
use crate::{DocumentEnd, Ends, SpecialTokensInText, TokenizeError, TokenizerSpec};

/// Which code turns text into ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum EngineKind {
    /// Byte-level BPE with a scanner for its split rule.
    ByteLevelBpe,
    /// Byte-level BPE whose split rule is left to the `tokenizers` crate.
    ByteLevelBpeRegex,
    /// SentencePiece BPE.
    SentencePieceBpe,
    /// SentencePiece unigram, from a `.model`.
    SentencePieceUnigram,
    /// SentencePiece BPE with pieces that may not appear, from a `.model`.
    SentencePieceBpeStepwise,
    /// SentencePiece words, from a `.model`.
    SentencePieceWord,
    /// SentencePiece characters, from a `.model`.
    SentencePieceChar,
    /// The `tokenizers` crate.
    HuggingFace,
}

impl EngineKind {
    /// Name in reports and in the sidecar.
    pub fn name(self) -> &'static str {
        match self {
            Self::ByteLevelBpe => "megaflow-byte-level-bpe",
            Self::ByteLevelBpeRegex => "megaflow-byte-level-bpe-regex",
            Self::SentencePieceBpe => "megaflow-sentencepiece-bpe",
            Self::SentencePieceUnigram => "megaflow-sentencepiece-unigram",
            Self::SentencePieceBpeStepwise => "megaflow-sentencepiece-bpe-stepwise",
            Self::SentencePieceWord => "megaflow-sentencepiece-word",
            Self::SentencePieceChar => "megaflow-sentencepiece-char",
            Self::HuggingFace => "huggingface-tokenizers",
        }
    }
}

/// How a text is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EncodeOptions {
    /// What to do with text that spells a special token.
    pub special_tokens_in_text: SpecialTokensInText,
    /// Whether the post-processor may add its tokens (often a BOS) to each text, as Megatron's Hugging Face path does.
    pub add_special_tokens: bool,
    /// Whether the tokenizer's BOS goes before each document.
    pub add_bos: bool,
    /// Whether the tokenizer's EOS goes behind each document.
    pub add_eos: bool,
    /// Most bytes that the word cache of an encoder may take.
    pub cache_bytes: usize,
}

impl Default for EncodeOptions {
    fn default() -> Self {
        let special_tokens_in_text = SpecialTokensInText::default();
        Self {
            special_tokens_in_text,
            add_special_tokens: false,
            add_bos: false,
            add_eos: false,
            cache_bytes: 64 << 20,
        }
    }
}

impl EncodeOptions {
    /// What an engine has to know of them: the ends of documents are put on outside.
    fn of_engine(self) -> Self {
        Self { add_bos: false, add_eos: false, ..self }
    }
}

/// Something that turns text into ids. Shared by threads; each has its own [`EngineEncoder`].
pub trait Engine: Send + Sync {
    /// Which one this is.
    fn kind(&self) -> EngineKind;

    /// Whether a text may be cut before a blank between two ASCII letters: the ids of the parts, one after the other, are
    /// those of the whole.
    fn cuts_at_blanks(&self) -> bool {
        false
    }

    /// State for one thread.
    fn encoder(&self, options: EncodeOptions) -> Box<dyn EngineEncoder>;

    /// Text of ids, special tokens included.
    ///
    /// # Errors
    /// [`TokenizeError`] if the decoder rule fails.
    fn decode(&self, ids: &[u32]) -> Result<String, TokenizeError>;
}

/// State of one thread that encodes.
pub trait EngineEncoder: Send {
    /// Appends the ids of `text` to `out`.
    ///
    /// # Errors
    /// [`TokenizeError::Encode`] if the text cannot be encoded; `out` then has its old length or more.
    fn encode(&mut self, text: &str, out: &mut Vec<u32>) -> Result<(), TokenizeError>;

    /// Appends the ids of `text` to `out` as `u16`.
    ///
    /// # Errors
    /// As [`Self::encode`], and [`TokenizeError::Invalid`] if the vocabulary has ids that do not fit.
    fn encode_u16(&mut self, text: &str, out: &mut Vec<u16>) -> Result<(), TokenizeError>;

    /// Bytes that its word caches hold.
    fn held_bytes(&self) -> usize {
        0
    }
}

/// Fails if `max_id` does not fit into a `u16`.
pub(crate) fn check_u16(max_id: u32) -> Result<(), TokenizeError> {
    u16::try_from(max_id).map(|_| ()).map_err(|_| {
        TokenizeError::invalid(format!("ids reach {max_id}, which is more than the {} of a u16", u16::MAX))
    })
}

/// A tokenizer: cheap to clone, shared by threads.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

struct Inner {
    spec: TokenizerSpec,
    engine: Box<dyn Engine>,
    specials: SpecialFinder,
    fingerprint: String,
    vocab_size: u64,
    declared: Declared,
    found_ends: FoundEnds,
    idle: IdleEncoders,
    room: Arc<IdRoom>,
    /// What the post-processor adds to a text, once somebody asks.
    added: OnceLock<Vec<u32>>,
}

/// Names under which tokenizers keep their end-of-document token, most specific first.
const KNOWN_EOD: [&str; 6] =
    ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<\u{FF5C}end\u{2581}of\u{2581}sentence\u{FF5C}>", "[SEP]"];

impl Tokenizer {
    /// From the text of a `tokenizer.json`.
    ///
    /// # Errors
    /// [`TokenizeError::Invalid`] if the text is not a tokenizer.
    pub fn from_tokenizer_json(bytes: &[u8]) -> Result<Self, TokenizeError> {
        Self::of_tokenizer_json(bytes, Declared::default())
    }

    /// As above, with the tokens that a file beside it declares.
    pub(crate) fn of_tokenizer_json(bytes: &[u8], declared: Declared) -> Result<Self, TokenizeError> {
        let spec = TokenizerSpec::from_tokenizer_json(bytes)?;
        Self::of_spec(spec, bytes, declared)
    }

    /// From GPT-2's two files, the bytes of a JSON vocabulary and the text of a list of merges.
    ///
    /// # Errors
    /// [`TokenizeError::Invalid`] if they are no such files, or not of one tokenizer.
    pub fn from_vocab_and_merges(vocab: &[u8], merges: &str) -> Result<Self, TokenizeError> {
        Self::of_vocab_and_merges(vocab, merges, Declared::default())
    }

    pub(crate) fn of_vocab_and_merges(vocab: &[u8], merges: &str, declared: Declared) -> Result<Self, TokenizeError> {
        let spec = TokenizerSpec::from_vocab_and_merges(vocab, merges)?;
        let declared = declared.within(&spec);
        if let Some(engine) = ByteLevel::from_spec(&spec, &[])? {
            return Self::with_engine(spec, Box::new(engine), declared); // it decodes by itself and asks for no other form
        }
        let json = spec.to_json();
        Self::of_spec(spec, &json, declared)
    }

    /// From a description and the same as text.
    fn of_spec(spec: TokenizerSpec, bytes: &[u8], declared: Declared) -> Result<Self, TokenizeError> {
        let engine: Box<dyn Engine> = if let Some(engine) = ByteLevel::from_spec(&spec, bytes)? {
            Box::new(engine)
        } else if let Some(engine) = SentencePiece::from_spec(&spec, bytes)? {
            Box::new(engine)
        } else {
            Box::new(Fallback::from_tokenizer_json(bytes)?)
        };
        Self::with_engine(spec, engine, declared)
    }

    /// From the bytes of a SentencePiece `.model`.
    ///
    /// # Errors
    /// [`TokenizeError::Invalid`] if the model is damaged or of a kind that is not handled.
    pub fn from_sentencepiece(bytes: &[u8]) -> Result<Self, TokenizeError> {
        Self::of_sentencepiece(bytes, Declared::default())
    }

    pub(crate) fn of_sentencepiece(bytes: &[u8], declared: Declared) -> Result<Self, TokenizeError> {
        let (spec, engine, [bos, eos]) = SentencePiece::from_model(bytes)?;
        let declared = declared.within(&spec).or(bos, eos);
        Self::with_engine(spec, Box::new(engine), declared)
    }

    /// From ranks and the configuration beside them.
    pub(crate) fn from_ranks(
        ranks: &Ranks,
        config: &TiktokenConfig,
        declared: Declared,
    ) -> Result<Self, TokenizeError> {
        let (spec, engine) = ByteLevel::from_ranks(ranks, config)?;
        let declared = declared.within(&spec);
        Self::with_engine(spec, Box::new(engine), declared)
    }

    /// From tiktoken's three arguments: the text of the ranks (lines of base64 and a number), the split pattern and the
    /// special tokens.
    ///
    /// # Errors
    /// [`TokenizeError::Invalid`] if the ranks are damaged or the pattern is not a known one.
    pub fn from_tiktoken(
        ranks: &[u8],
        pat_str: &str,
        special_tokens: &HashMap<String, u32>,
    ) -> Result<Self, TokenizeError> {
        let ranks = read_ranks(ranks)
            .ok_or_else(|| TokenizeError::invalid("expected lines of a token in base64 and its rank"))?;
        let config = TiktokenConfig { pat_str: pat_str.to_owned(), special_tokens: special_tokens.clone() };
        Self::from_ranks(&ranks, &config, Declared::default())
    }

    fn with_engine(spec: TokenizerSpec, engine: Box<dyn Engine>, declared: Declared) -> Result<Self, TokenizeError> {
        let specials = SpecialFinder::new(&spec.special_tokens())?;
        let (fingerprint, vocab_size) = (spec.fingerprint(), spec.vocab_size());
        let (idle, added, found_ends) = (IdleEncoders::default(), OnceLock::new(), FoundEnds::default());
        let room = Arc::default();
        let inner = Inner { spec, engine, specials, fingerprint, vocab_size, declared, found_ends, idle, room, added };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// State for one thread: one that was put back, or a new one.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn encoder(&self, options: EncodeOptions) -> Result<Encoder, TokenizeError> {
        self.check(options)?;
        let (ends, options) = (self.ends(options)?, options.of_engine());
        Ok(Encoder {
            engine: self.inner.idle.take(options).unwrap_or_else(|| self.inner.engine.encoder(options)),
            ends,
            options,
            tokenizer: self.clone(),
            special_hits: 0,
        })
    }

    /// Whether this tokenizer can do what the options ask for: to be called before any work begins.
    ///
    /// # Errors
    /// [`TokenizeError::NothingToAdd`] if tokens around each text are asked for and there are none,
    /// [`TokenizeError::AddsUnknownId`] if one of them is not in the vocabulary; as [`Self::ends`].
    pub fn check(&self, options: EncodeOptions) -> Result<(), TokenizeError> {
        self.ends(options)?;
        if !options.add_special_tokens {
            return Ok(());
        }
        let (added, vocab_size) = (self.added_special_tokens()?, self.inner.vocab_size);
        match added.iter().find(|&&id| u64::from(id) >= vocab_size) {
            _ if added.is_empty() => Err(TokenizeError::NothingToAdd),
            Some(&id) => Err(TokenizeError::AddsUnknownId { id, vocab_size }),
            None => Ok(()),
        }
    }

    /// Ids that the post-processor adds to each text, those before and those behind it: what it makes of an empty text.
    ///
    /// # Errors
    /// [`TokenizeError::Encode`] if the engine refuses the empty text.
    pub fn added_special_tokens(&self) -> Result<&[u32], TokenizeError> {
        if self.inner.added.get().is_none() {
            let options = EncodeOptions { add_special_tokens: true, cache_bytes: 0, ..EncodeOptions::default() };
            let mut ids = Vec::new();
            self.inner.engine.encoder(options).encode("", &mut ids)?;
            let _ = self.inner.added.set(ids); // another thread has set the same
        }
        Ok(self.inner.added.get().map_or(&[], Vec::as_slice))
    }

    /// Keeps an encoder, with what its word cache has learned, for the next one that is asked for with the same options. This
    /// tokenizer then holds its memory: at most one encoder for each processor. One that failed is better dropped.
    pub fn put_back(&self, encoder: Encoder) {
        self.inner.idle.put(encoder.options, encoder.engine);
    }

    /// Where ids of [`Self::encode_batch`] can be given back to once nobody reads them.
    pub fn used_ids(&self) -> UsedIds {
        UsedIds::of(&self.inner.room)
    }

    pub(crate) fn id_room(&self) -> &IdRoom {
        &self.inner.room
    }

    /// The first place from `near` on where `text` may be cut: the ids of both parts, one after the other, are those of the
    /// whole (without tokens around each). `None` if there is no such place, or the tokenizer has none.
    pub fn cut_point(&self, text: &str, near: usize) -> Option<usize> {
        if !self.inner.engine.cuts_at_blanks() {
            return None;
        }
        let (text, near) = (text.as_bytes(), near.max(1));
        let is_letter = |place: usize| text.get(place).is_some_and(u8::is_ascii_alphabetic);
        let mut blanks = memchr::memchr_iter(b' ', text.get(near..)?).map(|place| near + place);
        blanks.find(|&blank| is_letter(blank - 1) && is_letter(blank + 1))
    }

    pub(crate) fn spec(&self) -> &TokenizerSpec {
        &self.inner.spec
    }

    pub(crate) fn declared(&self) -> &Declared {
        &self.inner.declared
    }

    pub(crate) fn found_ends(&self) -> &FoundEnds {
        &self.inner.found_ends
    }

    /// Number of ids, added tokens included: every id is below it.
    pub fn vocab_size(&self) -> u64 {
        self.inner.vocab_size
    }

    /// SHA-256 over vocabulary, merges and rules; see [`TokenizerSpec::fingerprint`].
    pub fn fingerprint(&self) -> &str {
        &self.inner.fingerprint
    }

    /// Which engine encodes.
    pub fn engine_kind(&self) -> EngineKind {
        self.inner.engine.kind()
    }

    /// Kind of the model: `BPE`, `Unigram`, `WordPiece`, `WordLevel`.
    pub fn model_kind(&self) -> &str {
        self.inner.spec.model_kind()
    }

    /// Id of a token by its text.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.spec.token_id(token)
    }

    /// The end-of-document token: `explicit` if given, else the declared EOS, else the first known name.
    ///
    /// # Errors
    /// [`TokenizeError::UnknownToken`] if the explicit or declared one is not in the vocabulary.
    pub fn eod(&self, explicit: Option<&str>) -> Result<Option<(String, u32)>, TokenizeError> {
        let declared = match self.inner.declared.of(DocumentEnd::Eos) {
            Declaration::Token(token) => Some(token.as_str()),
            Declaration::Absent | Declaration::Unsaid => None,
        };
        if let Some(token) = explicit.or(declared) {
            let unknown = || TokenizeError::UnknownToken { token: token.to_owned(), vocab_size: self.inner.vocab_size };
            return Ok(Some((token.to_owned(), self.token_id(token).ok_or_else(unknown)?)));
        }
        let found = KNOWN_EOD.iter().filter_map(|name| Some((*name, self.token_id(name)?)));
        let mut own = found.filter(|(name, _)| !is_made_by_merges(&self.inner.spec, name));
        Ok(own.next().map(|(name, id)| (name.to_owned(), id)))
    }

    /// As [`Self::eod`], where nothing may need it: a declared one that does not exist stands in nobody's way who neither
    /// needs an end of document nor names one.
    ///
    /// # Errors
    /// [`TokenizeError::UnknownToken`].
    pub fn eod_where(&self, is_needed: bool, explicit: Option<&str>) -> Result<Option<(String, u32)>, TokenizeError> {
        match self.eod(explicit) {
            Err(_) if !is_needed && explicit.is_none() => Ok(None),
            found => found,
        }
    }

    /// Ids of the special tokens, in rising order.
    pub fn special_ids(&self) -> Vec<u32> {
        let mut ids: Vec<u32> =
            self.inner.spec.special_tokens().into_iter().filter_map(|token| self.token_id(token)).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Text of ids, special tokens included.
    ///
    /// # Errors
    /// [`TokenizeError::UnknownId`] for an id outside the vocabulary.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizeError> {
        let vocab_size = self.inner.vocab_size;
        if let Some(&id) = ids.iter().find(|&&id| u64::from(id) >= vocab_size) {
            return Err(TokenizeError::UnknownId { id, vocab_size });
        }
        self.inner.engine.decode(ids)
    }
}

/// State of one thread that encodes texts with one [`Tokenizer`].
pub struct Encoder {
    engine: Box<dyn EngineEncoder>,
    options: EncodeOptions,
    ends: Ends,
    tokenizer: Tokenizer,
    special_hits: u64,
}

impl Encoder {
    /// Appends the ids of a whole document to `out`, and the BOS and EOS that were asked for around them.
    ///
    /// # Errors
    /// As [`Self::encode_part`].
    pub fn encode(&mut self, text: &str, out: &mut Vec<u32>) -> Result<(), TokenizeError> {
        out.extend(self.ends.bos);
        self.encode_part(text, out)?;
        out.extend(self.ends.eos);
        Ok(())
    }

    /// Appends the ids of a part of a document to `out`, without BOS and EOS: whoever joins the parts puts [`Self::ends`] on.
    ///
    /// # Errors
    /// [`TokenizeError::SpecialInText`] under policy `Error`, [`TokenizeError::Encode`] if the engine refuses the text.
    pub fn encode_part(&mut self, text: &str, out: &mut Vec<u32>) -> Result<(), TokenizeError> {
        self.look_for_special(text)?;
        self.engine.encode(text, out)
    }

    /// As [`Self::encode`], as `u16`.
    ///
    /// # Errors
    /// As [`Self::encode`], and [`TokenizeError::Invalid`] if the vocabulary has ids that do not fit.
    pub fn encode_u16(&mut self, text: &str, out: &mut Vec<u16>) -> Result<(), TokenizeError> {
        self.look_for_special(text)?;
        let narrow = |id: Option<u32>| -> Result<Option<u16>, TokenizeError> {
            id.map(|id| check_u16(id).map(|()| id as u16)).transpose()
        };
        let (bos, eos) = (narrow(self.ends.bos)?, narrow(self.ends.eos)?);
        out.extend(bos);
        self.engine.encode_u16(text, out)?;
        out.extend(eos);
        Ok(())
    }

    /// Bytes that its caches might still take, of those that it was allowed.
    pub(crate) fn free_bytes(&self) -> usize {
        self.options.cache_bytes.saturating_sub(self.engine.held_bytes())
    }

    /// The ids that go around each document.
    pub fn ends(&self) -> Ends {
        self.ends
    }

    fn look_for_special(&mut self, text: &str) -> Result<(), TokenizeError> {
        match self.options.special_tokens_in_text {
            SpecialTokensInText::Error => self.tokenizer.inner.specials.refuse(text),
            SpecialTokensInText::Text | SpecialTokensInText::Encode => {
                self.special_hits += self.tokenizer.inner.specials.count(text);
                Ok(())
            }
        }
    }

    /// Places seen so far where text spelled a special token.
    pub fn special_hits(&self) -> u64 {
        self.special_hits
    }
}

#[cfg(test)]
#[path = "tokenizer_tests.rs"]
mod tests;
