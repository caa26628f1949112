//! Cutting text into blocks of whole lines.

use std::io::Read;
use std::path::PathBuf;

use crate::access::ContentHash;
use crate::block::{Block, BlockBody, Position};
use crate::decode::Decoded;
use crate::{Format, SourceError};

/// Bytes that one line may have. A document that long has more tokens than an index can say.
const MAX_LINE_BYTES: usize = 8 << 30;

pub(crate) const BOM: &[u8] = b"\xef\xbb\xbf";

/// Reads text in blocks of about `block_bytes`, never cutting a line.
pub(crate) struct LineReader {
    path: PathBuf,
    format: Format,
    decoded: Decoded,
    block_bytes: usize,
    carry: Vec<u8>,
    position: Position,
    /// Lines that begin at or behind this offset belong to others.
    end: u64,
    input_bytes: u64,
    at_end: bool,
}

/// Where a reader of lines begins and ends, in bytes of the unpacked input.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LineRange {
    pub(crate) position: Position,
    pub(crate) end: u64,
    /// Whether the first line belongs to the range before, because it began there.
    pub(crate) skip_first_line: bool,
}

impl LineReader {
    /// `decoded` stands at `range.position`, of which `head` was read already.
    pub(crate) fn new(
        path: PathBuf,
        format: Format,
        decoded: Decoded,
        head: Vec<u8>,
        range: LineRange,
        block_bytes: usize,
    ) -> Result<Self, SourceError> {
        let (position, end) = (range.position, range.end);
        // Behind an interruption, what was read to get there is no progress.
        let input_bytes = if position.record > 1 { decoded.input_bytes() } else { 0 };
        let block_bytes = block_bytes.max(1);
        let mut reader =
            Self { path, format, decoded, block_bytes, carry: head, position, end, input_bytes, at_end: false };
        if position.offset == 0 && reader.carry.starts_with(BOM) {
            reader.carry.drain(..BOM.len());
            reader.position.offset = BOM.len() as u64;
        }
        if range.skip_first_line {
            reader.skip_line()?;
        }
        Ok(reader)
    }

    /// Place of the next block.
    pub(crate) fn position(&self) -> Position {
        self.position
    }

    /// Size and hashes of the file's bytes read so far.
    pub(crate) fn content(&self) -> ContentHash {
        self.decoded.content()
    }

    /// The next block, or `None` at the end.
    pub(crate) fn next_block(&mut self) -> Result<Option<Block>, SourceError> {
        if self.position.offset >= self.end {
            return Ok(None);
        }
        let (mut bytes, mut end) = self.read_lines()?;
        if let Some(limit) = usize::try_from(self.end - self.position.offset).ok().filter(|&limit| limit < end) {
            // The last line that begins before the end is ours to its own end.
            end = memchr::memchr(b'\n', &bytes[limit - 1..]).map_or(end, |newline| limit + newline);
        }
        if end == 0 {
            return Ok(None);
        }
        self.carry = bytes.split_off(end);
        let position = self.position;
        self.position.offset += end as u64;
        let unended = u64::from(bytes.last() != Some(&b'\n')); // the last line of a file may have no end
        self.position.record += memchr::memchr_iter(b'\n', &bytes).count() as u64 + unended;
        let total = self.decoded.input_bytes();
        let input_bytes = total - self.input_bytes;
        self.input_bytes = total;
        let body = match self.format {
            Format::TextLines => BlockBody::TextLines(bytes),
            _ => BlockBody::JsonLines(bytes),
        };
        Ok(Some(Block { position, body, input_bytes }))
    }

    /// Bytes from the position on, and the end of the last whole line in them (at the end of the input: their end).
    fn read_lines(&mut self) -> Result<(Vec<u8>, usize), SourceError> {
        let mut bytes = std::mem::take(&mut self.carry);
        let mut searched = 0;
        loop {
            let missing = self.block_bytes.saturating_sub(bytes.len());
            let want = if searched == 0 { missing } else { missing.max(bytes.len()) };
            self.fill(&mut bytes, want)?;
            if self.at_end {
                let end = bytes.len();
                return Ok((bytes, end));
            }
            if let Some(newline) = memchr::memrchr(b'\n', &bytes[searched..]) {
                let end = searched + newline + 1;
                return Ok((bytes, end));
            }
            if bytes.len() > MAX_LINE_BYTES {
                return Err(SourceError::LineTooLong {
                    path: self.path.clone(),
                    line: self.position.record,
                    offset: self.position.offset,
                    limit: MAX_LINE_BYTES,
                });
            }
            searched = bytes.len();
        }
    }

    /// Drops everything up to and with the first line end.
    fn skip_line(&mut self) -> Result<(), SourceError> {
        loop {
            if let Some(newline) = memchr::memchr(b'\n', &self.carry) {
                self.carry.drain(..=newline);
                self.position.offset += newline as u64 + 1;
                return Ok(());
            }
            self.position.offset += self.carry.len() as u64;
            self.carry.clear();
            if self.at_end {
                return Ok(());
            }
            let mut more = Vec::new();
            self.fill(&mut more, self.block_bytes.max(1 << 16))?;
            self.carry = more;
        }
    }

    /// Appends up to `want` more bytes.
    fn fill(&mut self, bytes: &mut Vec<u8>, want: usize) -> Result<(), SourceError> {
        if want == 0 || self.at_end {
            return Ok(());
        }
        let read = Read::by_ref(&mut self.decoded).take(want as u64).read_to_end(bytes);
        let got = read.map_err(|source| SourceError::Io {
            path: self.path.clone(),
            offset: self.position.offset + bytes.len() as u64,
            source,
        })?;
        self.at_end = got < want;
        Ok(())
    }
}
