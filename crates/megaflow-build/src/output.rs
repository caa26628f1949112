//! What a job has written so far: pairs, rejects, counts, and the journal that says how much of it is durable.

use std::path::{Path, PathBuf};
use std::time::Instant;

use megaflow_core::TokenDtype;
use megaflow_indexed::{
    FileRecord, HASHED_ALL, IndexedWriter, SIDECAR_FORMAT_VERSION, Sidecar, SourceRecord, StagedPair, StagingFolder,
    TokenizerFile, TokenizerRecord, publish_pairs, resume_publication,
};
use megaflow_source::{ContentHash, Format, HASH_BLOCK_BYTES, Reject, Resume};
use megaflow_tokenize::{DocumentEnd, SpecialTokensInText, Tokenizer};

use crate::encode::EncodedBlock;
use crate::journal::{Journal, SavedResume, State};
use crate::rejects::RejectsWriter;
use crate::{BuildError, JobInput, JobOptions, OnBadRecord, Progress, Report};

/// Runs of lines without a document that a sidecar names; behind them it says that the list is not complete.
const MAX_RUNS: usize = 1 << 16;

/// How the lines or rows of a source are numbered in its runs.
struct Numbering {
    /// Rows of the file before the range.
    rows_before: u64,
    /// From one line of a partition to the next.
    step: u64,
}

impl Numbering {
    fn new(record: &SourceRecord, input: &JobInput) -> Self {
        let has_rows = Format::from_name(&record.format).is_some_and(Format::has_rows);
        let rows_before = input.range.as_ref().filter(|_| has_rows).map_or(0, |range| range.start);
        Self { rows_before, step: record.every.map_or(1, |[_, modulo, _]| modulo) }
    }
}

/// The files of a job under their staging names.
pub(crate) struct Output<'a> {
    options: &'a JobOptions,
    dtype: TokenDtype,
    writers: Vec<IndexedWriter>,
    rejects: RejectsWriter,
    journal: Option<Journal>,
    last_saved: Instant,
    /// What was counted; `pairs` and `rejects_bytes` are filled in when it is saved.
    state: State,
    resumed_documents: u64,
    bytes_total: u64,
}

impl<'a> Output<'a> {
    /// Starts the files, or goes on with those of a saved state.
    pub(crate) fn new(
        options: &'a JobOptions,
        dtype: TokenDtype,
        staging: &StagingFolder,
        journal: Option<Journal>,
        saved: Option<State>,
        bytes_total: u64,
    ) -> Result<Self, BuildError> {
        let state = saved.unwrap_or_default();
        let open = |(index, key): (usize, &String)| {
            let prefix = options.pair_prefix(key);
            match state.pairs.get(index) {
                Some(pair) => IndexedWriter::resume(staging, &prefix, dtype, pair),
                None => IndexedWriter::create(staging, &prefix, dtype),
            }
        };
        let writers = options.json_keys.iter().enumerate().map(open).collect::<Result<Vec<_>, _>>()?;
        let rejects = RejectsWriter::new(staging, &options.output_prefix, state.rejects_bytes)?;
        let resumed_documents = writers[0].counts().documents;
        let last_saved = Instant::now();
        Ok(Self { options, dtype, writers, rejects, journal, last_saved, state, resumed_documents, bytes_total })
    }

    /// The first input that is not done, and where to go on in it.
    pub(crate) fn start(&self) -> (usize, Option<Resume>) {
        (self.state.sources_done, self.state.resume.as_ref().map(Resume::from))
    }

    /// Lines or rows of the inputs that are done.
    pub(crate) fn lines_done(&self) -> u64 {
        self.state.sources[..self.state.sources_done].iter().map(|source| source.num_lines).sum()
    }

    pub(crate) fn progress(&self) -> Progress {
        // What was read ahead before an interruption is read and counted again.
        let limit = if self.bytes_total == 0 { u64::MAX } else { self.bytes_total };
        Progress {
            bytes_done: self.state.counts.input_bytes_done.min(limit),
            bytes_total: self.bytes_total,
            documents: self.writers[0].counts().documents,
            tokens: self.writers.iter().map(|writer| writer.counts().tokens).sum(),
            rejected: self.state.counts.rejected.values().sum(),
        }
    }

    /// An input was opened.
    pub(crate) fn begin_source(&mut self, source: usize, format: Format, warning: Option<String>, lines_before: u64) {
        if self.state.sources.len() > source {
            return; // begun by the job that was interrupted
        }
        let input = &self.options.inputs[source];
        let first_document = self.state.sources.last().map_or(0, |last| last.first_document + last.num_documents);
        let is_footer = matches!(format, Format::Parquet | Format::ArrowFile);
        self.state.sources.push(SourceRecord {
            path: input.source.name().display().to_string(),
            format: format.name().to_owned(),
            range: input.range.as_ref().map(|range| [range.start, range.end]),
            ends_input: input.range.as_ref().is_none_or(|range| range.end == u64::MAX),
            every: self.options.every.map(|(index, modulo)| [index, modulo, lines_before]),
            hashed: if is_footer { "last MiB" } else { HASHED_ALL }.to_owned(),
            first_document,
            lines_without_document_complete: true,
            ..SourceRecord::default()
        });
        self.state.counts.warnings.extend(warning);
    }

