//! Merging, checking and writing `.bin/.idx` pairs.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use megaflow_core::TokenDtype;
use megaflow_indexed::{
    EncodedDocuments, FileRecord, IndexedWriter, MergeError, MergeOptions, StagedPair, StagingFolder, VerifyError,
    VerifyOptions, WriteError,
};
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{IntoPyErr, error, write_class};
use crate::gil::WithoutGil;
use crate::parking::parked;

/// Time between two calls of a progress function.
const TELL_EVERY: Duration = Duration::from_millis(100);

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PairWriter>()?;
    module.add_function(wrap_pyfunction!(merge, module)?)?;
    module.add_function(wrap_pyfunction!(verify, module)?)?;
    module.add_function(wrap_pyfunction!(checksum_file, module)?)
}

impl IntoPyErr for WriteError {
    fn into_py_err(self) -> PyErr {
        error(write_class(&self), self.to_string())
    }
}

impl IntoPyErr for MergeError {
    fn into_py_err(self) -> PyErr {
        let class = match self {
            Self::Index(index) => return index.into_py_err(),
            Self::Write(write) => return write.into_py_err(),
            Self::MixedDtypes { .. } => "DataFormatError",
            Self::Tokenizers { .. } => "TokenizerError",
            _ => "ConfigError",
        };
        error(class, self.to_string())
    }
}

impl IntoPyErr for VerifyError {
    fn into_py_err(self) -> PyErr {
        match self {
            Self::Index(index) => index.into_py_err(),
            _ => error("MegaflowError", self.to_string()),
        }
    }
}

/// Calls `progress(done, total)` about ten times a second; what it raises stops the work.
struct Teller {
    progress: Py<PyAny>,
    last: Option<Instant>,
    raised: Option<PyErr>,
}

impl Teller {
    fn new(progress: Py<PyAny>) -> Self {
        Self { progress, last: None, raised: None }
    }

    fn tell(&mut self, done: u64, total: u64) -> ControlFlow<()> {
        if self.last.is_some_and(|last| last.elapsed() < TELL_EVERY) {
            return ControlFlow::Continue(());
        }
        self.last = Some(Instant::now());
        let progress = &self.progress;
        let told = parked(|| {
            Python::attach(|py| {
                py.check_signals()?;
                progress.call1(py, (done, total))
            })
        });
        match told {
            Ok(_) => ControlFlow::Continue(()),
            Err(error) => {
                self.raised = Some(error);
                ControlFlow::Break(())
            }
        }
    }

    /// What was raised, else the result.
    fn end<T, E: IntoPyErr>(self, result: Result<T, E>) -> PyResult<T> {
        match self.raised {
            Some(raised) => Err(raised),
            None => result.map_err(IntoPyErr::into_py_err),
        }
    }
}

/// Merges pairs, in this order.
#[pyfunction]
#[pyo3(signature = (prefixes, output, *, widen, force, command, progress))]
fn merge<'py>(
    py: Python<'py>,
    prefixes: Vec<PathBuf>,
    output: PathBuf,
    widen: bool,
    force: bool,
    command: Vec<String>,
    progress: Py<PyAny>,
) -> PyResult<Bound<'py, PyDict>> {
    let options = MergeOptions { widen, force, command };
    let mut teller = Teller::new(progress);
    let result = py
        .detach(|| megaflow_indexed::merge(&prefixes, &output, &options, &mut |done, total| teller.tell(done, total)));
    let report = teller.end(result)?;
    let dict = PyDict::new(py);
    dict.set_item("prefix", report.prefix.display().to_string())?;
    dict.set_item("dtype", report.dtype.name())?;
    dict.set_item("documents", report.counts.documents)?;
    dict.set_item("empty_documents", report.counts.empty_documents)?;
    dict.set_item("sequences", report.counts.sequences)?;
    dict.set_item("tokens", report.counts.tokens)?;
    dict.set_item("bin_bytes", report.bin_bytes)?;
    dict.set_item("num_widened", report.num_widened)?;
    dict.set_item("no_sidecar", report.no_sidecar)?;
    Ok(dict)
}

/// Checks everything about a pair.
#[pyfunction]
#[pyo3(signature = (prefix, *, threads, vocab_size, progress))]
fn verify<'py>(
    py: Python<'py>,
    prefix: PathBuf,
    threads: usize,
    vocab_size: Option<u64>,
    progress: Py<PyAny>,
) -> PyResult<Bound<'py, PyDict>> {
    let options = VerifyOptions { threads, vocab_size };
    let mut teller = Teller::new(progress);
    let result = py.detach(|| megaflow_indexed::verify(&prefix, options, &mut |done, total| teller.tell(done, total)));
    let report = teller.end(result)?;
    let faults: Vec<(String, Option<u64>, String)> =
        report.faults.into_iter().map(|fault| (fault.path.display().to_string(), fault.place, fault.problem)).collect();
    let dict = PyDict::new(py);
    dict.set_item("prefix", report.prefix.display().to_string())?;
    dict.set_item("faults", faults)?;
    dict.set_item("num_faults", report.num_faults)?;
    dict.set_item("has_checksums", report.has_checksums)?;
    dict.set_item("vocab_size", report.vocab_size)?;
    dict.set_item("ids", report.ids)?;
    dict.set_item("bytes", report.bytes)?;
    dict.set_item("documents", report.num_documents)?;
    dict.set_item("empty_documents", report.num_empty_documents)?;
    dict.set_item("sequences", report.num_sequences)?;
    dict.set_item("tokens", report.num_tokens)?;
    Ok(dict)
}

