//! Any bytes as lines, compressed or not: the same records at any block size, and behind any block the rest of them.
#![no_main]

use libfuzzer_sys::fuzz_target;
use megaflow_fuzz::{read, source};
use megaflow_source::Format;

fuzz_target!(|input: (u8, u8, Vec<u8>)| {
    let (small, stop, bytes) = input;
    let source = source(&bytes);
    let format = Some(Format::JsonLines);
    let whole = read(&source, format, &["text"], 1 << 20, None);
    let pieces = read(&source, format, &["text"], 1 + usize::from(small), None);
    let (Ok((records, _)), Ok((same, places))) = (&whole, &pieces) else {
        assert_eq!(whole.is_ok(), pieces.is_ok());
        return;
    };
    assert_eq!(records, same);
    let Some((done, resume)) = places.get(usize::from(stop) % places.len().max(1)) else { return };
    let (rest, _) = read(&source, format, &["text"], 1 + usize::from(small), Some(resume)).expect("read before");
    assert_eq!(records[*done..], rest);
});
