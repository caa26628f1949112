//! Arrow IPC, a message at a time. What a message says about sizes is compared with what there is before memory is taken for it.

use std::io::Read;
use std::sync::Arc;

use arrow_ipc::{Block, CompressionType, Endianness, MetadataVersion, RecordBatch, root_as_footer, root_as_message};
use arrow_schema::{ArrowError, Schema};

use crate::access::{RandomAccess, read_full};

/// Length of the footer, and the magic that ends a file.
const END_BYTES: u64 = 10;
/// What precedes the length of a message, but in files of old writers.
const CONTINUATION: [u8; 4] = [0xff; 4];
/// Memory that is taken before the first byte of a message has come.
const FIRST_BYTES: usize = 1 << 20;
/// Rows of one batch, at most: the limit that Arrow recommends.
const MAX_ROWS: i64 = i32::MAX as i64;

/// One message: its header, a flat buffer, and the columns that it describes.
pub(crate) struct Message {
    pub(crate) header: Vec<u8>,
    pub(crate) body: Vec<u8>,
}

/// Messages in the order in which they are to be read.
pub(crate) trait Messages {
    /// The next message, or `None` at the end.
    fn next_message(&mut self) -> Result<Option<Message>, ArrowError>;
}

/// Messages of a stream.
pub(crate) struct StreamMessages<R>(pub(crate) R);

impl<R: Read> Messages for StreamMessages<R> {
    fn next_message(&mut self) -> Result<Option<Message>, ArrowError> {
        let mut prefix = read_up_to(&mut self.0, 4, "the length of a message")?;
        if prefix == CONTINUATION {
            prefix = read_exactly(&mut self.0, 4, "the length of a message")?;
        }
        let Ok(length) = <[u8; 4]>::try_from(prefix.as_slice()) else {
            return if prefix.is_empty() { Ok(None) } else { Err(cut("the length of a message", 4, prefix.len())) };
        };
        let length = i32::from_le_bytes(length);
        let length = usize::try_from(length).map_err(|_| wrong(format!("a message of {length} bytes")))?;
        if length == 0 {
            return Ok(None);
        }
        let header = read_exactly(&mut self.0, length, "the header of a message")?;
        let body_bytes = root_as_message(&header).map_err(|error| wrong(error.to_string()))?.bodyLength();
        let body_bytes = usize::try_from(body_bytes).map_err(|_| wrong(format!("a batch of {body_bytes} bytes")))?;
        let body = read_exactly(&mut self.0, body_bytes, "a batch")?;
        Ok(Some(Message { header, body }))
    }
}

/// Messages of a file: its dictionaries, then its batches.
pub(crate) struct FileMessages {
    access: Arc<dyn RandomAccess>,
    blocks: std::vec::IntoIter<Block>,
}

impl FileMessages {
    /// Reads the footer, and checks that every block that it names lies in the file.
    pub(crate) fn open(access: Arc<dyn RandomAccess>) -> Result<(Self, Schema), ArrowError> {
        let size = access.size_bytes();
        let end = size.checked_sub(END_BYTES).ok_or_else(|| wrong(format!("a file of {size} bytes has no footer")))?;
        let length = read_at(access.as_ref(), end, 4)?;
        let length = u64::from(u32::from_le_bytes([length[0], length[1], length[2], length[3]]));
        let begin = end.checked_sub(length);
        let begin = begin.ok_or_else(|| wrong(format!("its footer of {length} bytes is longer than the file")))?;
        let bytes = read_at(access.as_ref(), begin, length as usize)?;
        let footer = root_as_footer(&bytes).map_err(|error| wrong(format!("its footer cannot be read: {error}")))?;
        let schema = footer.schema().ok_or_else(|| wrong("its footer has no schema".to_owned()))?;
        let schema = schema_of(schema)?;
        let blocks = footer.dictionaries().into_iter().flatten().chain(footer.recordBatches().into_iter().flatten());
        let blocks: Vec<Block> = blocks.copied().collect();
        blocks.iter().try_for_each(|block| check_block(block, size))?;
        Ok((Self { access, blocks: blocks.into_iter() }, schema))
    }
}

impl Messages for FileMessages {
    fn next_message(&mut self) -> Result<Option<Message>, ArrowError> {
        let Some(block) = self.blocks.next() else { return Ok(None) };
        let at = |part: i64| usize::try_from(part).map_err(|_| wrong(format!("a block with the number {part}")));
        let (offset, header_bytes) = (at(block.offset())?, at(i64::from(block.metaDataLength()))?);
        let mut header = read_at(self.access.as_ref(), offset as u64, header_bytes)?;
        let prefix = if header.starts_with(&CONTINUATION) { 8 } else { 4 };
        header.drain(..prefix.min(header.len()));
        let body = read_at(self.access.as_ref(), (offset + header_bytes) as u64, at(block.bodyLength())?)?;
        Ok(Some(Message { header, body }))
    }
}

/// The schema of a stream's first message.
pub(crate) fn schema_of_stream(messages: &mut impl Messages) -> Result<Schema, ArrowError> {
    let first = messages.next_message()?.ok_or_else(|| wrong("a stream without a message".to_owned()))?;
    let message = root_as_message(&first.header).map_err(|error| wrong(error.to_string()))?;
    let schema = message.header_as_schema();
    schema_of(schema.ok_or_else(|| wrong("its first message is no schema".to_owned()))?)
}

