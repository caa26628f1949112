//! Which descriptions are SentencePiece models, and the engine for each.

use std::collections::{HashMap, HashSet};
use std::sync::OnceLock;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::engine::{Algorithm, Joints, SentencePiece, Shared, TextOf, UserDefined};
use super::normalize::{MARK, ModelNormalizer, Prepend, SpNormalizer};
use super::proto::{Model, ModelKind, PieceKind};
use super::stepwise::Stepwise;
use super::unigram::Unigram;
use crate::added::AddedTokens;
use crate::bpe::{Lengths, MAX_TOKENS, Merge, Tables, Unknown, VocabSource};
use crate::ends::Declaration;
use crate::normalize::Normalizer;
use crate::post::Surround;
use crate::spec::{ModelSpec, VocabSpec};
use crate::{AddedTokenSpec, EngineKind, TokenizeError, TokenizerSpec};

/// Bytes of a piece, with blanks for marks.
pub(super) fn bytes_of(piece: &str) -> Vec<u8> {
    piece.replace(MARK, " ").into_bytes()
}

fn is_one_char(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_ok_and(|text| text.chars().count() == 1)
}

/// Ids of `<0x00>` to `<0xFF>`, if all are there.
fn byte_ids(id_of: impl Fn(&str) -> Option<u32>) -> Option<Box<[u32; 256]>> {
    let mut ids = Box::new([0; 256]);
    for (byte, id) in ids.iter_mut().enumerate() {
        *id = id_of(&format!("<0x{byte:02X}>"))?;
    }
    Some(ids)
}

impl SentencePiece {
    /// An engine for a `tokenizer.json` in the manner of Llama 2, or `None` if it is not one that is known exactly.
    pub(crate) fn from_spec(spec: &TokenizerSpec, text: &[u8]) -> Result<Option<Self>, TokenizeError> {
        if spec.vocab_size() >= MAX_TOKENS as u64 {
            return Ok(None);
        }
        let Some((prepend, cut_at_blanks)) = prepend(spec) else { return Ok(None) };
        let Some((source, fused)) = json_source(spec) else { return Ok(None) };
        let has_normalizer = !spec.normalizer.is_null();
        if has_normalizer && spec.added_tokens.iter().any(|token| token.normalized) {
            return Ok(None); // such tokens are looked for in their normalised form
        }
        let Some(added) = AddedTokens::new(spec, Normalizer::None)? else { return Ok(None) };
        let Some(surround) = Surround::from_value(&spec.post_processor) else { return Ok(None) };
        let Ok(tables) = Tables::build(&source) else { return Ok(None) }; // too many tokens
        let joints = Joints::new(&tables, &source, cut_at_blanks);
        Ok(Some(Self::new(Shared {
            algorithm: Algorithm::Bpe { tables: Box::new(tables), joints },
            normalizer: SpNormalizer::Json(prepend),
            added,
            surround,
            user_defined: None,
            fused,
            text_of: TextOf::Json(text.to_vec(), OnceLock::new()),
            max_id: spec.vocab_size().saturating_sub(1) as u32,
        })))
    }

