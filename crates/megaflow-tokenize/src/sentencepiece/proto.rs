//! SentencePiece's `.model` files: the parts of the protocol buffer that encoding needs.
//!
//! Field numbers: `sentencepiece_model.proto` of google/sentencepiece.

use crate::TokenizeError;
use crate::ends::Declaration;

/// Kind of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PieceKind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// One entry of the vocabulary; its id is its place.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Piece {
    pub(crate) text: String,
    pub(crate) score: f32,
    pub(crate) kind: PieceKind,
}

/// Algorithm of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ModelKind {
    Unigram,
    Bpe,
    Word,
    Char,
}

/// A model file.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Model {
    pub(crate) pieces: Vec<Piece>,
    pub(crate) kind: ModelKind,
    pub(crate) byte_fallback: bool,
    pub(crate) space_is_suffix: bool,
    pub(crate) charsmap: Vec<u8>,
    pub(crate) add_dummy_prefix: bool,
    pub(crate) remove_extra_whitespaces: bool,
    pub(crate) escape_whitespaces: bool,
    /// Names under which the BOS and the EOS stand among the pieces.
    pub(crate) end_names: [String; 2],
}

/// A value of the wire format.
enum Value<'a> {
    Number(u64),
    Float(f32),
    Bytes(&'a [u8]),
}

/// Splits a message into its fields.
fn fields(mut bytes: &[u8]) -> Result<Vec<(u64, Value<'_>)>, TokenizeError> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let tag = varint(&mut bytes)?;
        let value = match tag & 7 {
            0 => Value::Number(varint(&mut bytes)?),
            1 => {
                take(&mut bytes, 8)?;
                continue;
            }
            2 => {
                let len = varint(&mut bytes)?;
                Value::Bytes(take(&mut bytes, len)?)
            }
            5 => Value::Float(f32::from_le_bytes(take(&mut bytes, 4)?.try_into().map_err(|_| truncated())?)),
            kind => return Err(TokenizeError::invalid(format!("SentencePiece model: unknown wire type {kind}"))),
        };
        found.push((tag >> 3, value));
    }
    Ok(found)
}

fn truncated() -> TokenizeError {
    TokenizeError::invalid("SentencePiece model: the file is truncated")
}

fn varint(bytes: &mut &[u8]) -> Result<u64, TokenizeError> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first().ok_or_else(truncated)?;
        *bytes = rest;
        value |= u64::from(byte & 0x7F) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(TokenizeError::invalid("SentencePiece model: a number has more than 64 bits"))
}

fn take<'a>(bytes: &mut &'a [u8], len: u64) -> Result<&'a [u8], TokenizeError> {
    let len = usize::try_from(len).ok().filter(|&len| len <= bytes.len()).ok_or_else(truncated)?;
    let (taken, rest) = bytes.split_at(len);
    *bytes = rest;
    Ok(taken)
}

impl Model {
    /// Whether a file looks like a model: it begins with a piece that can be read.
    pub(crate) fn is_likely(bytes: &[u8]) -> bool {
        let mut rest = bytes;
        let first = varint(&mut rest).ok().filter(|&tag| tag == 1 << 3 | 2).and_then(|_| varint(&mut rest).ok());
        first.and_then(|len| take(&mut rest, len).ok()).is_some_and(|piece| read_piece(piece).is_ok())
    }

