//! Unicode classes of characters, as the split rules of tokenizers name them.
//!
//! The classes are those of the regex engine that defines these rules (see `ranges.rs`), not of the newest Unicode
//! version: a character that was unassigned there is in no class here.

mod ranges;

use std::sync::LazyLock;

/// Class bits.
pub(crate) mod class {
    /// `\p{L}`
    pub(crate) const LETTER: u8 = 1;
    /// `\p{N}`
    pub(crate) const NUMBER: u8 = 2;
    /// `\s`
    pub(crate) const SPACE: u8 = 4;
    /// `\p{M}`
    pub(crate) const MARK: u8 = 8;
    /// `\p{Lu}` or `\p{Lt}`
    pub(crate) const UPPER: u8 = 16;
    /// `\p{Ll}`
    pub(crate) const LOWER: u8 = 32;
    /// `\p{P}`
    pub(crate) const PUNCTUATION: u8 = 64;
    /// `\p{S}`
    pub(crate) const SYMBOL: u8 = 128;
}

const BLOCK: usize = 128;

/// Two levels: the block of a code point, and the class bits within the block.
pub(crate) struct ClassTable {
    blocks: Vec<u16>,
    bits: Vec<u8>,
}

static TABLE: LazyLock<ClassTable> = LazyLock::new(ClassTable::build);

impl ClassTable {
    /// The one table of the process.
    pub(crate) fn get() -> &'static Self {
        &TABLE
    }

    fn build() -> Self {
        let mut all = vec![0u8; 0x11_0000];
        for (index, &(start, bits)) in ranges::RANGES.iter().enumerate() {
            let end = ranges::RANGES.get(index + 1).map_or(0x11_0000, |&(next, _)| next);
            all[start as usize..end as usize].fill(bits);
        }
        let mut table = Self { blocks: Vec::with_capacity(0x11_0000 / BLOCK), bits: Vec::new() };
        let mut seen = std::collections::HashMap::new();
        for block in all.chunks_exact(BLOCK) {
            let next = table.bits.len() / BLOCK;
            let place = *seen.entry(block).or_insert(next);
            if place == next {
                table.bits.extend_from_slice(block);
            }
            table.blocks.push(place as u16); // fewer than 8,704 blocks in all
        }
        table
    }

    /// Class bits of a code point.
    #[inline]
    pub(crate) fn bits(&self, code: u32) -> u8 {
        let block = self.blocks[code as usize / BLOCK] as usize;
        self.bits[block * BLOCK + code as usize % BLOCK]
    }
}

/// Code point and length of the character that starts at `at` in valid UTF-8.
#[inline(always)]
pub(crate) fn decode(text: &[u8], at: usize) -> (u32, usize) {
    let first = text[at];
    let byte = |offset: usize| u32::from(text[at + offset] & 0x3F);
    match first {
        0..0x80 => (u32::from(first), 1),
        0x80..0xE0 => ((u32::from(first & 0x1F) << 6) | byte(1), 2),
        0xE0..0xF0 => ((u32::from(first & 0x0F) << 12) | (byte(1) << 6) | byte(2), 3),
        _ => ((u32::from(first & 0x07) << 18) | (byte(1) << 12) | (byte(2) << 6) | byte(3), 4),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::utils::SysRegex;

    #[test]
    fn classes_are_those_of_the_reference_regex_engine() {
        let all: String = (0..=0x10_FFFF).filter_map(char::from_u32).collect();
        let classes = [
            (r"\p{L}", class::LETTER),
            (r"\p{N}", class::NUMBER),
            (r"\s", class::SPACE),
            (r"\p{M}", class::MARK),
            (r"[\p{Lu}\p{Lt}]", class::UPPER),
            (r"\p{Ll}", class::LOWER),
            (r"\p{P}", class::PUNCTUATION),
            (r"\p{S}", class::SYMBOL),
        ];
        for (pattern, bit) in classes {
            let regex = SysRegex::new(pattern).unwrap();
            let expected: Vec<usize> = regex.find_iter(&all).map(|(start, _)| start).collect();
            let found: Vec<usize> = all
                .char_indices()
                .filter(|&(_, character)| ClassTable::get().bits(character as u32) & bit != 0)
                .map(|(at, _)| at)
                .collect();
            assert!(expected == found, "{pattern}");
        }
    }

    #[test]
    fn decode_reads_what_char_wrote() {
        for character in ['a', '\u{7F}', '\u{80}', '\u{7FF}', '\u{800}', '\u{FFFF}', '\u{10000}', '\u{10FFFF}'] {
            let text = character.to_string();
            assert_eq!(decode(text.as_bytes(), 0), (character as u32, text.len()));
        }
    }
}
