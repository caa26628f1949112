//! What a tokenizer is, whatever file described it: vocabulary, merges, rules.
//!
//! Every source (a `tokenizer.json`, vocabulary + merges) is turned into the same description, so that one loader, one
//! fingerprint and one choice of engine serve all.

use std::collections::HashMap;

use serde::de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::TokenizeError;

/// A tokenizer in the structure of a Hugging Face `tokenizer.json`.
#[derive(Debug, Clone, Deserialize)]
pub struct TokenizerSpec {
    /// Tokens matched in the text before the model runs, and those with a special meaning.
    #[serde(default)]
    pub added_tokens: Vec<AddedTokenSpec>,
    /// Rule applied to the text first, as written; `Null` if there is none.
    #[serde(default)]
    pub normalizer: Value,
    /// Rule that cuts the text into words.
    #[serde(default)]
    pub pre_tokenizer: Value,
    /// Rule that adds tokens around a text.
    #[serde(default)]
    pub post_processor: Value,
    /// Rule that turns tokens into text.
    #[serde(default)]
    pub decoder: Value,
    /// Vocabulary and merges.
    pub model: ModelSpec,
}

/// One entry of `added_tokens`.
#[derive(Debug, Clone, Deserialize)]
pub struct AddedTokenSpec {
    /// Its id.
    pub id: u32,
    /// Its text.
    pub content: String,
    /// Matches whole words only.
    #[serde(default)]
    pub single_word: bool,
    /// Swallows white space to the left.
    #[serde(default)]
    pub lstrip: bool,
    /// Swallows white space to the right.
    #[serde(default)]
    pub rstrip: bool,
    /// Is looked for in the normalised text.
    #[serde(default)]
    pub normalized: bool,
    /// Has a special meaning: left alone by `decode`, and plain text unless the policy says otherwise.
    #[serde(default)]
    pub special: bool,
}

/// The `model` of a `tokenizer.json`.
#[derive(Debug, Clone, Deserialize)]
pub struct ModelSpec {
    /// `BPE`, `Unigram`, `WordPiece` or `WordLevel`; empty in files of early versions.
    #[serde(rename = "type", default)]
    pub kind: String,
    /// Token to id (BPE, WordPiece, WordLevel), or a list of `[token, score]` (Unigram).
    #[serde(default)]
    pub vocab: VocabSpec,
    /// Merges in order of rank.
    #[serde(default)]
    pub merges: Vec<MergeSpec>,
    /// All other settings of the model, as written.
    #[serde(flatten)]
    pub settings: serde_json::Map<String, Value>,
}

/// A vocabulary as it is written.
#[derive(Debug, Clone)]
pub enum VocabSpec {
    /// Token to id.
    Ids(HashMap<String, u32>),
    /// Token and score; the id is the place in the list.
    Scores(Vec<(String, f64)>),
}

impl Default for VocabSpec {
    fn default() -> Self {
        Self::Ids(HashMap::new())
    }
}

/// A merge as it is written: a pair, or (older files) one string with a space between.
#[derive(Debug, Clone)]
pub enum MergeSpec {
    /// `["a", "b"]`
    Pair(String, String),
    /// `"a b"`
    Line(String),
}

impl MergeSpec {
    /// The two halves.
    pub fn halves(&self) -> Option<(&str, &str)> {
        match self {
            Self::Pair(left, right) => Some((left, right)),
            Self::Line(line) => line.split_once(' '),
        }
    }
}

// By hand: what serde derives for such choices keeps each value in a general form first, at twice the time.
impl<'de> Deserialize<'de> for VocabSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = VocabSpec;

            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str("a vocabulary: an object of ids or a list of tokens with scores")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<VocabSpec, A::Error> {
                let mut ids = HashMap::with_capacity(map.size_hint().unwrap_or(1 << 15));
                while let Some((token, id)) = map.next_entry()? {
                    ids.insert(token, id);
                }
                Ok(VocabSpec::Ids(ids))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<VocabSpec, A::Error> {
                let mut scores = Vec::new();
                while let Some(entry) = list.next_element()? {
                    scores.push(entry);
                }
                Ok(VocabSpec::Scores(scores))
            }
        }

        deserializer.deserialize_any(Entries)
    }
}

