//! Cutting a file into blocks of whole lines.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use crate::SourceError;

/// Bytes that one line may have: documents of up to 2^31 tokens are refused later, by name.
const MAX_LINE_BYTES: usize = 4 << 30;

const BOM: &[u8] = b"\xef\xbb\xbf";

/// Whole lines of one file.
#[derive(Debug)]
pub struct Block {
    /// The lines, with their ends; the last line of a file may have none.
    pub bytes: Vec<u8>,
    /// Byte offset of the block in its file.
    pub offset: u64,
    /// Number of its first line, from 1.
    pub first_line: u64,
}

/// Size and hash of what was read of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContentHash {
    /// Bytes read.
    pub bytes: u64,
    /// XXH3-128 of the bytes, in hexadecimal.
    pub xxh3_128: String,
}

/// Reads a file of lines in blocks of about `block_bytes`, never cutting a line.
pub struct BlockReader {
    path: PathBuf,
    file: File,
    block_bytes: usize,
    carry: Vec<u8>,
    read_bytes: u64,
    block_offset: u64,
    next_line: u64,
    hash: Box<Xxh3>,
    at_end: bool,
}

impl BlockReader {
    /// Opens `path` and looks at its first bytes.
    ///
    /// # Errors
    /// [`SourceError`] if it is missing, not a file, unreadable, or begins like a compressed or columnar file.
    pub fn open(path: &Path, block_bytes: usize) -> Result<Self, SourceError> {
        let io = |source: std::io::Error| match source.kind() {
            std::io::ErrorKind::NotFound => SourceError::Missing { path: path.to_owned() },
            _ => SourceError::Io { path: path.to_owned(), offset: 0, source },
        };
        let file = File::open(path).map_err(io)?;
        if file.metadata().map_err(io)?.is_dir() {
            return Err(SourceError::Folder { path: path.to_owned() });
        }
        let mut reader = Self {
            path: path.to_owned(),
            file,
            block_bytes: block_bytes.max(1),
            carry: Vec::new(),
            read_bytes: 0,
            block_offset: 0,
            next_line: 1,
            hash: Box::new(Xxh3::new()),
            at_end: false,
        };
        let mut head = Vec::new();
        reader.fill(&mut head, 16)?;
        if let Some(kind) = kind_of_other_content(&head) {
            return Err(SourceError::UnsupportedContent { path: path.to_owned(), kind });
        }
        if head.starts_with(BOM) {
            head.drain(..BOM.len());
            reader.block_offset = BOM.len() as u64;
        }
        reader.carry = head;
        Ok(reader)
    }

    /// The next block, or `None` at the end of the file.
    ///
    /// # Errors
    /// [`SourceError::Io`] if reading fails, [`SourceError::LineTooLong`] for a line above 4 GiB.
    pub fn next_block(&mut self) -> Result<Option<Block>, SourceError> {
        let mut bytes = std::mem::take(&mut self.carry);
        bytes.reserve(self.block_bytes.saturating_sub(bytes.len()));
        let mut searched = 0;
        let end = loop {
            let want =
                self.block_bytes.saturating_sub(bytes.len()).max(if searched == 0 { 0 } else { self.block_bytes });
            self.fill(&mut bytes, want)?;
            if self.at_end {
                break bytes.len();
            }
            if let Some(newline) = memchr::memrchr(b'\n', &bytes[searched..]) {
                break searched + newline + 1;
            }
            if bytes.len() > MAX_LINE_BYTES {
                return Err(SourceError::LineTooLong {
                    path: self.path.clone(),
                    line: self.next_line,
                    offset: self.block_offset,
                    limit: MAX_LINE_BYTES,
                });
            }
            searched = bytes.len();
        };
        if bytes.is_empty() {
            return Ok(None);
        }
        self.carry.extend_from_slice(&bytes[end..]);
        bytes.truncate(end);
        let block = Block { offset: self.block_offset, first_line: self.next_line, bytes };
        self.block_offset += end as u64;
        self.next_line += memchr::memchr_iter(b'\n', &block.bytes).count() as u64;
        Ok(Some(block))
    }

