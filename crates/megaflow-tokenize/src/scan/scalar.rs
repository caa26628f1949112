//! Split rules that are followed character by character: those that look at case, and DeepSeek's three in sequence.

use super::rules::Digits;
use crate::unicode::{ClassTable, class, decode};

/// Words found before a scan stops at the next end.
const ENOUGH: usize = 2048;

/// A text with its class table.
struct Reader<'a> {
    text: &'a [u8],
    table: &'static ClassTable,
}

impl Reader<'_> {
    /// Class bits and length of the character at `at`; 0 and 1 at the end.
    #[inline]
    fn class(&self, at: usize) -> (u8, usize) {
        if at >= self.text.len() {
            return (0, 1);
        }
        let (code, len) = decode(self.text, at);
        (self.table.bits(code), len)
    }

    fn byte(&self, at: usize) -> u8 {
        self.text.get(at).copied().unwrap_or(0)
    }

    /// End of the run of characters that have any of `bits`.
    #[inline]
    fn run(&self, mut at: usize, bits: u8) -> usize {
        loop {
            let (class, len) = self.class(at);
            if class & bits == 0 {
                return at;
            }
            at += len;
        }
    }

    /// End of `\s*[\r\n]+|\s+(?!\S)|\s+` at white space.
    fn white_space(&self, at: usize) -> usize {
        let (mut end, mut last, mut newline) = (at, at, None);
        loop {
            let (class, len) = self.class(end);
            if class & class::SPACE == 0 {
                break;
            }
            last = end;
            end += len;
            if matches!(self.byte(last), b'\r' | b'\n') {
                newline = Some(end);
            }
        }
        match newline {
            Some(newline) => newline,
            None if end == self.text.len() || last == at => end,
            None => last,
        }
    }

    /// End of one to three numbers, or of one.
    fn numbers(&self, mut at: usize, digits: Digits) -> usize {
        for _ in 0..if digits == Digits::One { 1 } else { 3 } {
            let (class, len) = self.class(at);
            if class & class::NUMBER == 0 {
                break;
            }
            at += len;
        }
        at
    }
}

/// o200k and its relatives:
/// `[^\r\n\p{L}\p{N}]?[U]*[L]+C?|[^\r\n\p{L}\p{N}]?[U]+[L]*C?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`
/// with U = `\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}`, L = `\p{Ll}\p{Lm}\p{Lo}\p{M}`, C = `(?i:'s|'t|'re|'ve|'m|'ll|'d)`.
pub(super) fn cased(contractions: bool, digits: Digits, text: &[u8], ends: &mut Vec<u32>) {
    let reader = Reader { text, table: ClassTable::get() };
    const WORD: u8 = class::LETTER | class::MARK;
    let mut at = 0;
    while at < text.len() && ends.len() < ENOUGH {
        let (class, len) = reader.class(at);
        let behind = at + len;
        let is_newline = matches!(text[at], b'\r' | b'\n');
        let end = if class & WORD != 0 {
            // A mark may be the optional character before a word as well as its first; both readings end it alike.
            cased_word(&reader, contractions, at)
        } else if class & class::NUMBER != 0 {
            reader.numbers(at, digits)
        } else if !is_newline && reader.class(behind).0 & WORD != 0 {
            cased_word(&reader, contractions, behind)
        } else if class & class::SPACE == 0 {
            symbols(&reader, at)
        } else if text[at] == b' ' && is_symbol(&reader, behind) {
            symbols(&reader, behind)
        } else {
            reader.white_space(at)
        };
        ends.push(end as u32);
        at = end;
    }
}

fn is_symbol(reader: &Reader<'_>, at: usize) -> bool {
    at < reader.text.len() && reader.class(at).0 & (class::SPACE | class::LETTER | class::NUMBER) == 0
}

/// End of `[^\s\p{L}\p{N}]+[\r\n/]*`.
fn symbols(reader: &Reader<'_>, mut at: usize) -> usize {
    while is_symbol(reader, at) {
        at += reader.class(at).1;
    }
    while matches!(reader.byte(at), b'\r' | b'\n' | b'/') {
        at += 1;
    }
    at
}

