//! Samples made of text on the fly.

use std::path::PathBuf;
use std::sync::Arc;

use megaflow_core::{SampleError, SampleSource};
use megaflow_source::Source;
use megaflow_stream::{OnBadRecord, StreamCounts, StreamError, StreamOptions, StreamSource};
use megaflow_tokenize::EncodeOptions;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::dataset::PySampleSource;
use crate::ending;
use crate::errors::{IntoPyErr, error};
use crate::gil::{DropDetached, WithoutGil};
use crate::inputs::repeatable_source_of;
use crate::preprocess::{InputArgument, format_of};
use crate::tokenizer::{PyTokenizer, special_policy};

impl IntoPyErr for StreamError {
    fn into_py_err(self) -> PyErr {
        let class = match &self {
            Self::BadSetting { .. } | Self::NoSources => "ConfigError",
            Self::NoDocuments { .. } => "NoDocumentsError",
            Self::BadRecord { .. } | Self::TooManyBadRecords { .. } => "DataFormatError",
            Self::StateMismatch { .. } | Self::NoSuchPosition { .. } => "CheckpointError",
            Self::Source(source) => crate::errors::source_class(source),
            Self::Tokenize(_) => "TokenizerError",
            _ => "MegaflowError",
        };
        error(class, self.to_string())
    }
}

/// The settings of a stream as Python names them.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Settings<'py> {
    inputs: Vec<InputArgument<'py>>,
    input_format: String,
    seq_len: usize,
    seed: u64,
    shuffle: bool,
    shuffle_window: usize,
    interleave: usize,
    shard_bytes: u64,
    epochs: Option<u64>,
    num_samples: Option<u64>,
    keep_partial: bool,
    pad_id: i64,
    json_key: String,
    invalid_utf8: String,
    eod_id: Option<u32>,
    part: Option<(u64, u64)>,
    on_bad_record: String,
    max_bad_records: Option<u64>,
    special_tokens_in_text: String,
    add_special_tokens: bool,
    add_bos: bool,
    add_eos: bool,
    num_threads: usize,
    block_bytes: usize,
}

/// (input, line or row, byte of the line, byte from which lines were counted, first token in the document, tokens)
type Origin = (usize, u64, u64, u64, usize, usize);

/// A stream that was opened at a position; its threads run until it is gone.
#[pyclass(frozen, name = "Stream", module = "megaflow._core")]
pub(crate) struct PyStream {
    inner: DropDetached<Arc<StreamSource>>,
}

#[pymethods]
impl PyStream {
    /// `state` is what `position` gave.
    #[new]
    #[pyo3(signature = (settings, tokenizer, state=None))]
    fn new(py: Python<'_>, settings: Settings<'_>, tokenizer: &PyTokenizer, state: Option<&str>) -> PyResult<Self> {
        let inputs = settings.inputs.iter();
        let sources = inputs.map(|(kind, name, object, _)| repeatable_source_of(kind, name, object.as_ref()));
        let sources = sources.collect::<PyResult<Vec<Source>>>()?;
        let num_samples = settings.num_samples;
        let options = options_of(settings)?;
        let state = state.map(serde_json::from_str).transpose();
        let state = state.map_err(|fault| error("CheckpointError", format!("not a position in a stream: {fault}")))?;
        let tokenizer = tokenizer.tokenizer.clone();
        let inner = py.without_gil(|| StreamSource::open(sources, tokenizer, options, num_samples, state))?;
        let inner = Arc::new(inner);
        ending::stop_at_end(py, &inner);
        Ok(Self { inner: DropDetached::new(inner) })
    }

    /// The same samples as the loader takes them.
    fn source(&self) -> PySampleSource {
        PySampleSource::new(Arc::clone(self.inner.get()) as Arc<dyn SampleSource>)
    }

    /// The position behind `count` samples, as JSON.
    fn position(&self, count: u64) -> PyResult<String> {
        let position = self.inner.get().position(count).map_err(IntoPyErr::into_py_err)?;
        serde_json::to_string(&position).map_err(|fault| error("MegaflowError", fault.to_string()))
    }

    /// Where the tokens of a sample come from, while the stream holds it.
    fn origins(&self, py: Python<'_>, index: u64) -> PyResult<Vec<Origin>> {
        let pieces = py.without_gil(|| self.inner.get().pieces(index))?;
        let origin = |piece: &megaflow_stream::StreamPiece| {
            let place = piece.place;
            (place.source, place.number, place.offset, place.counted_from, piece.offset, piece.length)
        };
        Ok(pieces.iter().map(origin).collect())
    }

    /// Waits until a sample is made, and lets go of all before it.
    fn go_to(&self, py: Python<'_>, index: u64) -> PyResult<()> {
        let stream = self.inner.get();
        stream.announce(index);
        stream.received(index);
        loop {
            let found = py.detach(|| stream.sample_tokens(index));
            if ending::must_rest() {
                py.detach(|| ending::rest());
            }
            match found {
                Ok(_) => return Ok(()),
                Err(SampleError::NotReady { .. }) => py.check_signals()?,
                Err(fault) => return Err(fault.into_py_err()),
            }
        }
    }

    /// Names of the inputs, as `origins` counts them.
    #[getter]
    fn names(&self) -> Vec<PathBuf> {
        self.inner.get().names()
    }

    /// What was made so far.
    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let StreamCounts { samples, tokens, documents, bad_records, epoch } = self.inner.get().counts();
        let counts = PyDict::new(py);
        counts.set_item("samples", samples)?;
        counts.set_item("tokens", tokens)?;
        counts.set_item("documents", documents)?;
        counts.set_item("bad_records", bad_records)?;
        counts.set_item("epoch", epoch)?;
        Ok(counts)
    }
}

fn options_of(settings: Settings<'_>) -> PyResult<StreamOptions> {
    let choice = |name: &str, found: &str, known: [&str; 2]| {
        let message = format!("{name} = {found:?}: expected {:?} or {:?}", known[0], known[1]);
        if known.contains(&found) { Ok(found == known[1]) } else { Err(error("ConfigError", message)) }
    };
    let skips = choice("on_bad_record", &settings.on_bad_record, ["error", "skip"])?;
    let encode = EncodeOptions {
        special_tokens_in_text: special_policy(&settings.special_tokens_in_text)?,
        add_special_tokens: settings.add_special_tokens,
        add_bos: settings.add_bos,
        add_eos: settings.add_eos,
        ..EncodeOptions::default()
    };
    Ok(StreamOptions {
        seq_len: settings.seq_len,
        seed: settings.seed,
        shuffle: settings.shuffle,
        window_tokens: settings.shuffle_window,
        interleave: settings.interleave,
        shard_bytes: settings.shard_bytes,
        epochs: settings.epochs,
        keep_partial: settings.keep_partial,
        pad_id: settings.pad_id,
        key: settings.json_key,
        format: format_of(&settings.input_format)?,
        replace_invalid_utf8: choice("invalid_utf8", &settings.invalid_utf8, ["error", "replace"])?,
        append_eod: settings.eod_id,
        on_bad_record: if skips { OnBadRecord::Skip { limit: settings.max_bad_records } } else { OnBadRecord::Error },
        part: settings.part.map(|(first, behind)| first..behind),
        encode,
        num_threads: settings.num_threads,
        block_bytes: settings.block_bytes,
    })
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyStream>()
}