    /// A description of a `.model`, an engine for it, and the BOS and EOS that it declares.
    pub(crate) fn from_model(bytes: &[u8]) -> Result<(TokenizerSpec, Self, [Declaration; 2]), TokenizeError> {
        let model = Model::read(bytes)?;
        let spec = model_spec(&model);
        let unknown_id = (0..).zip(&model.pieces).find(|(_, piece)| piece.kind == PieceKind::Unknown).map(|(id, _)| id);
        let unknown_id = unknown_id.ok_or_else(|| TokenizeError::invalid("SentencePiece model: no unknown piece"))?;
        let texts: Vec<Vec<u8>> = model.pieces.iter().map(|piece| bytes_of(&piece.text)).collect();
        let unknown = if model.byte_fallback {
            let ids: HashMap<&str, u32> = model.pieces.iter().map(|piece| piece.text.as_str()).zip(0..).collect();
            let bytes = byte_ids(|name| ids.get(name).copied());
            Unknown::Bytes(
                bytes.ok_or_else(|| TokenizeError::invalid("SentencePiece model: not all byte pieces are there"))?,
            )
        } else {
            Unknown::Token { id: unknown_id, fused: true }
        };
        let fused = (!model.byte_fallback).then_some(unknown_id);
        let own = (0..).zip(&model.pieces).filter(|(_, piece)| piece.kind == PieceKind::UserDefined);
        // A blank cannot be met: in normalised text it is a mark.
        let own = own.filter(|(_, piece)| !piece.text.is_empty() && !piece.text.contains(' '));
        let own = own.map(|(id, _)| (texts[id as usize].clone(), id));
        let user_defined = UserDefined::new(&own.collect::<Vec<_>>())?;
        let stepwise = |kind, unknown| -> Result<_, TokenizeError> {
            let model = Box::new(Stepwise::new(&model, unknown_id)?);
            Ok(Algorithm::Stepwise { model, unknown, unknown_id, kind })
        };
        let algorithm = match model.kind {
            ModelKind::Unigram => {
                let unigram = Unigram::new(&model, &texts, unknown_id)?;
                Algorithm::Unigram { model: Box::new(unigram), unknown, unknown_id }
            }
            ModelKind::Word => stepwise(EngineKind::SentencePieceWord, unknown)?,
            ModelKind::Char => stepwise(EngineKind::SentencePieceChar, unknown)?,
            ModelKind::Bpe if !is_plain(&model) => stepwise(EngineKind::SentencePieceBpeStepwise, unknown)?,
            ModelKind::Bpe => {
                let source = model_source(&model, &texts, unknown);
                let tables = Tables::build(&source)?;
                let joints = Joints::new(&tables, &source, false);
                Algorithm::Bpe { tables: Box::new(tables), joints }
            }
        };
        let added = AddedTokens::new(&spec, Normalizer::None)?;
        let shared = Shared {
            algorithm,
            normalizer: SpNormalizer::Model(Box::new(ModelNormalizer::new(&model)?)),
            added: added
                .ok_or_else(|| TokenizeError::invalid("SentencePiece model: two control pieces are the same"))?,
            surround: Surround::default(),
            user_defined,
            fused,
            text_of: TextOf::Pieces { texts: decoded(&model, &texts), drop_first_blank: model.add_dummy_prefix },
            max_id: model.pieces.len() as u32 - 1,
        };
        Ok((spec, Self::new(shared), model.ends()))
    }
}

/// Whether the fast engine covers a BPE model: every piece that merges may appear, each of its characters is a piece itself
/// (to SentencePiece, characters merge in any case), and an unknown mark is one id.
fn is_plain(model: &Model) -> bool {
    let of_kind = |kind| model.pieces.iter().filter(move |piece| piece.kind == kind).map(|piece| piece.text.as_str());
    let known = of_kind(PieceKind::Normal).chain(of_kind(PieceKind::UserDefined));
    let characters: HashSet<&str> = known.filter(|text| is_one_char(text.as_bytes())).collect();
    let mut buffer = [0; 4];
    (characters.contains(MARK) || !model.byte_fallback)
        && of_kind(PieceKind::Unused).next().is_none()
        && of_kind(PieceKind::Normal)
            .all(|text| text.chars().all(|letter| characters.contains(&*letter.encode_utf8(&mut buffer))))
}

