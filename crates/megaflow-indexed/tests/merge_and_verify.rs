//! Merging equals writing at once, and what is checked is found.
#![expect(clippy::unwrap_used, reason = "a test ends where its set-up fails")]

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use megaflow_core::TokenDtype;
use megaflow_indexed::{
    EncodedDocuments, IndexError, IndexedDataset, IndexedWriter, MergeError, MergeOptions, MergeReport, Sidecar,
    SourceRecord, StagingFolder, TokenizerRecord, VerifyError, VerifyOptions, VerifyReport, checksum_file, merge,
    verify,
};
use proptest::prelude::*;

/// Documents, each a list of sequences.
type Documents = Vec<Vec<Vec<u32>>>;

fn tokenizer() -> TokenizerRecord {
    TokenizerRecord { fingerprint: "f1".to_owned(), vocab_size: 200, append_eod: true, ..TokenizerRecord::default() }
}

/// Writes a pair; with a tokenizer, also its sidecar, whose one source is named like the pair.
fn write(prefix: &Path, documents: &Documents, dtype: TokenDtype, tokenizer: Option<TokenizerRecord>) -> PathBuf {
    let staging = StagingFolder::create(prefix).unwrap();
    let mut writer = IndexedWriter::create(&staging, prefix, dtype).unwrap();
    for document in documents {
        let mut encoded = EncodedDocuments::default();
        document.iter().for_each(|ids| encoded.push_sequence(ids, dtype).unwrap());
        encoded.end_document(document.len() as u32);
        writer.append(&encoded).unwrap();
    }
    let pair = writer.finish().unwrap();
    if tokenizer.is_some() {
        let source = SourceRecord {
            path: prefix.display().to_string(),
            num_documents: pair.counts.documents,
            num_lines: pair.counts.documents,
            ..SourceRecord::default()
        };
        let sidecar = Sidecar {
            format_version: 1,
            megaflow_version: "0".to_owned(),
            command: Vec::new(),
            json_key: "text".to_owned(),
            dtype: dtype.name().to_owned(),
            num_documents: pair.counts.documents,
            num_empty_documents: pair.counts.empty_documents,
            num_sequences: pair.counts.sequences,
            sentences: None,
            num_tokens: pair.counts.tokens,
            tokenizer,
            sources: vec![source],
            bin: pair.bin.clone(),
            idx: pair.idx.clone(),
        };
        pair.write_sidecar(&sidecar).unwrap();
    }
    pair.publish().unwrap();
    prefix.to_owned()
}

fn merge_all(pairs: &[PathBuf], output: &Path, options: &MergeOptions) -> Result<MergeReport, MergeError> {
    merge(pairs, output, options, &mut |_, _| ControlFlow::Continue(()))
}

fn check(prefix: &Path) -> VerifyReport {
    let options = VerifyOptions { threads: 2, vocab_size: None };
    verify(prefix, options, &mut |_, _| ControlFlow::Continue(())).unwrap()
}

fn file(prefix: &Path, suffix: &str) -> PathBuf {
    PathBuf::from(format!("{}{suffix}", prefix.display()))
}

