//! Several pairs to one: the bytes that one job over all their inputs would have written.
//!
//! Nothing but one piece of one file is in memory at a time. The index is checked while it is read and written first, so
//! that a damaged pair is found before its tokens are copied.

use std::fs;
use std::ops::ControlFlow;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use megaflow_core::TokenDtype;

use crate::checksummed::ChecksummedFile;
use crate::dataset::IndexedDataset;
use crate::error::IndexError;
use crate::layout::Layout;
use crate::prefix::{data_path, index_path, with_suffix};
use crate::sidecar::{SIDECAR_FORMAT_VERSION, Sidecar, TokenizerRecord, concatenate_sources};
use crate::staging::{StagingFolder, WriteError};
use crate::writer::{PairCounts, StagedPair};

mod copy;
mod dtypes;

use copy::{copy_tokens, write_index};
use dtypes::common_dtype;

/// Called with the bytes written and the bytes to write; `Break` stops the work.
pub type MergeProgress<'a> = &'a mut dyn FnMut(u64, u64) -> ControlFlow<()>;

/// Why pairs could not be merged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MergeError {
    /// A pair cannot be opened, or is damaged.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// The output cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// There is nothing to merge.
    #[error("no pair to merge: name the prefixes of at least one")]
    NoPairs,
    /// One pair twice.
    #[error("{} and {} are the same pair, whose documents would be there twice; name it once", .first.display(), .second.display())]
    Repeated {
        /// As it was named first.
        first: PathBuf,
        /// As it was named again.
        second: PathBuf,
    },
    /// The output would replace an input.
    #[error("{}: the output is one of the pairs to merge; give it another prefix", .prefix.display())]
    OutputIsInput {
        /// Prefix of the output.
        prefix: PathBuf,
    },
    /// The output has no name.
    #[error("{}: expected a prefix such as folder/name for the merged pair, found a folder", .prefix.display())]
    NoName {
        /// Prefix of the output.
        prefix: PathBuf,
    },
    /// Token types differ.
    #[error(
        "{} holds {first_dtype}, {} holds {second_dtype}; widen them to {} (--widen), or leave one out",
        .first.display(), .second.display(), common_dtype(*.first_dtype, *.second_dtype)
    )]
    MixedDtypes {
        /// The first pair.
        first: PathBuf,
        /// Its type.
        first_dtype: TokenDtype,
        /// A pair of another type.
        second: PathBuf,
        /// Its type.
        second_dtype: TokenDtype,
    },
    /// Tokenizers differ.
    #[error(
        "{} and {} were not tokenized alike: {setting} is {first_value} for the one and {second_value} for the other; \
         --force merges them, without a sidecar",
        .first.display(), .second.display()
    )]
    Tokenizers {
        /// The first pair.
        first: PathBuf,
        /// A pair made otherwise.
        second: PathBuf,
        /// What differs.
        setting: &'static str,
        /// Its value for the first.
        first_value: String,
        /// Its value for the second.
        second_value: String,
    },
    /// The caller asked to stop.
    #[error("stopped; nothing was written")]
    Stopped,
}

/// How pairs are merged.
#[derive(Debug, Clone, Default)]
pub struct MergeOptions {
    /// Pairs of different token types are stored in the smallest type that holds them all, instead of being refused.
    pub widen: bool,
    /// Pairs of different tokenizers are merged without a sidecar, instead of being refused.
    pub force: bool,
    /// The command that was typed, for the sidecar.
    pub command: Vec<String>,
}

/// What was merged.
#[derive(Debug, Clone)]
pub struct MergeReport {
    /// Prefix of the merged pair.
    pub prefix: PathBuf,
    /// Type of its tokens.
    pub dtype: TokenDtype,
    /// What it holds.
    pub counts: PairCounts,
    /// Bytes of its `.bin`.
    pub bin_bytes: u64,
    /// Pairs whose tokens were widened.
    pub num_widened: usize,
    /// Why it has no sidecar; `None` if it has one.
    pub no_sidecar: Option<String>,
}

/// One pair to merge. No file stays open, so that any number of pairs will do.
struct Part {
    prefix: PathBuf,
    layout: Layout,
    bin_bytes: u64,
    num_documents: u64,
    sidecar: Option<Sidecar>,
}

