//! Writes `src/unicode/ranges.rs`: the Unicode classes that split rules name, as the `tokenizers` crate's regex sees them.
//!
//! ```text
//! cargo run -p megaflow-tokenize --example make_class_table > crates/megaflow-tokenize/src/unicode/ranges.rs
//! ```

use std::fmt::Write as _;
use std::io::Write as _;

use tokenizers::utils::SysRegex;

/// One bit for each class, in the order of `unicode::class`.
const CLASSES: [&str; 8] = [r"\p{L}", r"\p{N}", r"\s", r"\p{M}", r"[\p{Lu}\p{Lt}]", r"\p{Ll}", r"\p{P}", r"\p{S}"];

fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let all: String = (0..=0x10_FFFF).filter_map(char::from_u32).collect();
    let mut class_of = vec![0u8; 0x11_0000];
    for (bit, class) in CLASSES.iter().enumerate() {
        for (start, end) in SysRegex::new(class)?.find_iter(&all) {
            for character in all[start..end].chars() {
                class_of[character as usize] |= 1 << bit;
            }
        }
    }
    let mut ranges = vec![(0u32, class_of[0])];
    for (code, &class) in (0u32..).zip(&class_of) {
        if ranges.last().is_some_and(|&(_, last)| last != class) {
            ranges.push((code, class));
        }
    }
    let mut out = String::from(
        "//! Made by `examples/make_class_table.rs`; a test compares it with the regex engine of the `tokenizers` crate.\n\n\
         /// First code point of each run of equal class bits, and the bits.\n",
    );
    writeln!(out, "#[rustfmt::skip]\npub(super) static RANGES: [(u32, u8); {}] = [", ranges.len())?;
    for line in ranges.chunks(8) {
        let cells: Vec<String> = line.iter().map(|(code, class)| format!("({code:#x}, {class})")).collect();
        writeln!(out, "    {},", cells.join(", "))?;
    }
    out.push_str("];\n");
    std::io::stdout().write_all(out.as_bytes())?;
    Ok(())
}
