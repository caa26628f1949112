//! Any bytes as `.idx`, beside a `.bin` of any size: refused, or a pair of which everything can be read. So does `verify`.
#![no_main]

use std::fs;

use libfuzzer_sys::fuzz_target;
use megaflow_indexed::{IndexedDataset, OpenOptions, VerifyOptions, verify};

fuzz_target!(|input: (bool, u16, Vec<u8>)| {
    let (with_modes, bin_bytes, index) = input;
    let folder = tempfile::tempdir().expect("a folder");
    let prefix = folder.path().join("pair");
    fs::write(prefix.with_extension("idx"), &index).expect("written");
    fs::write(prefix.with_extension("bin"), vec![1; usize::from(bin_bytes)]).expect("written");
    if let Ok(pair) = IndexedDataset::open_with(&prefix, OpenOptions { with_modes }) {
        for sequence in 0..pair.num_sequences().saturating_add(1) {
            if let Ok(length) = pair.sequence_len(sequence) {
                let mut out = vec![0; length.min(1 << 16)];
                let _ = pair.read_tokens(sequence, 0, &mut out);
                let _ = pair.token_bytes(sequence, 0..length);
            }
            let _ = (pair.sequence_offset(sequence), pair.sequence_tokens(sequence));
        }
        for document in 0..pair.num_documents().saturating_add(1) {
            let _ = (pair.document_bounds(document), pair.document_tokens(document));
        }
    }
    let _ = verify(&prefix, VerifyOptions::default(), &mut |_, _| std::ops::ControlFlow::Continue(()));
});
