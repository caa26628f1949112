//! Which split rules are known, by their exact text.

use crate::unicode::class;

/// English endings such as `'s` and `'ll`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Contraction {
    /// Lower case only: `'s|'t|'re|'ve|'m|'ll|'d`.
    Lower,
    /// Any case: `(?i:'s|'t|'re|'ve|'m|'ll|'d)`, which by Unicode's case folding includes the long s.
    AnyCase,
}

/// What may stand before the letters of a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Prefix {
    /// A blank, before letters and numbers alike: GPT-2's ` ?\p{L}+| ?\p{N}+`.
    Blank,
    /// Any character but a newline, a letter or a number: `[^\r\n\p{L}\p{N}]?\p{L}+`; newlines have rules of their own.
    Any,
}

/// How runs of numbers are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Digits {
    /// `\p{N}+`
    Run,
    /// `\p{N}{1,3}`
    Three,
    /// `\p{N}`
    One,
}

/// A split rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rule {
    pub(crate) contraction: Contraction,
    pub(crate) prefix: Prefix,
    pub(crate) digits: Digits,
    /// Class bits of what counts as a letter.
    pub(crate) letters: u8,
    /// White space at the end of the text is one word, even with newlines in it (`\s++$`).
    pub(crate) end_is_one: bool,
}

/// The pattern of `ByteLevel` with `use_regex`, and what tiktoken calls `gpt2`, `r50k` and `p50k`.
pub(crate) const GPT2: Rule = Rule {
    contraction: Contraction::Lower,
    prefix: Prefix::Blank,
    digits: Digits::Run,
    letters: class::LETTER,
    end_is_one: false,
};

/// Llama 3, and cl100k in its Hugging Face form.
pub(crate) const LLAMA3: Rule = Rule {
    contraction: Contraction::AnyCase,
    prefix: Prefix::Any,
    digits: Digits::Three,
    letters: class::LETTER,
    end_is_one: false,
};

/// Qwen 2, 2.5 and 3.
pub(crate) const QWEN2: Rule = Rule { digits: Digits::One, ..LLAMA3 };

/// Whose regular expressions a pattern is written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// Ruby's, in a `tokenizer.json`: `{1,3}+` is a repeated repetition, `$` ends a line.
    Ruby,
    /// Python's and Rust's, in tiktoken: `{1,3}+` is possessive, `$` ends the text.
    Tiktoken,
}

/// Patterns that mean the same in both dialects.
const COMMON: [(&str, Rule); 9] = [
    (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", GPT2),
    (r"'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", GPT2),
    (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", GPT2),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        LLAMA3,
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        LLAMA3,
    ),
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        LLAMA3,
    ),
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        LLAMA3,
    ),
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        LLAMA3,
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        QWEN2,
    ),
];

/// Patterns that tiktoken reads in its own way.
const TIKTOKEN: [(&str, Rule); 2] = [
    (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s", GPT2),
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
        Rule { end_is_one: true, ..LLAMA3 },
    ),
];

impl Rule {
    /// GPT-2's rule.
    pub(crate) fn gpt2() -> Option<Self> {
        Some(GPT2)
    }

    /// The rule that a pattern spells, if it is a known one. Only the exact text counts: a pattern that differs in one
    /// character may differ in meaning.
    pub(crate) fn from_pattern(pattern: &str, dialect: Dialect) -> Option<Self> {
        let own: &[_] = if dialect == Dialect::Tiktoken { &TIKTOKEN } else { &[] };
        COMMON.iter().chain(own).find(|(known, _)| *known == pattern).map(|&(_, rule)| rule)
    }

    /// All known patterns, for tests, as the reference engine must read them.
    #[cfg(test)]
    pub(super) fn all() -> Vec<(String, Self)> {
        let own = TIKTOKEN.iter().map(|(pattern, rule)| {
            (pattern.replace(r"\s++$", r"\s++\z").replace("{1,3}+", "{1,3}"), *rule)
        });
        COMMON.iter().map(|&(pattern, rule)| (pattern.to_owned(), rule)).chain(own).collect()
    }
}
