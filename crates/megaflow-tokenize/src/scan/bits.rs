//! Starts of words from class masks, 64 bytes at a time.

use super::rules::{Contraction, Digits, PlainRule, Prefix};
use crate::simd::Masks;

/// What a block leaves to the next one: single bits, at its bit 0 unless said.
#[derive(Default)]
struct Carry {
    letter: u64,
    number: u64,
    other: u64,
    space: u64,
    /// Last byte was a character of a symbol run or a newline that this run swallowed.
    swallowing: u64,
    /// Last byte belongs to white space that is the last before a word.
    edge: u64,
    edge_blank: u64,
    /// Last byte belongs to the first symbol of a run, with no blank before it.
    first_symbol: u64,
    newline: u64,
    /// Starts to set and to clear at the beginning of the next block.
    set: u64,
    clear: u64,
    /// Numbers since the start of the run, if it goes on.
    digits: u32,
}

/// Computes the starts of the words of `text`, whose masks (and one empty block behind) are given.
///
/// `at_end`: the text ends here. Otherwise starts near the end are guesses. `false` if the rule looks at case and a word
/// mixes letters with and without it.
pub(super) fn find_starts(rule: PlainRule, text: &[u8], masks: &[Masks], starts: &mut Vec<u64>, at_end: bool) -> bool {
    starts.clear();
    starts.reserve(masks.len());
    match (rule.prefix, rule.digits) {
        (Prefix::Blank, _) => {
            blank_prefix(text, masks, starts);
            true
        }
        (Prefix::Any, Digits::One) if rule.is_cased() => any_prefix::<true, true>(rule, text, masks, starts, at_end),
        (Prefix::Any, Digits::One) => any_prefix::<true, false>(rule, text, masks, starts, at_end),
        (Prefix::Any, _) if rule.is_cased() => any_prefix::<false, true>(rule, text, masks, starts, at_end),
        (Prefix::Any, _) => any_prefix::<false, false>(rule, text, masks, starts, at_end),
    }
}

/// Bytes of white space characters that are the last before something else, at the first byte of each.
#[inline]
fn edges(space: u64, here: &Masks, next: &Masks) -> u64 {
    let solid = |masks: &Masks| !masks.space & masks.valid;
    let after = |count: u32| solid(here) >> count | solid(next) << (64 - count);
    if here.high & space == 0 {
        return space & after(1);
    }
    // White space outside ASCII: two bytes (U+0085, U+00A0) or three.
    let continued = |count: u32| here.continuation >> count | next.continuation << (64 - count);
    let leads = space & !here.continuation;
    let (one, two, three) = (!continued(1), continued(1) & !continued(2), continued(1) & continued(2));
    leads & (one & after(1) | two & after(2) | three & after(3))
}

/// Adds the further bytes of the characters whose first bytes are set.
#[inline]
fn whole_characters(first: u64, carry: u64, continuation: u64) -> u64 {
    let mut bytes = first | carry & continuation & 1;
    if continuation != 0 {
        bytes |= bytes << 1 & continuation;
        bytes |= bytes << 1 & continuation;
        bytes |= bytes << 1 & continuation;
    }
    bytes
}

/// GPT-2: `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`.
///
/// A word starts where the class changes, and at the last white space before another class; if that is a blank, it
/// belongs to the word behind it.
fn blank_prefix(text: &[u8], masks: &[Masks], starts: &mut Vec<u64>) {
    let mut carry = Carry::default();
    for (block, pair) in masks.windows(2).enumerate() {
        let (here, next) = (&pair[0], &pair[1]);
        let (letter, number, space) = (here.letter, here.number, here.space);
        let other = here.valid & !(letter | number | space);
        let edge = edges(space, here, next);
        let mut start = letter & !(letter << 1 | carry.letter)
            | number & !(number << 1 | carry.number)
            | other & !(other << 1 | carry.other)
            | space & !(space << 1 | carry.space);
        let blank = edge & here.blank;
        start &= !(blank << 1 | carry.edge_blank);
        start |= edge;
        start = (start | carry.set) & !carry.clear;
        (carry.set, carry.clear) = (0, 0);
        let mut candidates = here.apostrophe & start & (letter >> 1 | next.letter << 63);
        while candidates != 0 {
            let bit = candidates.trailing_zeros();
            candidates &= candidates - 1;
            let at = block * 64 + bit as usize;
            let len = contraction_lower(&text[at + 1..]);
            if len != 0 {
                let (set, clear) = (1u128 << (bit + 1 + len), 2u128 << bit);
                start = (start | set as u64) & !(clear as u64);
                (carry.set, carry.clear) = (carry.set | (set >> 64) as u64, (clear >> 64) as u64);
            }
        }
        starts.push(start & here.valid);
        carry.letter = letter >> 63;
        carry.number = number >> 63;
        carry.other = other >> 63;
        carry.space = space >> 63;
        carry.edge_blank = blank >> 63;
    }
}