fn bytes(prefix: &Path) -> (Vec<u8>, Vec<u8>) {
    (fs::read(file(prefix, ".bin")).unwrap(), fs::read(file(prefix, ".idx")).unwrap())
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn small() -> Documents {
    vec![vec![vec![1, 2, 3]], vec![], vec![vec![4], vec![5, 6]], vec![vec![199]]]
}

fn documents() -> impl Strategy<Value = Documents> {
    let sequence = prop::collection::vec(0u32..200, 0..6);
    prop::collection::vec(prop::collection::vec(sequence, 0..4), 0..6)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn merging_equals_writing_at_once(parts in prop::collection::vec(documents(), 1..5), wide in any::<bool>()) {
        let folder = tempfile::tempdir().unwrap();
        let dtype = if wide { TokenDtype::I32 } else { TokenDtype::U16 };
        let named = |(number, part)| write(&folder.path().join(format!("p{number}")), part, dtype, Some(tokenizer()));
        let pairs: Vec<PathBuf> = parts.iter().enumerate().map(named).collect();
        let whole = write(&folder.path().join("whole"), &parts.concat(), dtype, Some(tokenizer()));
        let merged = folder.path().join("merged");
        let report = merge_all(&pairs, &merged, &MergeOptions::default()).unwrap();
        prop_assert_eq!(bytes(&merged), bytes(&whole));
        let (ours, theirs) = (Sidecar::read(&merged).unwrap().unwrap(), Sidecar::read(&whole).unwrap().unwrap());
        prop_assert_eq!((&ours.bin, &ours.idx, &ours.dtype), (&theirs.bin, &theirs.idx, &theirs.dtype));
        prop_assert_eq!(
            (ours.num_documents, ours.num_empty_documents, ours.num_sequences, ours.num_tokens),
            (theirs.num_documents, theirs.num_empty_documents, theirs.num_sequences, theirs.num_tokens)
        );
        prop_assert_eq!(ours.sources.len(), parts.len());
        let checked = check(&merged);
        prop_assert!(checked.faults.is_empty(), "{:?}", checked.faults);
        prop_assert_eq!(checked.num_tokens, report.counts.tokens);
    }

    #[test]
    fn mixed_types_widen_to_the_same_ids(first in documents(), second in documents()) {
        let folder = tempfile::tempdir().unwrap();
        let pairs = [
            write(&folder.path().join("a"), &first, TokenDtype::U16, None),
            write(&folder.path().join("b"), &second, TokenDtype::I32, None),
        ];
        let options = MergeOptions { widen: true, ..MergeOptions::default() };
        let merged = folder.path().join("merged");
        let report = merge_all(&pairs, &merged, &options).unwrap();
        let whole = write(&folder.path().join("whole"), &[first, second].concat(), report.dtype, None);
        prop_assert_eq!(bytes(&merged), bytes(&whole));
    }

    /// Whatever the bytes of an index are, both end in words.
    #[test]
    fn damaged_pairs_never_panic(edits in prop::collection::vec((0usize..130, any::<u8>()), 1..6), cut in 0usize..200) {
        let folder = tempfile::tempdir().unwrap();
        let prefix = write(&folder.path().join("p"), &small(), TokenDtype::U16, None);
        let mut index = bytes(&prefix).1;
        for (at, byte) in edits {
            if let Some(place) = index.get_mut(at) {
                *place = byte;
            }
        }
        index.truncate(cut);
        fs::write(file(&prefix, ".idx"), &index).unwrap();
        let _ = check(&prefix);
        let _ = merge_all(&[prefix], &folder.path().join("merged"), &MergeOptions::default());
    }
}

#[test]
fn verify_finds_every_changed_byte_of_both_files_by_its_checksum() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = write(&folder.path().join("p"), &small(), TokenDtype::U16, Some(tokenizer()));
    assert_eq!(check(&prefix).num_faults, 0);
    for suffix in [".bin", ".idx"] {
        let path = file(&prefix, suffix);
        let good = fs::read(&path).unwrap();
        for at in 0..good.len() {
            for flip in [1, 0x80] {
                let mut bad = good.clone();
                bad[at] ^= flip;
                fs::write(&path, &bad).unwrap();
                let report = check(&prefix);
                let found = report.faults.iter().any(|fault| fault.path == path && fault.problem.contains("checksum"));
                assert!(found, "byte {at} of {suffix}: {:?}", report.faults);
            }
        }
        fs::write(&path, &good).unwrap();
    }
    assert_eq!(check(&prefix).num_faults, 0);
}

/// Without checksums, structure alone: header, lengths, offsets, and the boundaries that fall or lead outside.
#[test]
fn verify_finds_every_changed_field_by_structure_alone() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = write(&folder.path().join("p"), &small(), TokenDtype::U16, None);
    let good = bytes(&prefix).1;
    let (num_sequences, offsets_at) = (4, 34 + 4 * 4);
    let boundaries_at = offsets_at + 8 * num_sequences;
    let mut cases: Vec<(usize, Vec<u8>)> =
        vec![(0, b"X".to_vec()), (9, vec![2]), (17, vec![4]), (18, vec![5]), (26, vec![6])];
    for sequence in 0..num_sequences {
        for length in [-1i32, 0, 7, i32::MAX, i32::MIN] {
            cases.push((34 + 4 * sequence, length.to_le_bytes().to_vec()));
        }
        for offset in [-2i64, 1, 1000, i64::MAX, i64::MIN] {
            cases.push((offsets_at + 8 * sequence, offset.to_le_bytes().to_vec()));
        }
    }
    for document in 0..5 {
        for boundary in [-1i64, 5, i64::MAX, i64::MIN] {
            cases.push((boundaries_at + 8 * document, boundary.to_le_bytes().to_vec()));
        }
    }
    for (at, value) in cases {
        let mut bad = good.clone();
        bad[at..at + value.len()].copy_from_slice(&value);
        assert_ne!(bad, good);
        fs::write(file(&prefix, ".idx"), &bad).unwrap();
        let report = check(&prefix);
        assert!(report.num_faults > 0, "{value:?} at {at}");
        let output = folder.path().join("merged");
        assert!(
            merge_all(std::slice::from_ref(&prefix), &output, &MergeOptions::default()).is_err(),
            "{value:?} at {at}"
        );
        assert!(!file(&output, ".idx").exists() && !file(&output, ".partial").exists());
    }
}

