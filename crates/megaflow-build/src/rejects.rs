//! `PREFIX.rejects.jsonl`: every record that became no document.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use megaflow_indexed::{StagingFolder, WriteError, publish_file};
use megaflow_source::Reject;
use serde_json::json;

/// Writes the rejects of a job; the file appears when the job is complete, and only if there are any.
pub(crate) struct RejectsWriter {
    staged: PathBuf,
    final_path: PathBuf,
    file: Option<BufWriter<File>>,
}

impl RejectsWriter {
    pub(crate) fn new(staging: &StagingFolder, output_prefix: &Path) -> Self {
        let mut name = output_prefix.as_os_str().to_owned();
        name.push(".rejects.jsonl");
        Self { staged: staging.path().join("rejects.jsonl"), final_path: PathBuf::from(name), file: None }
    }

    pub(crate) fn write(&mut self, source: &Path, reject: &Reject) -> Result<(), WriteError> {
        let mut line = json!({
            "source": source.display().to_string(), "line": reject.line, "offset": reject.offset,
            "reason": reject.reason.name(), "detail": reject.reason.to_string(),
        });
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
        writeln!(file, "{line}")
    }

    /// Publishes the file, or removes an older job's if this one rejected nothing.
    pub(crate) fn publish(mut self) -> Result<Option<PathBuf>, WriteError> {
        let Some(mut file) = self.file.take() else {
            return match fs::remove_file(&self.final_path) {
                Err(source) if source.kind() != io::ErrorKind::NotFound => Err(self.error(source)),
                _ => Ok(None),
            };
        };
        file.flush().and_then(|()| file.get_ref().sync_all()).map_err(|source| self.error(source))?;
        publish_file(&self.staged, &self.final_path)?;
        Ok(Some(self.final_path))
    }

    fn error(&self, source: io::Error) -> WriteError {
        WriteError::Io { path: self.final_path.clone(), action: "write the rejects", source }
    }
}