/// Where a `tokenizer.json` puts a blank, and whether it cuts before each; `None` for rules that are not known.
fn prepend(spec: &TokenizerSpec) -> Option<(Prepend, bool)> {
    let is_mark = |value: &Value| value == MARK;
    let is_replace = |value: &Value| {
        value["type"] == "Replace" && value["pattern"] == json!({"String": " "}) && is_mark(&value["content"])
    };
    let normalizer = &spec.normalizer;
    let steps: Vec<&Value> = match normalizer["type"].as_str() {
        None if normalizer.is_null() => Vec::new(),
        Some("Sequence") => normalizer["normalizers"].as_array()?.iter().collect(),
        _ => vec![normalizer],
    };
    let from_normalizer = match steps[..] {
        [] => None,
        [replace] if is_replace(replace) => Some(Prepend::Never),
        [first, replace] if first["type"] == "Prepend" && is_mark(&first["prepend"]) && is_replace(replace) => {
            Some(Prepend::Always)
        }
        _ => return None,
    };
    let pre = &spec.pre_tokenizer;
    match (from_normalizer, pre["type"].as_str()) {
        (Some(prepend), None) if pre.is_null() => Some((prepend, false)),
        (None, Some("Metaspace")) if is_mark(&pre["replacement"]) => {
            let scheme = match (pre["prepend_scheme"].as_str(), pre["add_prefix_space"].as_bool()) {
                (Some("never"), _) | (None, Some(false)) => Prepend::Never,
                (Some("first"), None | Some(true)) => Prepend::First,
                (Some("always") | None, None | Some(true)) => Prepend::IfMissing,
                _ => return None,
            };
            Some((scheme, pre["split"].as_bool().unwrap_or(true)))
        }
        _ => None,
    }
}

/// The vocabulary of a `tokenizer.json`, and the id of which a row counts once.
fn json_source(spec: &TokenizerSpec) -> Option<(VocabSource, Option<u32>)> {
    let VocabSpec::Ids(ids) = &spec.model.vocab else { return None };
    let setting = |name: &str| spec.model.settings.get(name).unwrap_or(&Value::Null);
    let is_off = |value: &Value| matches!(value, Value::Null | Value::Bool(false)) || value == 0.0 || value == "";
    let known = [
        "byte_fallback",
        "unk_token",
        "fuse_unk",
        "dropout",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "ignore_merges",
    ];
    let must_be_off = ["dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"];
    if spec.model_kind() != "BPE"
        || !spec.model.settings.keys().all(|name| known.contains(&name.as_str()))
        || !must_be_off.iter().all(|name| is_off(setting(name)))
        || !ids.contains_key(MARK)
    {
        return None;
    }
    let fused = setting("fuse_unk").as_bool().unwrap_or(false);
    let unknown = if setting("byte_fallback") == true {
        Unknown::Bytes(byte_ids(|name| ids.get(name).copied())?)
    } else {
        Unknown::Token { id: *ids.get(setting("unk_token").as_str()?)?, fused }
    };
    let fused = match unknown {
        Unknown::Token { id, fused: true } => Some(id),
        _ => None,
    };
    let is_byte = |id: u32| matches!(&unknown, Unknown::Bytes(ids) if ids.contains(&id));
    let usable = |token: &str| !token.is_empty() && !token.contains(' ');
    let mut tokens = Vec::with_capacity(ids.len());
    let mut used = vec![false; ids.values().max().map_or(0, |&id| id as usize + 1)];
    for (token, &id) in ids {
        if usable(token) && !(token.starts_with("<0x") && is_byte(id)) {
            if std::mem::replace(&mut used[id as usize], true) {
                return None;
            }
            tokens.push((bytes_of(token), id));
        }
    }
    let symbols = tokens.iter().filter(|(text, _)| is_one_char(text)).map(|&(_, id)| id).collect();
    let mut merges = Vec::with_capacity(spec.model.merges.len());
    for (rank, merge) in (0u32..).zip(&spec.model.merges) {
        let (left, right) = merge.halves()?;
        let (left_id, right_id, product) = (*ids.get(left)?, *ids.get(right)?, *ids.get(&format!("{left}{right}"))?);
        if ![left_id, right_id, product].iter().all(|&id| used[id as usize]) {
            return None;
        }
        merges.push(Merge { rank, left: left_id, right: right_id, product });
    }
    Some((VocabSource { tokens, symbols, merges, whole_words_first: false, unknown }, fused))
}