impl<'de> Deserialize<'de> for MergeSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Halves;

        impl<'de> Visitor<'de> for Halves {
            type Value = MergeSpec;

            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str("a merge: a pair of tokens, or both in one string with a space between")
            }

            fn visit_str<E: Error>(self, line: &str) -> Result<MergeSpec, E> {
                Ok(MergeSpec::Line(line.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<MergeSpec, A::Error> {
                let missing = |len| A::Error::invalid_length(len, &self);
                let left = list.next_element()?.ok_or_else(|| missing(0))?;
                let right = list.next_element()?.ok_or_else(|| missing(1))?;
                match list.next_element::<IgnoredAny>()? {
                    Some(_) => Err(missing(3)),
                    None => Ok(MergeSpec::Pair(left, right)),
                }
            }
        }

        deserializer.deserialize_any(Halves)
    }
}

impl VocabSpec {
    /// Number of entries.
    pub fn len(&self) -> usize {
        match self {
            Self::Ids(ids) => ids.len(),
            Self::Scores(scores) => scores.len(),
        }
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Entries ordered by id.
    pub fn by_id(&self) -> Vec<(&str, u32)> {
        match self {
            Self::Ids(ids) => {
                let mut entries: Vec<_> = ids.iter().map(|(token, &id)| (token.as_str(), id)).collect();
                entries.sort_unstable_by_key(|&(token, id)| (id, token));
                entries
            }
            Self::Scores(scores) => (0..).zip(scores).map(|(id, (token, _))| (token.as_str(), id)).collect(),
        }
    }

    /// Id of a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        match self {
            Self::Ids(ids) => ids.get(token).copied(),
            Self::Scores(scores) => {
                scores.iter().position(|(entry, _)| entry == token).and_then(|id| u32::try_from(id).ok())
            }
        }
    }
}

/// Characters of a line that a message shows.
const LONGEST_SHOWN: usize = 60;

impl TokenizerSpec {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// [`TokenizeError::Invalid`] if the text is not JSON or lacks a model.
    pub fn from_tokenizer_json(bytes: &[u8]) -> Result<Self, TokenizeError> {
        serde_json::from_slice(bytes)
            .map_err(|error| TokenizeError::invalid(format!("expected a tokenizer.json with a \"model\": {error}")))
    }

    /// A byte-level BPE given as GPT-2's two files: `vocab.json` and `merges.txt`.
    ///
    /// # Errors
    /// [`TokenizeError::Invalid`] if the vocabulary is not a JSON object of ids, or a merge is not a pair of its tokens.
    pub fn from_vocab_and_merges(vocab: &[u8], merges: &str) -> Result<Self, TokenizeError> {
        let ids: HashMap<String, u32> = serde_json::from_slice(vocab)
            .map_err(|error| TokenizeError::invalid(format!("the vocabulary is not a JSON object of ids: {error}")))?;
        let (mut pairs, mut product) = (Vec::with_capacity(ids.len()), String::new());
        for (number, line) in (1..).zip(merges.lines()) {
            if line.starts_with("#version") || line.trim().is_empty() {
                continue;
            }
            let pair = line.split_once(' ').filter(|(left, right)| {
                product.clear();
                product.extend([*left, *right]);
                !right.contains(' ') && [*left, *right, &product].iter().all(|token| ids.contains_key(*token))
            });
            let Some((left, right)) = pair else {
                let shown: String = line.chars().take(LONGEST_SHOWN).collect();
                let more = if shown.len() < line.len() { " and more" } else { "" };
                return Err(TokenizeError::invalid(format!(
                    "line {number} of the merges, {shown:?}{more}, is not a pair of tokens of the vocabulary; \
                     vocabulary and merges must be of the same tokenizer, and not be mistaken for each other"
                )));
            };
            pairs.push(MergeSpec::Pair(left.to_owned(), right.to_owned()));
        }
        let end = "<|endoftext|>";
        let added_tokens = ids.get(end).map(|&id| AddedTokenSpec {
            id,
            content: end.to_owned(),
            single_word: false,
            lstrip: false,
            rstrip: false,
            normalized: false,
            special: true,
        });
        let byte_level =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        let settings = json!({
            "dropout": null, "unk_token": null, "continuing_subword_prefix": "", "end_of_word_suffix": "",
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
        });
        Ok(Self {
            added_tokens: added_tokens.into_iter().collect(),
            normalizer: Value::Null,
            pre_tokenizer: byte_level.clone(),
            post_processor: Value::Null,
            decoder: byte_level,
            model: ModelSpec {
                kind: "BPE".to_owned(),
                vocab: VocabSpec::Ids(ids),
                merges: pairs,
                settings: settings.as_object().cloned().unwrap_or_default(),
            },
        })
    }