#[test]
fn a_wrong_length_names_the_sequence_and_its_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = write(&folder.path().join("p"), &small(), TokenDtype::U16, None);
    let mut index = bytes(&prefix).1;
    index[38..42].copy_from_slice(&2i32.to_le_bytes());
    fs::write(file(&prefix, ".idx"), &index).unwrap();
    let report = check(&prefix);
    let words = report.faults[0].to_string();
    assert!(words.contains("p.idx: byte 66: the offset of sequence 2 is byte 8"), "{words}");
    assert!(
        words.contains("sequence 1 begins at byte 6 and has 2 tokens of 2 bytes (its length is at byte 38)"),
        "{words}"
    );
}

#[test]
fn ids_outside_the_vocabulary_are_found_with_their_place() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = write(&folder.path().join("p"), &vec![vec![vec![1, 200, 199]]], TokenDtype::U16, Some(tokenizer()));
    let report = check(&prefix);
    assert_eq!((report.num_faults, report.ids, report.vocab_size), (1, Some((1, 200)), Some(200)));
    assert_eq!(report.faults[0].place, Some(2));
    assert!(report.faults[0].problem.contains("token 1 is id 200, outside the vocabulary of 200 ids"));
    let options = VerifyOptions { threads: 1, vocab_size: Some(201) };
    assert_eq!(verify(&prefix, options, &mut |_, _| ControlFlow::Continue(())).unwrap().num_faults, 0);
}

#[test]
fn every_count_of_the_sidecar_is_compared() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = write(&folder.path().join("p"), &small(), TokenDtype::U16, Some(tokenizer()));
    let good = Sidecar::read(&prefix).unwrap().unwrap();
    type Edit = fn(&mut Sidecar);
    let edits: [(&str, Edit); 12] = [
        ("dtype", |sidecar| sidecar.dtype = "int16".to_owned()),
        ("num_documents", |sidecar| sidecar.num_documents += 1),
        ("num_empty_documents", |sidecar| sidecar.num_empty_documents = 0),
        ("num_sequences", |sidecar| sidecar.num_sequences -= 1),
        ("num_tokens", |sidecar| sidecar.num_tokens = 0),
        ("begins at document 1", |sidecar| sidecar.sources[0].first_document = 1),
        ("the sources end at document 3", |sidecar| sidecar.sources[0].num_documents = 3),
        ("as the sidecar says", |sidecar| sidecar.bin.bytes += 1),
        ("as the sidecar says", |sidecar| sidecar.idx.bytes = 0),
        ("checksums of it", |sidecar| sidecar.bin.xxh3_64.clear()),
        ("blocks of 0 bytes", |sidecar| sidecar.idx.block_bytes = 0),
        ("checksum", |sidecar| sidecar.idx.xxh3_64[0] = "0".to_owned()),
    ];
    for (words, edit) in edits {
        let mut bad = good.clone();
        edit(&mut bad);
        fs::write(file(&prefix, ".json"), bad.to_json()).unwrap();
        let report = check(&prefix);
        assert!(report.faults.iter().any(|fault| fault.problem.contains(words)), "{words}: {:?}", report.faults);
    }
    fs::write(file(&prefix, ".json"), "{").unwrap();
    assert!(check(&prefix).faults[0].problem.contains("expected the JSON sidecar"));
}

