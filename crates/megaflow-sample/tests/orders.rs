//! Properties of the orders that need no index: every token once, prefixes that stay, shares that hold everywhere.
#![expect(clippy::unwrap_used, reason = "a test ends where its set-up fails")]

mod pairs;

use std::path::Path;
use std::sync::Arc;

use megaflow_core::{SampleError, SampleLayout, SampleSource, TokensMut};
use megaflow_indexed::IndexedDataset;
use megaflow_sample::{
    BestFitConfig, BestFitDataset, Blend, BlendOrder, GreedyIndex, InstantConfig, InstantDataset, Phases, Shares,
    Shuffle, SplitMatrix, SplitName,
};
use pairs::write_pair;
use proptest::prelude::*;

fn open(folder: &Path, lengths: &[i32]) -> Arc<IndexedDataset> {
    write_pair(&folder.join("pair"), lengths);
    Arc::new(IndexedDataset::open(folder.join("pair")).unwrap())
}

fn config(seq_len: usize, num_samples: Option<u64>, shuffle: Shuffle) -> InstantConfig {
    InstantConfig {
        seq_len,
        num_samples,
        seed: 3,
        add_extra_token: true,
        keep_partial: false,
        shuffle,
        matrix: SplitMatrix::whole(SplitName::Train),
        split: SplitName::Train,
        pad_id: -1,
    }
}

fn read(source: &dyn SampleSource, index: u64) -> Vec<i64> {
    let mut tokens = vec![0; source.sample_len()];
    source.read_sample(index, &mut tokens).unwrap();
    tokens
}

fn read_all(source: &dyn SampleSource) -> Vec<Vec<i64>> {
    (0..source.num_samples()).map(|index| read(source, index)).collect()
}

/// A layout names the very tokens of the sample; token t of the pair is t.
fn check_layout(source: &dyn SampleSource, index: u64, starts: &[i64]) {
    let mut layout = SampleLayout::default();
    source.layout(index, &mut layout).unwrap();
    let named = layout.pieces.iter().flat_map(|piece| {
        let first = starts[piece.sequence as usize] + piece.offset as i64;
        first..first + piece.length as i64
    });
    let tokens = read(source, index);
    let count = source.sample_tokens(index).unwrap();
    assert!(named.eq(tokens[..count].iter().copied()), "sample {index}");
    assert!(tokens[count..].iter().all(|&token| token == -1));
    let mut at = 0;
    for (piece, &start) in layout.pieces.iter().zip(&layout.starts) {
        assert!(piece.length > 0 && u64::from(start) == at);
        at += piece.length;
    }
    assert_eq!(layout.starts.len(), layout.pieces.len() + usize::from(count < tokens.len()));
}

fn starts(lengths: &[i32]) -> Vec<i64> {
    lengths
        .iter()
        .scan(0, |at, &length| {
            *at += i64::from(length);
            Some(*at - i64::from(length))
        })
        .collect()
}

fn lengths() -> impl Strategy<Value = Vec<i32>> {
    prop::collection::vec(prop_oneof![3 => 0..12, 1 => 0..200], 1..40)
        .prop_filter("a token is needed", |lengths| lengths.iter().any(|&length| length > 0))
}

