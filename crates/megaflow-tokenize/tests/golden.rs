//! Ids of all tokenizers of the test data, and of their corpora against the `tokenizers` crate.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::fs;
use std::path::Path;

use common::{PIECES, corpus, encode, shared};
use megaflow_tokenize::{EncodeOptions, EngineKind, SpecialTokensInText, Tokenizer, TokenizerFiles};
use proptest::prelude::*;
use serde_json::{Value, json};
use tokenizers::Tokenizer as HfTokenizer;

const BYTE_LEVEL: [&str; 3] = ["gpt2", "bbpe-32k-gpt2split", "bbpe-100k-llama3split"];

fn golden(data: &Path, name: &str, file: &str, policy: SpecialTokensInText, kind: EngineKind) {
    let tokenizer = TokenizerFiles::from_path(&data.join("tokenizers").join(name).join(file)).unwrap().tokenizer;
    assert_eq!(tokenizer.engine_kind(), kind, "{name}");
    let lines = fs::read_to_string(data.join(format!("tokenizers/golden/{name}.jsonl"))).unwrap();
    let mut checked = 0;
    for line in lines.lines().skip(1) {
        let case: Value = serde_json::from_str(line).unwrap();
        let text = case["text"].as_str().unwrap();
        let expected: Vec<u32> = case["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        assert_eq!(encode(&tokenizer, policy, text), expected, "{name} {text:?}");
        checked += 1;
    }
    assert!(checked > 200);
}

#[test]
fn golden_ids_of_byte_level_bpe() {
    let Some(data) = shared() else { return };
    for name in BYTE_LEVEL {
        golden(&data, name, "tokenizer.json", SpecialTokensInText::Encode, EngineKind::ByteLevelBpe);
    }
    golden(
        &data,
        "bbpe-32k-gpt2split",
        "tokenizer.legacy-merges.json",
        SpecialTokensInText::Encode,
        EngineKind::ByteLevelBpe,
    );
    golden(&data, "bbpe-100k-llama3split", "ranks.tiktoken", SpecialTokensInText::Encode, EngineKind::ByteLevelBpe);
    golden(&data, "gpt2", "vocab.json", SpecialTokensInText::Encode, EngineKind::ByteLevelBpe);
}

#[test]
fn golden_ids_of_sentencepiece() {
    let Some(data) = shared() else { return };
    let (text, bpe, unigram) =
        (SpecialTokensInText::Text, EngineKind::SentencePieceBpe, EngineKind::SentencePieceUnigram);
    golden(&data, "spm-bpe-16k-bytefallback", "spm.model", text, bpe);
    golden(&data, "spm-unigram-16k", "spm.model", text, unigram);
}

#[test]
fn golden_ids_of_word_piece() {
    let Some(data) = shared() else { return };
    golden(&data, "bert-base-uncased", "tokenizer.json", SpecialTokensInText::Encode, EngineKind::HuggingFace);
}

/// Both engines over one text, under both policies.
struct Pair {
    own: Tokenizer,
    reference: HfTokenizer,
}

impl Pair {
    fn new(json: &[u8]) -> Self {
        Self { own: Tokenizer::from_tokenizer_json(json).unwrap(), reference: HfTokenizer::from_bytes(json).unwrap() }
    }

    fn check(&mut self, text: &str) {
        for policy in [SpecialTokensInText::Encode, SpecialTokensInText::Text] {
            self.reference.set_encode_special_tokens(policy == SpecialTokensInText::Text);
            let expected = self.reference.encode_fast(text, false).unwrap();
            assert_eq!(encode(&self.own, policy, text), expected.get_ids(), "{policy:?} {text:?}");
        }
    }

    /// One encoder for all texts, so that its cache is used.
    fn check_corpus(&self, texts: &[String]) {
        let options = EncodeOptions { special_tokens_in_text: SpecialTokensInText::Encode, ..EncodeOptions::default() };
        let mut encoder = self.own.encoder(options).unwrap();
        for text in texts {
            let mut ids = Vec::new();
            encoder.encode(text, &mut ids).unwrap();
            assert!(ids == self.reference.encode_fast(text.as_str(), false).unwrap().get_ids(), "{text:?}");
        }
    }
}

/// A `tokenizer.json` in the manner of Llama 2, from the pieces of a SentencePiece BPE vocabulary.
fn llama_json(vocab: &str, normalizer: &Value, pre_tokenizer: &Value, byte_fallback: bool) -> Vec<u8> {
    let pieces: Vec<&str> = vocab.lines().map(|line| line.split('\t').next().unwrap()).collect();
    let kept = |piece: &&&str| byte_fallback || !piece.starts_with("<0x");
    let ids: std::collections::HashMap<&str, usize> =
        pieces.iter().filter(kept).enumerate().map(|(id, piece)| (*piece, id)).collect();
    let mut merges = Vec::new();
    for piece in pieces.iter().filter(|piece| !piece.starts_with('<')) {
        let cuts = piece.char_indices().skip(1).map(|(cut, _)| piece.split_at(cut));
        let mut own: Vec<_> = cuts.filter(|(left, right)| ids.contains_key(left) && ids.contains_key(right)).collect();
        own.sort_by_key(|(left, right)| (ids[left], ids[right]));
        merges.extend(own.into_iter().map(|(left, right)| json!([left, right])));
    }
    let added: Vec<Value> = ["<unk>", "<s>", "</s>"]
        .iter()
        .filter(|token| ids.contains_key(**token))
        .map(|token| {
            json!({"id": ids[token], "content": token, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
        })
        .collect();
    let spec = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": null,
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": byte_fallback, "ignore_merges": false,
            "vocab": ids, "merges": merges}});
    serde_json::to_vec(&spec).unwrap()
}

