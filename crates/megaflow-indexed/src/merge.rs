//! Several pairs to one: the bytes that one job over all their inputs would have written.
//!
//! Nothing but one piece of one file is in memory at a time. The index is checked while it is read and written first, so
//! that a damaged pair is found before its tokens are copied.

use std::fs::{self, File};
use std::ops::ControlFlow;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use megaflow_core::TokenDtype;

use crate::checksummed::ChecksummedFile;
use crate::dataset::IndexedDataset;
use crate::error::IndexError;
use crate::layout::{HEADER_BYTES, Layout, MAGIC, VERSION};
use crate::prefix::{data_path, index_path, with_suffix};
use crate::section::{PIECE_BYTES, ReadFile};
use crate::sidecar::{SIDECAR_FORMAT_VERSION, Sidecar, TokenizerRecord, concatenate_sources};
use crate::staging::{StagingFolder, WriteError};
use crate::widen::widen_tokens;
use crate::writer::{PairCounts, StagedPair};

/// Bytes of tokens that are hashed and copied at a time.
const COPY_BYTES: usize = 4 << 20;

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

/// Smallest and largest value of a type.
fn range_of(dtype: TokenDtype) -> (i64, i64) {
    match dtype {
        TokenDtype::U8 => (0, i64::from(u8::MAX)),
        TokenDtype::I8 => (i64::from(i8::MIN), i64::from(i8::MAX)),
        TokenDtype::U16 => (0, i64::from(u16::MAX)),
        TokenDtype::I16 => (i64::from(i16::MIN), i64::from(i16::MAX)),
        TokenDtype::I32 => (i64::from(i32::MIN), i64::from(i32::MAX)),
        TokenDtype::I64 => (i64::MIN, i64::MAX),
    }
}

