//! Tables to blocks of rows: Parquet, Arrow IPC, and whatever hands over record batches.

use std::io::{self, BufReader, Read};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use arrow_array::{RecordBatch, RecordBatchReader};
use arrow_schema::{ArrowError, Schema};
use bytes::Bytes;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder};
use parquet::errors::ParquetError;
use parquet::file::reader::{ChunkReader, Length};

use crate::access::{ContentHash, RandomAccess, tail_hash};
use crate::arrow_batches::ArrowBatches;
use crate::arrow_messages::{FileMessages, StreamMessages, schema_of_stream};
use crate::block::{Block, BlockBody, Keys, Position};
use crate::columns::TextColumn;
use crate::decode::Decoded;
use crate::strings_as_bytes::strings_as_bytes;
use crate::{Cut, Format, SourceError};

const READ_BYTES: usize = 1 << 20;
/// Bytes at the end of a Parquet or Arrow file that are hashed.
const FOOTER_BYTES: u64 = 1 << 20;
/// Rows of one Parquet batch, whatever their size.
const MAX_BATCH_ROWS: usize = 8192;

type Batches = Box<dyn Iterator<Item = Result<RecordBatch, ArrowError>> + Send>;

/// Reads the text columns of a table, a block of rows at a time.
pub(crate) struct RowReader {
    path: PathBuf,
    format: Format,
    keys: Keys,
    block_bytes: usize,
    batches: Batches,
    batch: Option<RecordBatch>,
    next_in_batch: usize,
    position: Position,
    /// Rows to pass over before the first block: those that an interrupted job has done.
    skip: u64,
    num_rows: Option<u64>,
    content: Content,
    told_bytes: u64,
}

/// Where size and hashes of the input come from.
enum Content {
    /// Known from the start: a file's size and its footer's hash.
    Known(ContentHash),
    /// Counted while a stream is read.
    Counted(SharedStream),
}

impl RowReader {
    /// Where a Parquet file can be cut: between its row groups.
    pub(crate) fn parquet_cuts(path: &Path, access: Arc<dyn RandomAccess>) -> Result<Vec<Cut>, SourceError> {
        let builder = guarded(|| ParquetRecordBatchReaderBuilder::try_new(Chunks(access)))
            .map_err(|detail| damaged(path, Format::Parquet, 0, detail))?;
        let (mut row, mut bytes, mut cuts) = (0_u64, 0_u64, Vec::new());
        for group in builder.metadata().row_groups() {
            if row > 0 {
                cuts.push(Cut { at: row, bytes_before: bytes });
            }
            row = row.saturating_add(u64::try_from(group.num_rows()).unwrap_or(0));
            bytes = bytes.saturating_add(u64::try_from(group.compressed_size()).unwrap_or(0));
        }
        Ok(cuts)
    }

    /// A range of the rows of a Parquet file.
    pub(crate) fn parquet(
        path: PathBuf,
        access: Arc<dyn RandomAccess>,
        keys: Keys,
        block_bytes: usize,
        wanted: Range<u64>,
    ) -> Result<Self, SourceError> {
        let content = footer_content(&path, access.as_ref())?;
        let damaged = |detail: String| damaged(&path, Format::Parquet, 0, detail);
        let builder = guarded(|| {
            let input = Chunks(access);
            let as_written = ArrowReaderMetadata::load(&input, ArrowReaderOptions::new())?;
            let metadata = strings_as_bytes(as_written.metadata())?;
            Ok::<_, ParquetError>(ParquetRecordBatchReaderBuilder::new_with_metadata(input, metadata))
        })
        .map_err(damaged)?;
        let roots: Vec<usize> = root_columns(builder.schema(), &keys, &path)?;
        let mask = ProjectionMask::roots(builder.parquet_schema(), roots);
        let num_rows: i64 = builder.metadata().file_metadata().num_rows();
        let num_rows = u64::try_from(num_rows).map_err(|_| damaged(format!("the footer says {num_rows} rows")))?;
        let mut text_bytes = 0_u64;
        for group in builder.metadata().row_groups() {
            for (leaf, column) in group.columns().iter().enumerate() {
                if mask.leaf_included(leaf) {
                    text_bytes = text_bytes.saturating_add(u64::try_from(column.uncompressed_size()).unwrap_or(0));
                }
            }
        }
        let row_bytes = (text_bytes / num_rows.max(1)).max(1);
        let batch_rows = (block_bytes as u64 / row_bytes).clamp(1, MAX_BATCH_ROWS as u64) as usize;
        let (begin, end) = (wanted.start.min(num_rows), wanted.end.min(num_rows));
        let skipped = usize::try_from(begin).unwrap_or(usize::MAX);
        let limit = usize::try_from(end.saturating_sub(begin)).unwrap_or(usize::MAX);
        let builder = builder.with_projection(mask).with_batch_size(batch_rows);
        let batches = guarded(|| builder.with_offset(skipped).with_limit(limit).build()).map_err(damaged)?;
        let mut rows = Self::new(path, Format::Parquet, keys, block_bytes, Box::new(batches), Content::Known(content));
        rows.num_rows = Some(num_rows);
        rows.position.record += skipped as u64;
        Ok(rows)
    }

