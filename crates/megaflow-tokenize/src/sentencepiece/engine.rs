//! SentencePiece models, from `.model` files and from `tokenizer.json`.

use std::sync::{Arc, OnceLock};

use aho_corasick::{AhoCorasick, Input, MatchKind};

use super::normalize::{MARK, SpNormalizer};
use super::stepwise::Stepwise;
use super::unigram::{Unigram, UnigramScratch};
use crate::added::{AddedTokens, Piece};
use crate::bpe::{Tables, TokenId, Unknown, VocabSource, WordEncoder};
use crate::fallback::Fallback;
use crate::normalize::Normalizer;
use crate::post::Surround;
use crate::{EncodeOptions, Engine, EngineEncoder, EngineKind, SpecialTokensInText, TokenizeError};

/// Ends of words that are found before these words are encoded.
const BATCH: usize = 4096;

/// Which algorithm a model has.
pub(crate) enum Algorithm {
    Bpe { tables: Box<Tables>, joints: Joints },
    Unigram { model: Box<Unigram>, unknown: Unknown, unknown_id: u32 },
    Stepwise { model: Box<Stepwise>, unknown: Unknown, unknown_id: u32, kind: EngineKind },
}

/// Pairs of bytes between which no token ever spans: there a text may be cut into words.
pub(crate) struct Joints {
    /// One bit for each pair that occurs within a token.
    joined: Vec<u64>,
}

impl Joints {
    /// From all tokens that can appear. `cut_at_blanks`: before each blank as well, whatever the tokens.
    pub(crate) fn new(tables: &Tables, source: &VocabSource, cut_at_blanks: bool) -> Self {
        let mut joined = vec![0u64; 1 << 10];
        tables.each_made(source, |text| {
            for pair in text.windows(2) {
                let index = usize::from(pair[0]) << 8 | usize::from(pair[1]);
                joined[index / 64] |= 1 << (index % 64);
            }
        });
        if cut_at_blanks {
            for before in 0..256 {
                let index = before << 8 | usize::from(b' ');
                joined[index / 64] &= !(1 << (index % 64));
            }
        }
        Self { joined }
    }

    #[inline]
    fn is_cut(&self, before: u8, after: u8) -> bool {
        let index = usize::from(before) << 8 | usize::from(after);
        self.joined[index / 64] >> (index % 64) & 1 == 0 && after & 0xC0 != 0x80
    }
}

/// How ids become text.
pub(crate) enum TextOf {
    /// The decoder of the `tokenizer.json`, by the `tokenizers` crate.
    Json(Vec<u8>, OnceLock<Box<Fallback>>),
    /// Bytes of each id; the first blank of a text is dropped if one was put in front.
    Pieces { texts: Vec<Vec<u8>>, drop_first_blank: bool },
}

/// What encoders share.
pub(crate) struct Shared {
    pub(crate) algorithm: Algorithm,
    pub(crate) normalizer: SpNormalizer,
    pub(crate) added: AddedTokens,
    pub(crate) surround: Surround,
    pub(crate) user_defined: Option<UserDefined>,
    /// An id of which a row counts once.
    pub(crate) fused: Option<u32>,
    pub(crate) text_of: TextOf,
    pub(crate) max_id: u32,
}

/// Pieces that are found in the normalised text before the model runs.
pub(crate) struct UserDefined {
    automaton: AhoCorasick,
    ids: Vec<u32>,
}

impl UserDefined {
    /// From texts and ids; none is empty.
    pub(crate) fn new(pieces: &[(Vec<u8>, u32)]) -> Result<Option<Self>, TokenizeError> {
        if pieces.is_empty() {
            return Ok(None);
        }
        let automaton =
            AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(pieces.iter().map(|(text, _)| text));
        let automaton = automaton.map_err(|error| TokenizeError::invalid(format!("user-defined pieces: {error}")))?;
        Ok(Some(Self { automaton, ids: pieces.iter().map(|&(_, id)| id).collect() }))
    }

    /// Where the next piece begins and ends, from a place on.
    pub(crate) fn next(&self, text: &[u8], from: usize) -> Option<(usize, usize)> {
        self.automaton.find(Input::new(text).range(from..)).map(|found| (found.start(), found.end()))
    }

    /// Where pieces begin and end.
    pub(crate) fn find(&self, text: &[u8]) -> Vec<(usize, usize)> {
        self.automaton.find_iter(text).map(|found| (found.start(), found.end())).collect()
    }
}

/// The engine of SentencePiece models.
pub(crate) struct SentencePiece {
    shared: Arc<Shared>,
}

impl SentencePiece {
    pub(crate) fn new(shared: Shared) -> Self {
        Self { shared: Arc::new(shared) }
    }
}

impl Engine for SentencePiece {
    fn kind(&self) -> EngineKind {
        match self.shared.algorithm {
            Algorithm::Bpe { .. } => EngineKind::SentencePieceBpe,
            Algorithm::Unigram { .. } => EngineKind::SentencePieceUnigram,
            Algorithm::Stepwise { kind, .. } => kind,
        }
    }

    fn encoder(&self, options: EncodeOptions) -> Box<dyn EngineEncoder> {
        Box::new(SentencePieceEncoder {
            shared: self.shared.clone(),
            special_as_text: options.special_tokens_in_text != SpecialTokensInText::Encode,
            surround: options.add_special_tokens,
            state: State {
                words: WordEncoder::new(options.cache_bytes),
                ends: Vec::new(),
                unigram: UnigramScratch::default(),
            },
        })
    }

