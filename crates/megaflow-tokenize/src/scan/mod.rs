//! Where words begin: the split rules of the byte-level families, without a regular expression engine.
//!
//! All characters of a window are first turned into bit masks of their classes, 64 bytes a word (the bytes of a longer
//! character carry its class); [`bits`] then computes the starts of words from these masks with shifts, ands and carries,
//! for 64 bytes at once. The idea of working on bit masks of character classes is that of simdjson (Langdale and Lemire,
//! 2019).

mod bits;
mod rules;
mod scalar;
#[cfg(test)]
mod tests;

use rules::{Contraction, PlainRule, Prefix};
pub(crate) use rules::{Dialect, Rule};

use crate::simd::{self, Masks};
use crate::unicode::{ClassTable, class, decode};

/// Bytes looked at in one go: the masks of a window stay in the first-level cache.
const WINDOW: usize = 8 << 10;

/// Ends of the words of one window.
#[derive(Default)]
pub(crate) struct Scanner {
    masks: Vec<Masks>,
    starts: Vec<u64>,
    /// Ends of words, from the window's first byte.
    pub(crate) ends: Vec<u32>,
}

impl Scanner {
    /// Finds the words at the beginning of `text`, some kilobytes of them (all bytes up to the last of [`Self::ends`]).
    /// `text` begins with a word and is not empty.
    pub(crate) fn next_words(&mut self, rule: Rule, text: &[u8]) {
        match rule {
            Rule::Plain(rule) => {
                self.next_plain(rule, text);
            }
            Rule::Cased { contractions, digits } => {
                let contraction = if contractions { Contraction::Suffix } else { Contraction::None };
                let rule =
                    PlainRule { contraction, digits, prefix: Prefix::Any, letters: class::LETTER, end_is_one: false };
                if !self.next_plain(rule, text) {
                    self.ends.clear();
                    scalar::cased(contractions, digits, text, &mut self.ends);
                }
            }
            Rule::DeepSeek => {
                self.ends.clear();
                scalar::deepseek(text, &mut self.ends);
            }
        }
    }

    /// As above, by bit masks; `false` if the rule looks at case and the text has marks, or mixes letters with and without
    /// case in one word.
    fn next_plain(&mut self, rule: PlainRule, text: &[u8]) -> bool {
        let mut window = WINDOW;
        loop {
            let mut len = window.min(text.len());
            while len < text.len() && text[len] & 0xC0 == 0x80 {
                len -= 1;
            }
            let at_end = len == text.len();
            let is_cased = rule.is_cased();
            if !self.mark(rule, is_cased, &text[..len])
                || !bits::find_starts(rule, &text[..len], &self.masks, &mut self.starts, at_end)
            {
                return false;
            }
            if self.collect(len, at_end) {
                return true;
            }
            // One word fills the window. If it is one byte again and again, all but a window of it is passed over: no rule
            // counts beyond three, and in such a word that is long past.
            let run = run_of_one_byte(text);
            if run > 2 * window {
                let skip = run - window;
                let found = self.next_plain(rule, &text[skip..]);
                self.ends.iter_mut().for_each(|end| *end += skip as u32);
                return found;
            }
            window *= 4;
        }
    }

    /// Fills the masks of a window; `false` at a mark if the rule looks at case.
    fn mark(&mut self, rule: PlainRule, is_cased: bool, text: &[u8]) -> bool {
        simd::classify(text, &mut self.masks);
        let table = ClassTable::get();
        let of = |class: u8, mask: u8| u64::from(class & mask != 0).wrapping_neg();
        for block in 0..self.masks.len() - 1 {
            let mut leads = self.masks[block].high & !self.masks[block].continuation;
            let (mut letter, mut number, mut space, mut upper, mut caseless) = (0, 0, 0, 0, 0);
            let (mut bit, mut bytes, mut class) = (0, 0u64, 0);
            while leads != 0 {
                bit = leads.trailing_zeros();
                leads &= leads - 1;
                let (code, len) = decode(text, block * 64 + bit as usize);
                (bytes, class) = ((1 << len) - 1, table.bits(code));
                let here = bytes << bit;
                letter |= here & of(class, rule.letters);
                number |= here & of(class, class::NUMBER);
                space |= here & of(class, class::SPACE);
                if is_cased {
                    if class & class::MARK != 0 {
                        return false;
                    }
                    upper |= here & of(class, class::UPPER);
                    caseless |= here & of(class, rule.letters) & !of(class, class::UPPER | class::LOWER);
                }
            }
            let masks = &mut self.masks[block];
            masks.letter |= letter;
            masks.number |= number;
            masks.space |= space;
            masks.upper |= upper;
            masks.caseless |= caseless;
            // The last character may reach into the next block.
            let rest = if bit == 0 { 0 } else { bytes >> (64 - bit) };
            if rest != 0 {
                let masks = &mut self.masks[block + 1];
                masks.letter |= rest & of(class, rule.letters);
                masks.number |= rest & of(class, class::NUMBER);
                masks.space |= rest & of(class, class::SPACE);
                if is_cased {
                    masks.upper |= rest & of(class, class::UPPER);
                    masks.caseless |= rest & of(class, rule.letters) & !of(class, class::UPPER | class::LOWER);
                }
            }
        }
        true
    }

    /// Turns starts into ends, up to the last one that no later text can change. `false` if there is none.
    fn collect(&mut self, len: usize, at_end: bool) -> bool {
        // Eight at a time, of which the last may be none: the number of words in a block is hard to predict.
        self.ends.clear();
        self.ends.resize(self.starts.iter().map(|starts| starts.count_ones() as usize).sum::<usize>() + 8, 0);
        let mut count = 0;
        for (block, &starts) in self.starts.iter().enumerate() {
            let mut left = starts;
            let words = starts.count_ones() as usize;
            for done in (0..words).step_by(8) {
                let slots: &mut [u32; 8] =
                    self.ends[count + done..].first_chunk_mut().expect("eight more than there are words");
                for slot in slots {
                    *slot = (block * 64) as u32 + left.trailing_zeros();
                    left &= left.wrapping_sub(1);
                }
            }
            count += words;
        }
        self.ends.truncate(count);
        if at_end {
            self.ends.push(len as u32);
        } else {
            // Starts behind white space depend on what follows it; all others on some bytes of what follows at most.
            while let Some(&end) = self.ends.last() {
                let before = (end as usize).wrapping_sub(1);
                if end as usize + 8 <= len && before < len && self.masks[before / 64].space >> (before % 64) & 1 == 0 {
                    break;
                }
                self.ends.pop();
            }
        }
        if self.ends.first() == Some(&0) {
            self.ends.remove(0);
        }
        !self.ends.is_empty()
    }
}

/// Length of the run of equal bytes that `text` begins with.
pub(crate) fn run_of_one_byte(text: &[u8]) -> usize {
    let Some(&byte) = text.first() else { return 0 };
    let equal =
        text.chunks_exact(64).take_while(|chunk| chunk.iter().fold(0, |diff, &other| diff | (other ^ byte)) == 0);
    let len = equal.count() * 64;
    len + text[len..].iter().take_while(|&&other| other == byte).count()
}
