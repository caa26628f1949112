//! Threads, order and the final names.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};
use megaflow_core::TokenDtype;
use megaflow_indexed::{
    FileRecord, IndexedWriter, SIDECAR_FORMAT_VERSION, Sidecar, SourceRecord, StagedPair, StagingFolder, TokenizerFile,
    TokenizerRecord,
};
use megaflow_source::{Block, BlockReader, ContentHash, Reject, SourceError};
use megaflow_tokenize::{SpecialTokensInText, Tokenizer};
use sha2::{Digest, Sha256};

use crate::encode::{BlockEncoder, EncodedBlock};
use crate::rejects::RejectsWriter;
use crate::{BuildError, JobOptions, OnBadRecord, Progress, Report};

/// Time after which a waiting writer reports progress and asks whether to stop.
const TICK: Duration = Duration::from_millis(100);

/// A block on its way to a thread that tokenizes.
struct Work {
    place: u64,
    source: usize,
    block: Block,
}

/// What reaches the writer, in the order of `place`.
enum Event {
    Block { source: usize, block: EncodedBlock },
    EndOfSource { source: usize, content: ContentHash },
    Failed(BuildError),
}

type Placed = (u64, Event);

/// Runs a job. `progress` is called on this thread about ten times a second; `Break` stops the job.
///
/// # Errors
/// [`BuildError`]; nothing is then left under a final name, and an older result under the same names is unharmed.
pub fn preprocess(
    options: &JobOptions,
    tokenizer: &Tokenizer,
    progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
) -> Result<Report, BuildError> {
    options.check()?;
    let bytes_total = total_bytes(&options.inputs)?;
    let tokenizer_files = tokenizer_files(&options.provenance.tokenizer_files)?;
    let dtype = TokenDtype::for_vocab_size(tokenizer.vocab_size());
    let staging = StagingFolder::create(&options.output_prefix)?;
    let writers = options.json_keys.iter().map(|key| IndexedWriter::create(&staging, &options.pair_prefix(key), dtype));
    let mut output = Output {
        options,
        writers: writers.collect::<Result<_, _>>()?,
        rejects: RejectsWriter::new(&staging, &options.output_prefix),
        sources: Vec::new(),
        report: Report::default(),
        progress: Progress { bytes_total, ..Progress::default() },
    };
    run_threads(options, tokenizer, dtype, &mut output, progress)?;
    output.publish(tokenizer, &tokenizer_files)
}

/// Reader, encoders and, on this thread, the ordered writer.
fn run_threads(
    options: &JobOptions,
    tokenizer: &Tokenizer,
    dtype: TokenDtype,
    output: &mut Output<'_>,
    progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
) -> Result<(), BuildError> {
    let in_flight = 2 * options.threads + 2;
    let (permit, permits) = bounded(in_flight);
    let (work, work_queue) = bounded(in_flight);
    let (done, done_queue) = unbounded();
    for _ in 0..in_flight {
        let _ = permit.send(()); // fits: the channel has this capacity
    }
    let encoders = (0..options.threads).map(|_| BlockEncoder::new(options, tokenizer, dtype));
    let encoders = encoders.collect::<Result<Vec<_>, _>>()?;
    thread::scope(|scope| {
        let done_by_reader = done.clone();
        scope.spawn(move || read_all(&options.inputs, options.block_bytes, &permits, &work, &done_by_reader));
        for encoder in encoders {
            let (queue, done) = (work_queue.clone(), done.clone());
            scope.spawn(move || encode_all(encoder, &options.inputs, &queue, &done));
        }
        drop((work_queue, done));
        // The receivers and the permit's sender end with this call: whatever stops it stops the other threads.
        write_in_order(output, done_queue, permit, progress)
    })
}