fn llama_variants(data: &Path) -> Vec<Pair> {
    let vocab = fs::read_to_string(data.join("tokenizers/spm-bpe-16k-bytefallback/spm.vocab")).unwrap();
    let prepend = json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u{2581}"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"}]});
    let metaspace = |scheme: &str, split: bool| json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": split});
    let pairs = vec![
        Pair::new(&llama_json(&vocab, &prepend, &Value::Null, true)),
        Pair::new(&llama_json(&vocab, &prepend, &Value::Null, false)),
        Pair::new(&llama_json(&vocab, &Value::Null, &metaspace("first", false), true)),
        Pair::new(&llama_json(&vocab, &Value::Null, &metaspace("always", true), true)),
        Pair::new(&llama_json(&vocab, &Value::Null, &metaspace("never", false), false)),
    ];
    assert!(pairs.iter().all(|pair| pair.own.engine_kind() == EngineKind::SentencePieceBpe));
    pairs
}

fn byte_level(data: &Path, name: &str) -> Pair {
    Pair::new(&fs::read(data.join(format!("tokenizers/{name}/tokenizer.json"))).unwrap())
}

#[test]
fn ranks_equal_the_tokenizer_json_made_from_them() {
    let Some(data) = shared() else { return };
    let folder = data.join("tokenizers/bbpe-100k-llama3split");
    let ranks = TokenizerFiles::from_path(&folder.join("ranks.tiktoken")).unwrap().tokenizer;
    let json = TokenizerFiles::from_path(&folder.join("tokenizer.json")).unwrap().tokenizer;
    let (mut ranks, mut json) =
        (ranks.encoder(EncodeOptions::default()).unwrap(), json.encoder(EncodeOptions::default()).unwrap());
    for text in ["prose", "code", "multilingual"].iter().flat_map(|name| corpus(name, 10)) {
        let (mut first, mut second) = (Vec::new(), Vec::new());
        ranks.encode(&text, &mut first).unwrap();
        json.encode(&text, &mut second).unwrap();
        assert!(first == second, "{text:?}");
    }
}

/// Byte-level variants that no file of the test data has, all on the own engine.
fn byte_level_variants(data: &Path) -> Vec<Pair> {
    let pairs = make_byte_level_variants(data);
    assert!(pairs.iter().all(|pair| pair.own.engine_kind() != EngineKind::HuggingFace));
    pairs
}

fn make_byte_level_variants(data: &Path) -> Vec<Pair> {
    let text = fs::read(data.join("tokenizers/bbpe-100k-llama3split/tokenizer.json")).unwrap();
    let spec: Value = serde_json::from_slice(&text).unwrap();
    let vary = |change: &dyn Fn(&mut Value)| {
        let mut spec = spec.clone();
        change(&mut spec);
        Pair::new(&serde_json::to_vec(&spec).unwrap())
    };
    vec![
        vary(&|spec| spec["normalizer"] = json!({"type": "NFC"})),
        vary(&|spec| spec["normalizer"] = json!({"type": "NFKC"})),
        vary(&|spec| spec["model"]["ignore_merges"] = json!(false)),
        // A pattern that no scanner knows.
        vary(&|spec| spec["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!(r"\p{L}+|\s+|\p{N}{2}")),
        vary(&|spec| {
            spec["pre_tokenizer"] = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
            "use_regex": true})
        }),
        // Added tokens that swallow white space, that are ordinary, that are normalised.
        vary(&|spec| {
            spec["normalizer"] = json!({"type": "NFC"});
            let tokens = spec["added_tokens"].as_array_mut().unwrap();
            for (id, content, special, normalized) in [
                (100_013, "<s>", true, false),
                (100_014, "</s>", false, false),
                (100_015, "\u{1F600}", false, true),
                (100_016, "\u{E9}t\u{E9}", false, true),
            ] {
                tokens.push(json!({"id": id, "content": content, "single_word": false, "lstrip": id % 2 == 1,
                    "rstrip": id % 2 == 0, "normalized": normalized, "special": special}));
            }
        }),
    ]
}

