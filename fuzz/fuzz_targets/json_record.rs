//! Any text as a line of JSON: a record, or a reason; where `serde_json` reads an object, its strings.
#![no_main]

use libfuzzer_sys::fuzz_target;
use megaflow_source::{Block, BlockBody, Outcome, ParseOptions, Position, parse_block};
use serde_json::Value;

fuzz_target!(|bytes: &[u8]| {
    let keys = ["text".to_owned(), "a.b".to_owned()];
    for replace in [false, true] {
        let parse = ParseOptions::new(&keys, replace);
        let body = BlockBody::JsonLines(bytes.to_vec());
        let block = Block { position: Position::START, body, input_bytes: 0 };
        parse_block(&block, &parse, |_, raw, outcome| {
            let Ok(text) = std::str::from_utf8(raw) else { return true };
            let Ok(Value::Object(object)) = serde_json::from_str::<Value>(text) else { return true };
            let nested = object.get("a").and_then(|inner| inner.get("b"));
            let expected = [object.get("text"), object.get("a.b").or(nested)];
            let found = match &outcome {
                Outcome::Record(fields) => Some(fields.iter().map(|field| field.texts().to_vec()).collect::<Vec<_>>()),
                Outcome::Blank | Outcome::Bad(_) => None,
            };
            let expected: Option<Vec<Vec<&str>>> = expected.into_iter().map(texts).collect();
            match (&found, &expected) {
                (Some(found), Some(expected)) => {
                    let same = found.iter().zip(expected).all(|(found, expected)| found.iter().eq(expected.iter()));
                    assert!(same, "{found:?} is not {expected:?}");
                }
                _ => assert_eq!(found.is_some(), expected.is_some(), "{outcome:?} for {text:?}"),
            }
            true
        });
    }
});

/// A string, or a list of strings.
fn texts(value: Option<&Value>) -> Option<Vec<&str>> {
    match value? {
        Value::String(text) => Some(vec![text]),
        Value::Array(items) => items.iter().map(Value::as_str).collect(),
        _ => None,
    }
}