/// Reads the inputs one after the other. Ends early when nobody listens any more.
fn read_all(
    inputs: &[PathBuf],
    block_bytes: usize,
    permits: &Receiver<()>,
    work: &Sender<Work>,
    done: &Sender<Placed>,
) {
    let mut place = 0;
    #[expect(clippy::explicit_counter_loop, reason = "it counts blocks too, not only inputs")]
    for (source, path) in inputs.iter().enumerate() {
        let mut read = || -> Result<Option<ContentHash>, SourceError> {
            let mut reader = BlockReader::open(path, block_bytes)?;
            loop {
                if permits.recv().is_err() {
                    return Ok(None);
                }
                let Some(block) = reader.next_block()? else {
                    return Ok(Some(reader.content_hash()));
                };
                if work.send(Work { place, source, block }).is_err() {
                    return Ok(None);
                }
                place += 1;
            }
        };
        let event = match read() {
            Ok(None) => return,
            Ok(Some(content)) => Event::EndOfSource { source, content },
            Err(error) => Event::Failed(error.into()),
        };
        let failed = matches!(event, Event::Failed(_));
        if done.send((place, event)).is_err() || failed {
            return;
        }
        place += 1;
    }
}

fn encode_all(mut encoder: BlockEncoder<'_>, inputs: &[PathBuf], queue: &Receiver<Work>, done: &Sender<Placed>) {
    for Work { place, source, block } in queue {
        let event = match catch_unwind(AssertUnwindSafe(|| encoder.encode(&block))) {
            Ok(block) => Event::Block { source, block },
            Err(panic) => Event::Failed(BuildError::Panicked {
                path: inputs[source].clone(),
                offset: block.offset,
                detail: panic_message(panic.as_ref()),
            }),
        };
        if done.send((place, event)).is_err() {
            return;
        }
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

fn write_in_order(
    output: &mut Output<'_>,
    done: Receiver<Placed>,
    permit: Sender<()>,
    progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
) -> Result<(), BuildError> {
    let mut waiting = BTreeMap::new();
    let mut next = 0;
    let mut last_report = std::time::Instant::now();
    loop {
        match done.recv_timeout(TICK) {
            Ok((place, event)) => {
                waiting.insert(place, event);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
        while let Some(event) = waiting.remove(&next) {
            output.take(event)?;
            next += 1;
            let _ = permit.send(()); // the reader may have ended
        }
        if last_report.elapsed() >= TICK {
            last_report = std::time::Instant::now();
            if progress(&output.progress).is_break() {
                return Err(BuildError::Interrupted);
            }
        }
    }
}

/// What a job has written so far.
struct Output<'a> {
    options: &'a JobOptions,
    writers: Vec<IndexedWriter>,
    rejects: RejectsWriter,
    sources: Vec<SourceRecord>,
    report: Report,
    progress: Progress,
}

impl Output<'_> {
    fn take(&mut self, event: Event) -> Result<(), BuildError> {
        match event {
            Event::Failed(error) => Err(error),
            Event::Block { source, block } => self.take_block(source, &block),
            Event::EndOfSource { source, content } => {
                let record = self.source(source);
                record.bytes = content.bytes;
                record.xxh3_128 = content.xxh3_128;
                self.report.input_bytes += content.bytes;
                Ok(())
            }
        }
    }

    fn take_block(&mut self, source: usize, block: &EncodedBlock) -> Result<(), BuildError> {
        for (writer, documents) in self.writers.iter_mut().zip(&block.documents) {
            writer.append(documents)?;
        }
        for reject in &block.rejects {
            self.take_reject(source, reject)?;
        }
        let record = self.source(source);
        record.num_records += block.records;
        record.num_rejected += block.rejects.len() as u64;
        record.num_documents += block.records - block.rejects.len() as u64;
        for &line in &block.lines_without_document {
            match record.lines_without_document.last_mut() {
                Some([first, count]) if *first + *count == line => *count += 1,
                _ => record.lines_without_document.push([line, 1]),
            }
        }
        self.report.records += block.records;
        self.report.special_hits += block.special_hits;
        self.progress.bytes_done += block.bytes;
        self.progress.documents = self.writers[0].counts().documents;
        self.progress.tokens = self.writers.iter().map(|writer| writer.counts().tokens).sum();
        Ok(())
    }

    fn take_reject(&mut self, source: usize, reject: &Reject) -> Result<(), BuildError> {
        let path = &self.options.inputs[source];
        let (line, offset, reason) = (reject.line, reject.offset, reject.reason.clone());
        if self.options.on_bad_record == OnBadRecord::Error {
            return Err(BuildError::BadRecord { path: path.clone(), line, offset, reason });
        }
        *self.report.rejected.entry(reason.name()).or_default() += 1;
        self.progress.rejected += 1;
        self.rejects.write(path, reject)?;
        match self.options.max_bad_records {
            Some(limit) if self.progress.rejected > limit => {
                Err(BuildError::TooManyBadRecords { path: path.clone(), line, limit, reason })
            }
            _ => Ok(()),
        }
    }

    fn source(&mut self, source: usize) -> &mut SourceRecord {
        while self.sources.len() <= source {
            let path = self.options.inputs[self.sources.len()].display().to_string();
            let first_document = self.sources.last().map_or(0, |last| last.first_document + last.num_documents);
            self.sources.push(SourceRecord {
                path,
                bytes: 0,
                xxh3_128: String::new(),
                num_records: 0,
                num_documents: 0,
                first_document,
                num_rejected: 0,
                lines_without_document: Vec::new(),
            });
        }
        &mut self.sources[source]
    }

    fn publish(mut self, tokenizer: &Tokenizer, files: &[TokenizerFile]) -> Result<Report, BuildError> {
        let documents = self.writers[0].counts().documents;
        if documents == 0 && !self.options.allow_no_documents {
            return Err(BuildError::NoDocuments {
                records: self.report.records,
                rejected: self.report.num_rejected(),
                by_reason: self.report.reasons_in_words(),
            });
        }
        let tokenizer = self.tokenizer_record(tokenizer, files);
        let mut staged = Vec::new();
        for (key, writer) in self.options.json_keys.iter().zip(self.writers) {
            let mut pair = writer.finish()?;
            pair.write_sidecar(&sidecar(self.options, key, &pair, &tokenizer, &self.sources))?;
            staged.push(pair);
        }
        self.report.rejects_path = self.rejects.publish()?;
        for pair in staged {
            let (dtype, counts) = (pair.dtype.name(), pair.counts);
            self.report.pairs.push((pair.publish()?, dtype, counts));
        }
        Ok(self.report)
    }

    fn tokenizer_record(&self, tokenizer: &Tokenizer, files: &[TokenizerFile]) -> TokenizerRecord {
        let (options, provenance) = (self.options, &self.options.provenance);
        let (eod_token, eod_id) = provenance.eod.clone().unzip();
        TokenizerRecord {
            kind: provenance.tokenizer_type.clone(),
            engine: tokenizer.engine_kind().name().to_owned(),
            files: files.to_vec(),
            fingerprint: tokenizer.fingerprint().to_owned(),
            vocab_size: tokenizer.vocab_size(),
            eod_token,
            eod_id,
            append_eod: options.append_eod.is_some(),
            add_special_tokens: options.encode.add_special_tokens,
            special_tokens_in_text: match options.encode.special_tokens_in_text {
                SpecialTokensInText::Text => "text",
                SpecialTokensInText::Encode => "encode",
                SpecialTokensInText::Error => "error",
            }
            .to_owned(),
            special_tokens_in_text_hits: self.report.special_hits,
        }
    }
}

fn sidecar(
    options: &JobOptions,
    key: &str,
    pair: &StagedPair,
    tokenizer: &TokenizerRecord,
    sources: &[SourceRecord],
) -> Sidecar {
    let (bin, idx): (FileRecord, FileRecord) = (pair.bin.clone(), pair.idx.clone());
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
        tokenizer: tokenizer.clone(),
        sources: sources.to_vec(),
        bin,
        idx,
    }
}

/// Size of all inputs; one that is missing or of another kind stops the job before any work.
fn total_bytes(inputs: &[PathBuf]) -> Result<u64, BuildError> {
    let mut total = 0;
    for path in inputs {
        let metadata = std::fs::metadata(path).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => SourceError::Missing { path: path.clone() },
            _ => SourceError::Io { path: path.clone(), offset: 0, source },
        })?;
        if metadata.is_file() {
            BlockReader::open(path, 1)?; // a pipe can be opened only once, when it is read
        }
        total += metadata.len();
    }
    Ok(total)
}

fn tokenizer_files(paths: &[PathBuf]) -> Result<Vec<TokenizerFile>, BuildError> {
    let record = |path: &PathBuf| {
        let bytes = std::fs::read(path).map_err(|source| SourceError::Io { path: path.clone(), offset: 0, source })?;
        let sha256 = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        let name = path.file_name().unwrap_or(Path::new("").as_os_str()).to_string_lossy().into_owned();
        Ok(TokenizerFile { name, sha256 })
    };
    paths.iter().map(record).collect()
}