/// End of `[U]*[L]+C?|[U]+[L]*C?`, at a letter or mark.
///
/// The capitals are taken first, with all characters that are both; if a small letter follows, it and its like are
/// taken as well. Else `[L]+` needs a character that was taken: the last one that is both. Without any, all are capitals.
fn cased_word(reader: &Reader<'_>, contractions: bool, start: usize) -> usize {
    let (mut at, mut both_end) = (start, start);
    let end = loop {
        let (class, len) = reader.class(at);
        if class & class::LOWER != 0 {
            loop {
                let (class, len) = reader.class(at);
                if class & (class::LETTER | class::MARK) == 0 || class & class::UPPER != 0 {
                    break;
                }
                at += len;
            }
            break at;
        }
        if class & (class::LETTER | class::MARK) == 0 {
            break if both_end > start { both_end } else { at };
        }
        at += len;
        if class & class::UPPER == 0 {
            both_end = at;
        }
    };
    if contractions && reader.byte(end) == b'\'' {
        return end + super::bits::contraction_any_case_with_apostrophe(&reader.text[end..]);
    }
    end
}

/// DeepSeek V3 and R1: `\p{N}{1,3}`, then `[U+4E00-U+9FA5U+3040-U+309FU+30A0-U+30FF]+`, then
/// `[!-/:-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`,
/// each within the pieces that the one before left.
pub(super) fn deepseek(text: &[u8], ends: &mut Vec<u32>) {
    let all = Reader { text, table: ClassTable::get() };
    let is_han_or_kana = |at: usize| at < text.len() && matches!(decode(text, at).0, 0x4E00..=0x9FA5 | 0x3040..=0x30FF);
    let mut at = 0;
    while at < text.len() && ends.len() < ENOUGH {
        if all.class(at).0 & class::NUMBER != 0 {
            at = all.numbers(at, Digits::Three);
            ends.push(at as u32);
            continue;
        }
        let kind = is_han_or_kana(at);
        let mut end = at;
        while end < text.len() && is_han_or_kana(end) == kind && all.class(end).0 & class::NUMBER == 0 {
            end += all.class(end).1;
        }
        deepseek_piece(&text[at..end], at, ends);
        at = end;
    }
}

fn deepseek_piece(text: &[u8], offset: usize, ends: &mut Vec<u32>) {
    const WORD: u8 = class::LETTER | class::MARK;
    const SYMBOL: u8 = class::PUNCTUATION | class::SYMBOL;
    let reader = Reader { text, table: ClassTable::get() };
    let (mut at, mut done) = (0, 0);
    while at < text.len() {
        let (class, len) = reader.class(at);
        let (behind, byte) = (at + len, text[at]);
        let (next, _) = reader.class(behind);
        let end = if byte.is_ascii_punctuation() && reader.byte(behind).is_ascii_alphabetic() {
            behind + text[behind..].iter().take_while(|byte| byte.is_ascii_alphabetic()).count()
        } else if class & (class::LETTER | SYMBOL) == 0 && !matches!(byte, b'\r' | b'\n') && next & WORD != 0 {
            reader.run(behind, WORD)
        } else if class & WORD != 0 {
            reader.run(at, WORD)
        } else if class & SYMBOL != 0 || byte == b' ' && next & SYMBOL != 0 {
            let end = reader.run(if class & SYMBOL != 0 { at } else { behind }, SYMBOL);
            end + text[end..].iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count()
        } else if class & class::SPACE != 0 {
            reader.white_space(at)
        } else {
            at = behind; // matched by nothing: such characters in a row are one piece
            continue;
        };
        if done < at {
            ends.push((offset + at) as u32);
        }
        ends.push((offset + end) as u32);
        (at, done) = (end, end);
    }
    if done < text.len() {
        ends.push((offset + text.len()) as u32);
    }
}