/// `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
/// and its relatives.
///
/// `CASED`: o200k and tekken, where moreover a capital behind a small letter begins a word, endings belong to the word
/// before them, and slashes are swallowed like newlines.
fn any_prefix<const ONE_DIGIT: bool, const CASED: bool>(
    rule: PlainRule,
    text: &[u8],
    masks: &[Masks],
    starts: &mut Vec<u64>,
    at_end: bool,
) -> bool {
    let (mut ending_end, mut lower_before, mut cased_before, mut caseless_before) = (usize::MAX, 0, 0, 0);
    let mut tail_before = 0;
    let mut carry = Carry::default();
    for (block, pair) in masks.windows(2).enumerate() {
        let (here, next) = (&pair[0], &pair[1]);
        let (letter, number, newline) = (here.letter, here.number, here.newline);
        let mut other = here.valid & !(letter | number | here.space);
        // `[^\s\p{L}\p{N}]+[\r\n]*`: newlines right behind a symbol. Adding the first of a run of ones clears the run.
        let first_swallowed = newline & (other << 1 | carry.swallowing);
        let swallowed = if CASED {
            let swallowed = swallow_slashes(newline | here.slash, first_swallowed | tail_before & here.slash);
            other &= !swallowed;
            tail_before = swallowed >> 63;
            swallowed
        } else {
            newline & !newline.wrapping_add(first_swallowed)
        };
        carry.swallowing = (other | swallowed) >> 63;
        let space = here.space & !swallowed;
        let edge = edges(here.space, here, next) & !newline;
        let mut start = letter & !(letter << 1 | carry.letter)
            | other & !(other << 1 | carry.other)
            | space & !(space << 1 | carry.space)
            | edge;
        // White space before letters, and a blank before symbols, belong to them.
        let edge_bytes = whole_characters(edge, carry.edge, here.continuation);
        let blank = edge & here.blank;
        let behind_blank = blank << 1 | carry.edge_blank;
        // A single symbol before letters belongs to them, unless it has a blank before it.
        let first_symbol = whole_characters(
            other & !(other << 1 | carry.other) & !behind_blank,
            carry.first_symbol,
            here.continuation,
        );
        start &= !(letter & (edge_bytes << 1 | carry.edge | first_symbol << 1 | carry.first_symbol));
        start &= !(other & behind_blank);
        if CASED {
            let lower = letter & !here.upper & !here.caseless;
            let cased = lower | here.upper;
            if here.caseless & (cased << 1 | cased_before) | cased & (here.caseless << 1 | caseless_before) != 0 {
                return false;
            }
            start |= here.upper & !here.continuation & (lower << 1 | lower_before);
            (lower_before, cased_before, caseless_before) = (lower >> 63, cased >> 63, here.caseless >> 63);
        }
        if ONE_DIGIT {
            start |= number & !here.continuation;
        } else if number != 0 {
            start |= number & !(number << 1 | carry.number) | threes(number, here.continuation, &mut carry);
        } else {
            carry.digits = 0;
        }
        // Behind the last newline of a stretch of white space a new word begins.
        let mut candidates = space & !newline & (newline << 1 | carry.newline) & !start;
        while candidates != 0 {
            let bit = candidates.trailing_zeros();
            candidates &= candidates - 1;
            if newline_is_last(rule, masks, block, bit, at_end) {
                start |= 1 << bit;
            }
        }
        start = (start | carry.set) & !carry.clear;
        (carry.set, carry.clear) = (0, 0);
        let mut candidates = here.apostrophe & start & (letter >> 1 | next.letter << 63);
        if CASED {
            candidates &= letter << 1 | carry.letter;
        }
        while candidates != 0 {
            let bit = candidates.trailing_zeros();
            candidates &= candidates - 1;
            let at = block * 64 + bit as usize;
            let len = match rule.contraction {
                Contraction::Lower => contraction_lower(&text[at + 1..]),
                // A word takes one ending; a second one begins a word of its own.
                Contraction::Suffix if at == ending_end => 0,
                Contraction::AnyCase | Contraction::Suffix => contraction_any_case(&text[at + 1..]),
                Contraction::None => 0,
            };
            if len != 0 {
                let set = 1u128 << (bit + 1 + len);
                if CASED {
                    let clear = ((1u128 << (1 + len)) - 1) << bit;
                    start &= !(clear as u64);
                    carry.clear = (clear >> 64) as u64;
                    ending_end = at + 1 + len as usize;
                }
                start |= set as u64;
                carry.set |= (set >> 64) as u64;
            }
        }
        starts.push(start & here.valid);
        carry.letter = letter >> 63;
        carry.number = number >> 63;
        carry.other = other >> 63;
        carry.space = space >> 63;
        carry.newline = newline >> 63;
        carry.edge = edge_bytes >> 63;
        carry.edge_blank = blank >> 63;
        carry.first_symbol = first_symbol >> 63;
    }
    true
}

