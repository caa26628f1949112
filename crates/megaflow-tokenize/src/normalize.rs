//! Unicode normalisation, with the tables of the `tokenizers` crate and a quick way past text that is normalised already.

use std::borrow::Cow;

use serde_json::Value;
use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization, is_nfc_quick, is_nfkc_quick};

/// What happens to a text first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Normalizer {
    /// Nothing.
    None,
    /// Canonical composition.
    Nfc,
    /// Compatibility composition.
    Nfkc,
}

impl Normalizer {
    /// From a `normalizer` of a `tokenizer.json`; `None` if it is another.
    pub(crate) fn from_value(value: &Value) -> Option<Self> {
        if value.is_null() {
            return Some(Self::None);
        }
        match value["type"].as_str()? {
            "NFC" => Some(Self::Nfc),
            "NFKC" => Some(Self::Nfkc),
            "Sequence" => match value["normalizers"].as_array()?.as_slice() {
                [] => Some(Self::None),
                [one] => Self::from_value(one),
                _ => None,
            },
            _ => None,
        }
    }

    /// The normalised text.
    pub(crate) fn apply(self, text: &str) -> Cow<'_, str> {
        let is_normal = match self {
            Self::None => true,
            Self::Nfc => is_inert(text) || is_nfc_quick(text.chars()) == IsNormalized::Yes,
            Self::Nfkc => text.is_ascii() || is_nfkc_quick(text.chars()) == IsNormalized::Yes,
        };
        match self {
            _ if is_normal => Cow::Borrowed(text),
            Self::Nfkc => Cow::Owned(text.nfkc().map(|(character, _)| character).collect()),
            _ => Cow::Owned(text.nfc().map(|(character, _)| character).collect()),
        }
    }
}

/// Whether all characters are of a kind that canonical composition never touches: ASCII, Latin, Cyrillic without its
/// combining marks, kana without the combining voiced marks, Han, Hangul syllables.
fn is_inert(text: &str) -> bool {
    // Bytes below 0xCC begin, or continue, characters below U+0300.
    text.bytes().all(|byte| byte < 0xCC)
        || text.chars().all(|character| {
            matches!(character, '\0'..='\u{2FF}' | '\u{400}'..='\u{482}' | '\u{48A}'..='\u{52F}'
                | '\u{2010}'..='\u{2027}' | '\u{3001}'..='\u{3029}' | '\u{3041}'..='\u{3096}' | '\u{30A1}'..='\u{30FA}'
                | '\u{4E00}'..='\u{9FFF}' | '\u{AC00}'..='\u{D7A3}' | '\u{FF01}'..='\u{FF5E}')
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inert_characters_are_starters_that_stay_as_they_are() {
        use unicode_normalization_alignments::char::canonical_combining_class;
        for character in (0..=0x10_FFFF).filter_map(char::from_u32) {
            let text = character.to_string();
            if is_inert(&text) {
                assert_eq!(is_nfc_quick(text.chars()), IsNormalized::Yes, "{character:?}");
                assert_eq!(canonical_combining_class(character), 0, "{character:?}");
            }
        }
    }

    #[test]
    fn quick_way_and_full_way_agree() {
        for text in
            ["e\u{301}", "\u{E9}", "\u{30AB}\u{3099}", "\u{1100}\u{1161}", "a\u{323}\u{307}", "\u{212B}", "\u{FB01}"]
        {
            assert_eq!(Normalizer::Nfc.apply(text), text.nfc().map(|c| c.0).collect::<String>());
            assert_eq!(Normalizer::Nfkc.apply(text), text.nfkc().map(|c| c.0).collect::<String>());
            assert_eq!(Normalizer::None.apply(text), text);
        }
    }
}
