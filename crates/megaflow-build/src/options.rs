use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use megaflow_source::{Format, Source};
use megaflow_tokenize::EncodeOptions;

use crate::BuildError;

/// Threads of one job: each holds some megabytes.
pub const MAX_THREADS: usize = 1024;

/// What an empty document becomes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum EmptyDocuments {
    /// A boundary without a sequence, as in Megatron's `preprocess_data.py`.
    #[default]
    Boundary,
    /// A sequence of just the end-of-document token, as in Megatron's `preprocess_data_fast.py`.
    Eod,
}

/// What a record that is not a document does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnBadRecord {
    /// Stops the job.
    #[default]
    Error,
    /// Is written to `PREFIX.rejects.jsonl` and counted.
    Skip,
}

/// An input, or the range of one.
#[derive(Clone)]
pub struct JobInput {
    /// The input.
    pub source: Source,
    /// For a shard: only the lines that begin in these bytes, or these rows of a Parquet file.
    pub range: Option<Range<u64>>,
}

/// Cuts a text into sentences, each a sequence of its own.
pub trait SplitSentences: Send + Sync {
    /// What it is, with everything that decides where it cuts.
    fn name(&self) -> String;

    /// The sentences of a text, in order. Called from several threads at once.
    ///
    /// # Errors
    /// Why it cannot go on, in words: that stops the job.
    fn split(&self, text: &str) -> Result<Vec<String>, String>;
}

/// What a job is to do.
#[derive(Clone)]
pub struct JobOptions {
    /// Inputs, read in this order.
    pub inputs: Vec<JobInput>,
    /// What the inputs are; `None` lets the first bytes of each decide.
    pub format: Option<Format>,
    /// Whether bytes that are not UTF-8 become U+FFFD instead of making a record bad.
    pub replace_invalid_utf8: bool,
    /// Only every `modulo`-th line of all inputs together, beginning with number `index`: a partition as Megatron cuts them.
    pub every: Option<(u64, u64)>,
    /// Cuts each text into sentences; a list of strings is taken as it is.
    pub sentences: Option<Arc<dyn SplitSentences>>,
    /// The pairs are named `PREFIX_KEY_document`, or `PREFIX_KEY_sentence` where texts are cut.
    pub output_prefix: PathBuf,
    /// Keys of the records that hold text; a pair each.
    pub json_keys: Vec<String>,
    /// Id appended to each document that is not empty.
    pub append_eod: Option<u32>,
    /// What an empty document becomes.
    pub empty_documents: EmptyDocuments,
    /// What a bad record does.
    pub on_bad_record: OnBadRecord,
    /// Bad records after which `Skip` stops the job all the same.
    pub max_bad_records: Option<u64>,
    /// How texts are encoded. A BOS stands before the first sequence of a document that is not empty, an EOS behind the last,
    /// before the end-of-document token.
    pub encode: EncodeOptions,
    /// Threads that tokenize.
    pub threads: usize,
    /// Bytes of input that one thread takes at a time.
    pub block_bytes: usize,
    /// Whether what an interrupted job of the same output has done is thrown away.
    pub restart: bool,
    /// Time between two journal entries.
    pub journal_every: Duration,
    /// Whether an input without documents gives an empty pair, as in Megatron, and not an error.
    pub allow_no_documents: bool,
    /// For the sidecar.
    pub provenance: Provenance,
}

/// What the sidecar says of the job and its tokenizer.
#[derive(Debug, Clone, Default)]
pub struct Provenance {
    /// The command that was typed.
    pub command: Vec<String>,
    /// Megatron's name of the tokenizer's kind.
    pub tokenizer_type: String,
    /// The tokenizer's files.
    pub tokenizer_files: Vec<PathBuf>,
    /// Text and id of the end-of-document token, appended or not.
    pub eod: Option<(String, u32)>,
}

impl JobOptions {
    /// Options that make no sense together.
    pub(crate) fn check(&self) -> Result<(), BuildError> {
        let fault = |text: &str| Err(BuildError::Options(text.to_owned()));
        if self.inputs.is_empty() && !self.allow_no_documents {
            return fault("no input: name at least one file");
        }
        if self.every.is_some_and(|(index, modulo)| index >= modulo) {
            return fault("a partition's number must be below the number of partitions");
        }
        if self.json_keys.is_empty() {
            return fault("no key: --json-keys needs at least one");
        }
        if (1..self.json_keys.len()).any(|index| self.json_keys[..index].contains(&self.json_keys[index])) {
            return fault("--json-keys names a key twice; each key makes one pair");
        }
        if let Some(key) = self.json_keys.iter().find(|key| key.is_empty() || key.contains(['/', '\0'])) {
            return fault(&format!(
                "--json-keys {key:?}: a key names a file, so it must not be empty nor hold '/' or NUL"
            ));
        }
        for key in &self.json_keys {
            for suffix in [".bin", ".idx", ".json"] {
                let mut target = self.pair_prefix(key).into_os_string();
                target.push(suffix);
                if std::path::Path::new(&target).is_dir() {
                    let target = std::path::Path::new(&target).display();
                    return fault(&format!(
                        "{target}: is a folder where a file is to be written; remove it, or choose another --output-prefix"
                    ));
                }
            }
        }
        if self.threads == 0 || self.threads > MAX_THREADS {
            return fault(&format!("--workers must be from 1 to {MAX_THREADS}, got {}", self.threads));
        }
        if self.output_prefix.file_name().is_none() {
            return fault("--output-prefix must end in a name, not in a folder");
        }
        Ok(())
    }

    /// Prefix of the pair of a key.
    pub(crate) fn pair_prefix(&self, key: &str) -> PathBuf {
        let mut name = self.output_prefix.as_os_str().to_owned();
        let level = if self.sentences.is_some() { "sentence" } else { "document" };
        name.push(format!("_{key}_{level}"));
        PathBuf::from(name)
    }
}