/// Newlines and slashes (`tail`) from the first newline behind symbols on; `first` has the newlines that follow symbols.
#[inline]
fn swallow_slashes(tail: u64, first: u64) -> u64 {
    let (mut swallowed, mut left) = (0u64, first);
    while left != 0 {
        let bit = left.trailing_zeros();
        let len = (!(tail >> bit)).trailing_zeros();
        swallowed |= (if len >= 64 { u64::MAX } else { (1 << len) - 1 }) << bit;
        left &= left - 1;
        left &= !swallowed;
    }
    swallowed
}

/// Starts within runs of more than three numbers.
#[inline]
fn threes(number: u64, continuation: u64, carry: &mut Carry) -> u64 {
    let runs_of_four = number & (number << 1) & (number << 2) & (number << 3);
    if runs_of_four == 0 && continuation & number == 0 && carry.number == 0 {
        carry.digits = (!number).leading_zeros(); // at most 3
        return 0;
    }
    if continuation & number == 0 {
        return threes_of_bytes(number, carry);
    }
    let mut start = 0;
    let mut left = number & !continuation;
    let mut run = if carry.number != 0 { carry.digits } else { 0 };
    while left != 0 {
        let bit = left.trailing_zeros();
        left &= left - 1;
        let goes_on = if bit == 0 { carry.number != 0 } else { number >> (bit - 1) & 1 != 0 };
        run = if goes_on { run } else { 0 };
        if run != 0 && run % 3 == 0 {
            start |= 1 << bit;
        }
        run += 1;
    }
    carry.digits = run;
    start
}

/// As [`threes`], where each number is one byte: a run at a time.
#[inline]
fn threes_of_bytes(number: u64, carry: &mut Carry) -> u64 {
    /// Every third bit, from bit 0 on.
    const EVERY_THIRD: u64 = 0x9249_2492_4924_9249;
    let (mut start, mut left) = (0, number);
    while left != 0 {
        let bit = left.trailing_zeros();
        let len = (!(left >> bit)).trailing_zeros().min(64 - bit);
        let run = (u64::MAX >> (64 - len)) << bit;
        let before = if bit == 0 && carry.number != 0 { carry.digits } else { 0 };
        let first = bit + (3 - before % 3) % 3;
        // The start of a new run may be among them: it is a start anyway.
        start |= EVERY_THIRD.checked_shl(first).unwrap_or(0) & run;
        carry.digits = before + len;
        left &= !run;
    }
    start
}

/// Whether the white space at `bit` of `block`, which follows a newline, reaches its end without another newline.
#[inline]
fn newline_is_last(rule: PlainRule, masks: &[Masks], block: usize, bit: u32, at_end: bool) -> bool {
    let mut block = block;
    let mut end = !(masks[block].space & !masks[block].newline) & u64::MAX << bit;
    while end == 0 {
        block += 1;
        match masks.get(block) {
            Some(masks) => end = !(masks.space & !masks.newline),
            None => return !rule.end_is_one || !at_end,
        }
    }
    let bit = end.trailing_zeros();
    let is_newline = masks[block].newline >> bit & 1 != 0;
    let is_end = masks[block].valid >> bit & 1 == 0;
    let ends_the_text = is_end && at_end;
    !(is_newline || ends_the_text && rule.end_is_one)
}

/// Length of the ending that follows an apostrophe, or 0.
#[inline]
fn contraction_lower(text: &[u8]) -> u32 {
    match text {
        [b's' | b't' | b'm' | b'd', ..] => 1,
        [b'r' | b'v', b'e', ..] | [b'l', b'l', ..] => 2,
        _ => 0,
    }
}

/// As above for any case. The long s, U+017F, is an s to a regular expression that ignores case.
#[inline]
fn contraction_any_case(text: &[u8]) -> u32 {
    match text {
        [b's' | b't' | b'm' | b'd' | b'S' | b'T' | b'M' | b'D', ..] => 1,
        [b'r' | b'v' | b'R' | b'V', b'e' | b'E', ..] | [b'l' | b'L', b'l' | b'L', ..] => 2,
        [0xC5, 0xBF, ..] => 2,
        _ => 0,
    }
}

/// Length of the ending that begins with an apostrophe, with it, or 0.
pub(super) fn contraction_any_case_with_apostrophe(text: &[u8]) -> usize {
    match contraction_any_case(&text[1..]) {
        0 => 0,
        len => len as usize + 1,
    }
}