/// The vocabulary of a BPE `.model`: two pieces merge if their texts together are a piece, those of the highest score
/// first.
fn model_source(model: &Model, texts: &[Vec<u8>], unknown: Unknown) -> VocabSource {
    let can_match = |piece: &super::proto::Piece| piece.kind == PieceKind::Normal && !piece.text.contains(' ');
    let normal = || (0u32..).zip(&model.pieces).filter(|(_, piece)| can_match(piece));
    let id_of: HashMap<&[u8], u32> = normal().map(|(id, _)| (texts[id as usize].as_slice(), id)).collect();
    let mut by_score: Vec<u32> = normal().map(|(id, _)| id).collect();
    let score = |id: u32| model.pieces[id as usize].score;
    by_score.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
    let mut merges = Vec::new();
    let lengths = Lengths::of(id_of.keys().map(|text| text.len()));
    let mut rank = 0;
    for (place, &id) in by_score.iter().enumerate() {
        if place > 0 && score(by_score[place - 1]) != score(id) {
            rank += 1;
        }
        let text = &texts[id as usize];
        let cuts = lengths.cuts(text.len()).filter(|&cut| text[cut] & 0xC0 != 0x80);
        merges.extend(cuts.filter_map(|cut| {
            Some(Merge { rank, left: *id_of.get(&text[..cut])?, right: *id_of.get(&text[cut..])?, product: id })
        }));
    }
    let tokens: Vec<_> = normal().map(|(id, _)| (texts[id as usize].clone(), id)).collect();
    let symbols = tokens.iter().filter(|(text, _)| is_one_char(text)).map(|&(_, id)| id).collect();
    VocabSource { tokens, symbols, merges, whole_words_first: false, unknown }
}

/// A description of a `.model`, for fingerprint, sizes and names.
fn model_spec(model: &Model) -> TokenizerSpec {
    let special = |kind: PieceKind| matches!(kind, PieceKind::Control | PieceKind::Unknown);
    let added_tokens = (0..).zip(&model.pieces).filter(|(_, piece)| special(piece.kind) && !piece.text.is_empty());
    let added_tokens = added_tokens.map(|(id, piece)| AddedTokenSpec {
        id,
        content: piece.text.clone(),
        single_word: false,
        lstrip: false,
        rstrip: false,
        normalized: false,
        special: true,
    });
    let kinds: String = model.pieces.iter().map(|piece| char::from(b'a' + piece.kind as u8)).collect();
    let digest = |bytes: &[u8]| Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let settings = json!({"byte_fallback": model.byte_fallback, "piece_kinds": digest(kinds.as_bytes())});
    TokenizerSpec {
        added_tokens: added_tokens.collect(),
        normalizer: json!({"type": "SentencePiece", "charsmap": digest(&model.charsmap),
            "add_dummy_prefix": model.add_dummy_prefix, "remove_extra_whitespaces": model.remove_extra_whitespaces,
            "treat_whitespace_as_suffix": model.space_is_suffix}),
        pre_tokenizer: Value::Null,
        post_processor: Value::Null,
        decoder: Value::Null,
        model: ModelSpec {
            kind: match model.kind {
                ModelKind::Unigram => "Unigram",
                ModelKind::Bpe => "BPE",
                ModelKind::Word => "Word",
                ModelKind::Char => "Char",
            }
            .to_owned(),
            vocab: VocabSpec::Scores(model.pieces.iter().map(|p| (p.text.clone(), f64::from(p.score))).collect()),
            merges: Vec::new(),
            settings: settings.as_object().cloned().unwrap_or_default(),
        },
    }
}

/// What each piece decodes to: control pieces to nothing, the unknown piece to what SentencePiece writes for it.
fn decoded(model: &Model, texts: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let text = |(piece, text): (&super::proto::Piece, &Vec<u8>)| match piece.kind {
        PieceKind::Control => Vec::new(),
        PieceKind::Unknown => " \u{2047} ".as_bytes().to_vec(),
        PieceKind::Byte => {
            let hex = piece.text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
            hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()).map_or_else(|| text.clone(), |byte| vec![byte])
        }
        _ => text.clone(),
    };
    model.pieces.iter().zip(texts).map(text).collect()
}
