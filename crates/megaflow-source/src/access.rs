//! Bytes of an input: a local file, a remote object, or a stream that can be read once.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::sync::Arc;

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Bytes of an input under one hash: 64 MiB, so that a job can go on in the middle of a file.
pub const HASH_BLOCK_BYTES: u64 = 64 << 20;

/// Something of known size that can be read at any place, from several threads.
pub trait RandomAccess: Send + Sync {
    /// Size in bytes.
    fn size_bytes(&self) -> u64;

    /// Reads into `buffer` from `offset`; fewer bytes than asked for only at the end.
    ///
    /// # Errors
    /// What the system or the remote side said.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize>;
}

/// A local file; its size is taken when it is opened.
pub(crate) struct LocalFile {
    file: File,
    size_bytes: u64,
}

impl LocalFile {
    pub(crate) fn new(file: File) -> io::Result<Self> {
        let size_bytes = file.metadata()?.len();
        Ok(Self { file, size_bytes })
    }
}

impl RandomAccess for LocalFile {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        std::os::unix::fs::FileExt::read_at(&self.file, buffer, offset)
    }
}

/// Size and hashes of what was read of an input.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContentHash {
    /// Bytes read.
    pub bytes: u64,
    /// XXH3-64 of each block of [`HASH_BLOCK_BYTES`], the last one shorter.
    pub xxh3_64: Vec<u64>,
}

/// Reads bytes in order and hashes them on the way.
pub(crate) struct HashingReader {
    input: Input,
    /// Place of the next byte.
    offset: u64,
    /// Bytes that are hashed; the begin is a multiple of [`HASH_BLOCK_BYTES`].
    hashed: Range<u64>,
    hash: Box<Xxh3>,
    content: ContentHash,
}

enum Input {
    Access { access: Arc<dyn RandomAccess>, end: u64 },
    Stream(Box<dyn Read + Send>),
}

impl HashingReader {
    /// Reads an input from `begin` on and hashes what lies in `hashed`.
    ///
    /// Hashes of the first blocks of `hashed` may be known already; the rest of the block that holds `begin` is read again.
    pub(crate) fn new(
        access: Arc<dyn RandomAccess>,
        begin: u64,
        hashed: Range<u64>,
        known: &[u64],
    ) -> io::Result<Self> {
        let end = access.size_bytes();
        let input = Input::Access { access, end };
        let blocks = (begin.saturating_sub(hashed.start) / HASH_BLOCK_BYTES).min(known.len() as u64);
        let content = ContentHash { bytes: blocks * HASH_BLOCK_BYTES, xxh3_64: known[..blocks as usize].to_vec() };
        let offset = if begin < hashed.start { begin } else { hashed.start + content.bytes };
        let mut reader = Self { input, offset, hashed, hash: Box::new(Xxh3::new()), content };
        reader.skip(begin - offset)?;
        Ok(reader)
    }

    /// Reads a stream from its start.
    pub(crate) fn stream(stream: Box<dyn Read + Send>) -> Self {
        let input = Input::Stream(stream);
        Self { input, offset: 0, hashed: 0..u64::MAX, hash: Box::new(Xxh3::new()), content: ContentHash::default() }
    }

    /// Size and hashes of what was read so far.
    pub(crate) fn content(&self) -> ContentHash {
        let mut content = self.content.clone();
        if content.bytes % HASH_BLOCK_BYTES != 0 {
            content.xxh3_64.push(self.hash.digest());
        }
        content
    }

    /// Bytes read so far, without their hashes.
    pub(crate) fn bytes(&self) -> u64 {
        self.content.bytes
    }

    fn skip(&mut self, mut bytes: u64) -> io::Result<()> {
        let mut buffer = vec![0; if bytes == 0 { 0 } else { 1 << 20 }];
        while bytes > 0 {
            let want = bytes.min(buffer.len() as u64) as usize;
            match self.read(&mut buffer[..want])? {
                0 => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the input is shorter than it was")),
                got => bytes -= got as u64,
            }
        }
        Ok(())
    }

