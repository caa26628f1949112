//! What `IndexedDataset::open` accepts and refuses, and what an open pair answers.
#![expect(clippy::unwrap_used, reason = "a test ends where its set-up fails")]

use std::fs;
use std::path::{Path, PathBuf};

use megaflow_core::TokenDtype;
use megaflow_indexed::{IndexError, IndexedDataset, OpenOptions, resolve_prefix};
use proptest::prelude::*;

/// The `.idx` of sequences with these lengths, and boundaries as given.
fn index_bytes(code: u8, item_bytes: i64, lengths: &[i32], boundaries: &[i64]) -> Vec<u8> {
    let mut bytes = b"MMIDIDX\0\0".to_vec();
    bytes.extend(1u64.to_le_bytes());
    bytes.push(code);
    bytes.extend((lengths.len() as u64).to_le_bytes());
    bytes.extend((boundaries.len() as u64).to_le_bytes());
    lengths.iter().for_each(|length| bytes.extend(length.to_le_bytes()));
    let mut offset = 0i64;
    for &length in lengths {
        bytes.extend(offset.to_le_bytes());
        offset += i64::from(length) * item_bytes;
    }
    boundaries.iter().for_each(|boundary| bytes.extend(boundary.to_le_bytes()));
    bytes
}

fn write_pair(prefix: &Path, index: &[u8], data: &[u8]) {
    fs::write(prefix.with_extension("idx"), index).unwrap();
    fs::write(prefix.with_extension("bin"), data).unwrap();
}

/// Three sequences (3, 0, 2 tokens: 10 11 12 | | 20 21) in three documents, the second empty.
fn small_pair(folder: &Path) -> (PathBuf, Vec<u8>, Vec<u8>) {
    let prefix = folder.join("small");
    let index = index_bytes(8, 2, &[3, 0, 2], &[0, 2, 2, 3]);
    let data: Vec<u8> = [10u16, 11, 12, 20, 21].iter().flat_map(|token| token.to_le_bytes()).collect();
    write_pair(&prefix, &index, &data);
    (prefix, index, data)
}

#[test]
fn open_pair_answers_counts_and_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let (prefix, ..) = small_pair(folder.path());
    let dataset = IndexedDataset::open(&prefix).unwrap();
    assert_eq!((dataset.num_sequences(), dataset.num_documents(), dataset.num_tokens()), (3, 3, 5));
    assert_eq!(dataset.dtype(), TokenDtype::U16);
    assert_eq!((dataset.sequence_len(2).unwrap(), dataset.sequence_offset(2).unwrap()), (2, 3));
    assert_eq!(dataset.document_bounds(0).unwrap(), 0..2);
    assert_eq!(dataset.document_tokens(1).unwrap(), 0..0);
    assert_eq!(dataset.document_tokens(2).unwrap(), 3..5);
    let mut tokens = [0; 2];
    dataset.read_tokens(0, 1, &mut tokens).unwrap();
    assert_eq!(tokens, [11, 12]);
    assert_eq!(dataset.token_bytes(1, 0..0).unwrap(), b"");
}

#[test]
fn reads_outside_are_refused_in_words() {
    let folder = tempfile::tempdir().unwrap();
    let dataset = IndexedDataset::open(small_pair(folder.path()).0).unwrap();
    let message = dataset.token_bytes(0, 1..4).unwrap_err().to_string();
    assert!(message.contains("tokens 1..4 of sequence 0") && message.contains("3 tokens"), "{message}");
    assert!(matches!(dataset.sequence_len(3), Err(IndexError::NoSuchSequence { index: 3, .. })));
    assert!(matches!(dataset.document_bounds(3), Err(IndexError::NoSuchDocument { index: 3, .. })));
    assert!(dataset.read_tokens(0, usize::MAX, &mut [0]).is_err());
}

#[test]
fn empty_pair_opens() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("empty");
    write_pair(&prefix, &index_bytes(4, 4, &[], &[0]), b"");
    let dataset = IndexedDataset::open(&prefix).unwrap();
    assert_eq!((dataset.num_sequences(), dataset.num_documents(), dataset.num_tokens()), (0, 0, 0));
    assert_eq!(dataset.content_key().unwrap().len(), 64);
}

#[test]
fn prefix_is_found_by_every_spelling() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("corpus_text_document");
    write_pair(&prefix, &index_bytes(8, 2, &[1], &[0, 1]), &[7, 0]);
    for spelling in ["corpus", "corpus_text_document", "corpus_text_document.idx", "corpus_text_document.bin"] {
        assert_eq!(resolve_prefix(folder.path().join(spelling)).unwrap(), prefix, "{spelling}");
    }
    let message = resolve_prefix(folder.path().join("corpse")).unwrap_err().to_string();
    assert!(message.contains("corpse_text_document.idx") && message.contains("corpus_text_document"), "{message}");
    fs::remove_file(prefix.with_extension("bin")).unwrap();
    let message = resolve_prefix(folder.path().join("corpus")).unwrap_err().to_string();
    assert!(message.contains("corpus_text_document.bin is not"), "{message}");
}

