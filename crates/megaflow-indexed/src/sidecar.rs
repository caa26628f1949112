//! `PREFIX_text_document.json`: where a pair came from, so that a token can be traced and a mistake be noticed.

use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::IndexError;
use crate::prefix::with_suffix;

/// Version of the sidecar's structure.
pub const SIDECAR_FORMAT_VERSION: u32 = 1;

/// What `SourceRecord::hashed` says if all bytes that were read were hashed.
pub const HASHED_ALL: &str = "all";

/// What the sidecar of a pair says.
#[derive(Debug, Clone, Serialize, Deserialize)]
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
    /// What split the texts into sentences, a sequence each, if they were split.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sentences: Option<String>,
    /// What turned the text into tokens; `None` if nobody said so.
    pub tokenizer: Option<TokenizerRecord>,
    /// The inputs, in the order in which they were read.
    pub sources: Vec<SourceRecord>,
    /// The `.bin`.
    pub bin: FileRecord,
    /// The `.idx`.
    pub idx: FileRecord,
}

/// The tokenizer of a pair.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    /// The BOS, if the tokenizer has one.
    #[serde(default)]
    pub bos_token: Option<String>,
    /// Its id.
    #[serde(default)]
    pub bos_id: Option<u32>,
    /// Whether it was put before each document.
    #[serde(default)]
    pub add_bos: bool,
    /// The EOS, if the tokenizer has one.
    #[serde(default)]
    pub eos_token: Option<String>,
    /// Its id.
    #[serde(default)]
    pub eos_id: Option<u32>,
    /// Whether it was put behind each document, before the end-of-document token.
    #[serde(default)]
    pub add_eos: bool,
    /// Whether the tokenizer's own post-processor added its tokens.
    pub add_special_tokens: bool,
    /// `text`, `encode` or `error`.
    pub special_tokens_in_text: String,
    /// Places where text spelled a special token.
    pub special_tokens_in_text_hits: u64,
}

/// A file of a tokenizer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    /// For a shard that read only the lines that begin in a range of bytes, or a range of rows (from 0): the range.
    pub range: Option<[u64; 2]>,
    /// Whether the range ends where the input ends.
    #[serde(default)]
    pub ends_input: bool,
    /// For a partition: `[index, modulo, lines of the inputs before]`. Its lines are those whose number among all inputs, from
    /// 0, leaves `index` divided by `modulo`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every: Option<[u64; 3]>,
    /// Size and hashes of what was read of it.
    pub content: FileRecord,
    /// What the hashes cover: `all`, or `last MiB` for Parquet and Arrow files, whose footer names all else.
    pub hashed: String,
    /// Bytes of each piece, where the blocks under the hashes begin anew in several pieces: ranges that were hashed apart.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hashed_pieces: Vec<u64>,
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
    /// Lines or rows without a document (blank or rejected) as runs of `[first, count]`, counted from 1 where the range begins:
    /// with it, the line of a document follows from its number. Of a partition, only its own lines count.
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

    /// The sidecar of a pair, `None` if it has none.
    ///
    /// # Errors
    /// [`IndexError::Io`] if it cannot be read, [`IndexError::BadSidecar`] if it is no sidecar of a known version.
    pub fn read(prefix: &Path) -> Result<Option<Self>, IndexError> {
        let path = with_suffix(prefix, ".json");
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(IndexError::io(&path, "read it", error)),
        };
        let sidecar: Self = serde_json::from_slice(&bytes).map_err(|error| IndexError::BadSidecar {
            path: path.clone(),
            problem: format!("expected the JSON sidecar of a token file: {error}"),
        })?;
        if sidecar.format_version != SIDECAR_FORMAT_VERSION {
            let found = sidecar.format_version;
            let problem = format!("expected a sidecar of format_version {SIDECAR_FORMAT_VERSION}, found {found}");
            return Err(IndexError::BadSidecar { path, problem });
        }
        Ok(Some(sidecar))
    }
}

