//! Byte-level BPE: which `tokenizer.json` it serves, and the engine.

use std::sync::{Arc, OnceLock};

use serde_json::Value;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

use super::bytes::ByteAlphabet;
use super::pairs::MAX_TOKENS;
use super::vocab::{Merge, Tables, Unknown, VocabSource};
use super::words::{TokenId, WordEncoder};
use crate::added::{AddedTokens, Piece};
use crate::fallback::{Fallback, guarded};
use crate::normalize::Normalizer;
use crate::post::Surround;
use crate::scan::{Dialect, Rule, Scanner};
use crate::spec::{TokenizerSpec, VocabSpec};
use crate::{EncodeOptions, Engine, EngineEncoder, EngineKind, SpecialTokensInText, TokenizeError};

/// How text is cut into words.
enum Split {
    /// By one of our scanners.
    Scan(Rule),
    /// By the `tokenizers` crate, whatever its rule: slow and general.
    Reference(Box<PreTokenizerWrapper>),
}

/// What encoders share.
struct Shared {
    tables: Tables,
    split: Split,
    added: AddedTokens,
    normalizer: Normalizer,
    surround: Surround,
    /// Bytes of each id, for decoding.
    texts: Vec<Vec<u8>>,
    /// Set if the decoder is not `ByteLevel`: the crate decodes.
    decoder: Option<(Vec<u8>, OnceLock<Fallback>)>,
    max_id: u32,
}

/// The engine of byte-level BPE.
pub(crate) struct ByteLevel {
    shared: Arc<Shared>,
}

impl ByteLevel {
    /// An engine for a description, or `None` if it is not byte-level BPE as this engine knows it. `json` is the same
    /// description as text.
    pub(crate) fn from_spec(spec: &TokenizerSpec, json: &[u8]) -> Result<Option<Self>, TokenizeError> {
        if spec.vocab_size() >= MAX_TOKENS as u64 {
            return Ok(None); // the tables have a row for each id up to the largest
        }
        let Some(normalizer) = Normalizer::from_value(&spec.normalizer) else { return Ok(None) };
        let Some(split) = Split::from_value(&spec.pre_tokenizer) else { return Ok(None) };
        let Some(source) = vocab_source(spec) else { return Ok(None) };
        let Some(added) = AddedTokens::new(spec, normalizer)? else { return Ok(None) };
        let Some(surround) = Surround::from_value(&spec.post_processor) else { return Ok(None) };
        let Ok(tables) = Tables::build(&source) else { return Ok(None) }; // too many tokens
        let is_byte_level = spec.decoder["type"] == "ByteLevel";
        let shared = Shared {
            tables,
            split,
            added,
            normalizer,
            surround,
            texts: if is_byte_level { texts(spec) } else { Vec::new() },
            decoder: (!is_byte_level).then(|| (json.to_vec(), OnceLock::new())),
            max_id: spec.vocab_size().saturating_sub(1) as u32,
        };
        Ok(Some(Self { shared: Arc::new(shared) }))
    }
}

impl ByteLevel {
    /// An engine of given parts, without normaliser and post-processor.
    pub(super) fn from_parts(source: &VocabSource, rule: Rule, spec: &TokenizerSpec) -> Result<Self, TokenizeError> {
        let ids = spec.vocab_size();
        if ids >= MAX_TOKENS as u64 {
            return Err(TokenizeError::invalid(format!("ids reach {}, at most {MAX_TOKENS} are handled", ids - 1)));
        }
        let shared = Shared {
            tables: Tables::build(source)?,
            split: Split::Scan(rule),
            added: AddedTokens::with_given_ids(spec)?,
            normalizer: Normalizer::None,
            surround: Surround::default(),
            texts: texts(spec),
            decoder: None,
            max_id: spec.vocab_size().saturating_sub(1) as u32,
        };
        Ok(Self { shared: Arc::new(shared) })
    }
}

