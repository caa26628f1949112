//! Policies, names of the end of a document, and what is refused.

use super::*;

const WORDS: &str = r#"{"added_tokens": [{"id": 2, "content": "</s>", "single_word": false, "lstrip": false,
    "rstrip": false, "normalized": false, "special": true}], "pre_tokenizer": {"type": "WhitespaceSplit"},
    "model": {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1, "</s>": 2}, "unk_token": "[UNK]"}}"#;

fn encode(policy: SpecialTokensInText, text: &str) -> Result<(Vec<u32>, u64), TokenizeError> {
    let tokenizer = Tokenizer::from_tokenizer_json(WORDS.as_bytes())?;
    let mut encoder =
        tokenizer.encoder(EncodeOptions { special_tokens_in_text: policy, ..EncodeOptions::default() })?;
    let mut ids = Vec::new();
    encoder.encode(text, &mut ids)?;
    Ok((ids, encoder.special_hits()))
}

#[test]
fn tokens_around_a_text_are_refused_where_there_are_none_or_they_do_not_exist() {
    let options = EncodeOptions { add_special_tokens: true, ..EncodeOptions::default() };
    let with_rule = |id: u32| {
        let rule = serde_json::json!({"type": "TemplateProcessing", "pair": [],
            "single": [{"SpecialToken": {"id": "</s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [id], "tokens": ["</s>"]}}});
        let mut json: serde_json::Value = serde_json::from_str(WORDS).unwrap();
        json["post_processor"] = rule;
        Tokenizer::from_tokenizer_json(json.to_string().as_bytes()).unwrap()
    };
    let none = Tokenizer::from_tokenizer_json(WORDS.as_bytes()).unwrap();
    assert!(matches!(none.check(options), Err(TokenizeError::NothingToAdd)));
    assert!(matches!(none.encoder(options), Err(TokenizeError::NothingToAdd)));
    assert!(matches!(none.encode_batch(&[], options, 1), Err(TokenizeError::NothingToAdd)));
    assert!(none.check(EncodeOptions::default()).is_ok());
    let wrong = with_rule(3).check(options);
    assert!(matches!(wrong, Err(TokenizeError::AddsUnknownId { id: 3, vocab_size: 3 })));
    let right = with_rule(2);
    assert_eq!(right.added_special_tokens().unwrap(), [2]);
    assert_eq!(right.encode_batch(&["a"], options, 1).unwrap().ids, [2, 0]);
}

#[test]
fn special_text_is_text_token_or_error_by_policy_and_is_counted() {
    assert_eq!(encode(SpecialTokensInText::Text, "a x</s>y").unwrap(), (vec![0, 1], 1));
    assert_eq!(encode(SpecialTokensInText::Encode, "a x</s>y").unwrap(), (vec![0, 1, 2, 1], 1));
    let error = encode(SpecialTokensInText::Error, "a x</s>y").unwrap_err().to_string();
    assert!(error.contains("\"</s>\" at byte 3"), "{error}");
}

#[test]
fn eod_follows_the_rule_explicit_then_declared_then_known_name() {
    let known = Tokenizer::from_tokenizer_json(WORDS.as_bytes()).unwrap();
    assert_eq!(known.eod(None).unwrap(), Some(("</s>".to_owned(), 2)));
    assert_eq!(known.eod(Some("a")).unwrap(), Some(("a".to_owned(), 0)));
    assert!(known.eod(Some("zebra")).unwrap_err().to_string().contains("no token \"zebra\""));
    let says = Declared { eos: Declaration::Token("a".to_owned()), ..Declared::default() };
    let declared = Tokenizer::of_tokenizer_json(WORDS.as_bytes(), says).unwrap();
    assert_eq!(declared.eod(None).unwrap(), Some(("a".to_owned(), 0)));
}

#[test]
fn ids_far_above_the_number_of_tokens_take_no_memory() {
    let letters = (0..=255u8).map(|byte| crate::bpe::token_of(&[byte]));
    let mut vocab: HashMap<String, u32> = letters.zip(0..).collect();
    let (mut ids, end) = (Vec::new(), "<|endoftext|>");
    for far in ["\u{65E5}", "ab"] {
        vocab.insert(far.to_owned(), u32::MAX);
        let vocab = serde_json::to_vec(&vocab).unwrap();
        let tokenizer = Tokenizer::from_vocab_and_merges(&vocab, "").unwrap();
        assert_eq!((tokenizer.engine_kind(), tokenizer.vocab_size()), (EngineKind::HuggingFace, 1 << 32));
        ids.clear();
        tokenizer.encoder(EncodeOptions::default()).unwrap().encode("a b", &mut ids).unwrap();
        assert_eq!(ids, [97, 32, 98]);
    }
    let ranks: Ranks = (0..=255u8).map(|byte| (vec![byte], u32::from(byte))).collect();
    let pat_str = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s".to_owned();
    let config = TiktokenConfig { pat_str, special_tokens: HashMap::from([(end.to_owned(), u32::MAX)]) };
    let error = Tokenizer::from_ranks(&ranks, &config, Declared::default()).err().unwrap().to_string();
    assert!(error.contains("ids reach 4294967295, at most 2097152"), "{error}");
}

#[test]
fn ids_outside_the_vocabulary_are_not_decoded() {
    let tokenizer = Tokenizer::from_tokenizer_json(WORDS.as_bytes()).unwrap();
    assert!(tokenizer.decode(&[3]).unwrap_err().to_string().contains("id 3 is outside"));
}
