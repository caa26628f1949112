use std::path::PathBuf;

use megaflow_tokenize::EncodeOptions;

use crate::BuildError;

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

/// What a job is to do.
#[derive(Debug, Clone)]
pub struct JobOptions {
    /// Files of JSON lines, read in this order.
    pub inputs: Vec<PathBuf>,
    /// The pairs are named `PREFIX_KEY_document`.
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
    /// How texts are encoded.
    pub encode: EncodeOptions,
    /// Threads that tokenize.
    pub threads: usize,
    /// Bytes of input that one thread takes at a time.
    pub block_bytes: usize,
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
        if self.inputs.is_empty() {
            return fault("no input: name at least one file");
        }
        if self.json_keys.is_empty() {
            return fault("no key: --json-keys needs at least one");
        }
        if (1..self.json_keys.len()).any(|index| self.json_keys[..index].contains(&self.json_keys[index])) {
            return fault("--json-keys names a key twice; each key makes one pair");
        }
        if self.threads == 0 {
            return fault("--workers must be at least 1, got 0");
        }
        if self.output_prefix.file_name().is_none() {
            return fault("--output-prefix must end in a name, not in a folder");
        }
        Ok(())
    }

    /// Prefix of the pair of a key.
    pub(crate) fn pair_prefix(&self, key: &str) -> PathBuf {
        let mut name = self.output_prefix.as_os_str().to_owned();
        name.push(format!("_{key}_document"));
        PathBuf::from(name)
    }
}