    /// An input was read to its end, which is at byte or row `ends_at`.
    pub(crate) fn end_source(&mut self, source: usize, content: &ContentHash, num_lines: u64, ends_at: u64) {
        let record = &mut self.state.sources[source];
        if let (Some(range), true) = (&mut record.range, record.ends_input) {
            range[1] = ends_at;
        }
        record.content = FileRecord {
            bytes: content.bytes,
            block_bytes: HASH_BLOCK_BYTES,
            xxh3_64: content.xxh3_64.iter().map(|hash| format!("{hash:016x}")).collect(),
        };
        record.num_lines = num_lines;
        self.state.counts.input_bytes += content.bytes;
        self.state.sources_done = source + 1;
        self.state.resume = None;
    }

    /// A block's documents, in input order; `behind` is the place where the next block begins.
    pub(crate) fn take_block(
        &mut self,
        source: usize,
        block: &EncodedBlock,
        behind: &Resume,
    ) -> Result<(), BuildError> {
        for (writer, documents) in self.writers.iter_mut().zip(&block.documents) {
            writer.append(documents)?;
        }
        for reject in &block.rejects {
            self.take_reject(source, reject)?;
        }
        let record = &mut self.state.sources[source];
        let own = Numbering::new(record, &self.options.inputs[source]);
        record.num_records += block.records;
        record.num_rejected += block.rejects.len() as u64;
        record.num_documents += block.records - block.rejects.len() as u64;
        for &line in &block.lines_without_document {
            let runs = &mut record.lines_without_document;
            let is_full = runs.len() >= MAX_RUNS;
            let line = line - own.rows_before;
            match runs.last_mut() {
                Some([first, count]) if *first + *count * own.step == line => *count += 1,
                _ if is_full => record.lines_without_document_complete = false,
                _ => runs.push([line, 1]),
            }
        }
        self.state.counts.records += block.records;
        self.state.counts.text_bytes += block.text_bytes;
        self.state.counts.special_hits += block.special_hits;
        self.state.counts.input_bytes_done += block.input_bytes;
        self.state.resume = Some(SavedResume::from(behind));
        if self.last_saved.elapsed() >= self.options.journal_every {
            self.save()?;
        }
        Ok(())
    }

    fn take_reject(&mut self, source: usize, reject: &Reject) -> Result<(), BuildError> {
        let path = self.options.inputs[source].source.name();
        let (place, reason) = (reject.place, reject.reason.clone());
        if self.options.on_bad_record == OnBadRecord::Error {
            return Err(BuildError::BadRecord { path: path.to_owned(), place, reason });
        }
        *self.state.counts.rejected.entry(reason.name().to_owned()).or_default() += 1;
        self.rejects.write(path, reject)?;
        let rejected: u64 = self.state.counts.rejected.values().sum();
        match self.options.max_bad_records {
            Some(limit) if rejected > limit => {
                Err(BuildError::TooManyBadRecords { path: path.to_owned(), place, limit, reason })
            }
            _ => Ok(()),
        }
    }

    /// Makes everything written so far durable and says so in the journal.
    pub(crate) fn save(&mut self) -> Result<(), BuildError> {
        if let Some(journal) = &self.journal {
            self.state.pairs = self.writers.iter_mut().map(IndexedWriter::checkpoint).collect::<Result<_, _>>()?;
            self.state.rejects_bytes = self.rejects.checkpoint()?;
            journal.save(self.state.clone())?;
        }
        self.last_saved = Instant::now();
        Ok(())
    }

    /// Completes the pairs and gives all files their final names.
    pub(crate) fn publish(mut self, tokenizer: &Tokenizer, files: &[TokenizerFile]) -> Result<Report, BuildError> {
        let documents = self.writers[0].counts().documents;
        if documents == 0 && !self.options.allow_no_documents {
            let report = report_of(&self.state, 0);
            return Err(BuildError::NoDocuments {
                records: report.records,
                rejected: report.num_rejected(),
                by_reason: report.reasons_in_words(),
            });
        }
        self.save()?;
        let tokenizer = tokenizer_record(self.options, &self.state, tokenizer, files);
        let mut staged: Vec<StagedPair> = Vec::new();
        for (key, writer) in self.options.json_keys.iter().zip(self.writers) {
            let pair = writer.finish()?;
            pair.write_sidecar(&sidecar(self.options, key, &pair, &tokenizer, &self.state.sources))?;
            staged.push(pair);
        }
        self.state.is_publishing = true;
        if let Some(journal) = &self.journal {
            journal.save(self.state.clone())?;
        }
        let mut report = report_of(&self.state, self.resumed_documents);
        report.rejects_path = self.rejects.publish()?;
        report.pairs = staged.iter().map(|pair| (pair.prefix().to_owned(), self.dtype.name(), pair.counts)).collect();
        publish_pairs(staged)?;
        Ok(report)
    }
}