    /// Hashes the bytes that were just read, block by block.
    fn take_in(&mut self, bytes: &[u8]) {
        let begin = self.hashed.start.saturating_sub(self.offset).min(bytes.len() as u64);
        let end = self.hashed.end.saturating_sub(self.offset).min(bytes.len() as u64);
        self.offset += bytes.len() as u64;
        let mut rest = &bytes[begin as usize..end.max(begin) as usize];
        while !rest.is_empty() {
            let left = HASH_BLOCK_BYTES - self.content.bytes % HASH_BLOCK_BYTES;
            let (now, later) = rest.split_at(left.min(rest.len() as u64) as usize);
            self.hash.update(now);
            self.content.bytes += now.len() as u64;
            if self.content.bytes % HASH_BLOCK_BYTES == 0 {
                self.content.xxh3_64.push(self.hash.digest());
                self.hash.reset();
            }
            rest = later;
        }
    }
}

impl Read for HashingReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = match &mut self.input {
            Input::Stream(stream) => stream.read(buffer),
            Input::Access { access, end } => {
                let want = end.saturating_sub(self.offset).min(buffer.len() as u64) as usize;
                access.read_at(self.offset, &mut buffer[..want])
            }
        };
        let got = read.map_err(|source| match source.kind() {
            io::ErrorKind::Interrupted => source, // readers try again
            kind => io::Error::new(kind, InputFailed(source)),
        })?;
        self.take_in(&buffer[..got]);
        Ok(got)
    }
}

/// Marks an error of the system or the remote side, so that it is not taken for a fault of the data that a decoder found.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
struct InputFailed(io::Error);

/// The error of the system that made a decoder stop, or `Err` with the decoder's own.
pub(crate) fn system_error(error: io::Error) -> Result<io::Error, io::Error> {
    match error.downcast::<InputFailed>() {
        Ok(InputFailed(source)) => Ok(source),
        Err(error) => Err(error),
    }
}

/// Hash of the last `bytes` of an input: for Parquet the footer, which names the size and place of everything else.
pub(crate) fn tail_hash(access: &dyn RandomAccess, bytes: u64) -> io::Result<u64> {
    let begin = access.size_bytes().saturating_sub(bytes);
    let mut tail = vec![0; (access.size_bytes() - begin) as usize];
    read_full(access, begin, &mut tail)?;
    Ok(xxh3_64(&tail))
}

/// Fills `buffer` from `offset`.
pub(crate) fn read_full(access: &dyn RandomAccess, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
    let mut filled = 0;
    while filled < buffer.len() {
        match access.read_at(offset + filled as u64, &mut buffer[filled..])? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            got => filled += got,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Pattern(u64);

    impl RandomAccess for Pattern {
        fn size_bytes(&self) -> u64 {
            self.0
        }

        fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
            let want = buffer.len().min((self.0 - offset.min(self.0)) as usize).min(1_000_003);
            for (place, byte) in (offset..).zip(&mut buffer[..want]) {
                *byte = (place ^ (place >> 13)) as u8;
            }
            Ok(want)
        }
    }

    fn hashes(size: u64, begin: u64, hashed: Range<u64>, known: &[u64]) -> ContentHash {
        let mut reader = HashingReader::new(Arc::new(Pattern(size)), begin, hashed, known).unwrap();
        io::copy(&mut reader, &mut io::sink()).unwrap();
        reader.content()
    }

    #[test]
    fn going_on_in_the_middle_and_ranges_give_the_hashes_of_one_pass() {
        let size = 2 * HASH_BLOCK_BYTES + 12_345;
        let whole = hashes(size, 0, 0..u64::MAX, &[]);
        assert_eq!((whole.bytes, whole.xxh3_64.len()), (size, 3));
        assert_eq!(hashes(size, HASH_BLOCK_BYTES + 77, 0..u64::MAX, &whole.xxh3_64[..1]), whole);
        let first = hashes(size, 0, 0..HASH_BLOCK_BYTES, &[]);
        let rest = hashes(size, HASH_BLOCK_BYTES - 1, HASH_BLOCK_BYTES..u64::MAX, &[]);
        assert_eq!(first.bytes + rest.bytes, size);
        assert_eq!([first.xxh3_64, rest.xxh3_64].concat(), whole.xxh3_64);
    }

    #[test]
    fn an_input_that_became_shorter_is_noticed() {
        let error = HashingReader::new(Arc::new(Pattern(10)), 20, 0..u64::MAX, &[]).err().unwrap();
        assert!(error.to_string().contains("shorter than it was"));
    }
}