    fn decode(&self, ids: &[u32]) -> Result<String, TokenizeError> {
        match &self.shared.text_of {
            TextOf::Json(json, fallback) => {
                if fallback.get().is_none() {
                    let _ = fallback.set(Box::new(Fallback::from_tokenizer_json(json)?));
                }
                fallback.get().map_or_else(|| Ok(String::new()), |fallback| fallback.decode(ids))
            }
            TextOf::Pieces { texts, drop_first_blank } => {
                let mut bytes: Vec<u8> = ids.iter().flat_map(|&id| texts.get(id as usize)).flatten().copied().collect();
                if *drop_first_blank && bytes.first() == Some(&b' ') {
                    bytes.remove(0);
                }
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
        }
    }
}

struct SentencePieceEncoder {
    shared: Arc<Shared>,
    special_as_text: bool,
    surround: bool,
    state: State,
}

struct State {
    words: WordEncoder,
    ends: Vec<u32>,
    unigram: UnigramScratch,
}

impl SentencePieceEncoder {
    fn encode_any<T: TokenId>(&mut self, text: &str, out: &mut Vec<T>) -> Result<(), TokenizeError> {
        let shared = &*self.shared;
        if self.surround {
            out.extend(shared.surround.before.iter().map(|&id| T::from_id(id)));
        }
        if self.special_as_text && shared.added.all_special() {
            if !text.is_empty() {
                self.state.encode_text(shared, text, true, out)?;
            }
        } else {
            let (state, mut is_first) = (&mut self.state, true);
            shared.added.pieces(text, self.special_as_text, Normalizer::None, &mut |piece| {
                let first = std::mem::replace(&mut is_first, false);
                match piece {
                    Piece::Text(text) => state.encode_text(shared, text, first, out),
                    Piece::Token(id) => {
                        out.push(T::from_id(id));
                        Ok(())
                    }
                }
            })?;
        }
        if self.surround {
            out.extend(shared.surround.after.iter().map(|&id| T::from_id(id)));
        }
        Ok(())
    }
}

impl State {
    fn encode_text<T: TokenId>(
        &mut self,
        shared: &Shared,
        text: &str,
        is_first: bool,
        out: &mut Vec<T>,
    ) -> Result<(), TokenizeError> {
        let start = out.len();
        let normal = shared.normalizer.apply(text, is_first);
        match &shared.algorithm {
            Algorithm::Unigram { model, unknown, unknown_id } => {
                model.encode(&normal, &mut self.unigram, |id, piece| push(id, piece, unknown, *unknown_id, out));
            }
            Algorithm::Stepwise { model, unknown, unknown_id, .. } => {
                let pieces = shared.user_defined.as_ref();
                model.encode(&normal, pieces, |id, piece| push(id, piece, unknown, *unknown_id, out));
            }
            Algorithm::Bpe { tables, joints } => {
                let mut done = 0;
                if let Some(pieces) = &shared.user_defined {
                    for found in pieces.automaton.find_iter(&normal[..]) {
                        self.encode_words(tables, joints, &normal[done..found.start()], out)?;
                        out.push(T::from_id(pieces.ids[found.pattern().as_usize()]));
                        done = found.end();
                    }
                }
                self.encode_words(tables, joints, &normal[done..], out)?;
            }
        }
        if let Some(id) = shared.fused {
            let id = T::from_id(id);
            let mut kept = start;
            for index in start..out.len() {
                if out[index] != id || kept == start || out[kept - 1] != id {
                    out[kept] = out[index];
                    kept += 1;
                }
            }
            out.truncate(kept);
        }
        Ok(())
    }

    fn encode_words<T: TokenId>(
        &mut self,
        tables: &Tables,
        joints: &Joints,
        text: &[u8],
        out: &mut Vec<T>,
    ) -> Result<(), TokenizeError> {
        let mut rest = text;
        while !rest.is_empty() {
            self.ends.clear();
            for (index, pair) in rest.windows(2).enumerate() {
                if joints.is_cut(pair[0], pair[1]) {
                    self.ends.push(index as u32 + 1);
                    if self.ends.len() == BATCH {
                        break;
                    }
                }
            }
            if self.ends.len() < BATCH {
                self.ends.push(rest.len() as u32);
            }
            self.words.encode(tables, rest, &self.ends, out)?;
            rest = &rest[self.ends.last().map_or(rest.len(), |&end| end as usize)..];
        }
        Ok(())
    }
}

/// Appends a piece; an unknown one as the bytes of its text if there are ids for these.
fn push<T: TokenId>(id: u32, piece: &[u8], unknown: &Unknown, unknown_id: u32, out: &mut Vec<T>) {
    match unknown {
        Unknown::Bytes(ids) if id == unknown_id => {
            for &byte in piece {
                // The mark is a blank here and three bytes in the model.
                let mark = if byte == b' ' { MARK.as_bytes() } else { std::slice::from_ref(&byte) };
                out.extend(mark.iter().map(|&byte| T::from_id(ids[usize::from(byte)])));
            }
        }
        _ => out.push(T::from_id(id)),
    }
}

impl EngineEncoder for SentencePieceEncoder {
    fn encode(&mut self, text: &str, out: &mut Vec<u32>) -> Result<(), TokenizeError> {
        self.encode_any(text, out)
    }

    fn encode_u16(&mut self, text: &str, out: &mut Vec<u16>) -> Result<(), TokenizeError> {
        crate::tokenizer::check_u16(self.shared.max_id)?;
        self.encode_any(text, out)
    }

    fn held_bytes(&self) -> usize {
        self.state.words.held_bytes()
    }
}