#[test]
fn many_faults_are_counted_and_the_first_ones_shown_whatever_the_threads() {
    let folder = tempfile::tempdir().unwrap();
    let ids: Vec<u32> = (0..5_000).map(|_| 60_000).collect();
    let prefix = write(&folder.path().join("p"), &vec![vec![ids]], TokenDtype::U16, Some(tokenizer()));
    let mut seen = Vec::new();
    for threads in [1, 2, 5] {
        let options = VerifyOptions { threads, vocab_size: None };
        let report = verify(&prefix, options, &mut |_, _| ControlFlow::Continue(())).unwrap();
        assert_eq!((report.num_faults, report.faults.len()), (5_000, 20));
        seen.push(report.faults);
    }
    assert!(seen[0] == seen[1] && seen[1] == seen[2]);
    assert_eq!(seen[0][19].place, Some(38));
}

#[test]
fn a_truncated_pair_is_a_fault_and_a_missing_one_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = write(&folder.path().join("p"), &small(), TokenDtype::U16, Some(tokenizer()));
    let (bin, index) = bytes(&prefix);
    fs::write(file(&prefix, ".bin"), &bin[..bin.len() - 1]).unwrap();
    let words: Vec<String> = check(&prefix).faults.iter().map(ToString::to_string).collect();
    assert!(words.iter().any(|fault| fault.contains("p.bin: byte 13: expected 14 bytes")), "{words:?}");
    fs::write(file(&prefix, ".bin"), &bin).unwrap();
    fs::write(file(&prefix, ".idx"), &index[..50]).unwrap();
    assert!(check(&prefix).num_faults > 0);
    let missing = verify(&folder.path().join("q"), VerifyOptions::default(), &mut |_, _| ControlFlow::Continue(()));
    assert!(matches!(missing, Err(VerifyError::Index(IndexError::Missing { .. }))));
}

#[test]
fn types_that_differ_are_refused_by_default_and_nothing_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let pairs = [
        write(&folder.path().join("a"), &small(), TokenDtype::U16, None),
        write(&folder.path().join("b"), &small(), TokenDtype::I32, None),
    ];
    let words = merge_all(&pairs, &folder.path().join("m"), &MergeOptions::default()).unwrap_err().to_string();
    assert!(words.contains("a holds uint16") && words.contains("b holds int32; widen them to int32"), "{words}");
    assert_eq!(names(folder.path()), ["a.bin", "a.idx", "b.bin", "b.idx"]);
}

#[test]
fn a_pair_without_tokens_takes_the_type_of_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let empty = write(&folder.path().join("empty"), &vec![], TokenDtype::I32, None);
    let only_empty_documents = write(&folder.path().join("boundaries"), &vec![vec![], vec![]], TokenDtype::U8, None);
    let full = write(&folder.path().join("full"), &small(), TokenDtype::U16, None);
    let merged = folder.path().join("m");
    let pairs = [empty.clone(), only_empty_documents, full];
    let report = merge_all(&pairs, &merged, &MergeOptions::default()).unwrap();
    assert_eq!((report.dtype, report.counts.documents, report.counts.empty_documents), (TokenDtype::U16, 6, 3));
    assert_eq!(IndexedDataset::open(&merged).unwrap().document_tokens(2).unwrap(), 0..3);
    let alone = folder.path().join("alone");
    assert_eq!(merge_all(&[empty], &alone, &MergeOptions::default()).unwrap().dtype, TokenDtype::I32);
    assert_eq!((bytes(&alone).0.len(), bytes(&alone).1.len()), (0, 42));
}

/// The merge of two pairs with these tokenizers.
fn merge_of(folder: &Path, tokenizers: [TokenizerRecord; 2]) -> Result<MergeReport, MergeError> {
    let pair = |(name, tokenizer)| write(&folder.join(name), &small(), TokenDtype::U16, Some(tokenizer));
    let pairs: Vec<PathBuf> = ["x", "y"].into_iter().zip(tokenizers).map(pair).collect();
    merge_all(&pairs, &folder.join("xy"), &MergeOptions::default())
}

