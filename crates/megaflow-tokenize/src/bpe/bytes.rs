//! The alphabet in which byte-level tokenizers write bytes: printable bytes as themselves, others from U+0100 on.
//!
//! Defined by `bytes_to_unicode` of GPT-2's `encoder.py` (OpenAI, 2019).

/// Bytes by character code; `u16::MAX` where there is none.
pub(crate) struct ByteAlphabet {
    byte_of: [u16; 0x144],
}

impl ByteAlphabet {
    /// The one alphabet.
    pub(crate) fn new() -> Self {
        let mut byte_of = [u16::MAX; 0x144];
        let mut next = 0x100;
        for byte in 0..=255u8 {
            let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
            let code = if printable { usize::from(byte) } else { next };
            next += usize::from(!printable);
            byte_of[code] = u16::from(byte);
        }
        Self { byte_of }
    }

    /// Byte that a character stands for.
    #[inline]
    pub(crate) fn byte(&self, character: char) -> Option<u8> {
        self.byte_of.get(character as usize).and_then(|&byte| u8::try_from(byte).ok())
    }

    /// Bytes that a token stands for; `None` if a character is not of the alphabet.
    pub(crate) fn bytes(&self, token: &str) -> Option<Vec<u8>> {
        token.chars().map(|character| self.byte(character)).collect()
    }

    /// The token that stands for bytes.
    pub(crate) fn token(&self, bytes: &[u8]) -> String {
        let mut char_of = ['\0'; 256];
        for (code, &byte) in (0u32..).zip(&self.byte_of) {
            if let (Ok(byte), Some(character)) = (u8::try_from(byte), char::from_u32(code)) {
                char_of[usize::from(byte)] = character;
            }
        }
        bytes.iter().map(|&byte| char_of[usize::from(byte)]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bytes_have_a_character_of_their_own() {
        let alphabet = ByteAlphabet::new();
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(alphabet.bytes(&alphabet.token(&all)), Some(all));
        assert_eq!(alphabet.token(b" a\n"), "\u{120}a\u{10A}");
        assert_eq!(alphabet.bytes("\u{2581}"), None);
    }
}
