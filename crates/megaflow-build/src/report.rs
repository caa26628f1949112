use std::collections::BTreeMap;
use std::path::PathBuf;

use megaflow_indexed::PairCounts;

/// How far a job is.
#[derive(Debug, Clone, Copy, Default)]
pub struct Progress {
    /// Bytes of input whose documents are written.
    pub bytes_done: u64,
    /// Bytes of input; 0 if not known.
    pub bytes_total: u64,
    /// Documents written.
    pub documents: u64,
    /// Tokens written, all keys together.
    pub tokens: u64,
    /// Bad records.
    pub rejected: u64,
}

/// What a job did.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// The pairs, in the order of the keys: prefix, token type, counts.
    pub pairs: Vec<(PathBuf, &'static str, PairCounts)>,
    /// Bytes of the inputs, packed as they are.
    pub input_bytes: u64,
    /// Bytes of text that were tokenized, in UTF-8.
    pub text_bytes: u64,
    /// Sentences about inputs that are not what their names promise.
    pub warnings: Vec<String>,
    /// Documents that an interrupted job had done before.
    pub resumed_documents: u64,
    /// Lines that are not blank.
    pub records: u64,
    /// Records that became no document, by reason.
    pub rejected: BTreeMap<String, u64>,
    /// Where the bad records were written.
    pub rejects_path: Option<PathBuf>,
    /// Places where text spelled a special token.
    pub special_hits: u64,
}

impl Report {
    /// Bad records of all reasons.
    pub fn num_rejected(&self) -> u64 {
        self.rejected.values().sum()
    }

    /// The counts by reason in words, for messages: empty without bad records.
    pub(crate) fn reasons_in_words(&self) -> String {
        if self.rejected.is_empty() {
            return String::new();
        }
        let parts: Vec<String> = self.rejected.iter().map(|(reason, count)| format!("{reason}: {count}")).collect();
        format!(" ({})", parts.join(", "))
    }
}
