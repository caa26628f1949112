//! One input, whatever it is, as a run of blocks.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use arrow_array::RecordBatchReader;

use crate::SourceError;
use crate::access::{ContentHash, HashingReader, LocalFile, RandomAccess, read_full};
use crate::block::{Block, BlockBody, Keys, Position};
use crate::content::{Compression, Format, container_of, name_warning};
use crate::decode::Decoded;
use crate::lines::{BOM, LineRange, LineReader};
use crate::rows::RowReader;

/// Bytes at the start of an input that tell what it is.
const HEAD_BYTES: u64 = 16;

/// An input that was named but not opened yet.
#[derive(Clone)]
pub struct Source {
    name: PathBuf,
    kind: Kind,
}

#[derive(Clone)]
enum Kind {
    File,
    Stdin,
    Remote(Arc<dyn RandomAccess>),
    Batches(Arc<Mutex<Option<Box<dyn RecordBatchReader + Send>>>>),
    Table(OpenTable),
}

/// Hands over the record batches of a table from their start, as often as it is called.
pub type OpenTable = Arc<dyn Fn() -> io::Result<Box<dyn RecordBatchReader + Send>> + Send + Sync>;

/// How an input is read.
#[derive(Debug, Clone)]
pub struct ReadOptions {
    /// The keys that hold text.
    pub keys: Keys,
    /// What the input is; `None` lets its first bytes decide.
    pub format: Option<Format>,
    /// Bytes of one block, about.
    pub block_bytes: usize,
}

/// Where a job that was interrupted goes on in an input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resume {
    /// The place behind the last block that is durable.
    pub position: Position,
    /// Hashes of the file's bytes up to there.
    pub content: ContentHash,
}

impl Source {
    /// A local file or pipe.
    pub fn file(path: PathBuf) -> Self {
        Self { name: path, kind: Kind::File }
    }

    /// Standard input.
    pub fn stdin() -> Self {
        Self { name: PathBuf::from("-"), kind: Kind::Stdin }
    }

    /// An object of a remote file system.
    pub fn remote(name: PathBuf, access: Arc<dyn RandomAccess>) -> Self {
        Self { name, kind: Kind::Remote(access) }
    }

    /// Record batches that somebody else makes; they can be read once.
    pub fn batches(name: PathBuf, reader: Box<dyn RecordBatchReader + Send>) -> Self {
        Self { name, kind: Kind::Batches(Arc::new(Mutex::new(Some(reader)))) }
    }

    /// A table whose record batches can be had again and again.
    pub fn table(name: PathBuf, open: OpenTable) -> Self {
        Self { name, kind: Kind::Table(open) }
    }

    /// The name under which it is reported.
    pub fn name(&self) -> &Path {
        &self.name
    }

    /// Whether a second job could read it again from the start.
    pub fn is_repeatable(&self) -> bool {
        match &self.kind {
            Kind::File => std::fs::metadata(&self.name).is_ok_and(|metadata| metadata.is_file()),
            Kind::Remote(_) | Kind::Table(_) => true,
            Kind::Stdin | Kind::Batches(_) => false,
        }
    }

    /// Its size, where it is known before reading.
    ///
    /// # Errors
    /// [`SourceError::Missing`], [`SourceError::Io`] for a file.
    pub fn size_bytes(&self) -> Result<Option<u64>, SourceError> {
        match &self.kind {
            Kind::File => {
                let metadata = std::fs::metadata(&self.name).map_err(|source| self.io(0, source))?;
                if metadata.is_dir() {
                    let source = io::Error::new(io::ErrorKind::IsADirectory, "it is a folder");
                    return Err(self.io(0, source));
                }
                Ok(metadata.is_file().then_some(metadata.len()))
            }
            Kind::Remote(access) => Ok(Some(access.size_bytes())),
            Kind::Stdin | Kind::Batches(_) | Kind::Table(_) => Ok(None),
        }
    }

    fn io(&self, offset: u64, source: io::Error) -> SourceError {
        match source.kind() {
            io::ErrorKind::NotFound => SourceError::Missing { path: self.name.clone() },
            _ => SourceError::Io { path: self.name.clone(), offset, source },
        }
    }