    /// Rows of an Arrow IPC file.
    pub(crate) fn arrow_file(
        path: PathBuf,
        access: Arc<dyn RandomAccess>,
        keys: Keys,
        block_bytes: usize,
        skip: u64,
    ) -> Result<Self, SourceError> {
        let content = footer_content(&path, access.as_ref())?;
        let (messages, schema) =
            guarded(|| FileMessages::open(access)).map_err(|detail| damaged(&path, Format::ArrowFile, 0, detail))?;
        let reader = ArrowBatches::new(messages, &schema, root_columns(&schema, &keys, &path)?);
        let mut rows = Self::new(path, Format::ArrowFile, keys, block_bytes, Box::new(reader), Content::Known(content));
        rows.skip = skip;
        Ok(rows)
    }

    /// Rows of an Arrow IPC stream.
    pub(crate) fn arrow_stream(
        path: PathBuf,
        head: Vec<u8>,
        decoded: Decoded,
        keys: Keys,
        block_bytes: usize,
        skip: u64,
    ) -> Result<Self, SourceError> {
        let stream = SharedStream(Arc::new(Mutex::new(io::Cursor::new(head).chain(decoded))));
        let mut messages = StreamMessages(stream.clone());
        let schema = guarded(|| schema_of_stream(&mut messages))
            .map_err(|detail| damaged(&path, Format::ArrowStream, 0, detail))?;
        let reader = ArrowBatches::new(messages, &schema, root_columns(&schema, &keys, &path)?);
        let content = Content::Counted(stream);
        let mut rows = Self::new(path, Format::ArrowStream, keys, block_bytes, Box::new(reader), content);
        rows.skip = skip;
        Ok(rows)
    }

    /// Rows of record batches that somebody else makes.
    pub(crate) fn batches(
        path: PathBuf,
        reader: Box<dyn RecordBatchReader + Send>,
        keys: Keys,
        block_bytes: usize,
        skip: u64,
    ) -> Result<Self, SourceError> {
        root_columns(&reader.schema(), &keys, &path)?;
        let content = Content::Known(ContentHash::default());
        let mut rows = Self::new(path, Format::ArrowStream, keys, block_bytes, Box::new(reader), content);
        rows.skip = skip;
        Ok(rows)
    }

    fn new(path: PathBuf, format: Format, keys: Keys, block_bytes: usize, batches: Batches, content: Content) -> Self {
        Self {
            path,
            format,
            keys,
            block_bytes: block_bytes.max(1),
            batches,
            batch: None,
            next_in_batch: 0,
            position: Position::START,
            skip: 0,
            num_rows: None,
            content,
            told_bytes: 0,
        }
    }

    /// Place of the next block.
    pub(crate) fn position(&self) -> Position {
        self.position
    }

    /// Size and hashes of the input: of a stream, what was read so far; of a file, its size and the hash of its footer.
    pub(crate) fn content(&self) -> ContentHash {
        match &self.content {
            Content::Known(content) => content.clone(),
            Content::Counted(stream) => stream.content(),
        }
    }

    /// The next block, or `None` at the end.
    pub(crate) fn next_block(&mut self) -> Result<Option<Block>, SourceError> {
        loop {
            if let Some(batch) = self.batch.as_ref().filter(|batch| self.next_in_batch < batch.num_rows()) {
                let left = batch.num_rows() - self.next_in_batch;
                let pass_over = left.min(usize::try_from(self.skip).unwrap_or(usize::MAX));
                if pass_over > 0 {
                    self.skip -= pass_over as u64;
                    self.next_in_batch += pass_over;
                    self.position.record += pass_over as u64;
                    continue;
                }
                let mut block = self.block_of(batch, left)?;
                self.advance(&mut block);
                return Ok(Some(block));
            }
            self.next_in_batch = 0;
            self.batch = match guarded(|| self.batches.next().transpose()) {
                Ok(None) => return Ok(None),
                Ok(batch) => batch,
                Err(detail) => return Err(damaged(&self.path, self.format, self.position.record - 1, detail)),
            };
        }
    }