#[test]
fn each_damage_is_named() {
    type Damage = fn(&mut Vec<u8>, &mut Vec<u8>);
    let boundaries_at = 34 + 12 * 3;
    assert_eq!(boundaries_at, 70);
    let cases: [(&str, Damage); 14] = [
        ("not an index", |index, _| index[0] = b'X'),
        ("not an index", |index, _| *index = b"GIF89a".to_vec()),
        ("truncated at byte 20", |index, _| index.truncate(20)),
        ("truncated at byte 0", |index, _| index.clear()),
        ("expected version 1", |index, _| index[9] = 2),
        ("found 7 (float32)", |index, _| index[17] = 7),
        ("found 99", |index, _| index[17] = 99),
        ("102 bytes, but the file has 152", |index, _| index.extend([0; 50])),
        ("102 bytes, but the file has 101", |index, _| index.truncate(101)),
        ("open it with modes", |index, _| index.extend([0; 3])),
        ("expected 10 bytes", |_, data| data.truncate(9)),
        ("found 12", |_, data| data.extend([0; 2])),
        ("first document boundary (byte 70): expected 0, found 1", |index, _| index[70] = 1),
        ("last document boundary (byte 94): expected 3, the number of sequences, found 9", |index, _| index[94] = 9),
    ];
    for (number, (expected, damage)) in cases.into_iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        let (prefix, mut index, mut data) = small_pair(folder.path());
        damage(&mut index, &mut data);
        write_pair(&prefix, &index, &data);
        let message = IndexedDataset::open(&prefix).expect_err(expected).to_string();
        assert!(message.contains(expected), "case {number}: {message}");
        assert!(message.contains("small."), "case {number} names no file: {message}");
    }
}

#[test]
fn counts_beyond_all_bounds_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (prefix, index, data) = small_pair(folder.path());
    for (at, value) in [(18, u64::MAX), (18, u64::MAX / 12), (26, u64::MAX), (26, 0), (18, 1 << 61)] {
        let mut damaged = index.clone();
        damaged[at..at + 8].copy_from_slice(&value.to_le_bytes());
        write_pair(&prefix, &damaged, &data);
        assert!(matches!(IndexedDataset::open(&prefix), Err(IndexError::IndexSize { .. })), "{value} at {at}");
    }
}

#[test]
fn modes_are_read_when_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let (prefix, mut index, data) = small_pair(folder.path());
    let with_modes = OpenOptions { with_modes: true };
    assert!(matches!(IndexedDataset::open_with(&prefix, with_modes), Err(IndexError::IndexSize { .. })));
    index.extend([0, 1, 2]);
    write_pair(&prefix, &index, &data);
    assert_eq!(IndexedDataset::open_with(&prefix, with_modes).unwrap().mode_bytes(), [0, 1, 2]);
}

#[test]
fn damage_in_the_middle_is_found_when_it_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let (prefix, index, data) = small_pair(folder.path());
    let middle_offset = 34 + 12 + 8;
    for (at, value) in
        [(38usize, i64::from(i32::MAX)), (middle_offset, 7), (middle_offset, -2), (middle_offset, i64::MAX)]
    {
        let mut damaged = index.clone();
        let width = if at == 38 { 4 } else { 8 };
        damaged[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
        write_pair(&prefix, &damaged, &data);
        let dataset = IndexedDataset::open(&prefix).unwrap();
        let message = dataset.sequence_tokens(1).unwrap_err().to_string();
        assert!(message.contains("of sequence 1 (byte") && message.contains(&value.to_string()), "{message}");
    }
    let mut damaged = index.clone();
    damaged[78..86].copy_from_slice(&(-1i64).to_le_bytes());
    write_pair(&prefix, &damaged, &data);
    let dataset = IndexedDataset::open(&prefix).unwrap();
    assert!(dataset.document_bounds(0).is_err() && dataset.document_bounds(1).is_err());
    assert_eq!(dataset.document_bounds(2).unwrap(), 2..3);
}

#[test]
fn content_key_follows_content_and_not_the_name() {
    let folder = tempfile::tempdir().unwrap();
    let (prefix, index, mut data) = small_pair(folder.path());
    let key = IndexedDataset::open(&prefix).unwrap().content_key().unwrap().to_owned();
    let copy = folder.path().join("copy");
    write_pair(&copy, &index, &data);
    assert_eq!(IndexedDataset::open(&copy).unwrap().content_key().unwrap(), key);
    data[0] ^= 1;
    write_pair(&copy, &index, &data);
    assert_ne!(IndexedDataset::open(&copy).unwrap().content_key().unwrap(), key);
}

