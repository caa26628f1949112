//! The token types that an `.idx` file can name.

use std::fmt;

/// Vocabularies below this size are stored as `u16`, all others as `i32`.
///
/// The bound is Megatron-LM's: 65,499 ids still fit in `u16` there, 65,500 do not.
pub const U16_VOCAB_LIMIT: u64 = 65_500;

/// Type of one stored token. The codes are those of the `.idx` header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TokenDtype {
    /// Code 1.
    U8,
    /// Code 2.
    I8,
    /// Code 3.
    I16,
    /// Code 4: vocabularies of 65,500 ids and more.
    I32,
    /// Code 5.
    I64,
    /// Code 8: vocabularies below 65,500 ids.
    U16,
}

impl TokenDtype {
    /// Type with this header code. Codes 6 and 7 are the floating types, which hold no tokens.
    pub fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::U8),
            2 => Some(Self::I8),
            3 => Some(Self::I16),
            4 => Some(Self::I32),
            5 => Some(Self::I64),
            8 => Some(Self::U16),
            _ => None,
        }
    }

    /// Type in which ids of a vocabulary of `vocab_size` entries are stored.
    pub fn for_vocab_size(vocab_size: u64) -> Self {
        if vocab_size < U16_VOCAB_LIMIT { Self::U16 } else { Self::I32 }
    }

    /// Code in the `.idx` header.
    pub fn code(self) -> u8 {
        match self {
            Self::U8 => 1,
            Self::I8 => 2,
            Self::I16 => 3,
            Self::I32 => 4,
            Self::I64 => 5,
            Self::U16 => 8,
        }
    }

    /// Bytes of one token.
    pub fn size_bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::I16 | Self::U16 => 2,
            Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    /// numpy's name, for example `uint16`.
    pub fn name(self) -> &'static str {
        match self {
            Self::U8 => "uint8",
            Self::I8 => "int8",
            Self::I16 => "int16",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::U16 => "uint16",
        }
    }

    /// Largest token id that the type holds.
    pub fn max_id(self) -> u64 {
        match self {
            Self::U8 => u8::MAX.into(),
            Self::I8 => i8::MAX as u64,
            Self::I16 => i16::MAX as u64,
            Self::I32 => i32::MAX as u64,
            Self::I64 => i64::MAX as u64,
            Self::U16 => u16::MAX.into(),
        }
    }
}

impl fmt::Display for TokenDtype {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_those_of_the_format() {
        let codes: Vec<u8> = (0..=9).filter(|&code| TokenDtype::from_code(code).is_some()).collect();
        assert_eq!(codes, [1, 2, 3, 4, 5, 8]);
        for code in codes {
            assert_eq!(TokenDtype::from_code(code).map(TokenDtype::code), Some(code));
        }
    }

    #[test]
    fn vocabulary_of_65499_is_u16_and_65500_is_i32() {
        assert_eq!(TokenDtype::for_vocab_size(65_499), TokenDtype::U16);
        assert_eq!(TokenDtype::for_vocab_size(65_500), TokenDtype::I32);
    }
}
