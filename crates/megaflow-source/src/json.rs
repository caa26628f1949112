//! The text fields of one JSON object.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::record::{Field, RejectReason};

/// The wanted keys as a tree. A key with dots (`data.text`) is a path, unless the object has a key of that very name.
#[derive(Debug, Default)]
pub(crate) struct KeyTree {
    children: Vec<(String, KeyTree)>,
    slot: Option<usize>,
}

impl KeyTree {
    /// Slot `2 * i` is for key `i` by its very name, slot `2 * i + 1` for its path.
    pub(crate) fn new(keys: &[String]) -> Self {
        let mut root = Self::default();
        for (index, key) in keys.iter().enumerate() {
            root.child(key).slot = Some(2 * index);
            if key.contains('.') {
                let leaf = key.split('.').fold(&mut root, |node, part| node.child(part));
                // Two keys can lead to one place only if they are equal, and those are refused.
                leaf.slot = Some(leaf.slot.unwrap_or(2 * index + 1));
            }
        }
        root
    }

    fn child(&mut self, name: &str) -> &mut Self {
        let place = self.children.iter().position(|(child, _)| child == name).unwrap_or_else(|| {
            self.children.push((name.to_owned(), Self::default()));
            self.children.len() - 1
        });
        &mut self.children[place].1
    }

    /// Forgets what an earlier object of the same name held: the last one counts, as a whole.
    fn clear(&self, slots: &mut [Option<Slot<'_>>]) {
        for (_, child) in &self.children {
            if let Some(slot) = child.slot {
                slots[slot] = None;
            }
            child.clear(slots);
        }
    }
}

/// The fields of the object in `text`, in the order of `keys`.
pub(crate) fn parse_object<'a>(text: &'a str, keys: &[String], tree: &KeyTree) -> Result<Vec<Field<'a>>, RejectReason> {
    let first = text.bytes().find(|byte| !matches!(byte, b' ' | b'\t' | b'\r')).unwrap_or(b' ');
    if first != b'{' {
        return Err(match serde_json::from_str::<IgnoredAny>(text) {
            Ok(_) => RejectReason::NotAnObject { found: kind_by_first_byte(first) },
            Err(error) => invalid_json(&error),
        });
    }
    match parse_slots(text, keys.len(), tree) {
        Ok(slots) => fields_of(keys, slots),
        Err(error) => {
            // Python writes and reads NaN and Infinity, which JSON does not know. Where they stand outside of strings they are
            // replaced by a number of the same length, so that places stay what they are.
            let Some(mended) = without_python_numbers(text) else { return Err(invalid_json(&error)) };
            match parse_slots(&mended, keys.len(), tree) {
                Ok(slots) => fields_of(keys, slots.into_iter().map(|slot| slot.map(Slot::into_owned)).collect()),
                Err(error) => Err(invalid_json(&error)),
            }
        }
    }
}

fn parse_slots<'a>(text: &'a str, num_keys: usize, tree: &KeyTree) -> serde_json::Result<Vec<Option<Slot<'a>>>> {
    let mut slots: Vec<Option<Slot<'a>>> = (0..2 * num_keys).map(|_| None).collect();
    let mut deserializer = serde_json::Deserializer::from_str(text);
    Node { tree, slots: &mut slots }.deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok(slots)
}

fn fields_of<'a>(keys: &[String], slots: Vec<Option<Slot<'a>>>) -> Result<Vec<Field<'a>>, RejectReason> {
    let mut slots = slots.into_iter();
    keys.iter()
        .map(|key| {
            let (exact, by_path) = (slots.next().flatten(), slots.next().flatten());
            match exact.or(by_path) {
                None => Err(RejectReason::MissingKey { key: key.clone() }),
                Some(Slot::Field(field)) => Ok(field),
                Some(Slot::Other(found)) => Err(RejectReason::NotText { key: key.clone(), found }),
            }
        })
        .collect()
}

/// `text` with `NaN`, `Infinity` and `-Infinity` outside of strings replaced, or `None` if there are none.
fn without_python_numbers(text: &str) -> Option<String> {
    let mut mended = String::new();
    let (mut copied, mut place, mut in_string) = (0, 0, false);
    let bytes = text.as_bytes();
    while place < bytes.len() {
        match bytes[place] {
            b'\\' if in_string => place += 1,
            b'"' => in_string = !in_string,
            b'N' | b'I' | b'-' if !in_string => {
                let words = ["NaN", "Infinity", "-Infinity"];
                if let Some(word) = words.iter().find(|word| bytes[place..].starts_with(word.as_bytes())) {
                    mended.push_str(&text[copied..place]);
                    mended.push('0');
                    mended.extend(std::iter::repeat_n(' ', word.len() - 1));
                    copied = place + word.len();
                    place = copied;
                    continue;
                }
            }
            _ => {}
        }
        place += 1;
    }
    (copied > 0).then(|| mended + &text[copied..])
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

impl Slot<'_> {
    fn into_owned<'b>(self) -> Slot<'b> {
        match self {
            Self::Field(field) => Slot::Field(field.into_owned()),
            Self::Other(kind) => Slot::Other(kind),
        }
    }
}

