//! What of a job is durable, so that it can go on after being killed.
//!
//! The journal is one small file, replaced as a whole. It names the job; a job with another name does not go on with it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use megaflow_indexed::{JOURNAL, PairState, SourceRecord, StagingFolder, WriteError, publish_file};
use megaflow_source::{ContentHash, Position, Resume};
use megaflow_tokenize::Tokenizer;
use serde::{Deserialize, Serialize};

use crate::{BuildError, JobOptions, OnBadRecord};

const JOURNAL_VERSION: u32 = 3;
/// The setting that says what a bad record does, and its values.
const BAD_RECORDS: &str = "policy for bad records";
const POLICIES: [&str; 2] = ["stop", "skip"];

/// Everything that decides the bytes of a job's result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct JobName {
    version: u32,
    /// Name, range, size and time of change of each input.
    inputs: Vec<InputName>,
    settings: BTreeMap<String, String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct InputName {
    /// Lossy where the name is not UTF-8: size and time of change tell such files apart.
    path: String,
    range: Option<(u64, u64)>,
    bytes: Option<u64>,
    modified_ns: Option<u128>,
}

impl JobName {
    pub(crate) fn new(options: &JobOptions, tokenizer: &Tokenizer) -> Result<Self, BuildError> {
        let mut inputs = Vec::new();
        for input in &options.inputs {
            let modified = fs::metadata(input.source.name()).and_then(|metadata| metadata.modified()).ok();
            let since = modified.and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok());
            inputs.push(InputName {
                path: input.source.name().to_string_lossy().into_owned(),
                range: input.range.as_ref().map(|range| (range.start, range.end)),
                bytes: input.source.size_bytes()?,
                modified_ns: since.map(|time| time.as_nanos()),
            });
        }
        let ends = tokenizer.ends(options.encode)?;
        let settings = [
            ("json keys", format!("{:?}", options.json_keys)),
            ("input format", options.format.map_or("auto", megaflow_source::Format::name).to_owned()),
            ("invalid UTF-8", if options.replace_invalid_utf8 { "replace" } else { "bad" }.to_owned()),
            (
                "partition",
                options.every.map_or_else(|| "none".to_owned(), |(index, count)| format!("{index} of {count}")),
            ),
            ("end of document", name_token(options.append_eod)),
            ("empty documents", format!("{:?}", options.empty_documents)),
            (BAD_RECORDS, POLICIES[usize::from(options.on_bad_record == OnBadRecord::Skip)].to_owned()),
            ("special tokens in text", format!("{:?}", options.encode.special_tokens_in_text)),
            ("added special tokens", options.encode.add_special_tokens.to_string()),
            ("BOS of documents", name_token(ends.bos)),
            ("EOS of documents", name_token(ends.eos)),
            ("sentences", options.sentences.as_ref().map_or_else(|| "whole texts".to_owned(), |split| split.name())),
            ("tokenizer", tokenizer.fingerprint().to_owned()),
        ];
        let settings = settings.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        Ok(Self { version: JOURNAL_VERSION, inputs, settings })
    }

    fn stopped_at_bad_records(&self) -> bool {
        self.settings.get(BAD_RECORDS).is_some_and(|policy| policy == POLICIES[0])
    }

    /// The first difference between the job of a journal and this one, in words.
    fn difference(&self, now: &Self) -> Option<String> {
        if self.version != now.version {
            return Some(format!("its journal has version {}, not {}", self.version, now.version));
        }
        // A job that stopped at its first bad record goes on with a policy that skips it: nothing was skipped before.
        let mends =
            |name: &str, value: &str| name == BAD_RECORDS && value == POLICIES[1] && self.stopped_at_bad_records();
        let changed =
            now.settings.iter().find(|&(name, value)| self.settings.get(name) != Some(value) && !mends(name, value));
        if let Some((name, value)) = changed {
            let before = self.settings.get(name).map_or("not set", String::as_str);
            return Some(format!("{name} was {before} and is {value}"));
        }
        if self.inputs.len() != now.inputs.len() {
            return Some(format!("it had {} inputs, this one has {}", self.inputs.len(), now.inputs.len()));
        }
        let pair = self.inputs.iter().zip(&now.inputs).find(|(before, now)| before != now)?;
        let (before, now) = (&pair.0.path, &pair.1.path);
        let same_path = pair.0.path == pair.1.path;
        Some(if same_path { format!("{now} has changed since") } else { format!("it read {before}, this one {now}") })
    }
}

