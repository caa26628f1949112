//! tiktoken's ranks: byte strings with numbers, where any two neighbours merge whose bytes together have a number, the
//! lowest first. Also Mistral's `tekken.json`, which holds the same and the pattern in one file.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::bytes::ByteAlphabet;
use super::engine::ByteLevel;
use super::vocab::{Lengths, Merge, Unknown, VocabSource};
use crate::scan::{Dialect, Rule};
use crate::spec::{ModelSpec, VocabSpec};
use crate::{AddedTokenSpec, TokenizeError, TokenizerSpec};

/// What tiktoken's constructor takes beside the ranks.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct TiktokenConfig {
    /// The split rule.
    pub(crate) pat_str: String,
    /// Special tokens and their ids.
    #[serde(default)]
    pub(crate) special_tokens: HashMap<String, u32>,
}

/// Bytes and number of each token.
pub(crate) type Ranks = Vec<(Vec<u8>, u32)>;

/// Reads a file of lines, each of base64 and a number; `None` if it is something else.
pub(crate) fn read_ranks(bytes: &[u8]) -> Option<Ranks> {
    let text = std::str::from_utf8(bytes).ok()?;
    let line = |line: &str| {
        let (token, rank) = line.split_once(' ')?;
        Some((base64(token)?, rank.trim_end().parse().ok()?))
    };
    let ranks: Ranks = text.lines().filter(|line| !line.is_empty()).map(line).collect::<Option<_>>()?;
    (!ranks.is_empty()).then_some(ranks)
}

/// Reads a `tekken.json`; `None` if the text is something else.
pub(crate) fn read_tekken(bytes: &[u8]) -> Option<(Ranks, TiktokenConfig)> {
    #[derive(Deserialize)]
    struct Config {
        pattern: String,
        default_vocab_size: u32,
        default_num_special_tokens: u32,
    }
    #[derive(Deserialize)]
    struct Entry {
        rank: u32,
        token_bytes: String,
    }
    #[derive(Deserialize)]
    struct Special {
        rank: u32,
        token_str: String,
    }
    #[derive(Deserialize)]
    struct Tekken {
        config: Config,
        vocab: Vec<Entry>,
        #[serde(default)]
        special_tokens: Option<Vec<Special>>,
    }
    let tekken: Tekken = serde_json::from_slice(bytes).ok()?;
    let first = tekken.config.default_num_special_tokens;
    let count = tekken.config.default_vocab_size.checked_sub(first)?;
    let entries = tekken.vocab.into_iter().filter(|entry| entry.rank < count);
    let ranks =
        entries.map(|entry| Some((base64(&entry.token_bytes)?, entry.rank + first))).collect::<Option<Ranks>>()?;
    let named = |token: Special| (token.token_str, token.rank);
    let special_tokens = tekken.special_tokens.unwrap_or_else(|| {
        // Files of 2024 leave them to the library, whose names for the first three are fixed.
        let names = ["<unk>", "<s>", "</s>"].into_iter().zip(0..);
        names.map(|(name, rank)| Special { rank, token_str: name.to_owned() }).collect()
    });
    let special_tokens = special_tokens.into_iter().map(named).collect();
    Some((ranks, TiktokenConfig { pat_str: tekken.config.pattern, special_tokens }))
}

/// Standard base64 with or without padding.
fn base64(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0u32, 0);
    for byte in text.trim_end_matches('=').bytes() {
        let value = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    Some(bytes)
}