/// Calls everything that takes a position.
fn touch_all(dataset: &IndexedDataset) {
    let mut out = [0i64; 3];
    for index in 0..dataset.num_sequences().min(50) + 1 {
        let _ = dataset.sequence_tokens(index);
        let _ = dataset.token_bytes(index, 0..1);
        let _ = dataset.read_tokens(index, 1, &mut out);
    }
    for index in 0..dataset.num_documents().min(50) + 1 {
        let _ = dataset.document_tokens(index);
    }
    let _ = (dataset.content_key(), dataset.mode_bytes(), dataset.num_tokens());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn mutated_pairs_never_panic(
        edits in prop::collection::vec((0usize..110, any::<u8>()), 0..6),
        index_cut in 0usize..140,
        data_len in 0usize..14,
        with_modes: bool,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let (prefix, mut index, mut data) = small_pair(folder.path());
        for (at, byte) in edits {
            if let Some(place) = index.get_mut(at) {
                *place = byte;
            }
        }
        if index_cut < 130 {
            index.resize(index_cut, 0);
        }
        data.resize(data_len, 1);
        write_pair(&prefix, &index, &data);
        if let Ok(dataset) = IndexedDataset::open_with(&prefix, OpenOptions { with_modes }) {
            touch_all(&dataset);
        }
    }

    /// The ends of every array are as they must be, all between is arbitrary: open accepts it, and each read decides
    /// for itself.
    #[test]
    fn arbitrary_middles_never_panic(
        code in prop::sample::select(vec![1u8, 2, 3, 4, 5, 8]),
        sequences in 2usize..6,
        boundaries in 2usize..6,
        body in prop::collection::vec(any::<u8>(), 120),
        small in any::<bool>(),
        data in prop::collection::vec(any::<u8>(), 1..64),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let prefix = folder.path().join("small");
        let mut index = index_bytes(code, 1, &[], &[]);
        index[18..26].copy_from_slice(&(sequences as u64).to_le_bytes());
        index[26..34].copy_from_slice(&(boundaries as u64).to_le_bytes());
        index.extend(body[..12 * sequences + 8 * boundaries].iter().enumerate().map(|(at, byte)| {
            // Small values reach the checks behind those that arbitrary ones fail at once.
            if small { if at % 4 == 2 { byte % 8 } else { 0 } } else { *byte }
        }));
        let (offsets_at, boundaries_at) = (34 + 4 * sequences, 34 + 12 * sequences);
        let mut put = |at: usize, value: &[u8]| index[at..at + value.len()].copy_from_slice(value);
        put(offsets_at - 4, &0i32.to_le_bytes());
        put(offsets_at, &0i64.to_le_bytes());
        put(boundaries_at - 8, &(data.len() as i64).to_le_bytes());
        put(boundaries_at, &0i64.to_le_bytes());
        put(boundaries_at + 8 * (boundaries - 1), &(sequences as i64).to_le_bytes());
        write_pair(&prefix, &index, &data);
        touch_all(&IndexedDataset::open(&prefix).unwrap());
    }
}

/// One sequence of the tokens 0 to 19,999.
fn long_pair(prefix: &Path) {
    let data: Vec<u8> = (0..20_000u16).flat_map(u16::to_le_bytes).collect();
    write_pair(prefix, &index_bytes(8, 2, &[20_000], &[0, 1]), &data);
}

#[test]
#[cfg(unix)]
fn a_file_cut_short_under_its_map_is_an_error_and_no_signal() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("cut");
    long_pair(&prefix);
    let dataset = IndexedDataset::open(&prefix).unwrap();
    let mut out = vec![0; 100];
    dataset.watched(|| dataset.read_tokens(0, 0, &mut out)).unwrap().unwrap();
    let bin = folder.path().join("cut.bin");
    let whole = std::fs::read(&bin).unwrap();
    std::fs::OpenOptions::new().write(true).open(&bin).unwrap().set_len(5000).unwrap();
    let error = dataset.watched(|| dataset.read_tokens(0, 19_000, &mut out)).unwrap_err().to_string();
    assert!(error.contains("cut.bin") && error.contains(&whole.len().to_string()), "{error}");
    assert!(error.contains("found 5000"), "{error}");
    // Zeros lie in the map now, so that it stays damaged even if the file comes back.
    std::fs::write(&bin, &whole).unwrap();
    assert!(dataset.watched(|| dataset.read_tokens(0, 0, &mut out)).is_err());
    assert!(IndexedDataset::open(&prefix).is_ok());
}

#[test]
#[cfg(unix)]
fn a_cut_inside_a_page_is_seen_within_some_reads_and_removal_is_no_fault() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("cut");
    long_pair(&prefix);
    let dataset = IndexedDataset::open(&prefix).unwrap();
    let mut out = vec![0; 1];
    let mut read = || dataset.watched(|| dataset.read_tokens(0, 0, &mut out)).map(|read| read.unwrap());
    let bin = folder.path().join("cut.bin");
    std::fs::OpenOptions::new().write(true).open(&bin).unwrap().set_len(39_998).unwrap();
    assert!((0..64).any(|_| read().is_err()));
    let prefix = folder.path().join("gone");
    long_pair(&prefix);
    let dataset = IndexedDataset::open(&prefix).unwrap();
    std::fs::remove_file(folder.path().join("gone.bin")).unwrap();
    let mut out = vec![0; 3];
    for _ in 0..100 {
        dataset.watched(|| dataset.read_tokens(0, 19_997, &mut out)).unwrap().unwrap();
    }
    assert_eq!(out, [19_997, 19_998, 19_999]);
}