impl Part {
    fn open(prefix: &Path) -> Result<Self, IndexError> {
        let dataset = IndexedDataset::open(prefix)?;
        let part = Self {
            prefix: dataset.prefix().to_owned(),
            layout: dataset.layout(),
            bin_bytes: dataset.data_bytes().len() as u64,
            num_documents: dataset.num_documents() as u64,
            sidecar: Sidecar::read(dataset.prefix())?,
        };
        if let Some(sidecar) = &part.sidecar {
            part.check_sidecar(sidecar)?;
        }
        Ok(part)
    }

    fn check_sidecar(&self, sidecar: &Sidecar) -> Result<(), IndexError> {
        let says = [
            ("documents", sidecar.num_documents, self.num_documents),
            ("sequences", sidecar.num_sequences, self.layout.num_sequences as u64),
            ("bytes of tokens", sidecar.bin.bytes, self.bin_bytes),
        ];
        match says.into_iter().find(|(_, said, found)| said != found) {
            None => Ok(()),
            Some((what, said, found)) => Err(IndexError::BadSidecar {
                path: with_suffix(&self.prefix, ".json"),
                problem: format!(
                    "it counts {said} {what}, the pair beside it has {found}; it belongs to another pair: \
                     remove it, or write the pair again"
                ),
            }),
        }
    }

    fn num_sequences(&self) -> u64 {
        self.layout.num_sequences as u64
    }

    fn num_tokens(&self) -> u64 {
        self.bin_bytes / self.layout.dtype.size_bytes() as u64
    }
}

/// Merges `pairs`, in this order, into `output.bin` and `output.idx`.
///
/// # Errors
/// [`MergeError`] if a pair is damaged, pairs do not fit together, or the output cannot be written. Nothing appears under
/// the output's name then.
pub fn merge(
    pairs: &[PathBuf],
    output: &Path,
    options: &MergeOptions,
    progress: MergeProgress<'_>,
) -> Result<MergeReport, MergeError> {
    if output.file_name().is_none() || output.as_os_str().as_encoded_bytes().ends_with(b"/") {
        return Err(MergeError::NoName { prefix: output.to_owned() });
    }
    let parts = pairs.iter().map(|prefix| Part::open(prefix)).collect::<Result<Vec<_>, _>>()?;
    check_identities(&parts, output)?;
    let dtype = choose_dtype(&parts, options.widen)?;
    let no_sidecar = check_tokenizers(&parts, options.force)?;

    let staging = StagingFolder::create(output)?;
    let staged = staging.path().join(output.file_name().unwrap_or_default());
    let bin_bytes: u64 = parts.iter().map(Part::num_tokens).sum::<u64>() * dtype.size_bytes() as u64;
    let idx_bytes: u64 = parts.iter().map(|part| 12 * part.num_sequences() + 8 * part.num_documents).sum();
    let mut meter = Meter { done: 0, total: bin_bytes + idx_bytes, progress };
    let (idx, counts) = write_index(&parts, with_suffix(&staged, ".idx"), dtype, &mut meter)?;
    let mut bin = ChecksummedFile::create(with_suffix(&staged, ".bin"))?;
    for part in &parts {
        copy_tokens(part, dtype, &mut bin, &mut meter)?;
    }
    let pair = StagedPair::new((bin.finish()?, idx), dtype, counts, staged, output.to_owned());
    if no_sidecar.is_none() {
        pair.write_sidecar(&merged_sidecar(&parts, &pair, options))?;
    }
    Ok(MergeReport {
        prefix: pair.publish()?,
        dtype,
        counts,
        bin_bytes,
        num_widened: parts.iter().filter(|part| part.layout.dtype != dtype && part.bin_bytes > 0).count(),
        no_sidecar,
    })
}

/// Counts written bytes and asks now and then whether to go on.
struct Meter<'a> {
    done: u64,
    total: u64,
    progress: MergeProgress<'a>,
}

impl Meter<'_> {
    fn add(&mut self, bytes: usize) -> Result<(), MergeError> {
        self.done += bytes as u64;
        match (self.progress)(self.done, self.total) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(MergeError::Stopped),
        }
    }
}

