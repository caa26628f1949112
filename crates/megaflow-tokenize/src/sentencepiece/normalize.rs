//! SentencePiece's normaliser, with `U+2581` (the mark that stands for a blank) written as a blank.

use std::borrow::Cow;

use super::engine::UserDefined;
use super::proto::{Model, PieceKind};
use crate::TokenizeError;

/// The character that stands for a blank in pieces.
pub(crate) const MARK: &str = "\u{2581}";

/// How a text is brought into the form in which pieces are looked for.
pub(crate) enum SpNormalizer {
    /// As a `tokenizer.json` says: marks for blanks, and one in front.
    Json(Prepend),
    /// As a `.model` says.
    Model(Box<ModelNormalizer>),
}

/// When a blank is put in front of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Prepend {
    Never,
    /// Always, even if there is one (the `Prepend` normaliser).
    Always,
    /// If there is none (`Metaspace`, `always`).
    IfMissing,
    /// If there is none and the text is the first of the document (`Metaspace`, `first`).
    First,
}

impl SpNormalizer {
    /// The normalised text. `is_first`: the document begins with it.
    pub(crate) fn apply<'a>(&self, text: &'a str, is_first: bool) -> Cow<'a, [u8]> {
        match self {
            Self::Model(normalizer) => Cow::Owned(normalizer.apply(text)),
            Self::Json(prepend) => {
                let starts_blank = text.starts_with(' ') || text.starts_with(MARK);
                let blank = match prepend {
                    Prepend::Never => false,
                    Prepend::Always => true,
                    Prepend::IfMissing => !starts_blank,
                    Prepend::First => !starts_blank && is_first,
                };
                let text = unmarked(text);
                if blank && !text.is_empty() {
                    let mut bytes = Vec::with_capacity(text.len() + 1);
                    bytes.push(b' ');
                    bytes.extend_from_slice(text.as_bytes());
                    Cow::Owned(bytes)
                } else {
                    match text {
                        Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
                        Cow::Owned(text) => Cow::Owned(text.into_bytes()),
                    }
                }
            }
        }
    }
}

/// The text with blanks for marks.
fn unmarked(text: &str) -> Cow<'_, str> {
    if text.contains(MARK) { Cow::Owned(text.replace(MARK, " ")) } else { Cow::Borrowed(text) }
}

/// What the normaliser of a `.model` does.
pub(crate) struct ModelNormalizer {
    map: Option<CharsMap>,
    add_dummy_prefix: bool,
    remove_extra_whitespaces: bool,
    space_is_suffix: bool,
    /// User-defined pieces: they stay as they are.
    kept: Option<UserDefined>,
}

impl ModelNormalizer {
    /// From a model.
    pub(crate) fn new(model: &Model) -> Result<Self, TokenizeError> {
        if !model.escape_whitespaces {
            return Err(TokenizeError::invalid("SentencePiece model: escape_whitespaces is off, which is not handled"));
        }
        let own = (0..).zip(&model.pieces);
        let own = own.filter(|(_, piece)| piece.kind == PieceKind::UserDefined && !piece.text.is_empty());
        Ok(Self {
            map: if model.charsmap.is_empty() { None } else { Some(CharsMap::read(&model.charsmap)?) },
            add_dummy_prefix: model.add_dummy_prefix,
            remove_extra_whitespaces: model.remove_extra_whitespaces,
            space_is_suffix: model.space_is_suffix,
            kept: UserDefined::new(&own.map(|(id, piece)| (piece.text.clone().into_bytes(), id)).collect::<Vec<_>>())?,
        })
    }

    /// `Normalizer::Normalize` of SentencePiece.
    fn apply(&self, text: &str) -> Vec<u8> {
        let mut out = Vec::with_capacity(text.len() + 1);
        let mut rest = text;
        let mut kept = Kept { pieces: self.kept.as_ref(), text, next: (0, 0) };
        if self.remove_extra_whitespaces {
            while !rest.is_empty() {
                let (normal, len) = self.first(rest, &mut kept);
                if normal != " " {
                    break;
                }
                rest = &rest[len..];
            }
        }
        if rest.is_empty() {
            return out;
        }
        if self.add_dummy_prefix && !self.space_is_suffix {
            out.push(b' ');
        }
        if self.map.is_none() && !self.remove_extra_whitespaces {
            out.extend_from_slice(unmarked(rest).as_bytes());
            rest = "";
        }
        let mut after_blank = self.remove_extra_whitespaces;
        while !rest.is_empty() {
            let (mut normal, len) = self.first(rest, &mut kept);
            while after_blank && normal.starts_with(' ') {
                normal = &normal[1..];
            }
            if !normal.is_empty() {
                out.extend_from_slice(unmarked(normal).as_bytes());
                after_blank = normal.ends_with(' ');
            }
            rest = &rest[len..];
            if !self.remove_extra_whitespaces {
                after_blank = false;
            }
        }
        if self.remove_extra_whitespaces {
            while out.last() == Some(&b' ') {
                out.pop();
            }
        }
        if self.add_dummy_prefix && self.space_is_suffix {
            out.push(b' ');
        }
        out
    }

