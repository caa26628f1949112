//! Where a job keeps what is not complete, and how files get their final names.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use megaflow_core::TokenDtype;

/// Why a pair could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The system refused.
    #[error("{}: cannot {action}: {source}", .path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// What was being done.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// Another job writes the same output.
    #[error("{}: another job is writing this output; wait for it, or choose another --output-prefix", .path.display())]
    Busy {
        /// The staging folder.
        path: PathBuf,
    },
    /// The name of the staging folder is taken by something else.
    #[error("{}: exists and was not made by megaflow; remove it, or choose another --output-prefix", .path.display())]
    NotOurs {
        /// The staging folder.
        path: PathBuf,
    },
    /// A job that was interrupted has left its work.
    #[error(
        "{}: holds what an interrupted preprocessing job has done; finish that job, remove the folder, \
         or choose another --output-prefix",
        .path.display()
    )]
    Unfinished {
        /// The staging folder.
        path: PathBuf,
    },
    /// A sequence has more tokens than the index can say.
    #[error("a sequence of {tokens} tokens is longer than the {} that an .idx can hold; split the document", i32::MAX)]
    SequenceTooLong {
        /// Its tokens.
        tokens: usize,
    },
    /// An id does not fit the type of the file.
    #[error("token id {id} does not fit {dtype}; the tokenizer gives ids above its own vocabulary size")]
    IdTooLarge {
        /// The id.
        id: u32,
        /// Type of the file.
        dtype: TokenDtype,
    },
}

/// Name of a job's journal in its staging folder.
pub const JOURNAL: &str = "journal.json";

pub(crate) fn io_error(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> WriteError {
    let path = path.to_owned();
    move |source| WriteError::Io { path, action, source }
}

/// Folder beside the output in which a job keeps everything that is not complete. Removed when dropped, unless it is kept for
/// a later job that goes on.
///
/// It holds a lock file, so that two jobs on one output cannot mix; the system frees the lock of a killed job.
#[derive(Debug)]
pub struct StagingFolder {
    path: PathBuf,
    lock_path: PathBuf,
    keep: bool,
    _lock: File,
}

impl StagingFolder {
    /// Makes and locks `PREFIX.partial`, and empties what a killed command left there that cannot go on.
    ///
    /// # Errors
    /// As `open`; [`WriteError::Unfinished`] if a job left its journal there.
    pub fn create(prefix: &Path) -> Result<Self, WriteError> {
        let mut staging = Self::open(prefix)?;
        if staging.path.join(JOURNAL).exists() {
            staging.set_keep(true);
            return Err(WriteError::Unfinished { path: staging.path.clone() });
        }
        staging.clear()?;
        Ok(staging)
    }

    /// Makes and locks `PREFIX.partial`; what a killed job left there stays.
    ///
    /// # Errors
    /// [`WriteError::Busy`] if another job holds it, [`WriteError::NotOurs`] if it is something else, [`WriteError::Io`]
    /// if the folder of the output cannot be written.
    pub fn open(prefix: &Path) -> Result<Self, WriteError> {
        let mut name = prefix.as_os_str().to_owned();
        name.push(".partial");
        let path = PathBuf::from(name);
        if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            fs::create_dir_all(parent).map_err(io_error(parent, "make the folder of the output"))?;
        }
        let lock_path = path.join("lock");
        let lock = loop {
            make_folder(&path, &lock_path)?;
            let lock = match File::create(&lock_path) {
                Ok(lock) => lock,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue, // a job that ends has just removed the folder
                Err(source) => return Err(io_error(&lock_path, "make the lock")(source)),
            };
            rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).map_err(|error| {
                if error == rustix::io::Errno::WOULDBLOCK {
                    WriteError::Busy { path: path.clone() }
                } else {
                    io_error(&lock_path, "lock")(error.into())
                }
            })?;
            if is_still_named(&lock, &lock_path) {
                break lock;
            }
        };
        Ok(Self { path, lock_path, keep: false, _lock: lock })
    }

    /// Removes everything but the lock.
    ///
    /// # Errors
    /// [`WriteError::Io`].
    pub fn clear(&self) -> Result<(), WriteError> {
        for entry in fs::read_dir(&self.path).map_err(io_error(&self.path, "list"))? {
            let left_over = entry.map_err(io_error(&self.path, "list"))?.path();
            if left_over != self.lock_path {
                fs::remove_file(&left_over).map_err(io_error(&left_over, "remove what a killed job left"))?;
            }
        }
        Ok(())
    }

    /// Whether the folder outlives this value, so that a later job can go on.
    pub fn set_keep(&mut self, keep: bool) {
        self.keep = keep;
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for StagingFolder {
    fn drop(&mut self) {
        // The lock goes last: a folder with files and without it is taken for somebody else's. What cannot be removed, or is
        // left by a kill in between, is emptied by the next job with this output.
        if !self.keep && self.clear().is_ok() && fs::remove_file(&self.lock_path).is_ok() {
            let _ = fs::remove_dir(&self.path);
        }
    }
}

/// Makes the folder, or finds one that a job has made.
fn make_folder(path: &Path, lock_path: &Path) -> Result<(), WriteError> {
    match fs::create_dir(path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let is_empty = fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
            if lock_path.is_file() || is_empty { Ok(()) } else { Err(WriteError::NotOurs { path: path.to_owned() }) }
        }
        Err(source) => Err(io_error(path, "write the output's folder")(source)),
    }
}