    /// An error met while the first bytes were read: the system's, or the data's.
    fn fault_at_start(&self, error: io::Error) -> SourceError {
        match SourceError::of_read(&self.name, 0, error) {
            SourceError::Io { source, .. } => self.io(0, source),
            damaged => damaged,
        }
    }

    /// Places at which the input can be cut for several jobs, with the share of bytes up to each: multiples of `step` bytes of
    /// uncompressed text, row groups of Parquet (as row numbers). Empty if it can only be read whole.
    ///
    /// # Errors
    /// [`SourceError`] if it cannot be opened.
    pub fn cuts(&self, format: Option<Format>, step: u64) -> Result<Vec<Cut>, SourceError> {
        let (Kind::File | Kind::Remote(_)) = &self.kind else { return Ok(Vec::new()) };
        let Opened::Access(access) = self.open_bytes()? else { return Ok(Vec::new()) };
        let head = head_of(access.as_ref()).map_err(|source| self.io(0, source))?;
        if Compression::of(&head) == Compression::None && format.or(container_of(&head)) == Some(Format::Parquet) {
            return RowReader::parquet_cuts(&self.name, access);
        }
        let has_lines = is_plain_text(&head) && format.is_none_or(Format::has_lines);
        let step = step.max(1);
        let last = if has_lines { access.size_bytes().saturating_sub(1) / step } else { 0 };
        Ok((1..=last).map(|index| Cut { at: index * step, bytes_before: index * step }).collect())
    }

    /// The input as something that can be read anywhere, or as a stream.
    fn open_bytes(&self) -> Result<Opened, SourceError> {
        match &self.kind {
            Kind::File => {
                let file = File::open(&self.name).map_err(|source| self.io(0, source))?;
                let metadata = file.metadata().map_err(|source| self.io(0, source))?;
                if !metadata.is_file() {
                    return Ok(Opened::Stream(Box::new(file)));
                }
                let local = LocalFile::new(file).map_err(|source| self.io(0, source))?;
                Ok(Opened::Access(Arc::new(local)))
            }
            Kind::Remote(access) => Ok(Opened::Access(Arc::clone(access))),
            Kind::Stdin => Ok(Opened::Stream(Box::new(io::stdin()))),
            Kind::Table(open) => Ok(Opened::Batches(open().map_err(|source| self.io(0, source))?)),
            Kind::Batches(reader) => {
                let taken = reader.lock().unwrap_or_else(PoisonError::into_inner).take();
                let used = || self.io(0, io::Error::other("these record batches were read before"));
                Ok(Opened::Batches(taken.ok_or_else(used)?))
            }
        }
    }
}

/// A place at which an input can be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// Byte of text, or row of a table.
    pub at: u64,
    /// Bytes of the file before it, about.
    pub bytes_before: u64,
}

enum Opened {
    Access(Arc<dyn RandomAccess>),
    Stream(Box<dyn Read + Send>),
    Batches(Box<dyn RecordBatchReader + Send>),
}

/// The blocks of one input.
pub struct SourceReader {
    inner: Inner,
    format: Format,
    warning: Option<String>,
}

enum Inner {
    Lines(LineReader),
    Rows(RowReader),
    Document { path: PathBuf, decoded: Decoded, head: Vec<u8>, done: bool },
}

/// The bytes of an input as they lie in it, and the first of them.
struct Raw {
    head: Vec<u8>,
    access: Option<Arc<dyn RandomAccess>>,
    stream: Option<Box<dyn Read + Send>>,
}

impl Raw {
    fn of_access(access: Arc<dyn RandomAccess>) -> io::Result<Self> {
        Ok(Self { head: head_of(access.as_ref())?, access: Some(access), stream: None })
    }

    fn of_stream(mut stream: Box<dyn Read + Send>) -> io::Result<Self> {
        let mut head = Vec::new();
        Read::by_ref(&mut stream).take(HEAD_BYTES).read_to_end(&mut head)?;
        Ok(Self { head, access: None, stream: Some(stream) })
    }

