use std::sync::LazyLock;

use proptest::prelude::*;
use tokenizers::utils::SysRegex;

use super::*;

/// Pieces of text in which the rules differ.
pub(crate) const ALPHABET: &[&str] = &[
    "a",
    "b",
    "Z",
    "s",
    "t",
    "re",
    "ve",
    "ll",
    "S",
    "LL",
    "'",
    "'s",
    "'T",
    "'re",
    "'VE",
    "'ll",
    "'\u{17F}",
    "\u{17F}",
    " ",
    "  ",
    "   ",
    "\n",
    "\r\n",
    "\r",
    "\t",
    "\u{A0}",
    "\u{3000}",
    "\u{85}",
    "\u{2028}",
    "\u{B}",
    "\u{1C}",
    "\0",
    "\u{7F}",
    "0",
    "1",
    "42",
    "123",
    "1234",
    "\u{661}",
    "\u{B2}",
    "\u{BD}",
    "\u{1D7D8}",
    "!",
    ".",
    "(",
    "()",
    "/",
    "//",
    "_",
    "-",
    "\u{2019}",
    "\u{2026}",
    "\u{1F600}",
    "\u{1F468}\u{200D}\u{1F469}",
    "\u{E9}",
    "e\u{301}",
    "\u{301}",
    "\u{30FB}",
    "\u{309B}",
    "\u{30AB}",
    "$",
    "A",
    "B",
    "Ab",
    "\u{4E2D}",
    "\u{6587}\u{5B57}",
    "\u{3042}",
    "\u{D55C}",
    "\u{915}\u{93F}",
    "\u{1C5}",
    "\u{2B0}",
    "\u{AA}",
    "\u{FEFF}",
    "\u{E000}",
    "\u{378}",
    "\u{10FFFF}",
    "\u{300}",
    "\u{DF}",
    "\u{FB05}",
    "\u{212A}",
    "word",
    " word",
    "\n\n",
];

const CASED: &[&str] = &[
    "a",
    "B",
    "Ab",
    "aB",
    "ABc",
    "'",
    "'s",
    "'S",
    "'Re",
    "'vE",
    "'ll",
    "'LL",
    "'\u{17F}",
    "\u{17F}",
    "\u{E9}",
    "\u{C9}",
    "\u{1C5}",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "\u{A0}",
    "\u{3000}",
    "/",
    "//",
    "!",
    "()",
    ";\n",
    "/\n/",
    "\u{2019}",
    "\u{1F600}",
    "1",
    "1234",
    "\u{430}",
    "\u{416}",
    "word",
    " Word",
    "don't",
    "'d've",
    "\u{1F600}x",
];

fn scanned(rule: Rule, text: &str) -> Vec<usize> {
    let (mut scanner, mut ends, mut at) = (Scanner::default(), Vec::new(), 0);
    while at < text.len() {
        scanner.next_words(rule, &text.as_bytes()[at..]);
        ends.extend(scanner.ends.iter().map(|&end| at + end as usize));
        at = *ends.last().unwrap();
    }
    ends
}

/// Ends of the matches, and of what lies between them.
fn matched(regex: &SysRegex, text: &str) -> Vec<usize> {
    let mut ends = Vec::new();
    for (start, end) in regex.find_iter(text) {
        if start != ends.last().copied().unwrap_or(0) {
            ends.push(start);
        }
        ends.push(end);
    }
    if ends.last().copied().unwrap_or(0) != text.len() {
        ends.push(text.len());
    }
    ends
}

fn check(text: &str) {
    static KNOWN: LazyLock<Vec<(SysRegex, Rule)>> = LazyLock::new(|| {
        Rule::all().into_iter().map(|(pattern, rule)| (SysRegex::new(&pattern).unwrap(), rule)).collect()
    });
    for (regex, rule) in KNOWN.iter() {
        assert_eq!(scanned(*rule, text), matched(regex, text), "{rule:?}\n{text:?}");
    }
    static DEEPSEEK: LazyLock<[SysRegex; 3]> =
        LazyLock::new(|| Rule::deepseek_patterns().map(|pattern| SysRegex::new(pattern).unwrap()));
    let expected = DEEPSEEK.iter().fold(vec![text.len()], |ends, regex| {
        let mut start = 0;
        let cut = |end: usize| {
            let piece = &text[std::mem::replace(&mut start, end)..end];
            matched(regex, piece).into_iter().map(move |place| end - piece.len() + place)
        };
        ends.into_iter().flat_map(cut).collect()
    });
    assert_eq!(
        scanned(Rule::DeepSeek, text),
        expected.into_iter().filter(|&end| end > 0).collect::<Vec<_>>(),
        "{text:?}"
    );
}

#[test]
fn scanners_equal_the_regex_on_all_short_sequences() {
    for first in ALPHABET {
        for second in ALPHABET {
            let mut all = String::new();
            for third in ALPHABET {
                check(&format!("{first}{second}{third}"));
                all.push_str(&format!("{first}{second}{third}x y"));
            }
            check(&all);
        }
    }
}

#[test]
fn words_across_blocks_and_windows() {
    for len in (0..70).chain([8190, 8191, 8192, 8193, 40_000]) {
        for (body, tail) in [
            ("a", "'s x"),
            (" ", "x"),
            ("7", "a"),
            ("\n ", "x"),
            ("!", "\n\n a"),
            ("\u{4E2D}", "\u{3000}a"),
            ("'ll", "ab"),
            ("'", "s x"),
            ("A", "b"),
            ("/", "\n"),
            ("\n", "\u{3000}"),
        ] {
            check(&format!("{}{tail}", body.repeat(len)));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn scanners_equal_the_regex_on_random_text(picks in prop::collection::vec(0..ALPHABET.len(), 0..400)) {
        check(&picks.iter().map(|&pick| ALPHABET[pick]).collect::<String>());
    }

    /// Without marks and letters without case, which would leave the bit masks of the rules that look at case.
    #[test]
    fn scanners_equal_the_regex_on_random_text_with_case(picks in prop::collection::vec(0..CASED.len(), 0..400)) {
        check(&picks.iter().map(|&pick| CASED[pick]).collect::<String>());
    }

    #[test]
    fn scanners_equal_the_regex_on_random_characters(text in "\\PC{0,200}") {
        check(&text);
    }
}