/// Goes on with a job that was killed while it gave its files their final names.
pub(crate) fn finish_publication(
    options: &JobOptions,
    dtype: TokenDtype,
    staging: &StagingFolder,
    state: &State,
) -> Result<Report, BuildError> {
    let mut report = report_of(state, state.pairs.first().map_or(0, |pair| pair.counts.documents));
    report.rejects_path = RejectsWriter::published(staging, &options.output_prefix, state.rejects_bytes)?;
    let prefixes: Vec<PathBuf> = options.json_keys.iter().map(|key| options.pair_prefix(key)).collect();
    resume_publication(staging, &prefixes)?;
    for (prefix, pair) in prefixes.into_iter().zip(&state.pairs) {
        report.pairs.push((prefix, dtype.name(), pair.counts));
    }
    Ok(report)
}

fn report_of(state: &State, resumed_documents: u64) -> Report {
    let counts = &state.counts;
    Report {
        pairs: Vec::new(),
        input_bytes: counts.input_bytes,
        text_bytes: counts.text_bytes,
        warnings: counts.warnings.clone(),
        resumed_documents,
        records: counts.records,
        rejected: counts.rejected.clone(),
        rejects_path: None,
        special_hits: counts.special_hits,
    }
}

fn tokenizer_record(
    options: &JobOptions,
    state: &State,
    tokenizer: &Tokenizer,
    files: &[TokenizerFile],
) -> TokenizerRecord {
    let (eod_token, eod_id) = options.provenance.eod.clone().unzip();
    // One that is declared and does not exist has stopped the job if it was asked for; else there is none.
    let end = |end| tokenizer.end_token(end).ok().flatten().cloned().unzip();
    let ((bos_token, bos_id), (eos_token, eos_id)) = (end(DocumentEnd::Bos), end(DocumentEnd::Eos));
    TokenizerRecord {
        kind: options.provenance.tokenizer_type.clone(),
        engine: tokenizer.engine_kind().name().to_owned(),
        files: files.to_vec(),
        fingerprint: tokenizer.fingerprint().to_owned(),
        vocab_size: tokenizer.vocab_size(),
        eod_token,
        eod_id,
        append_eod: options.append_eod.is_some(),
        bos_token,
        bos_id,
        add_bos: options.encode.add_bos,
        eos_token,
        eos_id,
        add_eos: options.encode.add_eos,
        add_special_tokens: options.encode.add_special_tokens,
        special_tokens_in_text: match options.encode.special_tokens_in_text {
            SpecialTokensInText::Text => "text",
            SpecialTokensInText::Encode => "encode",
            SpecialTokensInText::Error => "error",
        }
        .to_owned(),
        special_tokens_in_text_hits: state.counts.special_hits,
    }
}

fn sidecar(
    options: &JobOptions,
    key: &str,
    pair: &StagedPair,
    tokenizer: &TokenizerRecord,
    sources: &[SourceRecord],
) -> Sidecar {
    Sidecar {
        format_version: SIDECAR_FORMAT_VERSION,
        megaflow_version: env!("CARGO_PKG_VERSION").to_owned(),
        command: options.provenance.command.clone(),
        json_key: key.to_owned(),
        dtype: pair.dtype.name().to_owned(),
        num_documents: pair.counts.documents,
        num_empty_documents: pair.counts.empty_documents,
        num_sequences: pair.counts.sequences,
        num_tokens: pair.counts.tokens,
        sentences: options.sentences.as_ref().map(|split| split.name()),
        tokenizer: Some(tokenizer.clone()),
        sources: sources.to_vec(),
        bin: pair.bin.clone(),
        idx: pair.idx.clone(),
    }
}

/// What the sidecar says of the tokenizer's files.
pub(crate) fn tokenizer_files(paths: &[PathBuf]) -> Result<Vec<TokenizerFile>, BuildError> {
    use megaflow_source::SourceError;
    use sha2::{Digest, Sha256};

    let record = |path: &PathBuf| {
        let bytes = std::fs::read(path).map_err(|source| SourceError::Io { path: path.clone(), offset: 0, source })?;
        let sha256 = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        let name = path.file_name().unwrap_or(Path::new("").as_os_str()).to_string_lossy().into_owned();
        Ok(TokenizerFile { name, sha256 })
    };
    paths.iter().map(record).collect()
}