/// Size and checksums of a file, as a sidecar has them.
#[pyfunction]
fn checksum_file(py: Python<'_>, path: PathBuf) -> PyResult<Bound<'_, PyDict>> {
    let record = py.without_gil(|| megaflow_indexed::checksum_file(&path))?;
    record_dict(py, &record)
}

fn record_dict<'py>(py: Python<'py>, record: &FileRecord) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("bytes", record.bytes)?;
    dict.set_item("block_bytes", record.block_bytes)?;
    dict.set_item("xxh3_64", &record.xxh3_64)?;
    Ok(dict)
}

/// What a writer has made so far.
enum State {
    Writing(Box<IndexedWriter>),
    Finished(StagedPair),
    Closed,
}

/// Writes one pair from arrays of tokens. The staging folder goes when the object goes.
#[pyclass(frozen, module = "megaflow._core")]
pub(crate) struct PairWriter {
    state: Mutex<(State, Option<StagingFolder>)>,
}

#[pymethods]
impl PairWriter {
    #[new]
    fn new(py: Python<'_>, prefix: PathBuf, dtype: &str) -> PyResult<Self> {
        let all = [TokenDtype::U8, TokenDtype::I8, TokenDtype::I16, TokenDtype::U16, TokenDtype::I32, TokenDtype::I64];
        let dtype = all
            .into_iter()
            .find(|known| known.name() == dtype)
            .ok_or_else(|| error("ConfigError", format!("{dtype} is no type that an .idx can name")))?;
        py.without_gil(|| {
            let staging = StagingFolder::create(&prefix)?;
            let writer = IndexedWriter::create(&staging, &prefix, dtype)?;
            Ok::<_, WriteError>(Self { state: Mutex::new((State::Writing(Box::new(writer)), Some(staging))) })
        })
    }

    /// Appends tokens, and the documents that end among them: lengths of their sequences, sequences of each.
    fn append(
        &self,
        py: Python<'_>,
        tokens: PyReadonlyArray1<'_, u8>,
        sequence_lengths: PyReadonlyArray1<'_, i32>,
        sequences_per_document: PyReadonlyArray1<'_, u32>,
    ) -> PyResult<()> {
        let documents = EncodedDocuments {
            tokens: tokens.as_slice()?.to_vec(),
            sequence_lengths: sequence_lengths.as_slice()?.to_vec(),
            sequences_per_document: sequences_per_document.as_slice()?.to_vec(),
        };
        py.without_gil(|| match &mut self.lock().0 {
            State::Writing(writer) => writer.append(&documents).map_err(IntoPyErr::into_py_err),
            _ => Err(closed()),
        })
    }

    /// Makes both files durable; their counts and checksums.
    fn finish<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (bin, idx, counts) = py.without_gil(|| {
            let mut state = self.lock();
            let State::Writing(writer) = std::mem::replace(&mut state.0, State::Closed) else { return Err(closed()) };
            let pair = writer.finish().map_err(IntoPyErr::into_py_err)?;
            let found = (pair.bin.clone(), pair.idx.clone(), pair.counts);
            state.0 = State::Finished(pair);
            Ok(found)
        })?;
        let dict = PyDict::new(py);
        dict.set_item("num_documents", counts.documents)?;
        dict.set_item("num_empty_documents", counts.empty_documents)?;
        dict.set_item("num_sequences", counts.sequences)?;
        dict.set_item("num_tokens", counts.tokens)?;
        dict.set_item("bin", record_dict(py, &bin)?)?;
        dict.set_item("idx", record_dict(py, &idx)?)?;
        Ok(dict)
    }

    /// Gives the files their final names, with the sidecar that `text` is.
    fn publish(&self, py: Python<'_>, text: &str) -> PyResult<PathBuf> {
        py.without_gil(|| {
            let mut state = self.lock();
            let State::Finished(pair) = std::mem::replace(&mut state.0, State::Closed) else {
                return Err(closed());
            };
            pair.write_sidecar_text(text).map_err(IntoPyErr::into_py_err)?;
            let prefix = pair.publish().map_err(IntoPyErr::into_py_err)?;
            state.1 = None;
            Ok(prefix)
        })
    }

    /// Removes what was not published.
    fn close(&self) {
        *self.lock() = (State::Closed, None);
    }
}

impl PairWriter {
    fn lock(&self) -> std::sync::MutexGuard<'_, (State, Option<StagingFolder>)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn closed() -> PyErr {
    error("ConfigError", "this pair is finished; nothing more can be written to it".to_owned())
}
