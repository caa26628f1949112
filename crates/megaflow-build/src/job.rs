//! Threads and order.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, select, unbounded};
use megaflow_core::TokenDtype;
use megaflow_indexed::{JOURNAL, StagingFolder};
use megaflow_source::{Block, ContentHash, Format, ParseOptions, ReadOptions, Resume, SourceError, SourceReader};
use megaflow_tokenize::Tokenizer;

use crate::encode::{BlockEncoder, EncodedBlock};
use crate::journal::{JobName, Journal};
use crate::long_text::{Part, PartQueue};
use crate::output::{Output, finish_publication, tokenizer_files};
use crate::{BuildError, JobInput, JobOptions, Progress, Report};

/// Time after which a waiting writer reports progress and asks whether to stop.
const TICK: Duration = Duration::from_millis(100);

/// A block on its way to a thread that tokenizes.
struct Work {
    place: u64,
    source: usize,
    block: Block,
    /// Where the next block begins.
    behind: Resume,
    /// Lines of the inputs before this one.
    lines_before: u64,
}

/// What reaches the writer, in the order of `place`.
enum Event {
    BeginSource { source: usize, format: Format, warning: Option<String>, lines_before: u64 },
    Block { source: usize, block: EncodedBlock, behind: Resume },
    EndSource { source: usize, content: ContentHash, num_lines: u64, ends_at: u64 },
    Failed(BuildError),
}

type Placed = (u64, Event);

/// Runs a job. `progress` is called on this thread at the start, about ten times a second, and when all is read; `Break` stops
/// the job.
///
/// # Errors
/// [`BuildError`]; nothing is then left under a final name, and an older result under the same names is unharmed. If the
/// cause lay outside of data and settings, what is done stays in the staging folder, and the same job goes on with it.
pub fn preprocess(
    options: &JobOptions,
    tokenizer: &Tokenizer,
    progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
) -> Result<Report, BuildError> {
    options.check()?;
    tokenizer.check_documents(options.encode, options.append_eod)?;
    let bytes_total = total_bytes(&options.inputs)?;
    let files = tokenizer_files(&options.provenance.tokenizer_files)?;
    let dtype = TokenDtype::for_vocab_size(tokenizer.vocab_size());
    let is_repeatable = options.inputs.iter().all(|input| input.source.is_repeatable());
    let mut staging = StagingFolder::open(&options.output_prefix)?;
    staging.set_keep(is_repeatable);
    let mut job = || -> Result<Report, BuildError> {
        let name = if is_repeatable { Some(JobName::new(options, tokenizer)?) } else { None };
        let journal = name.map(|name| Journal::new(&staging, name));
        let saved = match &journal {
            Some(journal) if !options.restart => journal.load()?,
            _ => None,
        };
        if let Some(state) = saved.as_ref().filter(|state| state.is_publishing) {
            return finish_publication(options, dtype, &staging, state);
        }
        if saved.is_none() {
            staging.clear()?;
        }
        let mut output = Output::new(options, dtype, &staging, journal, saved, bytes_total)?;
        let ran = run_threads(options, tokenizer, dtype, &mut output, progress);
        if let Err(error) = ran {
            if error.is_between_blocks() {
                // The cause may well keep this from being saved; the last saved state then counts.
                let _ = output.save();
            }
            return Err(error);
        }
        output.publish(tokenizer, &files)
    };
    let result = job();
    let has_journal = staging.path().join(JOURNAL).exists(); // without one there is nothing to go on with
    let keep = is_repeatable && has_journal && result.as_ref().is_err_and(BuildError::is_resumable);
    staging.set_keep(keep);
    result
}

/// Reader, encoders and, on this thread, the ordered writer.
fn run_threads(
    options: &JobOptions,
    tokenizer: &Tokenizer,
    dtype: TokenDtype,
    output: &mut Output<'_>,
    progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
) -> Result<(), BuildError> {
    // More threads than blocks would only hold memory. Text may be far larger than the file that holds it.
    let blocks = match output.progress().bytes_total {
        0 => usize::MAX,
        bytes => (bytes / options.block_bytes.max(1) as u64).saturating_mul(32).saturating_add(1) as usize,
    };
    let threads = options.threads.min(blocks);
    let in_flight = 2 * threads + 2;
    let (permit, permits) = bounded(in_flight);
    let (work, work_queue) = bounded(in_flight);
    let (done, done_queue) = unbounded();
    for _ in 0..in_flight {
        let _ = permit.send(()); // fits: the channel has this capacity
    }
    let parse = ParseOptions::new(&options.json_keys, options.replace_invalid_utf8);
    let parts = PartQueue::new(threads);
    let encoders = (0..threads).map(|_| BlockEncoder::new(options, &parse, tokenizer, dtype, parts.clone()));
    let encoders = encoders.collect::<Result<Vec<_>, _>>()?;
    let part_queue = parts.parts();
    drop(parts); // it ends when no thread posts any more
    let start = output.start();
    let lines_before = output.lines_done();
    thread::scope(|scope| {
        let reader = Reader { options, permits, work, done: done.clone(), place: 0, lines_before };
        scope.spawn(move || reader.read_all(start));
        for encoder in encoders {
            let (queue, parts, done) = (work_queue.clone(), part_queue.clone(), done.clone());
            scope.spawn(move || encode_all(encoder, &options.inputs, &queue, &parts, &done));
        }
        drop((work_queue, part_queue, done));
        // The receiver and the permit's sender end with this call: whatever stops it stops the other threads.
        write_in_order(output, done_queue, permit, progress)
    })
}