fn shuffles() -> impl Strategy<Value = Shuffle> {
    prop_oneof![Just(Shuffle::Samples), Just(Shuffle::Documents)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_turn_delivers_every_token_once(
        lengths in lengths(), seq_len in 1usize..40, turns in 1u64..5, shuffle in shuffles(), extra: bool, seed: u64,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let indexed = open(folder.path(), &lengths);
        let tokens = indexed.num_tokens();
        // After seq_len turns cut and turn end together, so all of their samples are whole.
        let num_samples = tokens * turns;
        let mut config = config(seq_len, Some(num_samples), shuffle);
        (config.seed, config.add_extra_token) = (seed, extra);
        let dataset = InstantDataset::new(indexed, &config).unwrap();
        prop_assert_eq!(dataset.num_epochs(), turns * seq_len as u64);
        let mut seen = vec![0u64; tokens as usize];
        for (index, sample) in read_all(&dataset).iter().enumerate() {
            sample[..seq_len].iter().for_each(|&token| seen[token as usize] += 1);
            // When the first turns are over, no token has been seen more or less often but for the samples at the seam.
            let delivered = (index as u64 + 1) * seq_len as u64;
            if delivered % tokens == 0 {
                prop_assert!(seen.iter().all(|&count| count == delivered / tokens), "after {delivered} tokens");
            }
        }
        prop_assert!(seen.iter().all(|&count| count == turns * seq_len as u64));
        let starts = starts(&lengths);
        (0..num_samples.min(50)).for_each(|index| check_layout(&dataset, index, &starts));
    }

    #[test]
    fn a_single_epoch_is_every_whole_sample_once(
        lengths in lengths(), seq_len in 1usize..40, shuffle in shuffles(), extra: bool, partial: bool, seed: u64,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let indexed = open(folder.path(), &lengths);
        let mut config = config(seq_len, None, shuffle);
        (config.seed, config.add_extra_token, config.keep_partial) = (seed, extra, partial);
        let tokens = indexed.num_tokens() as usize;
        let dataset = InstantDataset::new(indexed, &config).unwrap();
        let usable = tokens - usize::from(extra).min(tokens);
        let expected = if partial { usable.div_ceil(seq_len) } else { usable / seq_len };
        prop_assert_eq!(dataset.num_samples(), expected as u64);
        let mut seen = vec![0; tokens];
        for sample in read_all(&dataset) {
            sample[..seq_len].iter().filter(|&&token| token >= 0).for_each(|&token| seen[token as usize] += 1);
        }
        prop_assert!(seen.iter().all(|&count| count <= 1));
        // In the partial sample the extra token is the last one, and no input.
        let delivered = if partial { usable } else { expected * seq_len };
        let inputs: usize = seen.iter().sum();
        prop_assert!(inputs == delivered || (partial && inputs == tokens), "{inputs} of {tokens}, {delivered} expected");
        let starts = starts(&lengths);
        (0..dataset.num_samples()).for_each(|index| check_layout(&dataset, index, &starts));
    }

    #[test]
    fn a_longer_run_begins_with_the_shorter_one(
        lengths in lengths(), seq_len in 1usize..20, short in 1u64..60, more in 1u64..60, shuffle in shuffles(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let indexed = open(folder.path(), &lengths);
        let make = |num_samples| {
            InstantDataset::new(Arc::clone(&indexed), &config(seq_len, Some(num_samples), shuffle)).unwrap()
        };
        let (short, long) = (read_all(&make(short)), read_all(&make(short + more)));
        prop_assert_eq!(&short[..], &long[..short.len()]);
    }

    #[test]
    fn best_fit_delivers_every_sequence_whole(
        lengths in lengths(), seq_len in 1usize..60, extra: bool, epochs in 1u64..4, seed: u64,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let indexed = open(folder.path(), &lengths);
        let mut config = BestFitConfig {
            seq_len,
            num_samples: None,
            seed,
            add_extra_token: extra,
            matrix: SplitMatrix::whole(SplitName::Train),
            split: SplitName::Train,
            pad_id: -1,
        };
        let per_epoch = BestFitDataset::build(Arc::clone(&indexed), &config).unwrap().num_samples();
        config.num_samples = Some(per_epoch * epochs);
        let dataset = BestFitDataset::build(indexed, &config).unwrap();
        let capacity = dataset.sample_len() as i64;
        let starts = starts(&lengths);
        for epoch in 0..epochs {
            let mut seen = vec![0i64; lengths.len()];
            for index in epoch * per_epoch..(epoch + 1) * per_epoch {
                check_layout(&dataset, index, &starts);
                let mut layout = SampleLayout::default();
                dataset.layout(index, &mut layout).unwrap();
                for piece in &layout.pieces {
                    let length = i64::from(lengths[piece.sequence as usize]);
                    prop_assert!(length > capacity || piece.length as i64 == length, "cut without need");
                    let repeated = if piece.offset > 0 { i64::from(extra) } else { 0 };
                    seen[piece.sequence as usize] += piece.length as i64 - repeated;
                }
            }
            prop_assert!(seen.iter().zip(&lengths).all(|(&seen, &length)| seen == i64::from(length)), "{seen:?}");
        }
    }

    #[test]
    fn shares_hold_at_every_prefix(weights in prop::collection::vec(0.0f64..1.0, 1..40), scale in 1e-3f64..1e3) {
        let weights: Vec<f64> = weights.iter().map(|weight| (weight * 8.0).powi(3) * scale).collect();
        prop_assume!(weights.iter().sum::<f64>() > 0.0);
        let shares = Shares::new(&weights).unwrap();
        let total: f64 = weights.iter().sum();
        let mut counts = vec![0u64; weights.len()];
        for index in 0..3000u64 {
            let place = shares.locate(index);
            prop_assert_eq!(place.sample, counts[place.dataset], "a dataset's samples come in their order");
            counts[place.dataset] += 1;
            for (count, weight) in counts.iter().zip(&weights) {
                let off = (*count as f64 - weight / total * (index + 1) as f64).abs();
                prop_assert!(off < if weights.len() == 2 { 0.501 } else { 2.0 }, "{off} after {index}");
                prop_assert!(*weight > 0.0 || *count == 0);
            }
        }
        prop_assert_eq!(shares.counts(3000), counts);
    }

    #[test]
    fn shares_hold_at_any_distance(weights in prop::collection::vec(0.01f64..1.0, 1..200), at in 0u64..1 << 45) {
        let shares = Shares::new(&weights).unwrap();
        let total: f64 = weights.iter().sum();
        let counts = shares.counts(at);
        prop_assert_eq!(counts.iter().sum::<u64>(), at);
        for (count, weight) in counts.iter().zip(&weights) {
            let exact = weight / total * at as f64;
            prop_assert!((*count as f64 - exact).abs() < 2.0 + exact * 1e-14, "{count} against {exact}");
        }
        let place = shares.locate(at);
        prop_assert_eq!(place.sample, counts[place.dataset]);
    }
}

#[test]
fn document_shuffle_mixes_documents_and_sample_shuffle_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let indexed = open(folder.path(), &[10; 400]);
    let neighbours = |shuffle| -> usize {
        let dataset = InstantDataset::new(Arc::clone(&indexed), &config(40, Some(100), shuffle)).unwrap();
        let follows = |tokens: Vec<i64>| tokens.windows(2).filter(|pair| pair[1] == pair[0] + 1).count();
        (0..100).map(|index| follows(read(&dataset, index))).sum()
    };
    assert_eq!(neighbours(Shuffle::Samples), 100 * 40 - 1, "file order, and one sample across the end of the turn");
    // Inside a document 9 of 10 tokens follow their neighbour; between documents hardly any does.
    assert!((3500..3700).contains(&neighbours(Shuffle::Documents)), "{}", neighbours(Shuffle::Documents));
}

#[test]
fn epochs_are_shuffled_anew() {
    let folder = tempfile::tempdir().unwrap();
    let indexed = open(folder.path(), &[10; 64]);
    for shuffle in [Shuffle::Samples, Shuffle::Documents] {
        let dataset = InstantDataset::new(Arc::clone(&indexed), &config(10, Some(192), shuffle)).unwrap();
        let samples = read_all(&dataset);
        assert_ne!(samples[..64], samples[64..128]);
        assert_ne!(samples[64..128], samples[128..]);
    }
}

#[test]
fn ids_come_in_the_type_that_was_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let indexed = open(folder.path(), &[7, 30, 2]);
    let dataset = InstantDataset::new(indexed, &config(8, Some(9), Shuffle::Documents)).unwrap();
    for index in 0..9 {
        let (mut shorts, mut ints) = ([0u16; 9], [0i32; 9]);
        dataset.read_into(index, TokensMut::U16(&mut shorts)).unwrap();
        dataset.read_into(index, TokensMut::I32(&mut ints)).unwrap();
        let wide = read(&dataset, index);
        assert!(wide.iter().zip(shorts).all(|(&wide, short)| wide == i64::from(short)));
        assert!(wide.iter().zip(ints).all(|(&wide, int)| wide == i64::from(int)));
    }
}