#[test]
fn tokenizers_that_differ_are_refused_unless_forced() {
    let folder = tempfile::tempdir().unwrap();
    let other = TokenizerRecord { fingerprint: "f2".to_owned(), ..tokenizer() };
    let without_eod = TokenizerRecord { append_eod: false, ..tokenizer() };
    let with_bos = TokenizerRecord { add_bos: true, bos_id: Some(1), ..tokenizer() };
    let with_other_eos = |id| TokenizerRecord { add_eos: true, eos_id: Some(id), ..tokenizer() };
    assert!(merge_of(folder.path(), [tokenizer(), TokenizerRecord { bos_id: Some(1), ..tokenizer() }]).is_ok());
    let words = merge_of(folder.path(), [with_other_eos(7), with_other_eos(8)]).unwrap_err().to_string();
    assert!(words.contains("eos_id is 7"), "{words}");
    let first = write(&folder.path().join("a"), &small(), TokenDtype::U16, Some(tokenizer()));
    for (name, tokenizer, setting) in [
        ("b", other, "fingerprint is f1"),
        ("c", without_eod, "append_eod is true"),
        ("d", with_bos, "add_bos is false"),
    ] {
        let pairs = [first.clone(), write(&folder.path().join(name), &small(), TokenDtype::U16, Some(tokenizer))];
        let output = folder.path().join("m");
        let words = merge_all(&pairs, &output, &MergeOptions::default()).unwrap_err().to_string();
        assert!(words.contains(setting), "{words}");
        let forced = MergeOptions { force: true, ..MergeOptions::default() };
        assert!(merge_all(&pairs, &output, &forced).unwrap().no_sidecar.is_some());
        assert!(!file(&output, ".json").exists());
    }
}

#[test]
fn a_sidecar_of_another_pair_stops_the_merge() {
    let folder = tempfile::tempdir().unwrap();
    let first = write(&folder.path().join("a"), &small(), TokenDtype::U16, Some(tokenizer()));
    let second = write(&folder.path().join("b"), &vec![vec![vec![1]]], TokenDtype::U16, Some(tokenizer()));
    fs::copy(file(&first, ".json"), file(&second, ".json")).unwrap();
    let words =
        merge_all(&[first, second], &folder.path().join("m"), &MergeOptions::default()).unwrap_err().to_string();
    assert!(words.contains("b.json: it counts 4 documents, the pair beside it has 1"), "{words}");
}

#[test]
fn a_pair_without_a_sidecar_gives_a_merged_pair_without_one() {
    let folder = tempfile::tempdir().unwrap();
    let first = write(&folder.path().join("a"), &small(), TokenDtype::U16, Some(tokenizer()));
    let second = write(&folder.path().join("b"), &small(), TokenDtype::U16, None);
    let output = folder.path().join("m");
    fs::write(file(&output, ".json"), "old").unwrap();
    let report = merge_all(&[first, second], &output, &MergeOptions::default()).unwrap();
    assert!(report.no_sidecar.unwrap().ends_with("b has none"));
    assert!(!file(&output, ".json").exists(), "the sidecar of the pair that was replaced is gone");
}

#[test]
fn the_same_pair_twice_and_an_output_that_is_an_input_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let pair = write(&folder.path().join("a"), &small(), TokenDtype::U16, None);
    let other = write(&folder.path().join("b"), &small(), TokenDtype::U16, None);
    let other_spelling = folder.path().join("a.idx");
    let options = MergeOptions::default();
    let twice = [pair.clone(), other.clone(), other_spelling];
    assert!(matches!(merge_all(&twice, &folder.path().join("m"), &options), Err(MergeError::Repeated { .. })));
    let before = bytes(&pair);
    assert!(matches!(merge_all(&[other, pair.clone()], &pair, &options), Err(MergeError::OutputIsInput { .. })));
    assert!(matches!(merge_all(&[], &folder.path().join("m"), &options), Err(MergeError::NoPairs)));
    assert!(matches!(merge_all(std::slice::from_ref(&pair), Path::new("/"), &options), Err(MergeError::NoName { .. })));
    assert_eq!(bytes(&pair), before);
}

#[test]
fn stopping_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let pair = write(&folder.path().join("a"), &small(), TokenDtype::U16, Some(tokenizer()));
    let output = folder.path().join("m");
    let stopped =
        merge(std::slice::from_ref(&pair), &output, &MergeOptions::default(), &mut |_, _| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(MergeError::Stopped)));
    assert_eq!(names(folder.path()), ["a.bin", "a.idx", "a.json"]);
    let stopped = verify(&pair, VerifyOptions::default(), &mut |_, _| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(VerifyError::Stopped)));
}