    /// Reads from where `start` says, and hashes on the way.
    fn reader(self, start: &Start, resume: Option<&Resume>, range: &Range<u64>) -> io::Result<HashingReader> {
        let Some(access) = self.access else {
            let rest = self.stream.unwrap_or_else(|| Box::new(io::empty()));
            return Ok(HashingReader::stream(Box::new(io::Cursor::new(self.head).chain(rest))));
        };
        match resume {
            _ if !start.is_plain => HashingReader::new(access, 0, 0..u64::MAX, &[]),
            Some(resume) => HashingReader::new(access, start.read_from, range.clone(), &resume.content.xxh3_64),
            None => {
                let from = start.read_from.min(access.size_bytes()); // a range may begin behind the end
                HashingReader::new(access, from, range.clone(), &[])
            }
        }
    }
}

/// Where reading begins. Plain text can go on, or begin, anywhere; everything else is unpacked from its start.
struct Start {
    is_plain: bool,
    /// First byte that is wanted.
    offset: u64,
    /// First byte that is read: one earlier in a range, which tells whether a line begins exactly at its start.
    read_from: u64,
}

impl Start {
    fn new(raw: &Raw, options: &ReadOptions, resume: Option<&Resume>, range: &Range<u64>) -> Self {
        let is_plain = is_plain_text(&raw.head) && options.format.is_none_or(Format::has_lines);
        let offset = match resume {
            _ if !is_plain => 0,
            Some(resume) => resume.position.offset,
            None => range.start,
        };
        let read_from = if resume.is_none() { offset.saturating_sub(1) } else { offset };
        Self { is_plain, offset, read_from }
    }
}

/// The unpacked bytes of an input; `head` was read of them already.
struct Unpacked {
    decoded: Decoded,
    head: Vec<u8>,
    /// For tables: the file, if it is not compressed.
    access: Option<Arc<dyn RandomAccess>>,
}

impl Inner {
    fn open(
        source: &Source,
        options: &ReadOptions,
        resume: Option<&Resume>,
        range: Range<u64>,
        format: Format,
        start: &Start,
        unpacked: Unpacked,
    ) -> Result<Self, SourceError> {
        let (path, keys, block_bytes) = (source.name.clone(), Arc::clone(&options.keys), options.block_bytes);
        let done_rows = resume.map_or(0, |resume| resume.position.record - 1);
        let Unpacked { mut decoded, mut head, access } = unpacked;
        let seekable = || access.ok_or_else(|| SourceError::NotSeekable { path: path.clone(), format: format.name() });
        Ok(match format {
            Format::Parquet => {
                let rows = done_rows.max(range.start)..range.end;
                Self::Rows(RowReader::parquet(path.clone(), seekable()?, keys, block_bytes, rows)?)
            }
            Format::ArrowFile => {
                Self::Rows(RowReader::arrow_file(path.clone(), seekable()?, keys, block_bytes, done_rows)?)
            }
            Format::ArrowStream => {
                Self::Rows(RowReader::arrow_stream(path, head, decoded, keys, block_bytes, done_rows)?)
            }
            Format::Text => Self::Document { path, decoded, head, done: done_rows > 0 },
            Format::JsonLines | Format::TextLines => {
                let begin = Position { offset: start.read_from, record: 1, counted_from: range.start };
                let position = resume.map_or(begin, |resume| resume.position);
                if !start.is_plain && position.offset > 0 {
                    let passed = pass_over(&mut decoded, &mut head, position.offset);
                    passed.map_err(|error| source.fault_at_start(error))?;
                }
                let skip_first_line = resume.is_none() && start.read_from < start.offset;
                let range = LineRange { position, end: range.end, skip_first_line };
                Self::Lines(LineReader::new(path, format, decoded, head, range, block_bytes)?)
            }
        })
    }
}

impl SourceReader {
    /// Opens an input at its start, or behind what an interrupted job has done.
    ///
    /// # Errors
    /// [`SourceError`] if it is missing, unreadable, or not what the options say.
    pub fn open(source: &Source, options: &ReadOptions, resume: Option<&Resume>) -> Result<Self, SourceError> {
        Self::open_range(source, options, resume, 0..u64::MAX)
    }

