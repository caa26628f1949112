//! JSON lines to records.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::Block;

/// Value of a text key: one text, or a list of texts (each becomes a sequence of the one document).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Field<'a> {
    /// A string.
    Text(Cow<'a, str>),
    /// A list of strings.
    Texts(Vec<Cow<'a, str>>),
}

impl Field<'_> {
    /// The texts, in order.
    pub fn texts(&self) -> &[Cow<'_, str>] {
        match self {
            Self::Text(text) => std::slice::from_ref(text),
            Self::Texts(texts) => texts,
        }
    }
}

/// Why a record is not a document.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RejectReason {
    /// A byte sequence that is not UTF-8.
    #[error("invalid UTF-8 at byte {at} of the line")]
    InvalidUtf8 {
        /// Place in the line, from 0.
        at: usize,
    },
    /// Not JSON.
    #[error("invalid JSON at byte {at} of the line: {detail}")]
    InvalidJson {
        /// Place in the line, from 0.
        at: usize,
        /// What is wrong there.
        detail: String,
    },
    /// JSON, but not an object.
    #[error("expected a JSON object, found {found}")]
    NotAnObject {
        /// Kind of value.
        found: &'static str,
    },
    /// The object lacks the key.
    #[error("the record has no key {key:?}; name the key of the text with --json-keys")]
    MissingKey {
        /// The key.
        key: String,
    },
    /// The value is neither a string nor a list of strings.
    #[error("the value of {key:?} is {found}; expected a string or a list of strings")]
    NotText {
        /// The key.
        key: String,
        /// Kind of value.
        found: &'static str,
    },
    /// The tokenizer refused the text.
    #[error("{detail}")]
    NotTokenized {
        /// What it said.
        detail: String,
    },
}

impl RejectReason {
    /// Short name for counts.
    pub fn name(&self) -> &'static str {
        match self {
            Self::InvalidUtf8 { .. } => "invalid-utf8",
            Self::InvalidJson { .. } => "invalid-json",
            Self::NotAnObject { .. } => "not-an-object",
            Self::MissingKey { .. } => "missing-key",
            Self::NotText { .. } => "not-text",
            Self::NotTokenized { .. } => "not-tokenized",
        }
    }
}

/// A record that is not a document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reject {
    /// Number of its line, from 1.
    pub line: u64,
    /// Byte offset of the line in the file.
    pub offset: u64,
    /// What is wrong.
    pub reason: RejectReason,
    /// The line as it is, without its end.
    pub raw: Vec<u8>,
}

/// What a line holds.
#[derive(Debug)]
pub enum LineOutcome<'a> {
    /// One field for each key, in the order of the keys.
    Record(Vec<Field<'a>>),
    /// Only white space.
    Blank,
    /// A record that is not a document.
    Bad(RejectReason),
}

/// Calls `each(line number, byte offset, the line without its end, outcome)` for every line of a block, in order, until it returns `false`.
///
/// The value of a key that occurs twice is the last one, as in Python's `json`. Line ends are `\n` or `\r\n`.
pub fn parse_block<'a>(
    block: &'a Block,
    keys: &[String],
    mut each: impl FnMut(u64, u64, &'a [u8], LineOutcome<'a>) -> bool,
) {
    // One check of the whole block is cheaper than one for each string; a block that fails it is checked by line.
    let whole = simdutf8::basic::from_utf8(&block.bytes).ok();
    let (mut start, mut line) = (0, block.first_line);
    while start < block.bytes.len() {
        let end = memchr::memchr(b'\n', &block.bytes[start..]).map_or(block.bytes.len(), |at| start + at);
        let bytes = block.bytes[start..end].strip_suffix(b"\r").unwrap_or(&block.bytes[start..end]);
        let text = match whole {
            Some(text) => Ok(&text[start..start + bytes.len()]),
            None => simdutf8::compat::from_utf8(bytes),
        };
        let outcome = match text {
            Err(error) => LineOutcome::Bad(RejectReason::InvalidUtf8 { at: error.valid_up_to() }),
            Ok(text) => parse_line(text, keys),
        };
        if !each(line, block.offset + start as u64, bytes, outcome) {
            return;
        }
        start = end + 1;
        line += 1;
    }
}

fn parse_line<'a>(text: &'a str, keys: &[String]) -> LineOutcome<'a> {
    let is_space = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\r');
    let Some(first) = text.as_bytes().iter().find(|byte| !is_space(byte)) else {
        return LineOutcome::Blank;
    };
    if *first != b'{' {
        return LineOutcome::Bad(match serde_json::from_str::<IgnoredAny>(text) {
            Ok(_) => RejectReason::NotAnObject { found: kind_by_first_byte(*first) },
            Err(error) => invalid_json(&error),
        });
    }
    let mut slots: Vec<Option<Slot<'a>>> = keys.iter().map(|_| None).collect();
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let parsed =
        RecordSeed { keys, slots: &mut slots }.deserialize(&mut deserializer).and_then(|()| deserializer.end());
    match parsed {
        Err(error) => LineOutcome::Bad(invalid_json(&error)),
        Ok(()) => match keys.iter().zip(slots).map(|(key, slot)| field_of(key, slot)).collect() {
            Ok(fields) => LineOutcome::Record(fields),
            Err(reason) => LineOutcome::Bad(reason),
        },
    }
}