/// Refuses a pair that is named twice, and an output that is a pair.
fn check_identities(parts: &[Part], output: &Path) -> Result<(), MergeError> {
    if parts.is_empty() {
        return Err(MergeError::NoPairs);
    }
    let identity = |path: PathBuf| fs::metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()));
    let outputs = [identity(index_path(output)), identity(data_path(output))];
    let mut seen = std::collections::HashMap::new();
    for part in parts {
        let files = [identity(index_path(&part.prefix)), identity(data_path(&part.prefix))];
        if files.iter().flatten().any(|file| outputs.contains(&Some(*file))) {
            return Err(MergeError::OutputIsInput { prefix: output.to_owned() });
        }
        if let Some(first) = seen.insert(files[0], &part.prefix) {
            return Err(MergeError::Repeated { first: first.clone(), second: part.prefix.clone() });
        }
    }
    Ok(())
}

/// Type of the merged pair. A pair without tokens fits every type.
fn choose_dtype(parts: &[Part], widen: bool) -> Result<TokenDtype, MergeError> {
    let mut with_tokens = parts.iter().filter(|part| part.bin_bytes > 0);
    let Some(first) = with_tokens.next() else { return Ok(parts[0].layout.dtype) };
    let mut dtype = first.layout.dtype;
    for part in with_tokens {
        if part.layout.dtype != dtype && !widen {
            return Err(MergeError::MixedDtypes {
                first: first.prefix.clone(),
                first_dtype: dtype,
                second: part.prefix.clone(),
                second_dtype: part.layout.dtype,
            });
        }
        dtype = common_dtype(dtype, part.layout.dtype);
    }
    Ok(dtype)
}

/// Refuses pairs of different tokenizers; else says why the merged pair can have no sidecar, if it cannot.
fn check_tokenizers(parts: &[Part], force: bool) -> Result<Option<String>, MergeError> {
    let mut known: Option<(&Part, &TokenizerRecord)> = None;
    for part in parts {
        let Some(tokenizer) = part.sidecar.as_ref().and_then(|sidecar| sidecar.tokenizer.as_ref()) else { continue };
        let Some((first, record)) = known else {
            known = Some((part, tokenizer));
            continue;
        };
        let Some((setting, first_value, second_value)) = record.difference(tokenizer) else { continue };
        let (first, second) = (first.prefix.clone(), part.prefix.clone());
        if force {
            let words = format!("{} and {} were not tokenized alike ({setting})", first.display(), second.display());
            return Ok(Some(words));
        }
        return Err(MergeError::Tokenizers { first, second, setting, first_value, second_value });
    }
    let without = parts.iter().find(|part| part.sidecar.is_none());
    Ok(without.map(|part| format!("{} has none", part.prefix.display())))
}

fn merged_sidecar(parts: &[Part], pair: &StagedPair, options: &MergeOptions) -> Sidecar {
    let sidecars = || parts.iter().filter_map(|part| part.sidecar.as_ref());
    let tokenizers: Option<Vec<&TokenizerRecord>> = sidecars().map(|sidecar| sidecar.tokenizer.as_ref()).collect();
    let mut tokenizer = tokenizers.as_ref().and_then(|records| records.first().map(|record| (*record).clone()));
    if let (Some(merged), Some(records)) = (&mut tokenizer, &tokenizers) {
        merged.special_tokens_in_text_hits = records.iter().map(|record| record.special_tokens_in_text_hits).sum();
    }
    let mut keys: Vec<&str> = Vec::new();
    for sidecar in sidecars() {
        if !keys.contains(&sidecar.json_key.as_str()) {
            keys.push(&sidecar.json_key);
        }
    }
    Sidecar {
        format_version: SIDECAR_FORMAT_VERSION,
        megaflow_version: env!("CARGO_PKG_VERSION").to_owned(),
        command: options.command.clone(),
        json_key: keys.join(","),
        dtype: pair.dtype.name().to_owned(),
        num_documents: pair.counts.documents,
        num_empty_documents: pair.counts.empty_documents,
        num_sequences: pair.counts.sequences,
        num_tokens: pair.counts.tokens,
        sentences: sidecars().find_map(|sidecar| sidecar.sentences.clone()),
        tokenizer,
        sources: concatenate_sources(sidecars()),
        bin: pair.bin.clone(),
        idx: pair.idx.clone(),
    }
}