    /// The same as the text of a `tokenizer.json`.
    pub(crate) fn to_json(&self) -> Vec<u8> {
        let vocab = match &self.model.vocab {
            VocabSpec::Ids(ids) => json!(ids),
            VocabSpec::Scores(scores) => json!(scores),
        };
        let merges: Vec<_> = self.model.merges.iter().filter_map(MergeSpec::halves).collect();
        let mut model = self.model.settings.clone();
        model.extend([
            ("type".to_owned(), json!(self.model.kind)),
            ("vocab".to_owned(), vocab),
            ("merges".to_owned(), json!(merges)),
        ]);
        let added = self.added_tokens.iter().map(|token| {
            json!({"id": token.id, "content": token.content, "single_word": token.single_word, "lstrip": token.lstrip,
                   "rstrip": token.rstrip, "normalized": token.normalized, "special": token.special})
        });
        let spec = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(),
            "normalizer": self.normalizer, "pre_tokenizer": self.pre_tokenizer,
            "post_processor": self.post_processor, "decoder": self.decoder, "model": model,
        });
        spec.to_string().into_bytes()
    }

    /// Kind of the model; files of early versions name none and are BPE if they have merges.
    pub fn model_kind(&self) -> &str {
        match self.model.kind.as_str() {
            "" if !self.model.merges.is_empty() => "BPE",
            kind => kind,
        }
    }

    /// Number of ids: one more than the largest, of model and added tokens together.
    pub fn vocab_size(&self) -> u64 {
        let model = match &self.model.vocab {
            VocabSpec::Ids(ids) => ids.values().max().map(|&id| u64::from(id) + 1),
            VocabSpec::Scores(scores) => Some(scores.len() as u64),
        };
        let added = self.added_tokens.iter().map(|token| u64::from(token.id) + 1).max();
        model.max(added).unwrap_or(0)
    }

    /// SHA-256 over vocabulary, merges, added tokens and rules, in hexadecimal.
    ///
    /// Two files that describe the same tokenizer in different spellings (merges as pairs or as lines, vocabulary and
    /// merges apart) have the same fingerprint; whatever changes an id changes it.
    pub fn fingerprint(&self) -> String {
        let mut hash = Sha256::new();
        let mut field = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        field(b"megaflow tokenizer 1");
        field(self.model_kind().as_bytes());
        for (token, id) in self.model.vocab.by_id() {
            field(token.as_bytes());
            field(&id.to_le_bytes());
        }
        if let VocabSpec::Scores(scores) = &self.model.vocab {
            for (_, score) in scores {
                field(&score.to_le_bytes());
            }
        }
        for merge in &self.model.merges {
            let (left, right) = merge.halves().unwrap_or_default();
            field(left.as_bytes());
            field(right.as_bytes());
        }
        for token in &self.added_tokens {
            let flags = [token.single_word, token.lstrip, token.rstrip, token.normalized, token.special];
            field(&token.id.to_le_bytes());
            field(token.content.as_bytes());
            field(&flags.map(u8::from));
        }
        let mut rules: Vec<(&str, &Value)> = vec![
            ("normalizer", &self.normalizer),
            ("pre_tokenizer", &self.pre_tokenizer),
            ("post", &self.post_processor),
        ];
        // A setting that is absent, null, false or empty changes no id.
        let matters = |value: &Value| !matches!(value, Value::Null | Value::Bool(false)) && value.as_str() != Some("");
        rules
            .extend(self.model.settings.iter().map(|(name, value)| (name.as_str(), value)).filter(|(_, v)| matters(v)));
        for (name, value) in rules {
            field(name.as_bytes());
            field(value.to_string().as_bytes());
        }
        hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Texts of the special tokens.
    pub fn special_tokens(&self) -> Vec<&str> {
        self.added_tokens.iter().filter(|token| token.special).map(|token| token.content.as_str()).collect()
    }

    /// Id of a token of the model or of the added ones.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        let added = self.added_tokens.iter().find(|entry| entry.content == token).map(|entry| entry.id);
        added.or_else(|| self.model.vocab.id(token))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAIRS: &str = r#"{"added_tokens": [{"id": 3, "content": "<e>", "special": true}], "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
        "model": {"type": "BPE", "dropout": null, "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}}"#;

    fn spec(text: &str) -> TokenizerSpec {
        TokenizerSpec::from_tokenizer_json(text.as_bytes()).unwrap()
    }

    #[test]
    fn merges_as_lines_have_the_fingerprint_of_merges_as_pairs() {
        let lines = PAIRS.replace(r#"[["a", "b"]]"#, r#"["a b"]"#);
        assert_ne!(lines, PAIRS);
        assert_eq!(spec(&lines).fingerprint(), spec(PAIRS).fingerprint());
    }

    #[test]
    fn whatever_changes_ids_changes_the_fingerprint() {
        let changes = [
            (r#""ab": 2"#, r#""ab": 5"#),
            (r#"[["a", "b"]]"#, "[]"),
            ("\"add_prefix_space\": false", "\"add_prefix_space\": true"),
            (r#""dropout": null"#, r#""ignore_merges": true"#),
            (r#""special": true"#, r#""special": false"#),
            (r#""normalizer": null"#, r#""normalizer": {"type": "NFC"}"#),
        ];
        for (from, to) in changes {
            let changed = PAIRS.replace(from, to);
            assert_ne!(changed, PAIRS, "{from}");
            assert_ne!(spec(&changed).fingerprint(), spec(PAIRS).fingerprint(), "{to}");
        }
    }

    #[test]
    fn two_files_and_the_json_made_of_them_are_one_tokenizer() {
        let vocab = br#"{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}"#;
        let files = TokenizerSpec::from_vocab_and_merges(vocab, "#version: 0.2\na b\n").unwrap();
        let json = TokenizerSpec::from_tokenizer_json(&files.to_json()).unwrap();
        assert_eq!(json.fingerprint(), files.fingerprint());
        assert_eq!((json.vocab_size(), json.special_tokens()), (4, vec!["<|endoftext|>"]));
        assert_eq!(json.model.merges[0].halves(), Some(("a", "b")));
        assert_eq!(json.pre_tokenizer, files.pre_tokenizer);
    }

    #[test]
    fn what_is_no_vocabulary_or_merge_is_named() {
        let vocab = TokenizerSpec::from_tokenizer_json(br#"{"model": {"vocab": 5}}"#).unwrap_err().to_string();
        assert!(vocab.contains("expected a vocabulary: an object of ids or a list of tokens with scores"), "{vocab}");
        for merge in ["5", r#"["a"]"#, r#"["a", "b", "c"]"#] {
            let text = PAIRS.replace(r#"["a", "b"]"#, merge);
            let error = TokenizerSpec::from_tokenizer_json(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains("expected a merge: a pair of tokens"), "{error}");
        }
    }

    #[test]
    fn vocab_size_counts_added_tokens() {
        assert_eq!(spec(PAIRS).vocab_size(), 4);
        assert_eq!(spec(PAIRS).special_tokens(), ["<e>"]);
        assert_eq!(spec(PAIRS).token_id("<e>"), Some(3));
    }

    #[test]
    fn merges_of_another_vocabulary_are_refused_with_the_line() {
        let error = TokenizerSpec::from_vocab_and_merges(br#"{"a": 0, "b": 1}"#, "#version: 0.2\na b\n");
        assert!(error.unwrap_err().to_string().contains("line 2 of the merges, \"a b\", is not"));
    }

    #[test]
    fn a_vocabulary_in_place_of_merges_is_not_printed_whole() {
        let vocab = format!("{{{}\"z\": 9}}", "\"a\": 0, ".repeat(10_000));
        let error = TokenizerSpec::from_vocab_and_merges(br#"{"a": 0}"#, &vocab).unwrap_err().to_string();
        assert!(error.contains("line 1 of the merges, \"{\\\"a\\\": 0, "), "{error}");
        assert!(error.contains("\" and more, is not a pair of tokens"), "{error}");
        assert!(error.len() < 400, "{error}");
    }
}