    /// Reads a `.model` file.
    ///
    /// # Errors
    /// [`TokenizeError::Invalid`] if the file is damaged, or is of a kind that is not handled.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, TokenizeError> {
        let mut model = Self {
            pieces: Vec::new(),
            kind: ModelKind::Unigram,
            byte_fallback: false,
            space_is_suffix: false,
            charsmap: Vec::new(),
            add_dummy_prefix: true,
            remove_extra_whitespaces: true,
            escape_whitespaces: true,
            end_names: ["<s>".to_owned(), "</s>".to_owned()],
        };
        for (field, value) in fields(bytes)? {
            match (field, value) {
                (1, Value::Bytes(piece)) => model.pieces.push(read_piece(piece)?),
                (2, Value::Bytes(trainer)) => model.read_trainer(trainer)?,
                (3, Value::Bytes(normalizer)) => model.read_normalizer(normalizer)?,
                _ => {}
            }
        }
        if model.pieces.is_empty() {
            return Err(TokenizeError::invalid("SentencePiece model: there are no pieces"));
        }
        Ok(model)
    }

    fn read_trainer(&mut self, bytes: &[u8]) -> Result<(), TokenizeError> {
        for (field, value) in fields(bytes)? {
            match (field, value) {
                (3, Value::Number(1)) => self.kind = ModelKind::Unigram,
                (3, Value::Number(2)) => self.kind = ModelKind::Bpe,
                (3, Value::Number(3)) => self.kind = ModelKind::Word,
                (3, Value::Number(4)) => self.kind = ModelKind::Char,
                (3, Value::Number(kind)) => {
                    return Err(TokenizeError::invalid(format!(
                        "SentencePiece model: of kind {kind}, expected 1 to 4"
                    )));
                }
                (24, Value::Number(value)) => self.space_is_suffix = value != 0,
                (35, Value::Number(value)) => self.byte_fallback = value != 0,
                (46 | 47, Value::Bytes(name)) if !name.is_empty() => {
                    self.end_names[usize::from(field == 47)] = String::from_utf8_lossy(name).into_owned();
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The BOS and the EOS, as SentencePiece finds them: control pieces of these names.
    pub(crate) fn ends(&self) -> [Declaration; 2] {
        let is_control = |name: &str| {
            let mut pieces = self.pieces.iter();
            pieces.any(|piece| piece.kind == PieceKind::Control && piece.text == name)
        };
        self.end_names
            .each_ref()
            .map(|name| if is_control(name) { Declaration::Token(name.clone()) } else { Declaration::Absent })
    }

    fn read_normalizer(&mut self, bytes: &[u8]) -> Result<(), TokenizeError> {
        for (field, value) in fields(bytes)? {
            match (field, value) {
                (2, Value::Bytes(charsmap)) => self.charsmap = charsmap.to_vec(),
                (3, Value::Number(value)) => self.add_dummy_prefix = value != 0,
                (4, Value::Number(value)) => self.remove_extra_whitespaces = value != 0,
                (5, Value::Number(value)) => self.escape_whitespaces = value != 0,
                _ => {}
            }
        }
        Ok(())
    }
}

fn read_piece(bytes: &[u8]) -> Result<Piece, TokenizeError> {
    let mut piece = Piece { text: String::new(), score: 0.0, kind: PieceKind::Normal };
    for (field, value) in fields(bytes)? {
        match (field, value) {
            (1, Value::Bytes(text)) => {
                let text = std::str::from_utf8(text);
                piece.text =
                    text.map_err(|error| TokenizeError::invalid(format!("SentencePiece model: {error}")))?.to_owned();
            }
            (2, Value::Float(score)) => piece.score = score,
            (3, Value::Number(kind)) => {
                piece.kind = match kind {
                    1 => PieceKind::Normal,
                    2 => PieceKind::Unknown,
                    3 => PieceKind::Control,
                    4 => PieceKind::UserDefined,
                    5 => PieceKind::Unused,
                    6 => PieceKind::Byte,
                    _ => return Err(TokenizeError::invalid(format!("SentencePiece model: piece of kind {kind}"))),
                };
            }
            _ => {}
        }
    }
    Ok(piece)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_models_are_errors() {
        for bytes in [&[0x0A][..], &[0x0A, 5, 1], &[0x0F], &[0xFF; 12], &[]] {
            assert!(Model::read(bytes).is_err(), "{bytes:?}");
        }
        assert!(!Model::is_likely(b"{\"model\": 1}"));
    }

    #[test]
    fn a_piece_and_the_flags_are_read() {
        let bytes = [0x0A, 8, 0x0A, 1, b'a', 0x15, 0, 0, 0x80, 0xBF, 0x12, 5, 0x18, 2, 0x98, 0x02, 1, 0x1A, 2, 0x18, 0];
        assert!(Model::is_likely(&bytes));
        let model = Model::read(&bytes).unwrap();
        assert_eq!(model.pieces, [Piece { text: "a".into(), score: -1.0, kind: PieceKind::Normal }]);
        assert_eq!((model.kind, model.byte_fallback, model.add_dummy_prefix), (ModelKind::Bpe, true, false));
    }
}
