//! The index at sizes that can be counted by hand, and at sizes that no machine holds.

use super::plan::THREADS_FROM;
use super::*;
use crate::mt19937::Mt19937;

const CONFIG: IndexConfig =
    IndexConfig { seq_len: 4, num_samples: None, seed: 1, add_extra_token: true, keep_partial: false };

fn build(lengths: &[i32], config: IndexConfig) -> GptIndex {
    GptIndex::build(lengths, 0..lengths.len(), &config).unwrap()
}

fn rows(index: &GptIndex) -> Vec<(usize, i64)> {
    (0..index.sample_index.num_rows()).map(|row| index.sample_index.row(row).unwrap()).collect()
}

#[test]
fn samples_overlap_by_the_extra_token() {
    // 9 tokens: two samples of 4 + 1, the second starts with the last token of the first.
    assert_eq!(rows(&build(&[9], CONFIG)), [(0, 0), (0, 4), (0, 8)]);
    // 12 tokens without it: the document is used up, and the position stays on it.
    assert_eq!(
        rows(&build(&[12], IndexConfig { add_extra_token: false, ..CONFIG })),
        [(0, 0), (0, 4), (0, 8), (0, 12)]
    );
}

#[test]
fn kept_partial_sample_ends_with_the_last_document() {
    let config = IndexConfig { keep_partial: true, ..CONFIG };
    assert_eq!(rows(&build(&[11], config)), [(0, 0), (0, 4), (0, 8), (0, 10)]);
    assert_eq!(build(&[9], config).shuffle_index.len(), 2);
    assert_eq!(build(&[1], config).shuffle_index.len(), 0);
}

#[test]
fn kept_partial_samples_are_counted_in_float32() {
    let step = 1 << 24;
    let config = IndexConfig { keep_partial: true, seq_len: step, ..CONFIG };
    // One token more than 100 samples: float32 does not see it.
    assert_eq!(build(&[100 * step as i32 + 2], config).shuffle_index.len(), 100);
    assert_eq!(build(&[100 * step as i32 + 1000], config).shuffle_index.len(), 101);
}

#[test]
fn too_few_tokens_for_a_sample_repeat() {
    let index = build(&[2, 1], IndexConfig { num_samples: Some(3), ..CONFIG });
    assert_eq!((index.num_epochs, index.document_index.len()), (5, 10));
    assert_eq!(index.shuffle_index.len(), 3);
    assert_eq!(build(&[2, 1], CONFIG).shuffle_index.len(), 0);
}

#[test]
fn no_tokens_with_samples_asked_is_an_error_not_a_loop() {
    for lengths in [&[][..], &[0, 0]] {
        let error = GptIndex::build(lengths, 0..lengths.len(), &IndexConfig { num_samples: Some(1), ..CONFIG });
        assert!(matches!(error, Err(BuildError::NoTokens { num_samples: 1, .. })), "{error:?}");
        assert!(build(lengths, IndexConfig { num_samples: Some(0), ..CONFIG }).shuffle_index.is_empty());
        assert!(build(lengths, CONFIG).shuffle_index.is_empty());
    }
}

#[test]
fn impossible_sizes_are_refused_in_words() {
    let lengths = [1, 2];
    for num_samples in [u64::MAX, u64::MAX / 8, 1 << 61] {
        let config = IndexConfig { num_samples: Some(num_samples), ..CONFIG };
        let message = GptIndex::build(&lengths[..], 0..2, &config).unwrap_err().to_string();
        assert!(message.contains("ask for fewer samples"), "{message}");
    }
    for seq_len in [0, usize::MAX] {
        assert!(GptIndex::build(&lengths[..], 0..2, &IndexConfig { seq_len, ..CONFIG }).is_err());
    }
    let error = GptIndex::build(&[3, -1][..], 0..2, &CONFIG);
    assert!(matches!(error, Err(BuildError::BadLength { sequence: 1, found: -1 })));
}

#[test]
fn last_epoch_is_shuffled_apart_below_four_fifths() {
    let lengths = [10; 10];
    let separate = build(&lengths, IndexConfig { num_samples: Some(25), ..CONFIG });
    assert_eq!((separate.num_epochs, separate.separate_last_epoch), (2, true));
    let ShuffleIndex::U32(Column::Owned(order)) = &separate.shuffle_index else { panic!("few samples") };
    assert!(order[..24].iter().all(|&sample| sample < 24) && order[24..].iter().all(|&sample| sample >= 24));
    let mixed = build(&lengths, IndexConfig { num_samples: Some(48), ..CONFIG });
    assert_eq!((mixed.num_epochs, mixed.separate_last_epoch), (2, false));
}

#[test]
fn threads_do_not_change_a_bit() {
    let lengths: Vec<i32> = (0..5000).map(|number| number * 31 % 97).collect();
    for num_samples in [None, Some(60_000), Some(100_000), Some(130_000)] {
        let config = IndexConfig { num_samples, ..CONFIG };
        let one = GptIndex::build(&lengths[..], 0..5000, &config).unwrap();
        assert!(one.shuffle_index.len() as u64 >= THREADS_FROM);
        let (two, _) = GptIndex::build_with(&lengths[..], 0..5000, &config, 2, None).unwrap();
        assert!(one == two, "{num_samples:?}");
    }
}

#[test]
fn rows_of_64_bits_equal_those_of_32() {
    let lengths: Vec<i32> = (0..700).map(|number| number * 31 % 97).collect();
    let config = IndexConfig { num_samples: Some(9000), ..CONFIG };
    let plan = Plan::new(&lengths[..], 0..700, &config).unwrap();
    let documents = plan.document_index(&mut Mt19937::new(1)).unwrap();
    let narrow = plan.sample_index(&lengths[..], &documents, |value| value as i32).unwrap();
    let wide = plan.sample_index(&lengths[..], &documents, |value| value).unwrap();
    assert!(wide.into_iter().eq(narrow.into_iter().map(i64::from)));
}

#[test]
fn positions_above_31_bits_are_stored_in_64() {
    // 2^31 - 1 and 2^31 positions in the document index: one token a sequence, one sequence repeated.
    for (num_samples, is_narrow) in [(i32::MAX as u64, true), (1 << 31, false)] {
        let config = IndexConfig { seq_len: 1, num_samples: Some(num_samples), add_extra_token: false, ..CONFIG };
        let plan = Plan::new(&[1][..], 0..1, &config).unwrap();
        assert_eq!((plan.num_documents(), plan.is_narrow()), (Some(num_samples), is_narrow));
    }
    let config = IndexConfig { seq_len: 1, num_samples: Some(u64::from(u32::MAX) - 1), ..CONFIG };
    assert!(!Plan::new(&[1][..], 0..1, &config).unwrap().is_order_narrow());
}

/// Lengths of sequences that no machine holds.
struct Long(usize);

impl SequenceLengths for Long {
    fn num_sequences(&self) -> usize {
        self.0
    }

    fn length(&self, _: usize) -> i32 {
        i32::MAX
    }
}

#[test]
fn token_counts_beyond_32_bits_are_exact() {
    let config = IndexConfig { seq_len: 1 << 30, ..CONFIG };
    let index = GptIndex::build(&Long(3000), 0..3000, &config).unwrap();
    let tokens = 3000 * u64::from(i32::MAX as u32);
    assert_eq!(index.tokens_per_epoch, tokens);
    assert_eq!(index.shuffle_index.len() as u64, (tokens - 1) >> 30);
}