/// The smallest type that holds every value of both.
fn common_dtype(first: TokenDtype, second: TokenDtype) -> TokenDtype {
    let ((low, high), (other_low, other_high)) = (range_of(first), range_of(second));
    let (low, high) = (low.min(other_low), high.max(other_high));
    let by_size = [TokenDtype::U8, TokenDtype::I8, TokenDtype::U16, TokenDtype::I16, TokenDtype::I32, TokenDtype::I64];
    let holds = |dtype: &TokenDtype| range_of(*dtype).0 <= low && high <= range_of(*dtype).1;
    by_size.into_iter().find(holds).unwrap_or(TokenDtype::I64)
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

/// Writes the `.idx` of all parts, and checks theirs on the way.
fn write_index(
    parts: &[Part],
    path: PathBuf,
    dtype: TokenDtype,
    meter: &mut Meter<'_>,
) -> Result<(crate::FileRecord, PairCounts), MergeError> {
    let mut counts = PairCounts {
        documents: parts.iter().map(|part| part.num_documents).sum(),
        sequences: parts.iter().map(Part::num_sequences).sum(),
        tokens: parts.iter().map(Part::num_tokens).sum(),
        empty_documents: 0,
    };
    let mut index = ChecksummedFile::create(path)?;
    let mut header = Vec::with_capacity(HEADER_BYTES);
    header.extend_from_slice(MAGIC);
    header.extend_from_slice(&VERSION.to_le_bytes());
    header.push(dtype.code());
    header.extend_from_slice(&counts.sequences.to_le_bytes());
    header.extend_from_slice(&(counts.documents + 1).to_le_bytes());
    index.write(&header)?;
    for part in parts {
        copy_lengths(part, &mut index, meter)?;
    }
    let mut first_byte = 0;
    for part in parts {
        copy_offsets(part, first_byte, dtype, &mut index, meter)?;
        first_byte += part.num_tokens() * dtype.size_bytes() as u64;
    }
    index.write(&0_i64.to_le_bytes())?;
    let mut first_sequence = 0;
    for part in parts {
        counts.empty_documents += copy_boundaries(part, first_sequence, &mut index, meter)?;
        first_sequence += part.num_sequences();
    }
    Ok((index.finish()?, counts))
}

fn copy_lengths(part: &Part, index: &mut ChecksummedFile, meter: &mut Meter<'_>) -> Result<(), MergeError> {
    let file = ReadFile::open(index_path(&part.prefix))?;
    let mut num_tokens = 0_u64;
    file.pieces(HEADER_BYTES, part.layout.offsets_at, PIECE_BYTES, |at, bytes| {
        for (entry, length) in bytes.chunks_exact(4).enumerate() {
            let length = i32::from_le_bytes([length[0], length[1], length[2], length[3]]);
            let Ok(tokens) = u64::try_from(length) else {
                let place = at + 4 * entry;
                let name = format!("length of sequence {}", (place - HEADER_BYTES) / 4);
                return Err(damage(file.path(), name, place, "0 or more".to_owned(), length.into()));
            };
            num_tokens += tokens;
        }
        index.write(bytes)?;
        meter.add(bytes.len())
    })?;
    let expected = num_tokens * part.layout.dtype.size_bytes() as u64;
    if expected != part.bin_bytes {
        let (path, dtype, found) = (data_path(&part.prefix), part.layout.dtype, part.bin_bytes);
        return Err(IndexError::DataSize { path, dtype, expected, found }.into());
    }
    Ok(())
}

fn copy_offsets(
    part: &Part,
    first_byte: u64,
    dtype: TokenDtype,
    index: &mut ChecksummedFile,
    meter: &mut Meter<'_>,
) -> Result<(), MergeError> {
    let file = ReadFile::open(index_path(&part.prefix))?;
    let (item_bytes, new_item_bytes) = (part.layout.dtype.size_bytes() as u64, dtype.size_bytes() as u64);
    let (mut stored, mut shifted) = (vec![0; 2 * PIECE_BYTES], Vec::with_capacity(2 * PIECE_BYTES));
    let mut num_tokens = 0_u64;
    file.pieces(HEADER_BYTES, part.layout.offsets_at, PIECE_BYTES, |at, lengths| {
        let first = (at - HEADER_BYTES) / 4;
        let stored = &mut stored[..2 * lengths.len()];
        file.read_at((part.layout.offsets_at + 8 * first) as u64, stored)?;
        shifted.clear();
        for (entry, (length, offset)) in lengths.chunks_exact(4).zip(stored.chunks_exact(8)).enumerate() {
            let offset = i64::from_le_bytes(crate::layout::array_at(offset, 0));
            if u64::try_from(offset) != Ok(num_tokens * item_bytes) {
                let sequence = first + entry;
                let (name, place) = (format!("offset of sequence {sequence}"), part.layout.offsets_at + 8 * sequence);
                let expected = format!("{}, where the sequence before it ends", num_tokens * item_bytes);
                return Err(damage(file.path(), name, place, expected, offset));
            }
            shifted.extend_from_slice(&(first_byte + num_tokens * new_item_bytes).to_le_bytes());
            // Lengths were found to be 0 or more when they were copied.
            num_tokens += u64::from(u32::from_le_bytes([length[0], length[1], length[2], length[3]]));
        }
        index.write(&shifted)?;
        meter.add(shifted.len())
    })
}

/// Returns the number of documents without a sequence.
fn copy_boundaries(
    part: &Part,
    first_sequence: u64,
    index: &mut ChecksummedFile,
    meter: &mut Meter<'_>,
) -> Result<u64, MergeError> {
    let file = ReadFile::open(index_path(&part.prefix))?;
    let (mut before, mut num_empty, mut shifted) = (0_i64, 0, Vec::with_capacity(PIECE_BYTES));
    // The first boundary is 0, as was checked on opening, and the merged index has it already.
    file.pieces(part.layout.boundaries_at + 8, part.layout.boundaries_end, PIECE_BYTES, |at, bytes| {
        shifted.clear();
        for (entry, boundary) in bytes.chunks_exact(8).enumerate() {
            let boundary = i64::from_le_bytes(crate::layout::array_at(boundary, 0));
            if boundary < before || boundary as u64 > part.num_sequences() {
                let place = at + 8 * entry;
                let name = format!("document boundary {}", (place - part.layout.boundaries_at) / 8);
                let expected = format!("from {before} to {}, the number of sequences", part.num_sequences());
                return Err(damage(file.path(), name, place, expected, boundary));
            }
            num_empty += u64::from(boundary == before);
            before = boundary;
            shifted.extend_from_slice(&(first_sequence + boundary as u64).to_le_bytes());
        }
        index.write(&shifted)?;
        meter.add(shifted.len())
    })?;
    Ok(num_empty)
}

fn damage(path: &Path, entry: String, place: usize, expected: String, found: i64) -> MergeError {
    IndexError::BadEntry { path: path.to_owned(), entry, place: place as u64, expected, found }.into()
}

fn copy_tokens(
    part: &Part,
    dtype: TokenDtype,
    bin: &mut ChecksummedFile,
    meter: &mut Meter<'_>,
) -> Result<(), MergeError> {
    let source = ReadFile::open(data_path(&part.prefix))?;
    let is_same = part.layout.dtype == dtype;
    let (mut ids, mut widened) = (Vec::new(), Vec::new());
    let mut in_kernel = true;
    source.pieces(0, part.bin_bytes as usize, COPY_BYTES, |at, bytes| {
        if !is_same {
            widen_bytes(part.layout.dtype, bytes, dtype, &mut ids, &mut widened);
            bin.write(&widened)?;
            return meter.add(widened.len());
        }
        in_kernel = in_kernel && write_from(bin, &source.file, at, bytes)?;
        if !in_kernel {
            bin.write(bytes)?;
        }
        meter.add(bytes.len())
    })
}

fn write_from(bin: &mut ChecksummedFile, source: &File, at: usize, bytes: &[u8]) -> Result<bool, MergeError> {
    Ok(bin.write_from(source, at as u64, bytes)?)
}

/// Tokens of one type as little-endian tokens of a type that holds all its values.
fn widen_bytes(from: TokenDtype, bytes: &[u8], to: TokenDtype, ids: &mut Vec<i64>, out: &mut Vec<u8>) {
    ids.resize(bytes.len() / from.size_bytes(), 0);
    widen_tokens(from, bytes, ids);
    out.clear();
    match to.size_bytes() {
        1 => out.extend(ids.iter().map(|&id| id as u8)),
        2 => out.extend(ids.iter().flat_map(|&id| (id as u16).to_le_bytes())),
        4 => out.extend(ids.iter().flat_map(|&id| (id as u32).to_le_bytes())),
        _ => out.extend(ids.iter().flat_map(|&id| id.to_le_bytes())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_common_type_holds_every_value_of_both() {
        use TokenDtype::{I8, I16, I32, I64, U8, U16};
        let all = [U8, I8, U16, I16, I32, I64];
        for first in all {
            for second in all {
                let common = common_dtype(first, second);
                for dtype in [first, second] {
                    assert!(range_of(common).0 <= range_of(dtype).0 && range_of(dtype).1 <= range_of(common).1);
                }
                assert_eq!(common, common_dtype(second, first));
            }
            assert_eq!(common_dtype(first, first), first);
        }
        assert_eq!((common_dtype(U16, I32), common_dtype(U16, I16), common_dtype(U8, I8)), (I32, I32, I16));
    }

    #[test]
    fn widening_keeps_signs_and_large_ids() {
        let (mut ids, mut out) = (Vec::new(), Vec::new());
        widen_bytes(TokenDtype::U16, &[0xff, 0xff, 1, 0], TokenDtype::I32, &mut ids, &mut out);
        assert_eq!(out, [0xff, 0xff, 0, 0, 1, 0, 0, 0]);
        widen_bytes(TokenDtype::I8, &[0xff], TokenDtype::I16, &mut ids, &mut out);
        assert_eq!(out, [0xff, 0xff]);
    }
}
