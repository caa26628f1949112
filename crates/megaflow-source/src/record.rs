//! Blocks to records.

use std::borrow::Cow;

use crate::block::{Block, BlockBody, Place, Position};
use crate::columns::{Cell, TextColumn};
use crate::json::{KeyTree, parse_object};

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

    /// The same, no longer borrowed.
    pub(crate) fn into_owned<'b>(self) -> Field<'b> {
        match self {
            Self::Text(text) => Field::Text(Cow::Owned(text.into_owned())),
            Self::Texts(texts) => Field::Texts(texts.into_iter().map(|text| Cow::Owned(text.into_owned())).collect()),
        }
    }
}

/// Why a record is not a document.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RejectReason {
    /// A byte sequence that is not UTF-8.
    #[error("invalid UTF-8 at byte {at} of the {what}; --utf8 replace accepts it with U+FFFD in its place")]
    InvalidUtf8 {
        /// Place in the line or text, from 0.
        at: usize,
        /// Line or text.
        what: &'static str,
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
    /// Where it is.
    pub place: Place,
    /// What is wrong.
    pub reason: RejectReason,
    /// The line as it is, without its end; empty for a row of a table.
    pub raw: Vec<u8>,
}

/// What a line or row holds.
#[derive(Debug)]
pub enum Outcome<'a> {
    /// One field for each key, in the order of the keys.
    Record(Vec<Field<'a>>),
    /// Only white space.
    Blank,
    /// A record that is not a document.
    Bad(RejectReason),
}

/// How blocks are parsed.
#[derive(Debug)]
pub struct ParseOptions {
    keys: Vec<String>,
    tree: KeyTree,
    replace_invalid_utf8: bool,
}

impl ParseOptions {
    /// For records whose `keys` hold text. Bytes that are not UTF-8 make a record bad, or become U+FFFD.
    pub fn new(keys: &[String], replace_invalid_utf8: bool) -> Self {
        Self { keys: keys.to_vec(), tree: KeyTree::new(keys), replace_invalid_utf8 }
    }

    fn text<'a>(&self, bytes: &'a [u8], what: &'static str) -> Result<Cow<'a, str>, RejectReason> {
        match simdutf8::compat::from_utf8(bytes) {
            Ok(text) => Ok(Cow::Borrowed(text)),
            Err(_) if self.replace_invalid_utf8 => Ok(String::from_utf8_lossy(bytes)),
            Err(error) => Err(RejectReason::InvalidUtf8 { at: error.valid_up_to(), what }),
        }
    }
}

/// Calls `each(place, raw bytes of the record, outcome)` for every line or row of a block, in order, until it returns `false`.
///
/// Line ends are `\n` or `\r\n`. The value of a key that occurs twice is the last one, as in Python's `json`.
pub fn parse_block<'a>(
    block: &'a Block,
    options: &ParseOptions,
    mut each: impl FnMut(Place, &'a [u8], Outcome<'a>) -> bool,
) {
    match &block.body {
        BlockBody::JsonLines(bytes) => each_line(bytes, block.position, |place, line, whole| {
            let text = whole.map_or_else(|| options.text(line, "line"), |text| Ok(Cow::Borrowed(text)));
            each(place, line, text.map_or_else(Outcome::Bad, |text| json_outcome(text, options)))
        }),
        BlockBody::TextLines(bytes) => each_line(bytes, block.position, |place, line, whole| {
            let text = whole.map_or_else(|| options.text(line, "line"), |text| Ok(Cow::Borrowed(text)));
            each(place, line, text.map_or_else(Outcome::Bad, |text| text_outcome(text, options)))
        }),
        BlockBody::Text(bytes) => {
            let place = Place::Line { number: 1, offset: 0, counted_from: 0 };
            let outcome =
                options.text(bytes, "text").map_or_else(Outcome::Bad, |text| Outcome::Record(fields(text, options)));
            each(place, bytes, outcome);
        }
        BlockBody::Rows { columns, num_rows } => {
            for row in 0..*num_rows {
                let place = Place::Row { number: block.position.record + row as u64 };
                if !each(place, b"", row_outcome(columns, row, options)) {
                    return;
                }
            }
        }
    }
}

/// Calls `each(place, line without its end, the line as text if the whole block is UTF-8)`.
fn each_line<'a>(bytes: &'a [u8], position: Position, mut each: impl FnMut(Place, &'a [u8], Option<&'a str>) -> bool) {
    // One check of the whole block is cheaper than one for each string; a block that fails it is checked by line.
    let whole = simdutf8::basic::from_utf8(bytes).ok();
    let (mut start, mut number) = (0, position.record);
    while start < bytes.len() {
        let end = memchr::memchr(b'\n', &bytes[start..]).map_or(bytes.len(), |at| start + at);
        let line = bytes[start..end].strip_suffix(b"\r").unwrap_or(&bytes[start..end]);
        let offset = position.offset + start as u64;
        let place = Place::Line { number, offset, counted_from: position.counted_from };
        if !each(place, line, whole.map(|text| &text[start..start + line.len()])) {
            return;
        }
        start = end + 1;
        number += 1;
    }
}