/// The vocabulary, if it is a byte-level one without settings that this engine lacks.
fn vocab_source(spec: &TokenizerSpec) -> Option<VocabSource> {
    if spec.model_kind() != "BPE" {
        return None;
    }
    let is_off = |value: &Value| matches!(value, Value::Null | Value::Bool(false)) || value == 0.0 || value == "";
    for (name, value) in &spec.model.settings {
        match name.as_str() {
            // All bytes are in the vocabulary, so that nothing is unknown.
            "unk_token" | "fuse_unk" | "byte_fallback" | "ignore_merges" => {}
            "dropout" | "continuing_subword_prefix" | "end_of_word_suffix" if is_off(value) => {}
            _ => return None,
        }
    }
    let VocabSpec::Ids(ids) = &spec.model.vocab else { return None };
    let alphabet = ByteAlphabet::new();
    let mut tokens = Vec::with_capacity(ids.len());
    let mut symbols = vec![u32::MAX; 256];
    for (token, &id) in ids {
        let Some(bytes) = alphabet.bytes(token) else { continue }; // no word can spell it
        if let [byte] = bytes[..] {
            symbols[usize::from(byte)] = id;
        }
        tokens.push((bytes, id));
    }
    let mut used = vec![false; tokens.iter().map(|&(_, id)| id as usize + 1).max()?];
    let distinct = tokens.iter().all(|&(_, id)| !std::mem::replace(&mut used[id as usize], true));
    if !distinct || symbols.contains(&u32::MAX) || tokens.iter().any(|(bytes, _)| bytes.is_empty()) {
        return None;
    }
    let mut merges = Vec::with_capacity(spec.model.merges.len());
    let mut product = String::new();
    for (rank, merge) in (0u32..).zip(&spec.model.merges) {
        let (left, right) = merge.halves()?;
        product.clear();
        product.push_str(left);
        product.push_str(right);
        let product = *ids.get(&product)?;
        let (left, right) = (*ids.get(left)?, *ids.get(right)?);
        if ![left, right, product].iter().all(|&id| used.get(id as usize) == Some(&true)) {
            return None;
        }
        merges.push(Merge { rank, left, right, product });
    }
    let whole_words_first = spec.model.settings.get("ignore_merges").and_then(Value::as_bool).unwrap_or(false);
    Some(VocabSource { tokens, symbols, merges, whole_words_first, unknown: Unknown::Never })
}

/// Bytes that each id decodes to: a token's bytes if it is written in the byte alphabet, else its own text.
fn texts(spec: &TokenizerSpec) -> Vec<Vec<u8>> {
    let alphabet = ByteAlphabet::new();
    let mut texts = vec![Vec::new(); spec.vocab_size() as usize];
    let mut put = |token: &str, id: u32| {
        texts[id as usize] = alphabet.bytes(token).unwrap_or_else(|| token.as_bytes().to_vec());
    };
    spec.model.vocab.by_id().into_iter().for_each(|(token, id)| put(token, id));
    spec.added_tokens.iter().for_each(|token| put(&token.content, token.id));
    texts
}

impl Split {
    /// From a `pre_tokenizer`; `None` if it does not end in the byte alphabet.
    fn from_value(value: &Value) -> Option<Self> {
        let rule = match value["type"].as_str()? {
            "ByteLevel" if is_byte_level(value, true) => Rule::gpt2(),
            "Sequence" => match value["pretokenizers"].as_array()?.as_slice() {
                [splits @ .., last] if is_byte_level(last, false) => split_rule(splits),
                [.., last] if last["type"] == "ByteLevel" => None, // another variant of it
                _ => return None,
            },
            "ByteLevel" => None,
            _ => return None,
        };
        match rule {
            Some(rule) => Some(Self::Scan(rule)),
            None => serde_json::from_value(value.clone()).ok().map(|reference| Self::Reference(Box::new(reference))),
        }
    }
}

fn is_byte_level(value: &Value, use_regex: bool) -> bool {
    value["type"] == "ByteLevel"
        && value["add_prefix_space"] == false
        && value.get("use_regex").is_none_or(|found| *found == use_regex)
        && (use_regex || value.get("use_regex").is_some())
}

/// Rule of `Split`s that keep everything: known patterns match all characters, so that what happens to the rest does not
/// matter. Of several, each must keep what it does not match.
fn split_rule(splits: &[Value]) -> Option<Rule> {
    let pattern = |split: &Value| {
        let keeps = match (split["behavior"].as_str()?, split["invert"].as_bool()?) {
            ("Isolated", false) => true,
            ("Isolated" | "Removed", true) => splits.len() == 1,
            _ => false,
        };
        (split["type"] == "Split" && keeps).then(|| split["pattern"]["Regex"].as_str().map(str::to_owned))?
    };
    let patterns: Vec<String> = splits.iter().map(pattern).collect::<Option<_>>()?;
    Rule::from_patterns(&patterns.iter().map(String::as_str).collect::<Vec<_>>(), Dialect::Ruby)
}

impl Engine for ByteLevel {
    fn kind(&self) -> EngineKind {
        match self.shared.split {
            Split::Scan(_) => EngineKind::ByteLevelBpe,
            Split::Reference(_) => EngineKind::ByteLevelBpeRegex,
        }
    }

    fn cuts_at_blanks(&self) -> bool {
        // All known rules end a word at such a blank and begin one with it, and look at nothing before their match.
        matches!(self.shared.split, Split::Scan(_)) && !self.shared.added.reaches_over_blanks()
    }