    /// Opens a part of an input: of uncompressed text the lines that begin in a range of bytes, of Parquet a range of rows (from
    /// 0). Other inputs are read whole, whatever the range.
    ///
    /// Line numbers are counted from the first line of the range, row numbers from the start of the file.
    ///
    /// # Errors
    /// As `open`.
    pub fn open_range(
        source: &Source,
        options: &ReadOptions,
        resume: Option<&Resume>,
        range: Range<u64>,
    ) -> Result<Self, SourceError> {
        let raw = match source.open_bytes()? {
            Opened::Batches(reader) => {
                let keys = Arc::clone(&options.keys);
                let skip = resume.map_or(0, |resume| resume.position.record - 1);
                let rows = RowReader::batches(source.name.clone(), reader, keys, options.block_bytes, skip)?;
                return Ok(Self { inner: Inner::Rows(rows), format: Format::ArrowStream, warning: None });
            }
            Opened::Access(access) => Raw::of_access(access),
            Opened::Stream(stream) => Raw::of_stream(stream),
        };
        let raw = raw.map_err(|error| source.io(0, error))?;
        let compression = Compression::of(&raw.head);
        let start = Start::new(&raw, options, resume, &range);
        let access = raw.access.clone().filter(|_| compression == Compression::None);
        let opened = raw.reader(&start, resume, &range).and_then(|bytes| Decoded::new(compression, bytes));
        let mut decoded = opened.map_err(|error| source.fault_at_start(error))?;
        let mut head = Vec::new();
        if start.offset == 0 {
            let read = Read::by_ref(&mut decoded).take(HEAD_BYTES).read_to_end(&mut head);
            read.map_err(|error| source.fault_at_start(error))?;
        }
        let format = options.format.or(container_of(&head)).unwrap_or_default();
        let warning = name_warning(&source.name, compression, format);
        let unpacked = Unpacked { decoded, head, access };
        let inner = Inner::open(source, options, resume, range, format, &start, unpacked)?;
        Ok(Self { inner, format, warning })
    }

    /// The next block, or `None` at the end.
    ///
    /// # Errors
    /// [`SourceError`] if the input is damaged or cannot be read on.
    pub fn next_block(&mut self) -> Result<Option<Block>, SourceError> {
        match &mut self.inner {
            Inner::Lines(lines) => lines.next_block(),
            Inner::Rows(rows) => rows.next_block(),
            Inner::Document { done: true, .. } => Ok(None),
            Inner::Document { path, decoded, head, done } => {
                let mut bytes = std::mem::take(head);
                let read = decoded.read_to_end(&mut bytes);
                read.map_err(|error| SourceError::of_read(path, bytes.len() as u64, error))?;
                if bytes.starts_with(BOM) {
                    bytes.drain(..BOM.len());
                }
                *done = true;
                let input_bytes = decoded.content().bytes;
                Ok(Some(Block { position: Position::START, body: BlockBody::Text(bytes), input_bytes }))
            }
        }
    }

    /// The place behind the last block.
    pub fn position(&self) -> Position {
        match &self.inner {
            Inner::Lines(lines) => lines.position(),
            Inner::Rows(rows) => rows.position(),
            Inner::Document { done, .. } => Position { record: if *done { 2 } else { 1 }, ..Position::START },
        }
    }

    /// Size and hashes of what was read so far; after the last block, of the whole input. For Parquet and Arrow files the hash is
    /// that of the last MiB, which holds the footer.
    pub fn content(&self) -> ContentHash {
        match &self.inner {
            Inner::Lines(lines) => lines.content(),
            Inner::Rows(rows) => rows.content(),
            Inner::Document { decoded, .. } => decoded.content(),
        }
    }

    /// What the input turned out to be.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The sentence for a name that promises something else.
    pub fn warning(&self) -> Option<&str> {
        self.warning.as_deref()
    }
}

fn is_plain_text(head: &[u8]) -> bool {
    Compression::of(head) == Compression::None && container_of(head).is_none()
}

fn head_of(access: &dyn RandomAccess) -> io::Result<Vec<u8>> {
    let mut head = vec![0; access.size_bytes().min(HEAD_BYTES) as usize];
    read_full(access, 0, &mut head)?;
    Ok(head)
}

/// Drops the first `bytes` unpacked bytes, of which `head` was read already.
fn pass_over(decoded: &mut Decoded, head: &mut Vec<u8>, bytes: u64) -> io::Result<()> {
    let from_head = bytes.min(head.len() as u64);
    head.drain(..from_head as usize);
    let left = bytes - from_head;
    let passed = io::copy(&mut Read::by_ref(decoded).take(left), &mut io::sink())?;
    if passed < left {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the input is shorter than it was"));
    }
    Ok(())
}
