//! The index against a walk that restates Megatron's step by step, and the samples against the tokens of the file.
#![expect(clippy::unwrap_used, reason = "a test ends where its set-up fails")]

mod pairs;

use std::path::Path;
use std::sync::Arc;

use megaflow_core::{Piece, SampleError, SampleLayout, SampleSource};
use megaflow_indexed::IndexedDataset;
use megaflow_sample::{
    BuildError, Column, GptConfig, GptDataset, GptIndex, IndexConfig, SampleIndex, SplitMatrix, SplitName,
};
use pairs::write_pair;
use proptest::prelude::*;

fn config(seq_len: usize) -> GptConfig {
    let index = IndexConfig { seq_len, num_samples: None, seed: 3, add_extra_token: true, keep_partial: false };
    GptConfig { index, matrix: SplitMatrix::whole(SplitName::Train), split: SplitName::Train, pad_id: -1 }
}

fn dataset(folder: &Path, lengths: &[i32], config: &GptConfig) -> Result<GptDataset, BuildError> {
    write_pair(&folder.join("pair"), lengths);
    GptDataset::build(Arc::new(IndexedDataset::open(folder.join("pair")).unwrap()), config)
}

fn pieces(dataset: &GptDataset, index: u64) -> Vec<Piece> {
    let mut layout = SampleLayout::default();
    dataset.layout(index, &mut layout).unwrap();
    layout.pieces
}

/// Every sample's tokens, in stored order of the samples.
fn all_samples(dataset: &GptDataset) -> Vec<Vec<i64>> {
    let read = |index| {
        let mut tokens = vec![0; dataset.sample_len()];
        dataset.read_sample(index, &mut tokens).unwrap();
        tokens
    };
    (0..dataset.num_samples()).map(read).collect()
}

#[test]
fn sample_is_its_pieces() {
    let folder = tempfile::tempdir().unwrap();
    let lengths = [5, 0, 7, 1, 9, 3];
    let dataset = dataset(folder.path(), &lengths, &config(4)).unwrap();
    let starts = [0, 5, 5, 12, 13, 22];
    for (index, tokens) in all_samples(&dataset).iter().enumerate() {
        let pieces = pieces(&dataset, index as u64);
        let from_pieces: Vec<i64> = pieces
            .iter()
            .flat_map(|piece| {
                (0..piece.length).map(|token| (starts[piece.sequence as usize] + piece.offset + token) as i64)
            })
            .collect();
        assert_eq!(tokens, &from_pieces, "sample {index}");
    }
    assert_eq!(dataset.num_samples(), 6);
}

#[test]
fn short_sample_is_padded() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(4);
    config.index.keep_partial = true;
    config.pad_id = -7;
    let dataset = dataset(folder.path(), &[7], &config).unwrap();
    let mut samples = all_samples(&dataset);
    samples.sort();
    assert_eq!(samples, [[0, 1, 2, 3, 4], [4, 5, 6, -7, -7]]);
    let place = (0..2).find(|&index| pieces(&dataset, index)[0].offset == 4).unwrap();
    assert_eq!(pieces(&dataset, place), [Piece { dataset: 0, sequence: 0, offset: 4, length: 3 }]);
}

#[test]
fn split_that_rounds_to_nothing_is_an_error_when_asked_for_samples() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(4);
    config.matrix = SplitMatrix::parse("969,30,1").unwrap();
    config.split = SplitName::Test;
    config.index.num_samples = Some(5);
    let message = dataset(folder.path(), &[8; 40], &config).unwrap_err().to_string();
    assert!(message.contains("test split rounds to none of the 40 sequences"), "{message}");
    config.index.num_samples = Some(0);
    assert_eq!(dataset(folder.path(), &[8; 40], &config).unwrap().num_samples(), 0);
}

#[test]
fn sample_behind_the_last_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let dataset = dataset(folder.path(), &[20], &config(4)).unwrap();
    for index in [dataset.num_samples(), u64::MAX] {
        assert!(matches!(dataset.read_sample(index, &mut [0; 5]), Err(SampleError::OutOfRange { num_samples: 4, .. })));
    }
}

/// The sample index by taking tokens one document at a time, as Megatron's helper does.
fn walk(lengths: &[i32], documents: &[i32], num_samples: usize, seq_len: i64, extra: i64) -> Vec<i32> {
    let (mut document, mut offset) = (0usize, 0i64);
    let mut rows = vec![0, 0];
    for _ in 0..num_samples {
        let mut need = seq_len + extra;
        while need > 0 {
            let have = i64::from(lengths[documents[document] as usize]) - offset;
            if need <= have {
                offset += need - extra;
                need = 0;
            } else if document + 1 == documents.len() {
                offset = i64::from(lengths[documents[document] as usize]) - extra;
                need = 0;
            } else {
                need -= have;
                document += 1;
                offset = 0;
            }
        }
        rows.extend([document as i32, offset as i32]);
    }
    rows
}

proptest! {
    #[test]
    fn index_equals_the_stepwise_walk(
        lengths in prop::collection::vec(prop_oneof![Just(0), 0..4i32, 0..60], 1..700),
        seq_len in 1usize..40,
        num_samples in prop::option::of(0u64..400),
        seed: u32,
        add_extra_token: bool,
        keep_partial: bool,
    ) {
        let config = IndexConfig { seq_len, num_samples, seed, add_extra_token, keep_partial };
        let index = match GptIndex::build(&lengths[..], 0..lengths.len(), &config) {
            Ok(index) => index,
            Err(error) => {
                let is_empty = lengths.iter().all(|&length| length == 0);
                let no_tokens = is_empty && matches!(error, BuildError::NoTokens { .. });
                prop_assert!(no_tokens, "{}", error);
                return Ok(());
            }
        };
        let samples = index.shuffle_index.len();
        let expected = walk(&lengths, index.document_index.as_slice().unwrap(), samples, seq_len as i64, i64::from(add_extra_token));
        prop_assert_eq!(&index.sample_index, &SampleIndex::I32(Column::Owned(expected)));
        prop_assert!(num_samples.is_none_or(|wanted| samples as u64 >= wanted));
        let mut order: Vec<usize> = (0..samples).map(|position| index.shuffle_index.get(position).unwrap()).collect();
        order.sort();
        prop_assert!(order.into_iter().eq(0..samples));
    }

    #[test]
    fn one_epoch_hands_out_every_token_once(lengths in prop::collection::vec(0..30i32, 1..40), seq_len in 1usize..9) {
        let folder = tempfile::tempdir().unwrap();
        let mut config = config(seq_len);
        config.index.add_extra_token = false;
        config.index.keep_partial = true;
        let dataset = dataset(folder.path(), &lengths, &config).unwrap();
        let mut tokens: Vec<i64> = all_samples(&dataset).concat().into_iter().filter(|&token| token >= 0).collect();
        tokens.sort();
        prop_assert!(tokens.into_iter().eq(0..i64::from(lengths.iter().sum::<i32>())));
    }
}
