//! Any bytes as an Arrow IPC stream: rows or an error, never a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use megaflow_fuzz::{read, source};
use megaflow_source::Format;

// The readers of tables panic on some damaged files. That is caught, and becomes an error: the hook of the fuzzer, which ends
// the process at any panic, is taken out. A panic that is not caught ends it still.
fuzz_target!(init: std::panic::set_hook(Box::new(|_| {})), |bytes: &[u8]| {
    let source = source(bytes);
    let _ = source.cuts(Some(Format::ArrowStream), 1);
    for keys in [&["text"][..], &["text", "data.text"]] {
        let _ = read(&source, Some(Format::ArrowStream), keys, 100, None);
    }
});