fn field_of<'a>(key: &str, slot: Option<Slot<'a>>) -> Result<Field<'a>, RejectReason> {
    match slot {
        None => Err(RejectReason::MissingKey { key: key.to_owned() }),
        Some(Slot::Field(field)) => Ok(field),
        Some(Slot::Other(found)) => Err(RejectReason::NotText { key: key.to_owned(), found }),
    }
}

fn invalid_json(error: &serde_json::Error) -> RejectReason {
    let text = error.to_string();
    let detail = text.rsplit_once(" at line ").map_or(text.as_str(), |(detail, _)| detail);
    let detail = match detail {
        "unexpected end of hex escape" | "lone leading surrogate in hex escape" => {
            "a lone surrogate in a \\u escape, which no UTF-8 text can hold"
        }
        "control character (\\u0000-\\u001F) found while parsing a string" => {
            "an unescaped control character in a string"
        }
        other => other,
    };
    RejectReason::InvalidJson { at: error.column().saturating_sub(1), detail: detail.to_owned() }
}

fn kind_by_first_byte(first: u8) -> &'static str {
    match first {
        b'[' => "a list",
        b'"' => "a string",
        b'n' => "null",
        b't' | b'f' => "a boolean",
        _ => "a number",
    }
}

enum Slot<'a> {
    Field(Field<'a>),
    Other(&'static str),
}

struct RecordSeed<'k, 's, 'a> {
    keys: &'k [String],
    slots: &'s mut [Option<Slot<'a>>],
}

impl<'a> DeserializeSeed<'a> for RecordSeed<'_, '_, 'a> {
    type Value = ();

    fn deserialize<D: Deserializer<'a>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'a> Visitor<'a> for RecordSeed<'_, '_, 'a> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(place) = map.next_key_seed(KeySeed { keys: self.keys })? {
            match place {
                Some(index) => self.slots[index] = Some(map.next_value_seed(SlotSeed)?),
                None => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(())
    }
}

/// Place of a key among the wanted ones. Keys are compared without being copied.
struct KeySeed<'k> {
    keys: &'k [String],
}

impl<'a> DeserializeSeed<'a> for KeySeed<'_> {
    type Value = Option<usize>;

    fn deserialize<D: Deserializer<'a>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for KeySeed<'_> {
    type Value = Option<usize>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a key")
    }

    fn visit_str<E>(self, key: &str) -> Result<Self::Value, E> {
        Ok(self.keys.iter().position(|wanted| wanted == key))
    }
}

struct SlotSeed;

impl<'a> DeserializeSeed<'a> for SlotSeed {
    type Value = Slot<'a>;

    fn deserialize<D: Deserializer<'a>>(self, deserializer: D) -> Result<Slot<'a>, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'a> Visitor<'a> for SlotSeed {
    type Value = Slot<'a>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("any JSON value")
    }

    fn visit_borrowed_str<E>(self, text: &'a str) -> Result<Slot<'a>, E> {
        Ok(Slot::Field(Field::Text(Cow::Borrowed(text))))
    }

    fn visit_str<E>(self, text: &str) -> Result<Slot<'a>, E> {
        Ok(Slot::Field(Field::Text(Cow::Owned(text.to_owned()))))
    }

