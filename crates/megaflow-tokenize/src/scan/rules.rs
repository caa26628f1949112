//! Which split rules are known, by their exact text.

use crate::unicode::class;

/// English endings such as `'s` and `'ll`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Contraction {
    /// Lower case only: `'s|'t|'re|'ve|'m|'ll|'d`.
    Lower,
    /// None.
    None,
    /// Any case, behind a word and part of it.
    Suffix,
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
pub(crate) enum Rule {
    /// One that bit masks follow.
    Plain(PlainRule),
    /// One that cuts where small letters end and capitals begin.
    Cased {
        /// Whether a word takes the English ending behind it.
        contractions: bool,
        /// How runs of numbers are cut.
        digits: Digits,
    },
    /// DeepSeek's three in sequence.
    DeepSeek,
}

/// What distinguishes the rules of GPT-2, cl100k, Llama 3 and Qwen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlainRule {
    pub(crate) contraction: Contraction,
    pub(crate) prefix: Prefix,
    pub(crate) digits: Digits,
    /// Class bits of what counts as a letter.
    pub(crate) letters: u8,
    /// White space at the end of the text is one word, even with newlines in it (`\s++$`).
    pub(crate) end_is_one: bool,
}

impl PlainRule {
    /// Whether words end where small letters end and capitals begin.
    pub(crate) fn is_cased(self) -> bool {
        matches!(self.contraction, Contraction::None | Contraction::Suffix)
    }
}

/// The pattern of `ByteLevel` with `use_regex`, and what tiktoken calls `gpt2`, `r50k` and `p50k`.
pub(crate) const GPT2: PlainRule = PlainRule {
    contraction: Contraction::Lower,
    prefix: Prefix::Blank,
    digits: Digits::Run,
    letters: class::LETTER,
    end_is_one: false,
};

/// Llama 3, and cl100k in its Hugging Face form.
pub(crate) const LLAMA3: PlainRule = PlainRule {
    contraction: Contraction::AnyCase,
    prefix: Prefix::Any,
    digits: Digits::Three,
    letters: class::LETTER,
    end_is_one: false,
};

/// Qwen 2, 2.5 and 3.
pub(crate) const QWEN2: PlainRule = PlainRule { digits: Digits::One, ..LLAMA3 };

/// Qwen 3.5: marks are letters.
const MARKS: PlainRule = PlainRule { letters: class::LETTER | class::MARK, ..QWEN2 };

/// o200k, also of Llama 4 and gpt-oss.
const O200K: Rule = Rule::Cased { contractions: true, digits: Digits::Three };

/// Tekken, of Mistral's newer models.
const TEKKEN: Rule = Rule::Cased { contractions: false, digits: Digits::One };

/// DeepSeek's `Split` patterns, in order.
const DEEPSEEK: [&str; 3] = [
    r"\p{N}{1,3}",
    "[\u{4E00}-\u{9FA5}\u{3040}-\u{309F}\u{30A0}-\u{30FF}]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
];

/// Whose regular expressions a pattern is written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// Ruby's, in a `tokenizer.json`: `{1,3}+` is a repeated repetition, `$` ends a line.
    Ruby,
    /// Python's and Rust's, in tiktoken: `{1,3}+` is possessive, `$` ends the text.
    Tiktoken,
}

/// Patterns that mean the same in both dialects.
const COMMON: [(&str, Rule); 12] = [
    (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", Rule::Plain(GPT2)),
    (r"'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", Rule::Plain(GPT2)),
    (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", Rule::Plain(GPT2)),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        Rule::Plain(LLAMA3),
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        Rule::Plain(LLAMA3),
    ),
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        Rule::Plain(LLAMA3),
    ),
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        Rule::Plain(LLAMA3),
    ),
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        Rule::Plain(LLAMA3),
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        Rule::Plain(QWEN2),
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        Rule::Plain(MARKS),
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        O200K,
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        TEKKEN,
    ),
];

/// Patterns that tiktoken reads in its own way.
const TIKTOKEN: [(&str, Rule); 2] = [
    (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s", Rule::Plain(GPT2)),
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
        Rule::Plain(PlainRule { end_is_one: true, ..LLAMA3 }),
    ),
];

impl Rule {
    /// GPT-2's rule.
    pub(crate) fn gpt2() -> Option<Self> {
        Some(Self::Plain(GPT2))
    }

    /// The rule that a pattern spells, if it is a known one. Only the exact text counts: a pattern that differs in one
    /// character may differ in meaning.
    pub(crate) fn from_pattern(pattern: &str, dialect: Dialect) -> Option<Self> {
        let own: &[_] = if dialect == Dialect::Tiktoken { &TIKTOKEN } else { &[] };
        COMMON.iter().chain(own).find(|(known, _)| *known == pattern).map(|&(_, rule)| rule)
    }

    /// The rule of several `Split`s in sequence.
    pub(crate) fn from_patterns(patterns: &[&str], dialect: Dialect) -> Option<Self> {
        match patterns {
            [one] => Self::from_pattern(one, dialect),
            _ if patterns == DEEPSEEK && dialect == Dialect::Ruby => Some(Self::DeepSeek),
            _ => None,
        }
    }

    /// DeepSeek's patterns, for tests.
    #[cfg(test)]
    pub(super) fn deepseek_patterns() -> [&'static str; 3] {
        DEEPSEEK
    }

    /// All known patterns, for tests, as the reference engine must read them.
    #[cfg(test)]
    pub(super) fn all() -> Vec<(String, Self)> {
        let own = TIKTOKEN
            .iter()
            .map(|(pattern, rule)| (pattern.replace(r"\s++$", r"\s++\z").replace("{1,3}+", "{1,3}"), *rule));
        COMMON.iter().map(|&(pattern, rule)| (pattern.to_owned(), rule)).chain(own).collect()
    }
}
