//! Indices kept on disk, under Megatron's names, shared by many processes.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use crate::error::BuildError;

/// How long a process that waits for the builder sleeps before it looks again, at first and at most.
const PAUSES: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(500)];
/// Behind this a waiting process builds for itself, and keeps the result in memory: whoever holds the lock may be stuck.
const PATIENCE: Duration = Duration::from_secs(900);

/// Where an index is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachePlace {
    /// Folder and begin of the files' names: `FOLDER/MD5-GPTDataset-train`.
    pub stem: PathBuf,
    /// Megatron's description, whose md5 is in the name.
    pub description: String,
    /// What must be the same beside it: content of the data, and settings that the description leaves out.
    pub content: String,
}

/// What became of the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CacheOutcome {
    /// The index was there.
    Found,
    /// Another program's index was there; it was compared with the data, and is right.
    Adopted,
    /// There was none; it was built and kept.
    Built,
    /// What was there did not fit the data; it was built anew.
    Replaced(String),
    /// It was built and could not be kept.
    NotKept(String),
}

/// What a cache keeps.
pub(crate) trait Cached: Sized {
    /// Writes the arrays.
    fn save(&self, writer: &CacheWriter<'_>) -> io::Result<()>;
}

impl CachePlace {
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        let mut path = self.stem.clone().into_os_string();
        path.push(format!("-{name}"));
        PathBuf::from(path)
    }

    fn side_file(&self) -> PathBuf {
        self.file("megaflow.json")
    }

    /// Opens the index, or has it built by one of the processes that want it, and by every one where files cannot be
    /// locked. `is_right` compares what another program wrote with the data.
    pub(crate) fn open_or_build<T: Cached>(
        &self,
        open: &dyn Fn() -> Result<T, String>,
        is_right: &dyn Fn(&T) -> Result<(), String>,
        build: &dyn Fn() -> Result<T, BuildError>,
    ) -> Result<(T, CacheOutcome), BuildError> {
        let mut reason = match self.look(open, is_right) {
            Look::Good(index, outcome) => return Ok((index, outcome)),
            Look::Missing => None,
            Look::Bad(reason) => Some(reason),
        };
        if let Err(error) = self.stem.parent().map_or(Ok(()), fs::create_dir_all) {
            return Ok((build()?, self.not_kept(&error)));
        }
        let lock = self.lock(|| match self.look(open, is_right) {
            Look::Good(index, outcome) => Some((index, outcome)),
            _ => None,
        });
        let _lock = match lock {
            Locked::Found(index, outcome) => return Ok((index, outcome)),
            Locked::Held(lock) => {
                // Another process may have been faster.
                match self.look(open, is_right) {
                    Look::Good(index, outcome) => return Ok((index, outcome)),
                    Look::Missing => {}
                    Look::Bad(found) => reason = Some(found),
                }
                Some(lock)
            }
            Locked::Impossible => None,
            Locked::TimedOut => {
                let error = io::Error::other("another process has held its lock for 15 minutes");
                return Ok((build()?, self.not_kept(&error)));
            }
        };
        let index = build()?;
        if let Err(error) = self.save(&index) {
            return Ok((index, self.not_kept(&error)));
        }
        match open() {
            // Mapped, so that all processes of the machine share its memory.
            Ok(index) => Ok((index, reason.map_or(CacheOutcome::Built, CacheOutcome::Replaced))),
            Err(found) => Ok((index, CacheOutcome::NotKept(found))),
        }
    }

    fn not_kept(&self, error: &io::Error) -> CacheOutcome {
        CacheOutcome::NotKept(format!("{}-*: {error}", self.stem.display()))
    }

    fn look<T: Cached>(
        &self,
        open: &dyn Fn() -> Result<T, String>,
        is_right: &dyn Fn(&T) -> Result<(), String>,
    ) -> Look<T> {
        if !self.file("description.txt").exists() {
            return Look::Missing;
        }
        match fs::read_to_string(self.side_file()) {
            Ok(content) if content == self.content => match open() {
                Ok(index) => Look::Good(index, CacheOutcome::Found),
                Err(reason) => Look::Bad(reason),
            },
            Ok(_) => Look::Bad(format!("{}: the data or the settings have changed", self.side_file().display())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => match open().and_then(|index| {
                is_right(&index)?;
                Ok(index)
            }) {
                Ok(index) => {
                    // If it cannot be written, the next process compares again.
                    let _ = self.write_text("megaflow.json", &self.content);
                    Look::Good(index, CacheOutcome::Adopted)
                }
                Err(reason) => Look::Bad(reason),
            },
            Err(error) => Look::Bad(format!("{}: {error}", self.side_file().display())),
        }
    }

    /// Waits for the lock, or for the index.
    fn lock<T>(&self, look: impl Fn() -> Option<(T, CacheOutcome)>) -> Locked<T> {
        let path = self.file("lock");
        let Ok(file) = File::create(&path) else { return Locked::Impossible };
        let (started, mut pause) = (Instant::now(), PAUSES[0]);
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Locked::Held(Lock { file, path }),
                Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {}
                // A file system without locks: every process builds, and the last one's equal files stay.
                Err(_) => return Locked::Impossible,
            }
            if let Some((index, outcome)) = look() {
                return Locked::Found(index, outcome);
            }
            if started.elapsed() > PATIENCE {
                return Locked::TimedOut;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSES[1]);
        }
    }

    /// Files appear whole, the description last: it is what says that the others are there. They replace older ones by
    /// a rename, so that a process that has mapped those keeps them.
    fn save<T: Cached>(&self, index: &T) -> io::Result<()> {
        index.save(&CacheWriter { place: self })?;
        self.write_text("megaflow.json", &self.content)?;
        self.write_text("description.txt", &self.description)
    }

    fn write_text(&self, name: &str, text: &str) -> io::Result<()> {
        self.publish(name, |mut file| file.write_all(text.as_bytes()))
    }

    fn publish(&self, name: &str, write: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
        let path = self.file(name);
        let folder = path.parent().unwrap_or(Path::new("."));
        // A name of this process and moment; `create_new` refuses one that is in use.
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let temporary = folder.join(format!(".{}-{}-{name}.tmp", std::process::id(), since.as_nanos()));
        let written = File::create_new(&temporary).and_then(|file| {
            write(&file)?;
            file.sync_all()
        });
        let renamed = written.and_then(|()| fs::rename(&temporary, &path));
        if renamed.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        renamed
    }
}

enum Look<T> {
    Good(T, CacheOutcome),
    Missing,
    Bad(String),
}

enum Locked<T> {
    Held(Lock),
    Found(T, CacheOutcome),
    Impossible,
    TimedOut,
}

/// The right to build. Ends with the process, whatever ends it.
struct Lock {
    #[expect(dead_code, reason = "closing it gives the lock back")]
    file: File,
    path: PathBuf,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Who opened the file before and locks it now builds once more at worst, and finds the index first.
        let _ = fs::remove_file(&self.path);
    }
}

/// Writes the arrays of one index.
pub(crate) struct CacheWriter<'a> {
    place: &'a CachePlace,
}

impl CacheWriter<'_> {
    pub(crate) fn array<T: crate::column::Item>(
        &self,
        name: &str,
        column: &crate::column::Column<T>,
        width: usize,
    ) -> io::Result<()> {
        self.place.publish(&format!("{name}.npy"), |file| column.write_npy(file, width))
    }
}