    fn visit_unit<E>(self) -> Result<Slot<'a>, E> {
        Ok(Slot::Other("null"))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Slot<'a>, E> {
        Ok(Slot::Other("a boolean"))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Slot<'a>, E> {
        Ok(Slot::Other("a number"))
    }

    fn visit_u64<E>(self, _: u64) -> Result<Slot<'a>, E> {
        Ok(Slot::Other("a number"))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Slot<'a>, E> {
        Ok(Slot::Other("a number"))
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<Slot<'a>, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Slot::Other("an object"))
    }

    fn visit_seq<A: SeqAccess<'a>>(self, mut items: A) -> Result<Slot<'a>, A::Error> {
        let mut texts = Vec::new();
        let mut other = false;
        while let Some(item) = items.next_element_seed(SlotSeed)? {
            match item {
                Slot::Field(Field::Text(text)) => texts.push(text),
                Slot::Field(Field::Texts(_)) | Slot::Other(_) => other = true,
            }
        }
        Ok(if other { Slot::Other("a list that holds more than strings") } else { Slot::Field(Field::Texts(texts)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcomes(text: &[u8], keys: &[&str]) -> Vec<String> {
        let block = Block { bytes: text.to_vec(), offset: 100, first_line: 7 };
        let keys: Vec<String> = keys.iter().map(|key| (*key).to_owned()).collect();
        let mut seen = Vec::new();
        parse_block(&block, &keys, |line, offset, _, outcome| {
            seen.push(match outcome {
                LineOutcome::Record(fields) => {
                    format!("{line}@{offset} {:?}", fields.iter().map(Field::texts).collect::<Vec<_>>())
                }
                LineOutcome::Blank => format!("{line}@{offset} blank"),
                LineOutcome::Bad(reason) => format!("{line}@{offset} {}: {reason}", reason.name()),
            });
            true
        });
        seen
    }

    #[test]
    fn lines_keep_their_number_and_place() {
        let text = b"{\"text\": \"a\"}\r\n\n \t\r\n{\"x\": [1, {\"text\": 0}], \"text\": \"b\\u00e9\"}";
        assert_eq!(
            outcomes(text, &["text"]),
            ["7@100 [[\"a\"]]", "8@115 blank", "9@116 blank", "10@120 [[\"b\u{e9}\"]]"]
        );
    }

    #[test]
    fn each_fault_has_its_reason() {
        let cases: [(&[u8], &str); 14] = [
            (b"{\"text\": \"a", "invalid-json: invalid JSON at byte 10 of the line: EOF while parsing a string"),
            (b"{\"text\": \"a\"} x", "invalid-json: invalid JSON at byte 14 of the line: trailing characters"),
            (b"[\"text\"]", "not-an-object: expected a JSON object, found a list"),
            (b"7", "not-an-object: expected a JSON object, found a number"),
            (b"nope", "invalid-json: invalid JSON at byte 1 of the line: expected ident"),
            (
                b"{\"body\": \"a\"}",
                "missing-key: the record has no key \"text\"; name the key of the text with --json-keys",
            ),
            (b"{\"text\": null}", "not-text: the value of \"text\" is null; expected a string or a list of strings"),
            (b"{\"text\": 1.5}", "not-text: the value of \"text\" is a number; expected a string or a list of strings"),
            (
                b"{\"text\": {\"a\": [1]}}",
                "not-text: the value of \"text\" is an object; expected a string or a list of strings",
            ),
            (
                b"{\"text\": [\"a\", 1]}",
                "not-text: the value of \"text\" is a list that holds more than strings; expected a string or a list of strings",
            ),
            (b"{\"text\": \"a\xff\"}", "invalid-utf8: invalid UTF-8 at byte 11 of the line"),
            (
                b"{\"text\": \"a\x00\"}",
                "invalid-json: invalid JSON at byte 11 of the line: an unescaped control character in a string",
            ),
            (
                b"{\"text\": \"\\ud800\"}",
                "invalid-json: invalid JSON at byte 16 of the line: a lone surrogate in a \\u escape, which no UTF-8 text can hold",
            ),
            (
                b"{\"text\": \"\\udc00\"}",
                "invalid-json: invalid JSON at byte 15 of the line: a lone surrogate in a \\u escape, which no UTF-8 text can hold",
            ),
        ];
        for (line, expected) in cases {
            assert_eq!(outcomes(line, &["text"]), [format!("7@100 {expected}")], "{}", line.escape_ascii());
        }
    }

    #[test]
    fn the_last_of_equal_keys_counts_and_several_keys_keep_their_order() {
        assert_eq!(outcomes(br#"{"text": 1, "text": "two"}"#, &["text"]), ["7@100 [[\"two\"]]"]);
        assert_eq!(outcomes(br#"{"b": ["x", ""], "a": "y"}"#, &["a", "b"]), ["7@100 [[\"y\"], [\"x\", \"\"]]"]);
    }

    #[test]
    fn deep_nesting_in_another_key_is_no_fault_and_in_the_text_is_bad() {
        let deep =
            |key: &str| format!("{{\"{key}\": {}{}, \"text\": \"a\"}}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(outcomes(deep("x").as_bytes(), &["text"]), ["7@100 [[\"a\"]]"]);
        let outcome =
            outcomes(format!("{{\"text\": {}{}}}", "[".repeat(9_999), "]".repeat(9_999)).as_bytes(), &["text"]);
        assert!(
            outcome[0].starts_with("7@100 invalid-json") && outcome[0].ends_with("recursion limit exceeded"),
            "{}",
            outcome[0]
        );
    }

    #[test]
    fn a_bad_line_leaves_its_neighbours_alone() {
        let text = b"{\"text\": \"a\"}\n{\"text\": \"\xff\"}\n{\"text\": \"b\"}\n";
        let seen = outcomes(text, &["text"]);
        assert_eq!((seen[0].as_str(), seen[2].as_str()), ("7@100 [[\"a\"]]", "9@128 [[\"b\"]]"));
        assert!(seen[1].contains("invalid-utf8"));
    }
}