    /// What the beginning of a text becomes, and how long that beginning is.
    #[inline]
    fn first<'a>(&'a self, text: &'a str, kept: &mut Kept<'_>) -> (&'a str, usize) {
        if let Some(len) = kept.len_at(text.len()) {
            return (&text[..len], len);
        }
        if let Some(found) = self.map.as_ref().and_then(|map| map.longest(text.as_bytes())) {
            return found;
        }
        let len = text.chars().next().map_or(0, char::len_utf8);
        (&text[..len], len)
    }
}

/// The user-defined pieces of a text, asked for from left to right.
struct Kept<'a> {
    pieces: Option<&'a UserDefined>,
    text: &'a str,
    /// Where the next one begins and ends.
    next: (usize, usize),
}

impl Kept<'_> {
    /// Length of the longest piece that begins where `rest` bytes of the text are left.
    #[inline]
    fn len_at(&mut self, rest: usize) -> Option<usize> {
        let (pieces, at) = (self.pieces?, self.text.len() - rest);
        if self.next.0 < at || self.next.1 == 0 {
            self.next = pieces.next(self.text.as_bytes(), at).unwrap_or((usize::MAX, usize::MAX));
        }
        (self.next.0 == at).then(|| self.next.1 - at)
    }
}

/// A precompiled map of strings to strings: a double array of `darts-clone` (Yata) and the results behind it.
struct CharsMap {
    units: Vec<u32>,
    strings: Vec<u8>,
}

impl CharsMap {
    fn read(bytes: &[u8]) -> Result<Self, TokenizeError> {
        let damaged = || TokenizeError::invalid("SentencePiece model: the character map is damaged");
        let (size, rest) = bytes.split_first_chunk::<4>().ok_or_else(damaged)?;
        let size = u32::from_le_bytes(*size) as usize;
        if size > rest.len() || size % 4 != 0 || size == 0 {
            return Err(damaged());
        }
        let (units, strings) = rest.split_at(size);
        let units = units.chunks_exact(4).map(|unit| u32::from_le_bytes([unit[0], unit[1], unit[2], unit[3]]));
        Ok(Self { units: units.collect(), strings: strings.to_vec() })
    }

    /// Result and length of the longest key that begins `text`.
    fn longest(&self, text: &[u8]) -> Option<(&str, usize)> {
        let offset = |unit: u32| ((unit >> 10) << ((unit & (1 << 9)) >> 6)) as usize;
        let mut found = None;
        let mut node = offset(*self.units.first()?);
        for (index, &byte) in text.iter().enumerate() {
            node ^= usize::from(byte);
            let unit = *self.units.get(node)?;
            if unit & (1 << 31 | 0xFF) != u32::from(byte) {
                break;
            }
            node ^= offset(unit);
            let at_end_of_char = text.get(index + 1).is_none_or(|next| next & 0xC0 != 0x80);
            if unit >> 8 & 1 == 1 && at_end_of_char {
                found = Some(((self.units.get(node)? & !(1 << 31)) as usize, index + 1));
            }
        }
        let (start, len) = found?;
        let string = self.strings.get(start..)?.split(|&byte| byte == 0).next()?;
        Some((std::str::from_utf8(string).ok()?, len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A map whose only key is one byte, which becomes `x`.
    fn map_of(byte: u8) -> CharsMap {
        let child = 256 ^ usize::from(byte);
        let mut units = vec![0u32; 1024];
        units[0] = 256 << 10;
        units[child] = 512 << 10 | 1 << 8 | u32::from(byte);
        units[child ^ 512] = 1 << 31; // the result begins at 0
        let units = units.iter().flat_map(|unit| unit.to_le_bytes());
        let bytes: Vec<u8> = (4096u32.to_le_bytes().into_iter()).chain(units).chain(*b"x\0").collect();
        CharsMap::read(&bytes).unwrap()
    }

    #[test]
    fn a_key_that_ends_within_a_character_does_not_match() {
        assert_eq!(map_of(b'a').longest(b"ab"), Some(("x", 1)));
        assert_eq!(map_of(0xE4).longest("\u{4E2D}".as_bytes()), None);
    }

    #[test]
    fn damaged_maps_are_refused_and_places_outside_lead_nowhere() {
        for bytes in [&[][..], &[4, 0, 0, 0], &[0; 8], &[3, 0, 0, 0, 1, 2, 3]] {
            assert!(CharsMap::read(bytes).is_err(), "{bytes:?}");
        }
        let outside = CharsMap { units: vec![u32::MAX], strings: Vec::new() };
        assert_eq!(outside.longest(b"ab"), None);
    }
}
