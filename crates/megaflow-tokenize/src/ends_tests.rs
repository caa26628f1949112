//! Which token is the BOS or the EOS, where it goes, and what is refused.

use serde_json::json;

use super::*;
use crate::TokenizerFiles;

const PLAIN: EncodeOptions = EncodeOptions {
    special_tokens_in_text: crate::SpecialTokensInText::Text,
    add_special_tokens: false,
    add_bos: false,
    add_eos: false,
    cache_bytes: 1 << 16,
};

/// Words `a`, `b`, `[UNK]`, `<s>` (3) and `</s>` (4), the last two special if it is said.
fn words(special: bool, post_processor: &Value) -> Value {
    let token = |id: u32, content: &str| {
        json!({"id": id, "content": content, "special": true, "normalized": false,
        "single_word": false, "lstrip": false, "rstrip": false})
    };
    let added = if special { vec![token(3, "<s>"), token(4, "</s>")] } else { Vec::new() };
    json!({"added_tokens": added, "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": post_processor,
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2, "<s>": 3, "</s>": 4}, "unk_token": "[UNK]"}})
}

fn template(before: &[u32], after: &[u32]) -> Value {
    let special = |id: &u32| json!({"SpecialToken": {"id": id.to_string(), "type_id": 0}});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let single: Vec<Value> = before.iter().map(special).chain([text]).chain(after.iter().map(special)).collect();
    let tokens = before
        .iter()
        .chain(after)
        .map(|id| (id.to_string(), json!({"id": id.to_string(), "ids": [id], "tokens": [id.to_string()]})));
    json!({"type": "TemplateProcessing", "single": single, "pair": [],
        "special_tokens": serde_json::Map::from_iter(tokens)})
}

fn load(tokenizer: &Value) -> Tokenizer {
    Tokenizer::from_tokenizer_json(tokenizer.to_string().as_bytes()).unwrap()
}

fn ids(tokenizer: &Tokenizer, text: &str, options: EncodeOptions) -> Result<Vec<u32>, TokenizeError> {
    let (mut wide, mut narrow) = (Vec::new(), Vec::new());
    tokenizer.encoder(options)?.encode(text, &mut wide)?;
    tokenizer.encoder(options)?.encode_u16(text, &mut narrow)?;
    assert_eq!(wide, narrow.iter().map(|&id| u32::from(id)).collect::<Vec<_>>());
    for threads in [1, 2] {
        let batch = tokenizer.encode_batch(&[text, text], options, threads)?;
        assert_eq!(batch.ids, [&wide[..], &wide].concat());
        assert_eq!(batch.offsets, [0, wide.len() as i64, 2 * wide.len() as i64]);
    }
    Ok(wide)
}

fn ends(tokenizer: &Tokenizer) -> (Option<u32>, Option<u32>) {
    let id = |end| tokenizer.end_token(end).unwrap().map(|&(_, id)| id);
    (id(Bos), id(Eos))
}

#[test]
fn both_ends_go_around_each_text_and_only_when_asked_for() {
    let tokenizer = load(&words(true, &Value::Null));
    let with = |add_bos, add_eos| EncodeOptions { add_bos, add_eos, ..PLAIN };
    assert_eq!(ids(&tokenizer, "a b", with(false, false)).unwrap(), [0, 1]);
    assert_eq!(ids(&tokenizer, "a b", with(true, false)).unwrap(), [3, 0, 1]);
    assert_eq!(ids(&tokenizer, "a b", with(false, true)).unwrap(), [0, 1, 4]);
    assert_eq!(ids(&tokenizer, "a b", with(true, true)).unwrap(), [3, 0, 1, 4]);
    assert_eq!(ids(&tokenizer, "", with(true, true)).unwrap(), [3, 4]);
    // A warm encoder serves all of them, and none hands its ends on to the next.
    assert_eq!(ids(&tokenizer, "a b", with(false, false)).unwrap(), [0, 1]);
}

#[test]
fn a_text_that_is_cut_for_several_threads_has_each_end_once() {
    let vocab: HashMap<String, u32> = (0..=255u8).map(|byte| crate::bpe::token_of(&[byte])).zip(0..).collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let special = |id: u32, content: &str| json!({"id": id, "content": content, "special": true});
    let tokenizer = load(&json!({"added_tokens": [special(256, "<s>"), special(257, "</s>")],
        "pre_tokenizer": byte_level, "model": {"type": "BPE", "vocab": vocab, "merges": []}}));
    let text = "the then ".repeat(90_000);
    let options = EncodeOptions { add_bos: true, add_eos: true, ..PLAIN };
    assert!(tokenizer.parts(&text, options).count() > 1);
    let ids = ids(&tokenizer, &text, options).unwrap();
    assert_eq!((ids.len(), ids[0], ids[ids.len() - 1]), (text.len() + 2, 256, 257));
    assert_eq!(ids.iter().filter(|&&id| id > 255).count(), 2);
}

