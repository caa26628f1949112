//! Files whose blocks are checksummed while they are written.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::PathBuf;

use xxhash_rust::xxh3::Xxh3;

use crate::sidecar::FileRecord;
use crate::staging::{WriteError, io_error};

/// Bytes of one checksummed block.
pub(crate) const CHECKSUM_BLOCK_BYTES: usize = 64 << 20;

/// Cuts a file to `size` and goes to its end; a shorter file is an error.
pub(crate) fn cut_to(file: &mut File, size: u64) -> io::Result<()> {
    if file.metadata()?.len() < size {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file is shorter than the journal says"));
    }
    file.set_len(size)?;
    file.seek(io::SeekFrom::Start(size))?;
    Ok(())
}

/// A file whose blocks are checksummed while they are written.
pub(crate) struct ChecksummedFile {
    path: PathBuf,
    file: File,
    hash: Box<Xxh3>,
    hashed_bytes: usize,
    record: FileRecord,
}

impl ChecksummedFile {
    pub(crate) fn create(path: PathBuf) -> Result<Self, WriteError> {
        let file = File::create(&path).map_err(io_error(&path, "make the file"))?;
        let record = FileRecord { bytes: 0, block_bytes: CHECKSUM_BLOCK_BYTES as u64, xxh3_64: Vec::new() };
        Ok(Self { path, file, hash: Box::new(Xxh3::new()), hashed_bytes: 0, record })
    }

    /// Goes on behind the first `bytes`, of which the whole blocks have known checksums; the rest is read again.
    pub(crate) fn resume(path: PathBuf, bytes: u64, xxh3_64: &[String]) -> Result<Self, WriteError> {
        let opened = File::options().read(true).write(true).open(&path);
        let file = opened.map_err(io_error(&path, "go on with the file"))?;
        let known = (xxh3_64.len() as u64).min(bytes / CHECKSUM_BLOCK_BYTES as u64);
        let hashed = known * CHECKSUM_BLOCK_BYTES as u64;
        let record = FileRecord {
            bytes: hashed,
            block_bytes: CHECKSUM_BLOCK_BYTES as u64,
            xxh3_64: xxh3_64[..known as usize].to_vec(),
        };
        let mut resumed = Self { path, file, hash: Box::new(Xxh3::new()), hashed_bytes: 0, record };
        let read_again = (|| {
            cut_to(&mut resumed.file, bytes)?;
            resumed.file.seek(io::SeekFrom::Start(hashed))?;
            let mut tail = Vec::new();
            Read::by_ref(&mut resumed.file).take(bytes - hashed).read_to_end(&mut tail)?;
            resumed.take_in(&tail);
            Ok(())
        })();
        read_again.map_err(io_error(&resumed.path, "go on with the file"))?;
        Ok(resumed)
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        self.file.write_all(bytes).map_err(io_error(&self.path, "write"))?;
        self.take_in(bytes);
        Ok(())
    }

    /// Appends `bytes`, which are those of `source` from `at` on, inside the kernel: file systems that can share blocks need
    /// not copy them. Returns false if it did nothing because the kernel or the file system cannot.
    pub(crate) fn write_from(&mut self, source: &File, at: u64, bytes: &[u8]) -> Result<bool, WriteError> {
        let copied = copy_inside_kernel(source, at, &self.file, bytes.len());
        let copied = copied.map_err(io_error(&self.path, "write"))?;
        if copied == 0 {
            return Ok(false);
        }
        self.file.write_all(&bytes[copied..]).map_err(io_error(&self.path, "write"))?;
        self.take_in(bytes);
        Ok(true)
    }

    /// Makes what was written durable.
    pub(crate) fn sync(&self) -> Result<(), WriteError> {
        self.file.sync_data().map_err(io_error(&self.path, "make durable"))
    }

    /// Checksums of the blocks that are complete.
    pub(crate) fn whole_blocks(&self) -> &[String] {
        &self.record.xxh3_64
    }

    /// Counts and hashes bytes that are in the file.
    fn take_in(&mut self, bytes: &[u8]) {
        self.record.bytes += bytes.len() as u64;
        let mut rest = bytes;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(CHECKSUM_BLOCK_BYTES - self.hashed_bytes));
            self.hash.update(now);
            self.hashed_bytes += now.len();
            if self.hashed_bytes == CHECKSUM_BLOCK_BYTES {
                self.end_block();
            }
            rest = later;
        }
    }

    fn end_block(&mut self) {
        self.record.xxh3_64.push(format!("{:016x}", self.hash.digest()));
        self.hash.reset();
        self.hashed_bytes = 0;
    }

    pub(crate) fn finish(mut self) -> Result<FileRecord, WriteError> {
        if self.hashed_bytes > 0 {
            self.end_block();
        }
        self.file.sync_all().map_err(io_error(&self.path, "make durable"))?;
        Ok(self.record)
    }
}

/// Bytes that the kernel appended to `target`, at most `bytes`; 0 if it cannot copy between these files.
#[cfg(target_os = "linux")]
fn copy_inside_kernel(source: &File, mut at: u64, target: &File, bytes: usize) -> io::Result<usize> {
    use rustix::io::Errno;
    let mut done = 0;
    while done < bytes {
        match rustix::fs::copy_file_range(source, Some(&mut at), target, None, bytes - done) {
            Ok(0) => break,
            Ok(now) => done += now,
            Err(Errno::INTR) => {}
            // Each of these says that another way of copying will do; what is wrong with the disk has other names.
            Err(Errno::XDEV | Errno::NOSYS | Errno::INVAL | Errno::OPNOTSUPP | Errno::PERM) => break,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(done)
}

#[cfg(not(target_os = "linux"))]
fn copy_inside_kernel(_: &File, _: u64, _: &File, _: usize) -> io::Result<usize> {
    Ok(0)
}