/// Several blocks of checksums, and pieces that do not end where blocks do.
#[test]
fn checksums_of_a_merged_pair_of_several_blocks_are_those_of_its_files() {
    let folder = tempfile::tempdir().unwrap();
    let ids = |count: u32| (0..count).map(|id| id % 199).collect::<Vec<_>>();
    let pairs = [
        write(&folder.path().join("a"), &vec![vec![ids(17_000_001)]], TokenDtype::U16, Some(tokenizer())),
        write(&folder.path().join("b"), &vec![vec![ids(18_000_003)]], TokenDtype::U16, Some(tokenizer())),
    ];
    let output = folder.path().join("m");
    merge_all(&pairs, &output, &MergeOptions::default()).unwrap();
    let sidecar = Sidecar::read(&output).unwrap().unwrap();
    assert_eq!(sidecar.bin.xxh3_64.len(), 2);
    assert_eq!(checksum_file(&file(&output, ".bin")).unwrap(), sidecar.bin);
    assert_eq!(checksum_file(&file(&output, ".idx")).unwrap(), sidecar.idx);
    let mut bin = bytes(&output).0;
    bin[66 << 20] ^= 1;
    fs::write(file(&output, ".bin"), bin).unwrap();
    assert_eq!(check(&output).faults[0].place, Some(64 << 20));
}

/// More sequences than one thread takes at a time: the seams between their pieces are checked too.
#[test]
fn seams_between_pieces_of_work_are_checked() {
    let folder = tempfile::tempdir().unwrap();
    let count = (1usize << 20) + 10;
    let documents: Documents = (0..count).map(|number| vec![vec![(number % 7) as u32]]).collect();
    let prefix = write(&folder.path().join("p"), &documents, TokenDtype::U16, None);
    let report = check(&prefix);
    assert_eq!((report.num_faults, report.num_empty_documents, report.ids), (0, 0, Some((0, 6))));
    let good = bytes(&prefix).1;
    for (place, value) in [(34 + 4 * count + 8 * (1 << 20), 4u64), (34 + 12 * count + 8 * (1 << 20), 9)] {
        let mut bad = good.clone();
        bad[place..place + 8].copy_from_slice(&value.to_le_bytes());
        fs::write(file(&prefix, ".idx"), &bad).unwrap();
        assert!(check(&prefix).faults.iter().any(|fault| fault.place == Some(place as u64)), "{place}");
    }
    fs::write(file(&prefix, ".idx"), &good).unwrap();
    merge_all(std::slice::from_ref(&prefix), &folder.path().join("m"), &MergeOptions::default()).unwrap();
    assert_eq!(bytes(&folder.path().join("m")), bytes(&prefix));
}

/// Sparse files stand in for 12 GiB of tokens: offsets pass 2^32 and come out right.
#[test]
fn offsets_beyond_32_bits_are_merged_right() {
    let folder = tempfile::tempdir().unwrap();
    let length = (1i32 << 30) + 1;
    let pairs: Vec<PathBuf> = ["a", "b"]
        .into_iter()
        .map(|name| {
            let prefix = folder.path().join(name);
            let mut index = b"MMIDIDX\0\0".to_vec();
            index.extend(1u64.to_le_bytes());
            index.push(8);
            index.extend(3u64.to_le_bytes());
            index.extend(4u64.to_le_bytes());
            (0..3).for_each(|_| index.extend(length.to_le_bytes()));
            (0..3i64).for_each(|number| index.extend((number * 2 * i64::from(length)).to_le_bytes()));
            (0..4i64).for_each(|number| index.extend(number.to_le_bytes()));
            fs::write(file(&prefix, ".idx"), index).unwrap();
            fs::File::create(file(&prefix, ".bin")).unwrap().set_len(6 * length as u64).unwrap();
            prefix
        })
        .collect();
    // The index is complete before the first token is copied: stop there and look at it.
    let output = folder.path().join("m");
    let staged = folder.path().join("m.partial").join("m.idx");
    let mut index = Vec::new();
    let stopped = merge(&pairs, &output, &MergeOptions::default(), &mut |done, _| {
        if done < 6 * 12 + 6 * 8 + 1 {
            return ControlFlow::Continue(());
        }
        index = fs::read(&staged).unwrap();
        ControlFlow::Break(())
    });
    assert!(matches!(stopped, Err(MergeError::Stopped)));
    assert_eq!(index.len(), 34 + 12 * 6 + 8 * 7);
    for sequence in 0..6i64 {
        let at = 34 + 4 * 6 + 8 * sequence as usize;
        let offset = i64::from_le_bytes(index[at..at + 8].try_into().unwrap());
        assert_eq!(offset, sequence * 2 * i64::from(length));
    }
}