impl TokenizerRecord {
    /// The first setting that makes other tokens of the same text than `other` would: its name and both values.
    pub(crate) fn difference(&self, other: &Self) -> Option<(&'static str, String, String)> {
        let or_none = |id: Option<u32>| id.map_or("none".to_owned(), |id| id.to_string());
        let settings = |record: &Self| {
            [
                ("fingerprint", record.fingerprint.clone()),
                ("eod_id", or_none(record.eod_id)),
                ("append_eod", record.append_eod.to_string()),
                ("add_bos", record.add_bos.to_string()),
                ("bos_id", or_none(record.bos_id.filter(|_| record.add_bos))),
                ("add_eos", record.add_eos.to_string()),
                ("eos_id", or_none(record.eos_id.filter(|_| record.add_eos))),
                ("add_special_tokens", record.add_special_tokens.to_string()),
                ("special_tokens_in_text", record.special_tokens_in_text.clone()),
            ]
        };
        let both = settings(self).into_iter().zip(settings(other));
        both.filter(|(mine, its)| mine != its).map(|((name, mine), (_, its))| (name, mine, its)).next()
    }
}

impl SourceRecord {
    /// Takes in `next` if it is the range of the same file that follows this one.
    ///
    /// If each range but the last is made of whole blocks, the hashes are those of the joined range; else they begin anew in each
    /// piece. Ranges of a table have the hash of the whole file's footer in common.
    pub(crate) fn join(&mut self, next: &Self) -> bool {
        let (Some(range), Some(next_range)) = (self.range, next.range) else { return false };
        let is_same = self.path == next.path && self.format == next.format;
        if !is_same || range[1] != next_range[0] {
            return false;
        }
        let (content, more) = (&mut self.content, &next.content);
        if self.hashed != next.hashed || (content.bytes > 0 && content.block_bytes != more.block_bytes) {
            return false;
        }
        if self.hashed != HASHED_ALL {
            if content != more {
                return false; // the file changed between two shards
            }
        } else if content.bytes == 0 {
            (*content, self.hashed_pieces) = (more.clone(), next.hashed_pieces.clone());
        } else if more.bytes > 0 {
            let is_whole = content.block_bytes > 0 && content.bytes % content.block_bytes == 0;
            if !is_whole || !self.hashed_pieces.is_empty() || !next.hashed_pieces.is_empty() {
                let pieces = |known: &[u64], bytes| if known.is_empty() { vec![bytes] } else { known.to_vec() };
                let mut joined = pieces(&self.hashed_pieces, content.bytes);
                joined.extend(pieces(&next.hashed_pieces, more.bytes));
                self.hashed_pieces = joined;
            }
            content.bytes += more.bytes;
            content.xxh3_64.extend_from_slice(&more.xxh3_64);
        }
        let runs: &[_] = if self.lines_without_document_complete { &next.lines_without_document } else { &[] };
        for &[first, count] in runs {
            let first = first + self.num_lines;
            match self.lines_without_document.last_mut() {
                Some([begin, length]) if *begin + *length == first => *length += count,
                _ => self.lines_without_document.push([first, count]),
            }
        }
        self.lines_without_document_complete &= next.lines_without_document_complete;
        // All ranges of a file together are the file.
        self.ends_input = next.ends_input;
        self.range = Some([range[0], next_range[1]]).filter(|joined| joined[0] > 0 || !next.ends_input);
        self.num_lines += next.num_lines;
        self.num_records += next.num_records;
        self.num_documents += next.num_documents;
        self.num_rejected += next.num_rejected;
        true
    }
}