#[test]
fn what_does_not_exist_is_refused_at_every_door_before_any_work() {
    let tokenizer = load(&words(false, &Value::Null));
    assert_eq!(ends(&tokenizer), (None, None), "a word of the corpus is no BOS");
    for (end, options) in
        [(Bos, EncodeOptions { add_bos: true, ..PLAIN }), (Eos, EncodeOptions { add_eos: true, ..PLAIN })]
    {
        let is_it = |error: TokenizeError| matches!(error, TokenizeError::NoEndToken { end: it, .. } if it == end);
        assert!(is_it(tokenizer.check(options).unwrap_err()));
        assert!(is_it(tokenizer.encoder(options).err().unwrap()));
        assert!(is_it(tokenizer.encode_batch(&[], options, 1).unwrap_err()));
    }
    let error = tokenizer.check(EncodeOptions { add_bos: true, ..PLAIN }).unwrap_err().to_string();
    let expected = "the tokenizer: asked for a BOS before each document (add_bos), but this tokenizer has none: nothing declares \
        one, and none of <|begin_of_text|>, <s>,";
    assert!(error.starts_with(expected) && error.contains("\"bos_token\" in a tokenizer_config.json"), "{error}");
}

#[test]
fn a_token_that_the_post_processor_adds_on_the_same_side_is_not_added_twice() {
    let both = EncodeOptions { add_special_tokens: true, ..PLAIN };
    let (bos, eos) = (EncodeOptions { add_bos: true, ..both }, EncodeOptions { add_eos: true, ..both });
    let begins = load(&words(true, &template(&[3], &[])));
    assert_eq!(ids(&begins, "a", both).unwrap(), [3, 0]);
    let error = begins.check(bos).unwrap_err().to_string();
    assert_eq!(
        error,
        "the tokenizer: add_bos and add_special_tokens would both put the BOS \"<s>\" (id 3) before each text, since the \
         tokenizer's post_processor adds it; leave one of the two off"
    );
    assert_eq!(ids(&begins, "a", eos).unwrap(), [3, 0, 4]);
    let around = load(&words(true, &template(&[3], &[4])));
    assert!(matches!(around.check(eos), Err(TokenizeError::AddedTwice { end: Eos, id: 4, .. })));
    // Behind the text the same id is no BOS.
    let behind = load(&words(true, &template(&[], &[3])));
    assert_eq!(ids(&behind, "a", bos).unwrap(), [3, 0, 3]);
}

#[test]
fn an_end_of_document_that_is_the_eos_is_not_added_twice() {
    let tokenizer = load(&words(true, &Value::Null));
    let options = EncodeOptions { add_eos: true, ..PLAIN };
    assert!(matches!(tokenizer.check_documents(options, Some(4)), Err(TokenizeError::EndsTwice { id: 4, .. })));
    assert!(tokenizer.check_documents(options, Some(1)).is_ok());
    assert!(tokenizer.check_documents(options, None).is_ok());
    assert!(tokenizer.check_documents(PLAIN, Some(4)).is_ok());
}

#[test]
fn a_configuration_beside_the_file_decides_before_known_names() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokenizer.json");
    fs::write(&file, words(true, &Value::Null).to_string()).unwrap();
    let with = |config: Value| {
        fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        TokenizerFiles::from_path(&file).unwrap().tokenizer
    };
    assert_eq!(ends(&with(json!({}))), (Some(3), Some(4)));
    assert_eq!(ends(&with(json!({"bos_token": "a", "eos_token": {"content": "b"}}))), (Some(0), Some(1)));
    let none = with(json!({"bos_token": null, "eos_token": ""}));
    assert_eq!(ends(&none), (None, None), "null says that there is none");
    let error = none.check(EncodeOptions { add_bos: true, ..PLAIN }).unwrap_err().to_string();
    assert!(error.starts_with(&format!("{}: asked for a BOS", file.display())), "{error}");
    let wrong = with(json!({"bos_token": "<zebra>"}));
    let error = wrong.check(EncodeOptions { add_bos: true, ..PLAIN }).unwrap_err().to_string();
    let says = "declares \"<zebra>\" as bos_token, which is none of the 5 tokens; mend one of the two files";
    assert!(error.starts_with(&file.display().to_string()) && error.ends_with(says), "{error}");
    assert_eq!(ids(&wrong, "a", EncodeOptions { add_eos: true, ..PLAIN }).unwrap(), [0, 4]);
}

