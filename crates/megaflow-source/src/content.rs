//! What a file is, by its first bytes. A name that disagrees is a warning.

use std::path::Path;

/// How the bytes of a file are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Not at all.
    None,
    /// gzip, one member or many.
    Gzip,
    /// Zstandard, one frame or many, skippable ones included.
    Zstd,
    /// bzip2, one stream or many.
    Bzip2,
    /// xz, one stream or many.
    Xz,
}

/// What the unpacked bytes of an input are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Format {
    /// One JSON object a line.
    #[default]
    JsonLines,
    /// Plain text, one document a file.
    Text,
    /// Plain text, one document a line.
    TextLines,
    /// Apache Parquet.
    Parquet,
    /// Arrow IPC file (Feather V2).
    ArrowFile,
    /// Arrow IPC stream.
    ArrowStream,
}

impl Format {
    /// Name that users type and read.
    pub fn name(self) -> &'static str {
        match self {
            Self::JsonLines => "jsonl",
            Self::Text => "text",
            Self::TextLines => "text-lines",
            Self::Parquet => "parquet",
            Self::ArrowFile => "arrow",
            Self::ArrowStream => "arrow-stream",
        }
    }

    /// Whether records are lines.
    pub(crate) fn has_lines(self) -> bool {
        matches!(self, Self::JsonLines | Self::TextLines)
    }

    /// Whether records are rows of a table.
    pub fn has_rows(self) -> bool {
        matches!(self, Self::Parquet | Self::ArrowFile | Self::ArrowStream)
    }

    /// Format by its name; `None` for `auto` and for names that are not known.
    pub fn from_name(name: &str) -> Option<Self> {
        let all = [Self::JsonLines, Self::Text, Self::TextLines, Self::Parquet, Self::ArrowFile, Self::ArrowStream];
        all.into_iter().find(|format| format.name() == name)
    }
}

const COMPRESSIONS: [(Compression, &[u8], &[&str]); 4] = [
    (Compression::Gzip, b"\x1f\x8b", &["gz", "gzip"]),
    (Compression::Zstd, b"\x28\xb5\x2f\xfd", &["zst", "zstd"]),
    (Compression::Bzip2, b"BZh", &["bz2"]),
    (Compression::Xz, b"\xfd7zXZ\x00", &["xz"]),
];

impl Compression {
    /// By the first bytes of a file. A file may begin with a skippable Zstandard frame.
    pub fn of(head: &[u8]) -> Self {
        let is_skippable = head.len() >= 4 && head[1..4] == [0x2a, 0x4d, 0x18] && head[0] & 0xf0 == 0x50;
        if is_skippable {
            return Self::Zstd;
        }
        let found = COMPRESSIONS.iter().find(|(_, magic, _)| head.starts_with(magic));
        found.map_or(Self::None, |&(compression, ..)| compression)
    }

    /// What a name promises.
    fn promised_by(extension: &str) -> Self {
        let found = COMPRESSIONS.iter().find(|(.., extensions)| extensions.contains(&extension));
        found.map_or(Self::None, |&(compression, ..)| compression)
    }

    fn words(self) -> &'static str {
        match self {
            Self::None => "not compressed",
            Self::Gzip => "gzip data",
            Self::Zstd => "zstd data",
            Self::Bzip2 => "bzip2 data",
            Self::Xz => "xz data",
        }
    }
}

/// The container that the first unpacked bytes show; `None` for text of any kind.
pub(crate) fn container_of(head: &[u8]) -> Option<Format> {
    let kinds: [(&[u8], Format); 3] = [
        (b"PAR1", Format::Parquet),
        (b"ARROW1\x00\x00", Format::ArrowFile),
        (b"\xff\xff\xff\xff", Format::ArrowStream),
    ];
    kinds.iter().find(|(magic, _)| head.starts_with(magic)).map(|&(_, format)| format)
}

/// The sentence for a name that promises another content than was found.
pub(crate) fn name_warning(path: &Path, compression: Compression, format: Format) -> Option<String> {
    let lower = path.file_name()?.to_string_lossy().to_lowercase();
    let mut extensions: Vec<&str> = lower.split('.').skip(1).collect();
    let last = extensions.last().copied().unwrap_or("");
    let promised = Compression::promised_by(last);
    if promised != compression {
        return Some(format!(
            "{}: the name promises {}, the content is {}; the content counts",
            path.display(),
            if promised == Compression::None { "no compression" } else { promised.words() },
            compression.words()
        ));
    }
    if promised != Compression::None {
        extensions.pop();
    }
    let promised = match extensions.last().copied().unwrap_or("") {
        "jsonl" | "json" | "ndjson" => "JSON lines",
        "parquet" | "pq" => "Parquet",
        "arrow" | "feather" | "ipc" | "arrows" => "Arrow",
        _ => return None,
    };
    let found = match format {
        Format::JsonLines => "JSON lines",
        Format::Parquet => "Parquet",
        Format::ArrowFile | Format::ArrowStream => "Arrow",
        Format::Text | Format::TextLines => return None, // asked for by name
    };
    let disagrees = promised != found;
    disagrees.then(|| {
        format!("{}: the name promises {promised}, the content is {found}; the content counts", path.display())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_decides_and_a_name_that_disagrees_is_told() {
        assert_eq!(Compression::of(b"\x1f\x8b\x08"), Compression::Gzip);
        assert_eq!(Compression::of(b"\x50\x2a\x4d\x18\x00"), Compression::Zstd);
        assert_eq!(Compression::of(b"{\"text\""), Compression::None);
        assert_eq!(container_of(b"PAR1\x15"), Some(Format::Parquet));
        assert_eq!(container_of(b"{}"), None);
        let warning = |name: &str, compression, format| name_warning(Path::new(name), compression, format);
        let words = warning("a.jsonl.gz", Compression::None, Format::JsonLines).unwrap();
        assert_eq!(words, "a.jsonl.gz: the name promises gzip data, the content is not compressed; the content counts");
        let words = warning("a.jsonl", Compression::Zstd, Format::JsonLines).unwrap();
        assert!(words.contains("promises no compression, the content is zstd data"));
        let words = warning("a.parquet", Compression::None, Format::JsonLines).unwrap();
        assert!(words.contains("promises Parquet, the content is JSON lines"));
        assert_eq!(warning("a.jsonl.zst", Compression::Zstd, Format::JsonLines), None);
        assert_eq!(warning("A.ARROW", Compression::None, Format::ArrowStream), None);
        assert_eq!(warning("corpus", Compression::None, Format::JsonLines), None);
    }

    #[test]
    fn every_format_has_a_name_of_its_own() {
        for name in ["jsonl", "text", "text-lines", "parquet", "arrow", "arrow-stream"] {
            assert_eq!(Format::from_name(name).map(Format::name), Some(name));
        }
        assert_eq!(Format::from_name("auto"), None);
    }
}