/// A value that a key leads to, or leads through.
struct Node<'t, 's, 'a> {
    tree: &'t KeyTree,
    slots: &'s mut [Option<Slot<'a>>],
}

impl<'a> Node<'_, '_, 'a> {
    fn store(self, slot: Slot<'a>) {
        self.tree.clear(self.slots);
        if let Some(place) = self.tree.slot {
            self.slots[place] = Some(slot);
        }
    }
}

impl<'a> DeserializeSeed<'a> for Node<'_, '_, 'a> {
    type Value = ();

    fn deserialize<D: Deserializer<'a>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'a> Visitor<'a> for Node<'_, '_, 'a> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("any JSON value")
    }

    fn visit_borrowed_str<E>(self, text: &'a str) -> Result<(), E> {
        self.store(Slot::Field(Field::Text(Cow::Borrowed(text))));
        Ok(())
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        self.store(Slot::Field(Field::Text(Cow::Owned(text.to_owned()))));
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        self.store(Slot::Other("null"));
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        self.store(Slot::Other("a boolean"));
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        self.store(Slot::Other("a number"));
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        self.store(Slot::Other("a number"));
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        self.store(Slot::Other("a number"));
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'a>>(self, mut items: A) -> Result<(), A::Error> {
        let mut texts = Vec::new();
        let mut other = false;
        while let Some(item) = items.next_element::<Item<'a>>()? {
            match item {
                Item::Text(text) => texts.push(text),
                Item::Other => other = true,
            }
        }
        self.store(if other {
            Slot::Other("a list that holds more than strings")
        } else {
            Slot::Field(Field::Texts(texts))
        });
        Ok(())
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<(), A::Error> {
        let Self { tree, slots } = self;
        tree.clear(slots);
        if let Some(place) = tree.slot {
            slots[place] = Some(Slot::Other("an object"));
        }
        while let Some(child) = map.next_key_seed(ChildOf(tree))? {
            match child {
                Some(tree) => map.next_value_seed(Node { tree, slots })?,
                None => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(())
    }
}

/// The subtree of a key. Keys are compared without being copied.
struct ChildOf<'t>(&'t KeyTree);

impl<'a, 't> DeserializeSeed<'a> for ChildOf<'t> {
    type Value = Option<&'t KeyTree>;

    fn deserialize<D: Deserializer<'a>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'t> Visitor<'_> for ChildOf<'t> {
    type Value = Option<&'t KeyTree>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a key")
    }

    fn visit_str<E>(self, key: &str) -> Result<Self::Value, E> {
        Ok(self.0.children.iter().find(|(name, _)| name == key).map(|(_, child)| child))
    }
}

/// An element of a list of texts.
enum Item<'a> {
    Text(Cow<'a, str>),
    Other,
}

impl<'a> serde::Deserialize<'a> for Item<'a> {
    fn deserialize<D: Deserializer<'a>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ItemVisitor)
    }
}

struct ItemVisitor;