/// The sources of pairs that become one: each shifted by the documents before it, ranges that follow one another joined.
pub(crate) fn concatenate_sources<'a>(parts: impl Iterator<Item = &'a Sidecar>) -> Vec<SourceRecord> {
    let (mut all, mut num_documents): (Vec<SourceRecord>, u64) = (Vec::new(), 0);
    for sidecar in parts {
        for source in &sidecar.sources {
            let mut source = source.clone();
            source.first_document += num_documents;
            let is_joined = all.last_mut().is_some_and(|last| last.join(&source));
            if !is_joined {
                all.push(source);
            }
        }
        num_documents += sidecar.num_documents;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(bytes: [u64; 2], num_lines: u64, without: &[[u64; 2]], block_bytes: u64) -> SourceRecord {
        let missing: u64 = without.iter().map(|run| run[1]).sum();
        let size = bytes[1] - bytes[0];
        SourceRecord {
            path: "a.jsonl".to_owned(),
            range: Some(bytes),
            content: FileRecord { bytes: size, block_bytes, xxh3_64: vec![format!("{}", bytes[0])] },
            hashed: "all".to_owned(),
            num_lines,
            num_documents: num_lines - missing,
            lines_without_document: without.to_vec(),
            lines_without_document_complete: true,
            ..SourceRecord::default()
        }
    }

    #[test]
    fn ranges_that_follow_one_another_become_one_with_shifted_lines() {
        let mut first = range([0, 64], 5, &[[2, 1], [5, 1]], 64);
        assert!(first.join(&range([64, 100], 4, &[[1, 2], [4, 1]], 64)));
        assert_eq!((first.range, first.num_lines, first.num_documents), (Some([0, 100]), 9, 4));
        assert_eq!(first.lines_without_document, [[2, 1], [5, 3], [9, 1]]);
        assert_eq!((first.content.bytes, first.content.xxh3_64.len()), (100, 2));
        assert_eq!(first.hashed, "all");
    }

    #[test]
    fn all_ranges_of_a_file_are_the_file() {
        let mut first = range([0, 64], 5, &[], 64);
        let last = SourceRecord { ends_input: true, ..range([64, 100], 4, &[], 64) };
        assert!(first.join(&last));
        assert_eq!((first.range, first.num_lines), (None, 9));
    }

    #[test]
    fn hashes_of_ranges_that_are_no_whole_blocks_begin_anew_in_each() {
        let mut first = range([0, 60], 5, &[], 64);
        assert!(first.join(&range([60, 100], 4, &[], 64)));
        assert!(first.join(&range([100, 130], 4, &[], 64)));
        assert_eq!(first.content.xxh3_64, ["0", "60", "100"]);
        assert_eq!((first.content.bytes, first.hashed_pieces), (130, vec![60, 40, 30]));
    }

    #[test]
    fn ranges_of_a_table_share_the_hash_of_its_footer() {
        let rows = |rows: [u64; 2]| {
            let mut part = range(rows, rows[1] - rows[0], &[], 64);
            part.hashed = "last MiB".to_owned();
            part.content = FileRecord { bytes: 999, block_bytes: 64, xxh3_64: vec!["f".to_owned()] };
            part
        };
        let mut first = rows([0, 10]);
        assert!(first.join(&rows([10, 30])));
        assert_eq!((first.content.bytes, first.content.xxh3_64.len(), first.num_lines), (999, 1, 30));
        let mut other = rows([30, 40]);
        other.content.xxh3_64 = vec!["e".to_owned()];
        assert!(!first.join(&other), "a file that was changed between two shards is not one source");
    }

    #[test]
    fn behind_a_list_that_is_not_complete_no_run_is_added() {
        let mut first = range([0, 64], 5, &[[2, 1]], 64);
        first.lines_without_document_complete = false;
        assert!(first.join(&range([64, 100], 4, &[[1, 2]], 64)));
        assert_eq!((first.lines_without_document, first.lines_without_document_complete), (vec![[2, 1]], false));
    }

    #[test]
    fn a_gap_or_another_file_stays_apart() {
        let first = range([0, 64], 5, &[], 64);
        let other_file = SourceRecord { path: "b.jsonl".to_owned(), ..range([64, 100], 4, &[], 64) };
        let whole = SourceRecord { range: None, ..range([64, 100], 4, &[], 64) };
        for next in [range([65, 100], 4, &[], 64), other_file, whole] {
            assert!(!first.clone().join(&next), "{next:?}");
        }
    }
}