/// A token that may be added, in a message.
fn name_token(id: Option<u32>) -> String {
    id.map_or_else(|| "none".to_owned(), |id| format!("token {id}"))
}

/// What is durable.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct State {
    /// A pair for each key.
    pub(crate) pairs: Vec<PairState>,
    /// Bytes of the rejects file.
    pub(crate) rejects_bytes: u64,
    /// What was counted.
    pub(crate) counts: Counts,
    /// Inputs that were begun.
    pub(crate) sources: Vec<SourceRecord>,
    /// How many of them are done.
    pub(crate) sources_done: usize,
    /// Where to go on in the first that is not done; `None` for its start.
    pub(crate) resume: Option<SavedResume>,
    /// Whether all files are complete and are being given their final names.
    pub(crate) is_publishing: bool,
}

/// Counts of a job that its report needs.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Counts {
    pub(crate) input_bytes: u64,
    pub(crate) input_bytes_done: u64,
    pub(crate) text_bytes: u64,
    pub(crate) records: u64,
    pub(crate) rejected: BTreeMap<String, u64>,
    pub(crate) special_hits: u64,
    pub(crate) warnings: Vec<String>,
}

/// [`Resume`] as it is written.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct SavedResume {
    offset: u64,
    record: u64,
    counted_from: u64,
    content_bytes: u64,
    content_xxh3_64: Vec<u64>,
}

impl From<&Resume> for SavedResume {
    fn from(resume: &Resume) -> Self {
        let Position { offset, record, counted_from } = resume.position;
        let ContentHash { bytes, xxh3_64 } = resume.content.clone();
        Self { offset, record, counted_from, content_bytes: bytes, content_xxh3_64: xxh3_64 }
    }
}

impl From<&SavedResume> for Resume {
    fn from(saved: &SavedResume) -> Self {
        let position = Position { offset: saved.offset, record: saved.record, counted_from: saved.counted_from };
        let content = ContentHash { bytes: saved.content_bytes, xxh3_64: saved.content_xxh3_64.clone() };
        Self { position, content }
    }
}

#[derive(Serialize, Deserialize)]
struct JournalFile {
    job: JobName,
    state: State,
}

/// The journal of a job in its staging folder.
pub(crate) struct Journal {
    path: PathBuf,
    job: JobName,
}

impl Journal {
    pub(crate) fn new(staging: &StagingFolder, job: JobName) -> Self {
        Self { path: staging.path().join(JOURNAL), job }
    }

    /// State of an interrupted job of this very name; `None` if there is no journal.
    pub(crate) fn load(&self) -> Result<Option<State>, BuildError> {
        let bytes = match fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(self.io("read the journal", source).into()),
        };
        let other = |difference: String| BuildError::OtherJob {
            path: self.path.parent().unwrap_or(Path::new("")).to_owned(),
            difference,
        };
        let saved: JournalFile =
            serde_json::from_slice(&bytes).map_err(|error| other(format!("its journal cannot be read ({error})")))?;
        match saved.job.difference(&self.job) {
            Some(difference) => Err(other(difference)),
            None => Ok(Some(saved.state)),
        }
    }

    /// Makes a state durable: it names only what was made durable before.
    pub(crate) fn save(&self, state: State) -> Result<(), WriteError> {
        let text = serde_json::to_vec(&JournalFile { job: self.job.clone(), state })
            .expect("a journal holds strings and numbers only");
        let fresh = self.path.with_extension("new");
        let written = File::create(&fresh).and_then(|mut file| {
            file.write_all(&text)?;
            file.sync_all()
        });
        written.map_err(|source| self.io("write the journal", source))?;
        publish_file(&fresh, &self.path)
    }

    fn io(&self, action: &'static str, source: io::Error) -> WriteError {
        WriteError::Io { path: self.path.clone(), action, source }
    }
}