fn schema_of(schema: arrow_ipc::Schema<'_>) -> Result<Schema, ArrowError> {
    if schema.endianness() != Endianness::Little {
        return Err(wrong("its numbers are big-endian; write it on a little-endian machine".to_owned()));
    }
    Ok(arrow_ipc::convert::fb_to_schema(schema))
}

/// Checks the version of a message, as old ones have another layout.
pub(crate) fn check_version(version: MetadataVersion) -> Result<(), ArrowError> {
    if version < MetadataVersion::V4 {
        return Err(wrong(format!(
            "its version is {version:?}; V4 and V5 can be read: write it again with a newer Arrow"
        )));
    }
    Ok(())
}

fn check_block(block: &Block, size: u64) -> Result<(), ArrowError> {
    let parts = [block.offset(), i64::from(block.metaDataLength()), block.bodyLength()];
    let total = parts.iter().try_fold(0_u64, |sum, &part| sum.checked_add(u64::try_from(part).ok()?));
    if total.is_none_or(|total| total > size) {
        let [offset, header, body] = parts;
        return Err(wrong(format!(
            "its footer names a batch of {header} and {body} bytes at byte {offset}, which lies outside of the {size} bytes of \
             the file"
        )));
    }
    Ok(())
}

/// Checks that the buffers of a batch lie in its body, and that what is compressed can hold what it promises.
pub(crate) fn check_batch(batch: RecordBatch<'_>, body: &[u8]) -> Result<(), ArrowError> {
    let rows = batch.length();
    if !(0..=MAX_ROWS).contains(&rows) {
        return Err(wrong(format!("a batch of {rows} rows; 0 to {MAX_ROWS} are read")));
    }
    let codec = batch.compression().map(|compression| compression.codec());
    for buffer in batch.buffers().into_iter().flatten() {
        let (offset, length) = (buffer.offset(), buffer.length());
        let begin = usize::try_from(offset).ok();
        let end = begin.zip(usize::try_from(length).ok()).and_then(|(begin, length)| begin.checked_add(length));
        let bytes = begin.zip(end).and_then(|(begin, end)| body.get(begin..end)).ok_or_else(|| {
            let body = body.len();
            wrong(format!("a buffer of {length} bytes at byte {offset} lies outside of a batch of {body} bytes"))
        })?;
        if let Some(codec) = codec {
            check_unpacked(codec, bytes)?;
        }
    }
    Ok(())
}

/// Compares the unpacked length that stands before a compressed buffer with what its bytes can hold, and with the memory there is.
fn check_unpacked(codec: CompressionType, buffer: &[u8]) -> Result<(), ArrowError> {
    let Some((length, packed)) = buffer.split_first_chunk::<8>() else {
        return if buffer.is_empty() { Ok(()) } else { Err(cut("a compressed buffer", 8, buffer.len())) };
    };
    let length = i64::from_le_bytes(*length);
    // LZ4: a byte adds at most 255 to a match. Zstandard: a block of 4 bytes stands for at most 128 KiB of one byte.
    let most_of_a_byte = if codec == CompressionType::LZ4_FRAME { 256 } else { 128 * 1024 / 4 };
    let most = (packed.len() as u64).saturating_mul(most_of_a_byte);
    let Ok(length) = usize::try_from(length) else {
        return if length == -1 { Ok(()) } else { Err(wrong(format!("a buffer of {length} bytes"))) };
    };
    if length as u64 > most {
        let packed = packed.len();
        return Err(wrong(format!("a buffer says that its {packed} compressed bytes hold {length}; they cannot")));
    }
    Vec::<u8>::new().try_reserve_exact(length).map_err(|_| too_large(length))
}

/// At most `length` bytes, fewer at the end; memory is taken as bytes come, and a size that is too large is an error.
fn read_up_to(reader: &mut impl Read, length: usize, what: &str) -> Result<Vec<u8>, ArrowError> {
    let mut bytes = Vec::new();
    while bytes.len() < length {
        let more = (length - bytes.len()).min(bytes.len().max(FIRST_BYTES));
        bytes.try_reserve_exact(more).map_err(|_| too_large(length))?;
        let got = reader.by_ref().take(more as u64).read_to_end(&mut bytes);
        let got = got.map_err(|error| ArrowError::IoError(format!("{what}: {error}"), error))?;
        if got < more {
            break;
        }
    }
    Ok(bytes)
}

fn read_exactly(reader: &mut impl Read, length: usize, what: &str) -> Result<Vec<u8>, ArrowError> {
    let bytes = read_up_to(reader, length, what)?;
    if bytes.len() < length { Err(cut(what, length, bytes.len())) } else { Ok(bytes) }
}

fn read_at(access: &dyn RandomAccess, offset: u64, length: usize) -> Result<Vec<u8>, ArrowError> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(length).map_err(|_| too_large(length))?;
    bytes.resize(length, 0);
    read_full(access, offset, &mut bytes).map_err(|error| ArrowError::IoError(error.to_string(), error))?;
    Ok(bytes)
}

pub(crate) fn wrong(what: String) -> ArrowError {
    ArrowError::IpcError(what)
}

fn cut(what: &str, expected: usize, found: usize) -> ArrowError {
    wrong(format!("it ends within {what}: {found} of {expected} bytes are there"))
}

fn too_large(length: usize) -> ArrowError {
    ArrowError::MemoryError(format!("a part of {length} bytes does not fit in the memory of this machine"))
}