#[test]
fn a_vocabulary_with_merges_has_the_tokens_that_no_merge_makes() {
    let letters: Vec<String> = (0..=255u8).map(|byte| crate::bpe::token_of(&[byte])).collect();
    let with = |extra: &[&str], merges: &str, config: Value| {
        let folder = tempfile::tempdir().unwrap();
        let all = letters.iter().map(String::as_str).chain(extra.iter().copied());
        let vocab: HashMap<&str, u32> = all.zip(0..).collect();
        let file = folder.path().join("vocab.json");
        fs::write(&file, serde_json::to_string(&vocab).unwrap()).unwrap();
        fs::write(folder.path().join("merges.txt"), merges).unwrap();
        fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        TokenizerFiles::from_path(folder.path()).unwrap().tokenizer
    };
    let merges = "< s\n<s >\n";
    assert_eq!(ends(&with(&["<s", "<s>", "</s>"], merges, json!({}))), (None, Some(258)));
    assert_eq!(ends(&with(&["ab", "<s>", "</s>"], "a b\n", json!({}))), (Some(257), Some(258)));
    let markup = with(&["</", "</s", "</s>"], "< /\n</ s\n</s >\n", json!({}));
    assert_eq!((ends(&markup), markup.eod(None).unwrap()), ((None, None), None), "text that merges make ends nothing");
    let declared = with(&["<s", "<s>", "</s>"], merges, json!({"bos_token": "<s>", "eos_token": "<|im_end|>"}));
    assert_eq!(ends(&declared), (Some(257), Some(258)), "a token of other files does not count");
    let eod = with(&["</s>", "!e"], "! e\n", json!({"eos_token": "!e"}));
    assert_eq!(eod.eod(None).unwrap(), Some(("!e".to_owned(), 257)), "the declared EOS ends documents");
}

/// A field of a protocol buffer: bytes.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut out = if number < 16 { vec![number << 3 | 2] } else { vec![number << 3 | 0x82, number >> 4] };
    out.push(bytes.len() as u8);
    out.extend_from_slice(bytes);
    out
}

/// A SentencePiece model of these pieces and kinds, whose trainer names BOS and EOS.
fn model(pieces: &[(&str, u8)], bos: &str, eos: &str) -> Tokenizer {
    let mut bytes = Vec::new();
    for (text, kind) in pieces {
        bytes.extend(field(1, &[field(1, text.as_bytes()), vec![0x15, 0, 0, 0x80, 0xBF, 0x18, *kind]].concat()));
    }
    let names = [(46, bos), (47, eos)].into_iter().filter(|(_, name)| !name.is_empty());
    let names: Vec<u8> = names.flat_map(|(number, name)| field(number, name.as_bytes())).collect();
    bytes.extend(field(2, &[vec![0x18, 2], names].concat()));
    Tokenizer::from_sentencepiece(&bytes).unwrap()
}

#[test]
fn a_sentencepiece_model_has_the_control_pieces_that_its_trainer_names() {
    const CONTROL: u8 = 3;
    const OWN: u8 = 4; // user-defined
    let llama = [("<unk>", 2), ("<s>", CONTROL), ("</s>", CONTROL), ("\u{2581}", 1), ("a", 1)];
    let tokenizer = model(&llama, "", "");
    assert_eq!(ends(&tokenizer), (Some(1), Some(2)));
    let options = EncodeOptions { add_bos: true, add_eos: true, ..PLAIN };
    assert_eq!(ids(&tokenizer, "aa", options).unwrap(), [1, 3, 4, 4, 2]);
    // In the manner of Gemma: the old names are mark-up of the corpus.
    let gemma = [("<unk>", 2), ("<bos>", CONTROL), ("<eos>", CONTROL), ("</s>", OWN), ("<s>", OWN), ("\u{2581}", 1)];
    let tokenizer = model(&gemma, "<bos>", "<eos>");
    assert_eq!(ends(&tokenizer), (Some(1), Some(2)));
    assert_eq!(tokenizer.eod(None).unwrap(), Some(("<eos>".to_owned(), 2)), "not the mark-up");
    let without = model(&[("<unk>", 2), ("<s>", 1), ("</s>", OWN), ("\u{2581}", 1)], "", "");
    assert_eq!(ends(&without), (None, None));
}

#[test]
fn a_tekken_file_means_its_tokens_by_the_names_of_its_library() {
    let special = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).zip(0..).collect();
    let token = |name: &str| Declaration::Token(name.to_owned());
    assert_eq!(of_tekken(&special(&["<unk>", "<s>", "</s>"])), (token("<s>"), token("</s>")));
    assert_eq!(of_tekken(&special(&["<unk>", "<s>"])), (token("<s>"), Declaration::Absent));
}

#[test]
fn the_names_of_deepseek_are_known_by_their_wide_bars() {
    let begin = "<\u{FF5C}begin\u{2581}of\u{2581}sentence\u{FF5C}>";
    let end = "<\u{FF5C}end\u{2581}of\u{2581}sentence\u{FF5C}>";
    let text = words(true, &Value::Null).to_string().replace("</s>", end).replace("<s>", begin);
    let tokenizer = Tokenizer::from_tokenizer_json(text.as_bytes()).unwrap();
    assert_eq!(ends(&tokenizer), (Some(3), Some(4)));
    assert_eq!(tokenizer.eod(None).unwrap(), Some((end.to_owned(), 4)));
}