#[test]
fn blend_reads_its_datasets_and_tells_which() {
    let folder = tempfile::tempdir().unwrap();
    let indexed = open(folder.path(), &[10; 50]);
    let part = |seq_len, num_samples| -> Arc<dyn SampleSource> {
        let config = config(seq_len, Some(num_samples), Shuffle::Samples);
        Arc::new(InstantDataset::new(Arc::clone(&indexed), &config).unwrap())
    };
    let phases = Phases::new(&[(0, vec![1.0, 3.0]), (8, vec![1.0, 0.0])]).unwrap();
    let order = BlendOrder::Shares { phases, num_samples: 20 };
    let blend = Blend::new(vec![part(8, 14), part(8, 6)], order.clone()).unwrap();
    assert_eq!((blend.num_samples(), blend.counts(20)), (20, vec![14, 6]));
    let mut next = [0u64; 2];
    for index in 0..20 {
        let place = blend.locate(index).unwrap();
        assert_eq!(place.sample, next[place.dataset]);
        next[place.dataset] += 1;
        assert_eq!(read(&blend, index), read(&*blend.datasets()[place.dataset], place.sample));
        let mut layout = SampleLayout::default();
        blend.layout(index, &mut layout).unwrap();
        assert!(layout.pieces.iter().all(|piece| piece.dataset as usize == place.dataset));
    }
    assert!(matches!(blend.read_sample(20, &mut [0; 9]), Err(SampleError::OutOfRange { num_samples: 20, .. })));
    for (datasets, word) in [
        (vec![part(8, 14), part(8, 5)], "dataset 2 of the blend: the blend draws 6 samples of it, and it has 5"),
        (vec![part(8, 14), part(9, 6)], "dataset 2 of the blend: its samples have 10 tokens, those of the first 9"),
        (vec![part(8, 20)], "dataset 2 of the blend: it has a weight"),
    ] {
        let Err(error) = Blend::new(datasets, order.clone()) else { panic!("expected {word}") };
        assert!(error.to_string().contains(word), "{error}");
    }
    let greedy = BlendOrder::Greedy(GreedyIndex::exhaustive(&[14, 6]).unwrap());
    assert_eq!(Blend::new(vec![part(8, 14), part(8, 6)], greedy).unwrap().counts(20), [14, 6]);
}

#[test]
fn samples_asked_of_nothing_are_an_error_in_words() {
    let folder = tempfile::tempdir().unwrap();
    let indexed = open(folder.path(), &[8; 40]);
    let mut empty = config(4, Some(5), Shuffle::Samples);
    empty.matrix = SplitMatrix::parse("969,30,1").unwrap();
    empty.split = SplitName::Test;
    let message = InstantDataset::new(Arc::clone(&indexed), &empty).unwrap_err().to_string();
    assert!(message.contains("test split rounds to none of the 40 sequences"), "{message}");
    empty.num_samples = Some(0);
    assert_eq!(InstantDataset::new(indexed, &empty).unwrap().num_samples(), 0);
    let other = tempfile::tempdir().unwrap();
    let nothing = open(other.path(), &[0, 0]);
    let message = InstantDataset::new(nothing, &config(4, Some(5), Shuffle::Samples)).unwrap_err().to_string();
    assert!(message.contains("all 2 sequences are empty"), "{message}");
}
