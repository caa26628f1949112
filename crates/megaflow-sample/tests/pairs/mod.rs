//! Pairs written for tests.

use std::fs;
use std::path::Path;

/// A pair whose token `t` of all tokens is `t`, one document a sequence.
pub(crate) fn write_pair(prefix: &Path, lengths: &[i32]) {
    let mut index = b"MMIDIDX\0\0".to_vec();
    index.extend(1u64.to_le_bytes());
    index.push(8);
    index.extend((lengths.len() as u64).to_le_bytes());
    index.extend((lengths.len() as u64 + 1).to_le_bytes());
    lengths.iter().for_each(|length| index.extend(length.to_le_bytes()));
    let mut tokens = 0i64;
    for &length in lengths {
        index.extend((2 * tokens).to_le_bytes());
        tokens += i64::from(length);
    }
    (0..=lengths.len() as i64).for_each(|boundary| index.extend(boundary.to_le_bytes()));
    fs::write(prefix.with_extension("idx"), index).unwrap();
    let data: Vec<u8> = (0..tokens as u16).flat_map(u16::to_le_bytes).collect();
    fs::write(prefix.with_extension("bin"), data).unwrap();
}
