//! `PREFIX.rejects.jsonl`: every record that became no document.

use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use megaflow_indexed::{StagingFolder, WriteError, publish_file};
use megaflow_source::{Place, Reject};
use serde_json::json;

/// Writes the rejects of a job; the file appears when the job is complete, and only if there are any.
pub(crate) struct RejectsWriter {
    staged: PathBuf,
    final_path: PathBuf,
    file: Option<BufWriter<File>>,
    bytes: u64,
}

impl RejectsWriter {
    /// Starts the file, or goes on behind its first `bytes`.
    pub(crate) fn new(staging: &StagingFolder, output_prefix: &Path, bytes: u64) -> Result<Self, WriteError> {
        let mut name = output_prefix.as_os_str().to_owned();
        name.push(".rejects.jsonl");
        let staged = staging.path().join("rejects.jsonl");
        let mut rejects = Self { staged, final_path: PathBuf::from(name), file: None, bytes };
        if bytes > 0 {
            let opened = File::options().write(true).open(&rejects.staged).and_then(|mut file| {
                file.set_len(bytes)?;
                file.seek(SeekFrom::End(0))?;
                Ok(file)
            });
            rejects.file = Some(BufWriter::new(opened.map_err(|source| rejects.error(source))?));
        }
        Ok(rejects)
    }

    pub(crate) fn write(&mut self, source: &Path, reject: &Reject) -> Result<(), WriteError> {
        let mut line = json!({
            "source": source.display().to_string(), "reason": reject.reason.name(), "detail": reject.reason.to_string(),
        });
        match reject.place {
            Place::Line { number, offset, counted_from } => {
                line["line"] = number.into();
                line["offset"] = offset.into();
                if counted_from > 0 {
                    line["counted_from"] = counted_from.into();
                }
            }
            Place::Row { number } => line["row"] = number.into(),
        }
        match std::str::from_utf8(&reject.raw) {
            Ok(text) => line["raw"] = text.into(),
            Err(_) => line["raw_hex"] = reject.raw.iter().map(|byte| format!("{byte:02x}")).collect::<String>().into(),
        }
        self.write_line(&line.to_string()).map_err(|source| self.error(source))
    }

    fn write_line(&mut self, line: &str) -> io::Result<()> {
        if self.file.is_none() {
            self.file = Some(BufWriter::new(File::create(&self.staged)?));
        }
        let file = self.file.as_mut().ok_or(io::ErrorKind::NotFound)?;
        self.bytes += line.len() as u64 + 1;
        writeln!(file, "{line}")
    }

    /// Makes everything written so far durable; returns its size.
    pub(crate) fn checkpoint(&mut self) -> Result<u64, WriteError> {
        let synced = self.file.as_mut().map_or(Ok(()), |file| file.flush().and_then(|()| file.get_ref().sync_data()));
        synced.map_err(|source| self.error(source))?;
        Ok(self.bytes)
    }

    /// Goes on with a publication that was interrupted.
    pub(crate) fn published(
        staging: &StagingFolder,
        output_prefix: &Path,
        bytes: u64,
    ) -> Result<Option<PathBuf>, WriteError> {
        let mut rejects = Self::new(staging, output_prefix, 0)?;
        rejects.bytes = bytes;
        rejects.publish()
    }

    /// Publishes the file, or removes an older job's if this one rejected nothing.
    pub(crate) fn publish(mut self) -> Result<Option<PathBuf>, WriteError> {
        self.checkpoint()?;
        if self.bytes == 0 {
            return match fs::remove_file(&self.final_path) {
                Err(source) if source.kind() != io::ErrorKind::NotFound => Err(self.error(source)),
                _ => Ok(None),
            };
        }
        if self.staged.exists() {
            publish_file(&self.staged, &self.final_path)?;
        }
        Ok(Some(self.final_path))
    }

    fn error(&self, source: io::Error) -> WriteError {
        WriteError::Io { path: self.final_path.clone(), action: "write the rejects", source }
    }
}