    fn encoder(&self, options: EncodeOptions) -> Box<dyn EngineEncoder> {
        Box::new(ByteLevelEncoder {
            shared: self.shared.clone(),
            special_as_text: options.special_tokens_in_text != SpecialTokensInText::Encode,
            surround: options.add_special_tokens,
            words: Words {
                scanner: Scanner::default(),
                encoder: WordEncoder::new(options.cache_bytes),
                alphabet: ByteAlphabet::new(),
                bytes: Vec::new(),
                ends: Vec::new(),
            },
        })
    }

    fn decode(&self, ids: &[u32]) -> Result<String, TokenizeError> {
        if let Some((json, fallback)) = &self.shared.decoder {
            if fallback.get().is_none() {
                let _ = fallback.set(Fallback::from_tokenizer_json(json)?);
            }
            return fallback.get().map_or_else(|| Ok(String::new()), |fallback| fallback.decode(ids));
        }
        let mut bytes = Vec::new();
        for &id in ids {
            bytes.extend_from_slice(self.shared.texts.get(id as usize).map_or(&[], Vec::as_slice));
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

struct ByteLevelEncoder {
    shared: Arc<Shared>,
    special_as_text: bool,
    surround: bool,
    words: Words,
}

/// The mutable half of an encoder.
struct Words {
    scanner: Scanner,
    encoder: WordEncoder,
    alphabet: ByteAlphabet,
    bytes: Vec<u8>,
    ends: Vec<u32>,
}

impl ByteLevelEncoder {
    fn encode_any<T: TokenId>(&mut self, text: &str, out: &mut Vec<T>) -> Result<(), TokenizeError> {
        let shared = &*self.shared;
        if self.surround {
            out.extend(shared.surround.before.iter().map(|&id| T::from_id(id)));
        }
        if self.special_as_text && shared.added.all_special() {
            let text = shared.normalizer.apply(text);
            self.words.encode(shared, &text, out)?;
        } else {
            let words = &mut self.words;
            shared.added.pieces(text, self.special_as_text, shared.normalizer, &mut |piece| match piece {
                Piece::Text(text) => words.encode(shared, text, out),
                Piece::Token(id) => {
                    out.push(T::from_id(id));
                    Ok(())
                }
            })?;
        }
        if self.surround {
            out.extend(shared.surround.after.iter().map(|&id| T::from_id(id)));
        }
        Ok(())
    }
}

impl Words {
    fn encode<T: TokenId>(&mut self, shared: &Shared, text: &str, out: &mut Vec<T>) -> Result<(), TokenizeError> {
        match &shared.split {
            Split::Scan(rule) => {
                let mut rest = text.as_bytes();
                while !rest.is_empty() {
                    self.scanner.next_words(*rule, rest);
                    let ends = &self.scanner.ends;
                    self.encoder.encode(&shared.tables, rest, ends, out)?;
                    rest = &rest[ends.last().map_or(rest.len(), |&end| end as usize)..];
                }
                Ok(())
            }
            Split::Reference(reference) => {
                self.cut_by_reference(reference, text)?;
                self.encoder.encode(&shared.tables, &self.bytes, &self.ends, out)
            }
        }
    }

    /// Lets the `tokenizers` crate cut the text, and takes its words back from the byte alphabet.
    fn cut_by_reference(&mut self, reference: &PreTokenizerWrapper, text: &str) -> Result<(), TokenizeError> {
        let refused = |detail: String| TokenizeError::Encode { bytes: text.len(), detail };
        let mut pieces = PreTokenizedString::from(text);
        guarded(text, || reference.pre_tokenize(&mut pieces))?;
        self.bytes.clear();
        self.ends.clear();
        for (word, _, _) in pieces.get_splits(OffsetReferential::Original, OffsetType::Byte) {
            for character in word.chars() {
                let byte = self.alphabet.byte(character);
                self.bytes.push(byte.ok_or_else(|| refused(format!("{character:?} is not of the byte alphabet")))?);
            }
            if !word.is_empty() {
                let end = u32::try_from(self.bytes.len()).map_err(|error| refused(error.to_string()))?;
                self.ends.push(end);
            }
        }
        Ok(())
    }
}

impl EngineEncoder for ByteLevelEncoder {
    fn encode(&mut self, text: &str, out: &mut Vec<u32>) -> Result<(), TokenizeError> {
        self.encode_any(text, out)
    }

    fn encode_u16(&mut self, text: &str, out: &mut Vec<u16>) -> Result<(), TokenizeError> {
        crate::tokenizer::check_u16(self.shared.max_id)?;
        self.encode_any(text, out)
    }

    fn held_bytes(&self) -> usize {
        self.words.encoder.held_bytes()
    }
}