fn json_outcome<'a>(text: Cow<'a, str>, options: &ParseOptions) -> Outcome<'a> {
    if text.bytes().all(|byte| matches!(byte, b' ' | b'\t' | b'\r')) {
        return Outcome::Blank;
    }
    let parsed = match text {
        Cow::Borrowed(text) => parse_object(text, &options.keys, &options.tree),
        Cow::Owned(text) => parse_object(&text, &options.keys, &options.tree)
            .map(|fields| fields.into_iter().map(Field::into_owned).collect()),
    };
    parsed.map_or_else(Outcome::Bad, Outcome::Record)
}

fn text_outcome<'a>(text: Cow<'a, str>, options: &ParseOptions) -> Outcome<'a> {
    if text.trim().is_empty() { Outcome::Blank } else { Outcome::Record(fields(text, options)) }
}

/// Plain text has no keys: it is the text of each.
fn fields<'a>(text: Cow<'a, str>, options: &ParseOptions) -> Vec<Field<'a>> {
    options.keys.iter().map(|_| Field::Text(text.clone())).collect()
}

fn row_outcome<'a>(columns: &'a [TextColumn], row: usize, options: &ParseOptions) -> Outcome<'a> {
    let field = |(key, column): (&String, &'a TextColumn)| match column.cell(row) {
        Cell::Bytes(bytes) => options.text(bytes, "text").map(Field::Text),
        Cell::List(items) => {
            items.into_iter().map(|item| options.text(item, "text")).collect::<Result<_, _>>().map(Field::Texts)
        }
        Cell::Null => Err(RejectReason::NotText { key: key.clone(), found: "null" }),
        Cell::NullInList => {
            Err(RejectReason::NotText { key: key.clone(), found: "a list that holds more than strings" })
        }
    };
    options.keys.iter().zip(columns).map(field).collect::<Result<_, _>>().map_or_else(Outcome::Bad, Outcome::Record)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcomes(body: BlockBody, options: &ParseOptions) -> Vec<String> {
        let block = Block { position: Position { offset: 100, record: 7, counted_from: 0 }, body, input_bytes: 0 };
        let mut seen = Vec::new();
        parse_block(&block, options, |place, _, outcome| {
            seen.push(match outcome {
                Outcome::Record(fields) => format!("{place} {:?}", fields.iter().map(Field::texts).collect::<Vec<_>>()),
                Outcome::Blank => format!("{place} blank"),
                Outcome::Bad(reason) => format!("{place} {}", reason.name()),
            });
            true
        });
        seen
    }

    fn text_key() -> ParseOptions {
        ParseOptions::new(&["text".to_owned()], false)
    }

    #[test]
    fn lines_keep_their_number_and_place() {
        let text = b"{\"text\": \"a\"}\r\n\n \t\r\n{\"x\": [1, {\"text\": 0}], \"text\": \"b\\u00e9\"}";
        let seen = outcomes(BlockBody::JsonLines(text.to_vec()), &text_key());
        let places = ["line 7 (byte 100)", "line 8 (byte 115)", "line 9 (byte 116)", "line 10 (byte 120)"];
        let expected = [" [[\"a\"]]", " blank", " blank", " [[\"b\u{e9}\"]]"];
        assert_eq!(seen, places.iter().zip(expected).map(|(place, rest)| format!("{place}{rest}")).collect::<Vec<_>>());
    }

    #[test]
    fn a_bad_line_leaves_its_neighbours_alone_and_can_be_mended() {
        let text = b"{\"text\": \"a\"}\n{\"text\": \"\xff\"}\n{\"text\": \"b\"}\n".to_vec();
        let seen = outcomes(BlockBody::JsonLines(text.clone()), &text_key());
        assert_eq!(seen[1], "line 8 (byte 114) invalid-utf8");
        assert!(seen[0].ends_with("[[\"a\"]]") && seen[2].ends_with("[[\"b\"]]"));
        let mended = outcomes(BlockBody::JsonLines(text), &ParseOptions::new(&["text".to_owned()], true));
        assert!(mended[1].ends_with("[[\"\u{fffd}\"]]"), "{}", mended[1]);
    }

    #[test]
    fn plain_text_is_a_document_a_line_or_one_document() {
        let text = b"one\r\n\ntwo {\n".to_vec();
        let seen = outcomes(BlockBody::TextLines(text.clone()), &text_key());
        assert_eq!(
            seen,
            ["line 7 (byte 100) [[\"one\"]]", "line 8 (byte 105) blank", "line 9 (byte 106) [[\"two {\"]]"]
        );
        assert_eq!(outcomes(BlockBody::Text(text), &text_key()), ["line 1 (byte 0) [[\"one\\r\\n\\ntwo {\\n\"]]"]);
    }
}