impl<'a> Visitor<'a> for ItemVisitor {
    type Value = Item<'a>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("any JSON value")
    }

    fn visit_borrowed_str<E>(self, text: &'a str) -> Result<Item<'a>, E> {
        Ok(Item::Text(Cow::Borrowed(text)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Item<'a>, E> {
        Ok(Item::Text(Cow::Owned(text.to_owned())))
    }

    fn visit_unit<E>(self) -> Result<Item<'a>, E> {
        Ok(Item::Other)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Item<'a>, E> {
        Ok(Item::Other)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Item<'a>, E> {
        Ok(Item::Other)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Item<'a>, E> {
        Ok(Item::Other)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Item<'a>, E> {
        Ok(Item::Other)
    }

    fn visit_seq<A: SeqAccess<'a>>(self, mut items: A) -> Result<Item<'a>, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Item::Other)
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<Item<'a>, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Item::Other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, keys: &[&str]) -> String {
        let keys: Vec<String> = keys.iter().map(|key| (*key).to_owned()).collect();
        match parse_object(text, &keys, &KeyTree::new(&keys)) {
            Ok(fields) => format!("{:?}", fields.iter().map(Field::texts).collect::<Vec<_>>()),
            Err(reason) => format!("{}: {reason}", reason.name()),
        }
    }

    #[test]
    fn each_fault_has_its_reason() {
        let cases = [
            ("{\"text\": \"a", "invalid-json: invalid JSON at byte 10 of the line: EOF while parsing a string"),
            ("{\"text\": \"a\"} x", "invalid-json: invalid JSON at byte 14 of the line: trailing characters"),
            ("[\"text\"]", "not-an-object: expected a JSON object, found a list"),
            ("7", "not-an-object: expected a JSON object, found a number"),
            ("nope", "invalid-json: invalid JSON at byte 1 of the line: expected ident"),
            (
                "{\"body\": \"a\"}",
                "missing-key: the record has no key \"text\"; name the key of the text with --json-keys",
            ),
            ("{\"text\": null}", "not-text: the value of \"text\" is null; expected a string or a list of strings"),
            ("{\"text\": 1.5}", "not-text: the value of \"text\" is a number; expected a string or a list of strings"),
            ("{\"text\": NaN}", "not-text: the value of \"text\" is a number; expected a string or a list of strings"),
            (
                "{\"text\": {\"a\": [1]}}",
                "not-text: the value of \"text\" is an object; expected a string or a list of strings",
            ),
            (
                "{\"text\": [\"a\", 1]}",
                "not-text: the value of \"text\" is a list that holds more than strings; expected a string or a list of strings",
            ),
            (
                "{\"text\": \"a\x00\"}",
                "invalid-json: invalid JSON at byte 11 of the line: an unescaped control character in a string",
            ),
            (
                "{\"text\": \"\\ud800\"}",
                "invalid-json: invalid JSON at byte 16 of the line: a lone surrogate in a \\u escape, which no UTF-8 text can hold",
            ),
            (
                "{\"text\": \"\\udc00\"}",
                "invalid-json: invalid JSON at byte 15 of the line: a lone surrogate in a \\u escape, which no UTF-8 text can hold",
            ),
        ];
        for (line, expected) in cases {
            assert_eq!(parse(line, &["text"]), expected, "{}", line.escape_debug());
        }
    }

    #[test]
    fn the_last_of_equal_keys_counts_and_several_keys_keep_their_order() {
        assert_eq!(parse(r#"{"text": 1, "text": "two"}"#, &["text"]), "[[\"two\"]]");
        assert_eq!(parse(r#"{"b": ["x", ""], "a": "y"}"#, &["a", "b"]), "[[\"y\"], [\"x\", \"\"]]");
        assert!(parse(r#"{"d": {"text": "x"}, "d": {}}"#, &["d.text"]).starts_with("missing-key"));
    }

    #[test]
    fn a_dotted_key_is_a_path_unless_a_key_has_that_very_name() {
        let nested = r#"{"text": "outer", "data": {"text": "inner", "x": {"text": "deep"}}}"#;
        assert_eq!(parse(nested, &["text"]), "[[\"outer\"]]");
        assert_eq!(parse(nested, &["data.text", "text", "data.x.text"]), "[[\"inner\"], [\"outer\"], [\"deep\"]]");
        assert_eq!(parse(r#"{"data.text": "plain", "data": {"text": "inner"}}"#, &["data.text"]), "[[\"plain\"]]");
        assert!(parse(r#"{"data": "text"}"#, &["data.text"]).starts_with("missing-key"));
        assert!(parse(r#"{"data": {"text": "x"}}"#, &["data", "data.text"]).contains("\"data\" is an object"));
    }

    #[test]
    fn python_numbers_are_accepted_outside_of_strings_only() {
        let line = r#"{"score": NaN, "low": -Infinity, "high": [Infinity], "text": "NaN \"-Infinity\" \\"}"#;
        assert_eq!(parse(line, &["text"]), "[[\"NaN \\\"-Infinity\\\" \\\\\"]]");
        assert!(parse(r#"{"score": NaNa, "text": "x"}"#, &["text"]).starts_with("invalid-json"));
        assert!(parse(r#"{"score": nan, "text": "x"}"#, &["text"]).starts_with("invalid-json"));
    }

    #[test]
    fn deep_nesting_in_another_key_is_no_fault_and_in_the_text_is_bad() {
        let deep = |key: &str, depth| format!("{{\"{key}\": {}{}, \"z\": 1}}", "[".repeat(depth), "]".repeat(depth));
        assert!(parse(&deep("x", 100_000).replace("\"z\": 1", "\"text\": \"a\""), &["text"]).starts_with("[[\"a\"]]"));
        assert!(parse(&deep("text", 9_999), &["text"]).starts_with("not-text"));
    }
}
