//! Any bytes as plain text, a document a file or a line: nothing but its line ends and its mark is lost.
#![no_main]

use libfuzzer_sys::fuzz_target;
use megaflow_fuzz::{read, source};
use megaflow_source::{Compression, Format};

fuzz_target!(|bytes: &[u8]| {
    let source = source(bytes);
    let whole = read(&source, Some(Format::Text), &["text"], 64, None);
    let lines = read(&source, Some(Format::TextLines), &["text"], 64, None);
    if Compression::of(bytes) != Compression::None {
        return;
    }
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let (Ok(text), Ok((whole, _)), Ok((lines, _))) = (std::str::from_utf8(bytes), whole, lines) else { return };
    assert_eq!(whole, [text]);
    let wanted = text.split('\n').map(|line| line.strip_suffix('\r').unwrap_or(line)).filter(|line| !line.trim().is_empty());
    assert!(wanted.eq(lines.iter().map(String::as_str)));
});
