//! `PREFIX_text_document.json`: where a pair came from, so that a token can be traced and a mistake be noticed.

use serde::{Deserialize, Serialize};

/// Version of the sidecar's structure.
pub const SIDECAR_FORMAT_VERSION: u32 = 1;

/// What the sidecar of a pair says.
#[derive(Debug, Clone, Serialize)]
pub struct Sidecar {
    /// [`SIDECAR_FORMAT_VERSION`].
    pub format_version: u32,
    /// Version of megaflow that wrote the pair.
    pub megaflow_version: String,
    /// The command that was typed.
    pub command: Vec<String>,
    /// Key of the records that holds the text.
    pub json_key: String,
    /// numpy's name of the token type.
    pub dtype: String,
    /// Documents, empty ones included.
    pub num_documents: u64,
    /// Documents without a sequence.
    pub num_empty_documents: u64,
    /// Sequences.
    pub num_sequences: u64,
    /// Tokens, end-of-document tokens included.
    pub num_tokens: u64,
    /// What turned the text into tokens.
    pub tokenizer: TokenizerRecord,
    /// The inputs, in the order in which they were read.
    pub sources: Vec<SourceRecord>,
    /// The `.bin`.
    pub bin: FileRecord,
    /// The `.idx`.
    pub idx: FileRecord,
}

/// The tokenizer of a pair.
#[derive(Debug, Clone, Serialize)]
pub struct TokenizerRecord {
    /// Megatron's name of the kind, for example `GPT2BPETokenizer`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Code that did the work.
    pub engine: String,
    /// Its files.
    pub files: Vec<TokenizerFile>,
    /// SHA-256 over vocabulary, merges and rules.
    pub fingerprint: String,
    /// Number of ids.
    pub vocab_size: u64,
    /// The end-of-document token, if the tokenizer has one.
    pub eod_token: Option<String>,
    /// Its id.
    pub eod_id: Option<u32>,
    /// Whether it was appended to each document.
    pub append_eod: bool,
    /// Whether the tokenizer's own post-processor added its tokens.
    pub add_special_tokens: bool,
    /// `text`, `encode` or `error`.
    pub special_tokens_in_text: String,
    /// Places where text spelled a special token.
    pub special_tokens_in_text_hits: u64,
}

/// A file of a tokenizer.
#[derive(Debug, Clone, Serialize)]
pub struct TokenizerFile {
    /// Its name without folder.
    pub name: String,
    /// SHA-256 of its bytes.
    pub sha256: String,
}

/// An input, or the range of one that a shard has read.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct SourceRecord {
    /// As it was named.
    pub path: String,
    /// `jsonl`, `parquet` and so on.
    pub format: String,
    /// For a shard that read only the lines that begin in a range of bytes: the range.
    pub range: Option<[u64; 2]>,
    /// Size and hashes of what was read of it.
    pub content: FileRecord,
    /// What the hashes cover: `all`, or `last MiB` for Parquet and Arrow files, whose footer names all else.
    pub hashed: String,
    /// Lines or rows, blank ones included.
    pub num_lines: u64,
    /// Records: lines that are not blank, or rows.
    pub num_records: u64,
    /// Documents that came from it.
    pub num_documents: u64,
    /// Number of its first document in the pair.
    pub first_document: u64,
    /// Records that became no document.
    pub num_rejected: u64,
    /// Lines or rows without a document (blank or rejected) as runs of `[first, count]`, counted from 1: with it, the line of a
    /// document follows from its number.
    pub lines_without_document: Vec<[u64; 2]>,
    /// Whether the runs are all there are; a source with very many names the first ones only.
    pub lines_without_document_complete: bool,
}

/// A file of the pair.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Its size.
    pub bytes: u64,
    /// Bytes of one checksummed block.
    pub block_bytes: u64,
    /// XXH3-64 of each block.
    pub xxh3_64: Vec<String>,
}

impl Sidecar {
    /// The text of the file.
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("a sidecar holds strings and numbers only");
        text.push('\n');
        text
    }
}