fn check_random(pairs: &mut [Pair], cases: u32) {
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let pieces = prop::collection::vec(0..PIECES.len(), 0..80)
        .prop_map(|picks| picks.into_iter().map(|pick| PIECES[pick]).collect::<String>());
    let texts = prop_oneof![pieces, "\\PC{0,100}", "[a-z '\n]{0,100}", "[\0-\u{10FFFF}]{0,60}"];
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let pairs = std::cell::RefCell::new(pairs);
    let result = runner.run(&texts, |text| {
        pairs.borrow_mut().iter_mut().for_each(|pair| pair.check(&text));
        Ok(())
    });
    result.unwrap();
}

#[test]
fn random_texts_equal_the_reference() {
    let Some(data) = shared() else { return };
    let mut pairs: Vec<Pair> = BYTE_LEVEL.iter().map(|name| byte_level(&data, name)).collect();
    pairs.extend(byte_level_variants(&data));
    pairs.extend(llama_variants(&data));
    check_random(&mut pairs, if cfg!(debug_assertions) { 40 } else { 300 });
}

#[test]
fn documents_equal_the_reference() {
    let Some(data) = shared() else { return };
    let step = if cfg!(debug_assertions) { 400 } else { 60 };
    let mut pairs: Vec<Pair> = BYTE_LEVEL.iter().map(|name| byte_level(&data, name)).collect();
    pairs.extend(byte_level_variants(&data));
    pairs.extend(llama_variants(&data));
    for name in ["prose", "code", "multilingual"] {
        let texts = corpus(name, step);
        pairs.iter().for_each(|pair| pair.check_corpus(&texts));
    }
}

#[test]
#[ignore = "minutes: every document of the three corpora"]
fn all_documents_equal_the_reference() {
    let Some(data) = shared() else { return };
    let mut pairs: Vec<Pair> = BYTE_LEVEL.iter().map(|name| byte_level(&data, name)).collect();
    pairs.push(byte_level_variants(&data).remove(0));
    pairs.push(llama_variants(&data).remove(0));
    for name in ["prose", "code", "multilingual"] {
        let texts = corpus(name, 1);
        pairs.iter().for_each(|pair| pair.check_corpus(&texts));
    }
}

#[test]
fn ids_do_not_depend_on_the_cache_nor_on_the_type() {
    let Some(data) = shared() else { return };
    let tokenizer = byte_level(&data, "gpt2").own;
    let small = EncodeOptions { cache_bytes: 1, ..EncodeOptions::default() };
    let (mut tight, mut roomy) =
        (tokenizer.encoder(small).unwrap(), tokenizer.encoder(EncodeOptions::default()).unwrap());
    for name in ["prose", "multilingual"] {
        for text in corpus(name, 20) {
            let (mut first, mut second, mut narrow) = (Vec::new(), Vec::new(), Vec::new());
            tight.encode(&text, &mut first).unwrap();
            roomy.encode(&text, &mut second).unwrap();
            roomy.encode_u16(&text, &mut narrow).unwrap();
            assert!(first == second, "{text:?}");
            assert!(narrow.into_iter().map(u32::from).eq(first), "{text:?}");
        }
    }
}

#[test]
fn parts_between_cut_points_have_the_ids_of_the_whole() {
    let Some(data) = shared() else { return };
    for name in BYTE_LEVEL {
        let tokenizer = byte_level(&data, name).own;
        let mut encoder = tokenizer.encoder(EncodeOptions::default()).unwrap();
        let mut cuts = 0;
        for text in ["prose", "code", "multilingual"].iter().flat_map(|name| corpus(name, 30)) {
            let (mut whole, mut parts, mut start) = (Vec::new(), Vec::new(), 0);
            encoder.encode(&text, &mut whole).unwrap();
            while let Some(cut) = tokenizer.cut_point(&text, start + 50) {
                encoder.encode(&text[start..cut], &mut parts).unwrap();
                (start, cuts) = (cut, cuts + 1);
            }
            encoder.encode(&text[start..], &mut parts).unwrap();
            assert!(whole == parts, "{text:?}");
        }
        assert!(cuts > 1000);
    }
}

#[test]
fn decoding_gives_the_text_back() {
    let Some(data) = shared() else { return };
    let pairs = BYTE_LEVEL.map(|name| byte_level(&data, name));
    let model = data.join("tokenizers/spm-bpe-16k-bytefallback/spm.model");
    let sentencepiece = TokenizerFiles::from_path(&model).unwrap().tokenizer;
    for text in corpus("multilingual", 100).iter().chain(&corpus("code", 100)) {
        for pair in &pairs {
            let ids = encode(&pair.own, SpecialTokensInText::Encode, text);
            assert_eq!(&pair.own.decode(&ids).unwrap(), text);
            assert_eq!(pair.own.decode(&ids[1..]).unwrap(), pair.reference.decode(&ids[1..], false).unwrap());
        }
        let ids = encode(&sentencepiece, SpecialTokensInText::Text, text);
        assert_eq!(sentencepiece.decode(&ids).unwrap(), text.replace('\u{2581}', " "));
    }
}