/// Whether a locked file is the one under its name, and not one that a job has removed when it ended.
fn is_still_named(lock: &File, lock_path: &Path) -> bool {
    let (Ok(held), Ok(named)) = (lock.metadata(), fs::metadata(lock_path)) else { return false };
    (held.dev(), held.ino()) == (named.dev(), named.ino())
}

/// Renames a durable file, then makes the new name durable.
///
/// # Errors
/// [`WriteError::Io`].
pub fn publish_file(from: &Path, to: &Path) -> Result<(), WriteError> {
    fs::rename(from, to).map_err(io_error(to, "give the file its final name"))?;
    let folder = to.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(io_error(folder, "make durable"))
}

pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_staging_folder_is_locked_cleaned_and_never_taken_from_others() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = folder.path().join("set");
        let staging = StagingFolder::create(&prefix).unwrap();
        assert!(matches!(StagingFolder::create(&prefix), Err(WriteError::Busy { .. })));
        fs::write(staging.path().join("left.bin"), b"x").unwrap();
        let path = staging.path().to_owned();
        std::mem::forget(staging); // as after a kill, but that this process still holds the lock
        assert!(matches!(StagingFolder::create(&prefix), Err(WriteError::Busy { .. })));
        fs::remove_file(path.join("lock")).unwrap();
        assert!(matches!(StagingFolder::create(&prefix), Err(WriteError::NotOurs { .. })));
        fs::write(path.join("lock"), b"").unwrap();
        let staging = StagingFolder::create(&prefix).unwrap();
        assert_eq!(fs::read_dir(staging.path()).unwrap().count(), 1);
        drop(staging);
        assert!(!path.exists());
    }

    #[test]
    fn the_lock_is_what_is_removed_last() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = folder.path().join("set");
        let staging = StagingFolder::create(&prefix).unwrap();
        let path = staging.path().to_owned();
        fs::write(path.join("out.bin"), b"x").unwrap();
        fs::create_dir(path.join("stays")).unwrap(); // as if the job were killed before it could remove this
        drop(staging);
        assert!(path.join("lock").exists());
        fs::remove_dir(path.join("stays")).unwrap();
        drop(StagingFolder::create(&prefix).unwrap());
        assert!(!path.exists());
    }

    #[test]
    fn a_lock_that_lost_its_name_is_not_held() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let lock = File::create(&path).unwrap();
        assert!(is_still_named(&lock, &path));
        fs::remove_file(&path).unwrap();
        assert!(!is_still_named(&lock, &path));
        let other = File::create(&path).unwrap();
        assert!(!is_still_named(&lock, &path));
        assert!(is_still_named(&other, &path));
    }
}
