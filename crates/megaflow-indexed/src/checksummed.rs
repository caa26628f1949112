//! Files whose blocks are checksummed while they are written.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::PathBuf;
use std::thread::{self, JoinHandle};

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

/// Bytes after which what was written is made durable beside the work that goes on, so that little is left to wait for at a
/// checkpoint and at the end.
const SYNC_BEHIND_BYTES: u64 = 16 << 20;

/// A file whose blocks are checksummed while they are written.
pub(crate) struct ChecksummedFile {
    path: PathBuf,
    file: File,
    hash: Box<Xxh3>,
    hashed_bytes: usize,
    record: FileRecord,
    /// Bytes at which the next write-back behind the work begins.
    sync_next: u64,
    /// The one that runs, or has ended.
    syncing: Option<JoinHandle<io::Result<()>>>,
    /// The system's number of the first write-back that failed. The system tells of it once, and later ones succeed: what
    /// was lost stays lost, so nothing of this file is durable from then on.
    sync_fault: Option<i32>,
}

impl ChecksummedFile {
    pub(crate) fn create(path: PathBuf) -> Result<Self, WriteError> {
        let file = File::create(&path).map_err(io_error(&path, "make the file"))?;
        let record = FileRecord { bytes: 0, block_bytes: CHECKSUM_BLOCK_BYTES as u64, xxh3_64: Vec::new() };
        Ok(Self::new(path, file, record))
    }

    fn new(path: PathBuf, file: File, record: FileRecord) -> Self {
        let sync_next = record.bytes + SYNC_BEHIND_BYTES;
        Self {
            path,
            file,
            hash: Box::new(Xxh3::new()),
            hashed_bytes: 0,
            record,
            sync_next,
            syncing: None,
            sync_fault: None,
        }
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
        let mut resumed = Self::new(path, file, record);
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
        self.sync_behind()
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
        self.sync_behind()?;
        Ok(true)
    }

    /// Makes what was written durable.
    pub(crate) fn sync(&mut self) -> Result<(), WriteError> {
        self.end_sync_behind()?;
        self.sync_next = self.record.bytes + SYNC_BEHIND_BYTES;
        let done = self.file.sync_data();
        self.synced(done)
    }

    /// What became of a write-back, or of an earlier one that failed.
    fn synced(&mut self, done: io::Result<()>) -> Result<(), WriteError> {
        const EIO: i32 = 5;
        if let (None, Err(error)) = (self.sync_fault, done) {
            self.sync_fault = Some(error.raw_os_error().unwrap_or(EIO));
        }
        let fault = self.sync_fault.map(io::Error::from_raw_os_error);
        fault.map_or(Ok(()), Err).map_err(io_error(&self.path, "make durable"))
    }

    /// Starts a write-back if enough was written since the last one, and that one has ended.
    fn sync_behind(&mut self) -> Result<(), WriteError> {
        let is_running = self.syncing.as_ref().is_some_and(|thread| !thread.is_finished());
        if self.record.bytes < self.sync_next || is_running {
            return Ok(());
        }
        self.end_sync_behind()?;
        self.sync_next = self.record.bytes + SYNC_BEHIND_BYTES;
        // Without a second handle or another thread all is made durable at the end.
        if let Ok(file) = self.file.try_clone() {
            self.syncing = thread::Builder::new().name("sync".to_owned()).spawn(move || file.sync_data()).ok();
        }
        Ok(())
    }

    /// Waits for the write-back that runs.
    fn end_sync_behind(&mut self) -> Result<(), WriteError> {
        let done = self.syncing.take().map_or(Ok(()), |thread| {
            thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread that wrote back panicked")))
        });
        self.synced(done)
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
        self.end_sync_behind()?;
        if self.hashed_bytes > 0 {
            self.end_block();
        }
        let done = self.file.sync_all();
        self.synced(done)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    fn file_at(path: &str) -> ChecksummedFile {
        ChecksummedFile::create(PathBuf::from(path)).unwrap()
    }

    #[test]
    fn what_is_written_back_beside_the_work_is_what_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bin");
        let mut file = ChecksummedFile::create(path.clone()).unwrap();
        let piece = vec![7; (SYNC_BEHIND_BYTES / 2) as usize];
        for pieces in 1..=5 {
            file.write(&piece).unwrap();
            assert_eq!(file.syncing.is_some(), pieces >= 2);
        }
        file.sync().unwrap();
        assert!(file.syncing.is_none());
        let record = file.finish().unwrap();
        assert_eq!((record.bytes, record.xxh3_64.len()), (5 * SYNC_BEHIND_BYTES / 2, 1));
        assert!(std::fs::read(path).unwrap() == piece.repeat(5));
    }

    #[cfg(target_os = "linux")] // where this device takes all bytes and cannot make them durable
    #[test]
    fn a_write_back_that_failed_is_told_at_every_later_one() {
        let mut file = file_at("/dev/null");
        file.write(&vec![0; SYNC_BEHIND_BYTES as usize]).unwrap();
        for _ in 0..2 {
            let error = file.sync().unwrap_err().to_string();
            assert!(error.contains("/dev/null") && error.contains("make durable"), "{error}");
        }
        assert!(file.finish().is_err());
        let mut file = file_at("/dev/null");
        file.write(b"few").unwrap();
        file.sync_fault = Some(5);
        let error = file.sync().unwrap_err().to_string();
        assert!(error.contains("os error 5"), "the first fault counts: {error}");
    }
}