    /// Rows of the batch from the position on, about `block_bytes` of memory at a time.
    fn block_of(&self, batch: &RecordBatch, left: usize) -> Result<Block, SourceError> {
        let row_bytes = (batch.get_array_memory_size() / batch.num_rows().max(1)).max(1);
        let num_rows = (self.block_bytes / row_bytes).clamp(1, left);
        let rows = batch.slice(self.next_in_batch, num_rows);
        let columns = self.keys.iter().map(|key| TextColumn::find(&rows, key, &self.path)).collect::<Result<_, _>>()?;
        Ok(Block { position: self.position, body: BlockBody::Rows { columns, num_rows }, input_bytes: 0 })
    }

    /// Moves behind a block, and tells how many bytes of the file it stands for.
    fn advance(&mut self, block: &mut Block) {
        let BlockBody::Rows { num_rows, .. } = block.body else { return };
        self.next_in_batch += num_rows;
        self.position.record += num_rows as u64;
        let bytes = self.content().bytes;
        let done = match self.num_rows {
            Some(total) => (u128::from(bytes) * u128::from(self.position.record - 1) / u128::from(total.max(1))) as u64,
            None => bytes,
        };
        block.input_bytes = done.saturating_sub(self.told_bytes);
        self.told_bytes = done;
    }
}

/// Runs a reader of damaged data: its errors in words, and so its panics, which the readers of tables do not all avoid.
fn guarded<T, E: std::fmt::Display>(read: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(read)) {
        Ok(done) => done.map_err(|error| error.to_string()),
        Err(panic) => {
            let words = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let words = words.or_else(|| panic.downcast_ref::<String>().cloned());
            Err(format!("its reader gave up: {}", words.unwrap_or_else(|| "no reason given".to_owned())))
        }
    }
}

fn damaged(path: &Path, format: Format, rows: u64, detail: String) -> SourceError {
    let format = match format {
        Format::Parquet => "Parquet",
        Format::ArrowFile => "Arrow file",
        _ => "Arrow stream",
    };
    SourceError::Columnar { path: path.to_owned(), format, rows, detail }
}

fn footer_content(path: &Path, access: &dyn RandomAccess) -> Result<ContentHash, SourceError> {
    let hash = tail_hash(access, FOOTER_BYTES);
    let hash = hash.map_err(|source| SourceError::Io { path: path.to_owned(), offset: access.size_bytes(), source })?;
    Ok(ContentHash { bytes: access.size_bytes(), xxh3_64: vec![hash] })
}

/// Places of the top-level columns that the keys lead to.
fn root_columns(schema: &Schema, keys: &[String], path: &Path) -> Result<Vec<usize>, SourceError> {
    keys.iter()
        .map(|key| {
            let root = key.split('.').next().unwrap_or(key);
            let place = schema.index_of(key).or_else(|_| schema.index_of(root));
            place.map_err(|_| SourceError::MissingColumn {
                path: path.to_owned(),
                key: key.clone(),
                columns: schema
                    .fields()
                    .iter()
                    .map(|field| format!("{:?}", field.name()))
                    .collect::<Vec<_>>()
                    .join(", "),
            })
        })
        .collect()
}

/// Parquet's view of an input.
struct Chunks(Arc<dyn RandomAccess>);

impl Length for Chunks {
    fn len(&self) -> u64 {
        self.0.size_bytes()
    }
}

impl ChunkReader for Chunks {
    type T = BufReader<Cursor>;

    fn get_read(&self, start: u64) -> parquet::errors::Result<Self::T> {
        Ok(BufReader::with_capacity(READ_BYTES, Cursor { access: Arc::clone(&self.0), offset: start }))
    }

    fn get_bytes(&self, start: u64, length: usize) -> parquet::errors::Result<Bytes> {
        let available = self.0.size_bytes().saturating_sub(start);
        if length as u64 > available {
            let text = format!("{length} bytes at {start} lie outside a file of {} bytes", self.0.size_bytes());
            return Err(parquet::errors::ParquetError::EOF(text));
        }
        let mut bytes = Vec::with_capacity(length);
        let mut cursor = Cursor { access: Arc::clone(&self.0), offset: start };
        Read::by_ref(&mut cursor).take(length as u64).read_to_end(&mut bytes)?;
        Ok(bytes.into())
    }
}

/// Reads an input from some place on.
struct Cursor {
    access: Arc<dyn RandomAccess>,
    offset: u64,
}

impl Read for Cursor {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.access.read_at(self.offset, buffer)?;
        self.offset += got as u64;
        Ok(got)
    }
}

/// An unpacked stream whose count of bytes can be asked for while an Arrow reader owns it.
#[derive(Clone)]
struct SharedStream(Arc<Mutex<io::Chain<io::Cursor<Vec<u8>>, Decoded>>>);

impl SharedStream {
    fn content(&self) -> ContentHash {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_ref().1.content()
    }
}

impl Read for SharedStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).read(buffer)
    }
}