    /// Size and hash of everything read so far; of the whole file once `next_block` has returned `None`.
    pub fn content_hash(&self) -> ContentHash {
        ContentHash { bytes: self.read_bytes, xxh3_128: format!("{:032x}", self.hash.digest128()) }
    }

    /// Appends up to `want` more bytes of the file.
    fn fill(&mut self, bytes: &mut Vec<u8>, want: usize) -> Result<(), SourceError> {
        let before = bytes.len();
        let got = Read::by_ref(&mut self.file)
            .take(want as u64)
            .read_to_end(bytes)
            .map_err(|source| SourceError::Io { path: self.path.clone(), offset: self.read_bytes, source })?;
        self.hash.update(&bytes[before..]);
        self.read_bytes += got as u64;
        self.at_end = got < want;
        Ok(())
    }
}

/// What a file is whose first bytes are not text, by its magic number.
fn kind_of_other_content(head: &[u8]) -> Option<&'static str> {
    let kinds: [(&[u8], &str); 6] = [
        (b"\x1f\x8b", "gzip data"),
        (b"\x28\xb5\x2f\xfd", "zstd data"),
        (b"BZh", "bzip2 data"),
        (b"\xfd7zXZ\x00", "xz data"),
        (b"PAR1", "a Parquet file"),
        (b"ARROW1", "an Arrow file"),
    ];
    kinds.iter().find(|(magic, _)| head.starts_with(magic)).map(|&(_, kind)| kind)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    fn blocks(content: &[u8], block_bytes: usize) -> (Vec<Block>, ContentHash) {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(content).unwrap();
        let mut reader = BlockReader::open(file.path(), block_bytes).unwrap();
        let mut blocks = Vec::new();
        while let Some(block) = reader.next_block().unwrap() {
            blocks.push(block);
        }
        (blocks, reader.content_hash())
    }

    proptest! {
        #[test]
        fn blocks_are_the_file_cut_at_line_ends(content in "([a-c]{0,9}\n|\n|[a-c]{20,40}\n){0,20}[a-c]{0,5}", size in 1_usize..50) {
            let (blocks, hash) = blocks(content.as_bytes(), size);
            let joined: Vec<u8> = blocks.iter().flat_map(|block| block.bytes.clone()).collect();
            prop_assert_eq!(&joined, content.as_bytes());
            prop_assert_eq!(hash.bytes, content.len() as u64);
            prop_assert_eq!(hash.xxh3_128, format!("{:032x}", xxhash_rust::xxh3::xxh3_128(content.as_bytes())));
            let (mut offset, mut line) = (0, 1);
            for (index, block) in blocks.iter().enumerate() {
                prop_assert_eq!((block.offset, block.first_line), (offset, line));
                prop_assert!(index + 1 == blocks.len() || block.bytes.ends_with(b"\n"));
                offset += block.bytes.len() as u64;
                line += block.bytes.iter().filter(|&&byte| byte == b'\n').count() as u64;
            }
        }
    }

    #[test]
    fn a_byte_order_mark_is_skipped_and_offsets_stay_those_of_the_file() {
        let (blocks, hash) = blocks(b"\xef\xbb\xbf{}\n{}\n", 4);
        assert_eq!(blocks[0].bytes[0], b'{');
        assert_eq!(blocks[0].offset, 3);
        assert_eq!(hash.bytes, 9);
    }

    #[test]
    fn other_content_and_missing_files_are_refused_by_name() {
        let message = |path: &Path| BlockReader::open(path, 64).err().unwrap().to_string();
        let folder = tempfile::tempdir().unwrap();
        assert!(message(folder.path()).contains("found a folder"));
        let path = folder.path().join("a.jsonl");
        assert!(message(&path).contains("a.jsonl: no such input file"));
        std::fs::write(&path, b"\x1f\x8b\x08\x00").unwrap();
        assert!(message(&path).contains("expected JSON lines, found gzip data"));
    }
}
