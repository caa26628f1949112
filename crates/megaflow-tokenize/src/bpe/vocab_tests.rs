use proptest::prelude::*;

use super::*;

/// BPE as it is defined: again and again the first pair of the lowest rank.
fn by_definition(source: &VocabSource, word: &[u8]) -> Vec<u32> {
    let id_of = |byte: u8| source.tokens.iter().find(|(text, _)| *text == [byte]).unwrap().1;
    let mut ids: Vec<u32> = word.iter().map(|&byte| id_of(byte)).collect();
    loop {
        let ranked = ids.windows(2).enumerate().filter_map(|(at, pair)| {
            let merge = source.merges.iter().rev().find(|merge| merge.left == pair[0] && merge.right == pair[1])?;
            Some((merge.rank, at, merge.product))
        });
        let Some((_, at, product)) = ranked.min() else { return ids };
        ids.splice(at..at + 2, [product]);
    }
}

/// A vocabulary over `a`, `b`, `c` whose merges join any two earlier tokens, in any order of rank.
fn vocabulary(picks: &[(usize, usize)], shuffle: bool) -> VocabSource {
    let mut tokens: Vec<(Vec<u8>, u32)> = vec![(vec![b'a'], 0), (vec![b'b'], 1), (vec![b'c'], 2)];
    let mut merges = Vec::new();
    for &(left, right) in picks {
        let (left, right) = (left % tokens.len(), right % tokens.len());
        let text = [tokens[left].0.as_slice(), &tokens[right].0].concat();
        if text.len() > 12 {
            continue;
        }
        let known = tokens.iter().find(|(token, _)| *token == text).map(|&(_, id)| id);
        let product = known.unwrap_or(tokens.len() as u32);
        if known.is_none() {
            tokens.push((text, product));
        }
        merges.push(Merge { rank: 0, left: left as u32, right: right as u32, product });
    }
    if shuffle {
        let half = merges.len() / 2;
        merges.rotate_left(half);
    }
    (0..).zip(&mut merges).for_each(|(rank, merge)| merge.rank = rank);
    VocabSource { tokens, symbols: vec![0, 1, 2], merges, whole_words_first: false, unknown: Unknown::Never }
}

/// The ranks of tiktoken: each pair whose text is a token merges, with the rank of that token.
fn by_product(mut source: VocabSource) -> VocabSource {
    let tokens = &source.tokens;
    let id_of = |text: &[u8]| tokens.iter().find(|(token, _)| token == text).map(|&(_, id)| id);
    let merges = tokens.iter().flat_map(|(text, id)| {
        (1..text.len()).filter_map(move |cut| {
            Some(Merge { rank: *id, left: id_of(&text[..cut])?, right: id_of(&text[cut..])?, product: *id })
        })
    });
    source.merges = merges.collect();
    source
}

/// With the 256 bytes as symbols, as in byte-level vocabularies: short words of which little merges then go their own way.
fn with_all_bytes(mut source: VocabSource) -> VocabSource {
    for byte in (0..=255u8).filter(|byte| !b"abc".contains(byte)) {
        let id = source.tokens.len() as u32;
        source.tokens.push((vec![byte], id));
        source.symbols.push(id);
    }
    source
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn search_equals_the_definition(
        picks in prop::collection::vec((0..40usize, 0..40usize), 0..40),
        words in prop::collection::vec("[abc]{1,40}", 1..6),
        (shuffle, ranks, all_bytes) in (any::<bool>(), any::<bool>(), any::<bool>()),
    ) {
        let source = vocabulary(&picks, shuffle);
        let source = if ranks { by_product(source) } else { source };
        let source = if all_bytes { with_all_bytes(source) } else { source };
        let tables = Tables::build(&source).unwrap();
        let mut scratch = Scratch::default();
        for word in &words {
            let mut ids = Vec::new();
            prop_assert!(tables.encode_word(word.as_bytes(), &mut scratch, &mut ids));
            prop_assert_eq!(&ids, &by_definition(&source, word.as_bytes()), "{} {:?}", word, source.merges);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn runs_equal_the_definition(picks in prop::collection::vec((0..8usize, 0..8usize), 0..12), len in 64..400usize) {
        let picks: Vec<_> = picks.into_iter().map(|(left, right)| (left + 3, right + 3)).collect();
        let mut all = vec![(0, 0)];
        all.extend(picks.iter().map(|&(left, right)| (if left == 3 { 0 } else { left }, if right == 4 { 0 } else { right })));
        let source = vocabulary(&all, false);
        let mut ids = Vec::new();
        let word = b"a".repeat(len);
        prop_assert!(Tables::build(&source).unwrap().encode_word(&word, &mut Scratch::default(), &mut ids));
        prop_assert_eq!(&ids, &by_definition(&source, &word), "{} {:?}", len, source.merges);
    }
}

#[test]
fn unknown_characters_become_bytes_or_one_token() {
    let mut source = vocabulary(&[(0, 1)], false);
    let bytes: Box<[u32; 256]> = Box::new(std::array::from_fn(|byte| 1000 + byte as u32));
    for (unknown, expected) in [
        (Unknown::Bytes(bytes), vec![3, 1195, 1169, 1120, 3]),
        (Unknown::Token { id: 9, fused: true }, vec![3, 9, 3]),
        (Unknown::Token { id: 9, fused: false }, vec![3, 9, 9, 3]),
    ] {
        source.unknown = unknown;
        let mut ids = Vec::new();
        assert!(Tables::build(&source).unwrap().encode_word(
            "ab\u{E9}xab".as_bytes(),
            &mut Scratch::default(),
            &mut ids
        ));
        assert_eq!(ids, expected);
    }
}

#[test]
fn whole_words_come_first_where_asked_for() {
    let mut source = vocabulary(&[(0, 1)], false);
    source.tokens.push((b"cab".to_vec(), 7));
    source.whole_words_first = true;
    let tables = Tables::build(&source).unwrap();
    let encode = |word: &str| {
        let mut ids = Vec::new();
        tables.encode_word(word.as_bytes(), &mut Scratch::default(), &mut ids);
        ids
    };
    assert_eq!(encode("cab"), [7]);
    assert_eq!(encode("cabc"), [2, 3, 2]);
}

#[test]
fn long_runs_take_linear_time() {
    let source = vocabulary(&[(0, 0), (3, 3), (4, 4), (4, 0)], false);
    let tables = Tables::build(&source).unwrap();
    let mut ids = Vec::new();
    tables.encode_word(&b"a".repeat(1 << 20), &mut Scratch::default(), &mut ids);
    assert_eq!(ids.len(), 1 << 17);
}

#[test]
fn listing_every_way_to_make_a_token_does_not_slow_it_down() {
    // "bcc" is made of "b" and "cc" at once, but could be listed as ("bc", "c") with "bc" younger.
    let source = by_product(vocabulary(&[(2, 2), (1, 3), (1, 2), (0, 5)], false));
    assert!(Tables::build(&source).unwrap().late.is_none());
}

#[test]
fn a_token_is_cut_where_both_halves_have_the_length_of_a_token() {
    let lengths = Lengths::of([1, 4, 0, 3, 7, 4].into_iter());
    assert_eq!(lengths.cuts(7).collect::<Vec<_>>(), [3, 4]);
    assert_eq!(lengths.cuts(4).collect::<Vec<_>>(), [1, 3]);
    assert_eq!(lengths.cuts(1).count(), 0);
}