impl ByteLevel {
    /// An engine and a description for ranks.
    pub(crate) fn from_ranks(ranks: &Ranks, config: &TiktokenConfig) -> Result<(TokenizerSpec, Self), TokenizeError> {
        let rule = Rule::from_pattern(&config.pat_str, Dialect::Tiktoken).ok_or_else(|| {
            TokenizeError::invalid(format!(
                "the split pattern {:?} is not one that is known to be scanned exactly; use the tokenizer.json of this model",
                config.pat_str
            ))
        })?;
        let id_of: HashMap<&[u8], u32> = ranks.iter().map(|(bytes, id)| (bytes.as_slice(), *id)).collect();
        let distinct: std::collections::HashSet<u32> = ranks.iter().map(|&(_, id)| id).collect();
        if id_of.len() != ranks.len() || distinct.len() != ranks.len() || id_of.contains_key(&[][..]) {
            return Err(TokenizeError::invalid("two tokens of the ranks are the same, or one is empty"));
        }
        let symbols = (0..=255u8).map(|byte| id_of.get(&[byte][..]).copied()).collect::<Option<Vec<u32>>>();
        let symbols = symbols.ok_or_else(|| TokenizeError::invalid("the ranks lack some of the 256 bytes"))?;
        let mut by_rank: Vec<&(Vec<u8>, u32)> = ranks.iter().collect();
        by_rank.sort_unstable_by_key(|&&(_, id)| id);
        let mut merges = Vec::with_capacity(ranks.len() * 2);
        let lengths = Lengths::of(ranks.iter().map(|(bytes, _)| bytes.len()));
        for &(bytes, id) in &by_rank {
            merges.extend(lengths.cuts(bytes.len()).filter_map(|cut| {
                let (left, right) = (*id_of.get(&bytes[..cut])?, *id_of.get(&bytes[cut..])?);
                Some(Merge { rank: *id, left, right, product: *id })
            }));
        }
        let source =
            VocabSource { tokens: ranks.clone(), symbols, merges, whole_words_first: true, unknown: Unknown::Never };
        let spec = description(ranks, config);
        let engine = Self::from_parts(&source, rule, &spec)?;
        Ok((spec, engine))
    }
}

/// The description that stands for ranks: the vocabulary in the byte alphabet, the pattern, no merges (the ranks imply
/// them).
fn description(ranks: &Ranks, config: &TiktokenConfig) -> TokenizerSpec {
    let alphabet = ByteAlphabet::new();
    let mut added: Vec<(&String, &u32)> = config.special_tokens.iter().collect();
    added.sort_unstable_by_key(|&(_, id)| *id);
    let added_token = |(content, &id): (&String, &u32)| AddedTokenSpec {
        id,
        content: content.clone(),
        single_word: false,
        lstrip: false,
        rstrip: false,
        normalized: false,
        special: true,
    };
    TokenizerSpec {
        added_tokens: added.into_iter().map(added_token).collect(),
        normalizer: Value::Null,
        pre_tokenizer: json!({"type": "tiktoken", "pat_str": config.pat_str}),
        post_processor: Value::Null,
        decoder: json!({"type": "ByteLevel"}),
        model: ModelSpec {
            kind: "BPE".to_owned(),
            vocab: VocabSpec::Ids(ranks.iter().map(|(bytes, id)| (alphabet.token(bytes), *id)).collect()),
            merges: Vec::new(),
            settings: Map::from_iter([("merges_by_rank".to_owned(), Value::Bool(true))]),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_decoded() {
        for (text, bytes) in [("IQ==", "!"), ("IHRoZQ==", " the"), ("YWJj", "abc"), ("", "")] {
            assert_eq!(base64(text).unwrap(), bytes.as_bytes());
        }
        assert_eq!(base64("a b"), None);
    }

    #[test]
    fn what_is_not_ranks_is_not_read_as_ranks() {
        assert_eq!(read_ranks(b"IQ== 0\nIg== 1\n"), Some(vec![(b"!".to_vec(), 0), (b"\"".to_vec(), 1)]));
        assert_eq!(read_ranks(b"#version: 0.2\na b\n"), None);
        assert_eq!(read_ranks(b""), None);
        assert!(read_tekken(b"{\"model\": {}}").is_none());
    }

    #[test]
    fn unknown_patterns_are_refused() {
        let ranks: Ranks = (0..=255u8).map(|byte| (vec![byte], u32::from(byte))).collect();
        let config = TiktokenConfig { pat_str: r"\w+|\W+".to_owned(), special_tokens: HashMap::new() };
        let error = ByteLevel::from_ranks(&ranks, &config).err().unwrap().to_string();
        assert!(error.contains("not one that is known"), "{error}");
    }
}