/// The thread that reads the inputs one after the other. It ends early when nobody listens any more.
struct Reader<'a> {
    options: &'a JobOptions,
    permits: Receiver<()>,
    work: Sender<Work>,
    done: Sender<Placed>,
    place: u64,
    lines_before: u64,
}

/// Nobody listens any more.
struct Stopped;

impl Reader<'_> {
    fn read_all(mut self, (first, mut resume): (usize, Option<Resume>)) {
        for source in first..self.options.inputs.len() {
            match self.read_source(source, resume.take()) {
                Ok(Ok(())) => {}
                Ok(Err(Stopped)) => return,
                Err(error) => {
                    let _ = self.tell(Event::Failed(error.into()));
                    return;
                }
            }
        }
    }

    fn read_source(&mut self, source: usize, resume: Option<Resume>) -> Result<Result<(), Stopped>, SourceError> {
        let options = ReadOptions {
            keys: Arc::from(self.options.json_keys.clone()),
            format: self.options.format,
            block_bytes: self.options.block_bytes,
        };
        let JobInput { source: input, range } = &self.options.inputs[source];
        let range = range.clone().unwrap_or(0..u64::MAX);
        let range_start = range.start;
        let mut reader = SourceReader::open_range(input, &options, resume.as_ref(), range)?;
        let warning = reader.warning().map(str::to_owned);
        let lines_before = self.lines_before;
        if self.tell(Event::BeginSource { source, format: reader.format(), warning, lines_before }).is_err() {
            return Ok(Err(Stopped));
        }
        loop {
            if self.permits.recv().is_err() {
                return Ok(Err(Stopped));
            }
            let Some(block) = reader.next_block()? else { break };
            let behind = Resume { position: reader.position(), content: reader.content() };
            let work = Work { place: self.place, source, block, behind, lines_before: self.lines_before };
            if self.work.send(work).is_err() {
                return Ok(Err(Stopped));
            }
            self.place += 1;
        }
        let (position, has_rows) = (reader.position(), reader.format().has_rows());
        let ends_at = range_start.max(if has_rows { position.record - 1 } else { position.offset });
        let num_lines = (position.record - 1).saturating_sub(if has_rows { range_start } else { 0 });
        self.lines_before += num_lines;
        Ok(self.tell(Event::EndSource { source, content: reader.content(), num_lines, ends_at }))
    }

    fn tell(&mut self, event: Event) -> Result<(), Stopped> {
        let sent = self.done.send((self.place, event));
        self.place += 1;
        sent.map_err(|_| Stopped)
    }
}

/// Encodes blocks while there are any, and parts of the long texts of others.
fn encode_all(
    mut encoder: BlockEncoder<'_>,
    inputs: &[JobInput],
    queue: &Receiver<Work>,
    parts: &Receiver<Part>,
    done: &Sender<Placed>,
) {
    loop {
        let work = select! {
            recv(queue) -> work => work,
            recv(parts) -> part => {
                part.into_iter().for_each(|part| encoder.encode_part(part));
                continue;
            }
        };
        let Ok(Work { place, source, block, behind, lines_before }) = work else { break };
        let event = match catch_unwind(AssertUnwindSafe(|| encoder.encode(&block, lines_before))) {
            Ok(Ok(block)) => Event::Block { source, block, behind },
            Ok(Err(error)) => Event::Failed(error),
            Err(panic) => Event::Failed(BuildError::Panicked {
                path: PathBuf::from(inputs[source].source.name()),
                record: block.position.record,
                detail: panic_message(panic.as_ref()),
            }),
        };
        if done.send((place, event)).is_err() {
            return;
        }
    }
    encoder.end_blocks();
    parts.iter().for_each(|part| encoder.encode_part(part));
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
    if progress(&output.progress()).is_break() {
        return Err(BuildError::Interrupted);
    }
    let mut waiting = BTreeMap::new();
    let mut next = 0;
    let mut last_report = Instant::now();
    loop {
        match done.recv_timeout(TICK) {
            Ok((place, event)) => {
                waiting.insert(place, event);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                let _ = progress(&output.progress()); // all is done: too late to stop
                return Ok(());
            }
        }
        while let Some(event) = waiting.remove(&next) {
            next += 1;
            let frees_permit = matches!(event, Event::Block { .. } | Event::EndSource { .. });
            match event {
                Event::BeginSource { source, format, warning, lines_before } => {
                    output.begin_source(source, format, warning, lines_before);
                }
                Event::Block { source, block, behind } => output.take_block(source, &block, &behind)?,
                Event::EndSource { source, content, num_lines, ends_at } => {
                    output.end_source(source, &content, num_lines, ends_at);
                }
                Event::Failed(error) => return Err(error),
            }
            if frees_permit {
                let _ = permit.send(()); // the reader may have ended
            }
        }
        if last_report.elapsed() >= TICK {
            last_report = Instant::now();
            if progress(&output.progress()).is_break() {
                return Err(BuildError::Interrupted);
            }
        }
    }
}

/// Size of all inputs, 0 if one is not known; one that is missing stops the job before any work.
fn total_bytes(inputs: &[JobInput]) -> Result<u64, BuildError> {
    let mut total = Some(0);
    for input in inputs {
        let size = input.source.size_bytes()?;
        // A range of rows says nothing of bytes: progress then has no end.
        let size = size.filter(|_| input.range.is_none());
        total = total.zip(size).map(|(total, size)| total + size);
    }
    Ok(total.unwrap_or(0))
}
