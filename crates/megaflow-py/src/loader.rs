//! Batches gathered ahead of need.

use std::sync::Arc;
use std::time::Duration;

use megaflow_core::TokenDtype;
use megaflow_prefetch::{
    Batch, BatchTokens, Next, PlanConfig, PrefetchError, PrefetchOptions, Prefetcher, Tokens, Totals,
};
use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::dataset::PySampleSource;
use crate::ending;
use crate::errors::{IntoPyErr, error};
use crate::gil::DropDetached;
use crate::views::array_interface;

/// How long one wait may keep Ctrl-C from being seen.
const PATIENCE: Duration = Duration::from_millis(100);

impl IntoPyErr for PrefetchError {
    fn into_py_err(self) -> PyErr {
        let class = match &self {
            Self::BadSetting { .. } => "ConfigError",
            Self::Sample { source: megaflow_core::SampleError::OutOfRange { .. }, .. } => "SampleIndexError",
            Self::Sample { source: megaflow_core::SampleError::Empty { .. }, .. } => "NoDocumentsError",
            Self::Sample { .. } => "DataFormatError",
            Self::Forked { .. } => "ForkError",
            _ => "MegaflowError",
        };
        error(class, self.to_string())
    }
}

/// A batch in memory that numpy shows without a copy, `[samples, tokens]`, writable. Once the last array on it is
/// gone, the memory goes back to the loader.
#[pyclass(frozen, module = "megaflow._core")]
pub(crate) struct BatchBuffer {
    _tokens: BatchTokens,
    address: usize,
    typestr: &'static str,
    shape: [usize; 2],
    sample_ids: Vec<i64>,
    wait_s: f64,
    request_to_ready_s: f64,
    queue_depth: usize,
    cache_misses: u64,
    disk_bytes: u64,
    short_rows: Vec<(usize, usize)>,
    starts: Vec<Vec<u32>>,
}

impl BatchBuffer {
    fn new(mut batch: Batch) -> Self {
        let rows = batch.sample_ids.len();
        let tokens = batch.tokens.tokens_mut();
        let shape = [rows, tokens.len() / rows.max(1)];
        let (typestr, address) = match tokens {
            Tokens::U16(tokens) => ("<u2", tokens.as_mut_ptr().expose_provenance()),
            Tokens::I32(tokens) => ("<i4", tokens.as_mut_ptr().expose_provenance()),
            Tokens::I64(tokens) => ("<i8", tokens.as_mut_ptr().expose_provenance()),
        };
        Self {
            _tokens: batch.tokens,
            address,
            typestr,
            shape,
            sample_ids: batch.sample_ids,
            wait_s: batch.wait.as_secs_f64(),
            request_to_ready_s: batch.request_to_ready.as_secs_f64(),
            queue_depth: batch.queue_depth,
            cache_misses: batch.cache_misses,
            disk_bytes: batch.disk_bytes,
            short_rows: batch.short_rows,
            starts: batch.starts,
        }
    }
}

#[pymethods]
impl BatchBuffer {
    /// numpy's array interface, version 3.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        array_interface(py, self.typestr, &self.shape, self.address, false)
    }

    #[getter]
    fn sample_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        self.sample_ids.clone().into_pyarray(py)
    }

    #[getter]
    fn wait_s(&self) -> f64 {
        self.wait_s
    }

    #[getter]
    fn request_to_ready_s(&self) -> f64 {
        self.request_to_ready_s
    }

    #[getter]
    fn queue_depth(&self) -> usize {
        self.queue_depth
    }

    #[getter]
    fn cache_misses(&self) -> u64 {
        self.cache_misses
    }

    #[getter]
    fn disk_bytes(&self) -> u64 {
        self.disk_bytes
    }

    /// Whether no row ends in padding.
    #[getter]
    fn is_full(&self) -> bool {
        self.short_rows.is_empty()
    }

    /// Rows that end in padding, and their tokens before it.
    #[getter]
    fn short_rows(&self) -> Vec<(usize, usize)> {
        self.short_rows.clone()
    }

    /// Positions in each row where a document, or a part of one, or the padding begins; empty unless asked for.
    #[getter]
    fn starts(&self) -> Vec<Vec<u32>> {
        self.starts.clone()
    }
}

/// The batches of one rank, in order.
#[pyclass(name = "Prefetcher", module = "megaflow._core")]
pub(crate) struct PyPrefetcher {
    inner: DropDetached<Prefetcher>,
}

#[pymethods]
impl PyPrefetcher {
    #[new]
    #[pyo3(signature = (source, *, micro_batch_size, dp_rank, dp_size, num_threads, prefetch, consumed_samples, dtype,
        with_starts = false))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn new(
        source: &PySampleSource,
        micro_batch_size: usize,
        dp_rank: usize,
        dp_size: usize,
        num_threads: usize,
        prefetch: usize,
        consumed_samples: u64,
        dtype: &str,
        with_starts: bool,
    ) -> PyResult<Self> {
        let plan = PlanConfig { micro_batch_size, dp_rank, dp_size, consumed_samples };
        let types = [TokenDtype::U16, TokenDtype::I32, TokenDtype::I64];
        let dtype = types.into_iter().find(|known| known.name() == dtype).ok_or_else(|| {
            error("ConfigError", format!("dtype = {dtype:?}: expected \"uint16\", \"int32\" or \"int64\""))
        })?;
        let options = PrefetchOptions { plan, num_threads, depth: prefetch, dtype, with_starts };
        let inner = Prefetcher::new(Arc::clone(source.source()), options).map_err(IntoPyErr::into_py_err)?;
        Ok(Self { inner: DropDetached::new(inner) })
    }

    /// The next batch, or None behind the last.
    fn next(&mut self, py: Python<'_>) -> PyResult<Option<BatchBuffer>> {
        // A batch that is ready costs no switch of threads.
        let mut patience = Duration::ZERO;
        loop {
            let inner = self.inner.get_mut();
            let next = if patience.is_zero() {
                inner.next_within(patience)
            } else {
                py.detach(|| inner.next_within(patience))
            };
            if ending::must_rest() {
                py.detach(|| ending::rest());
            }
            match next.map_err(IntoPyErr::into_py_err)? {
                Next::Batch(batch) => return Ok(Some(BatchBuffer::new(batch))),
                Next::End => return Ok(None),
                // Not by `without_gil`: Ctrl-C is looked for only where no batch was received, so that none is lost to
                // it.
                Next::Pending => py.check_signals()?,
            }
            patience = PATIENCE;
        }
    }

    #[getter]
    fn num_batches(&self) -> u64 {
        self.inner.get().plan().num_batches()
    }

    /// Samples that all ranks together have consumed once each has received as many batches as this one.
    #[getter]
    fn consumed_samples(&self) -> u64 {
        self.inner.get().plan().consumed_samples(self.inner.get().totals().batches)
    }

    /// Sums over the batches received.
    fn totals<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let Totals {
            batches,
            samples,
            ready_when_asked,
            queue_depth,
            wait,
            gather,
            request_to_ready,
            max_wait,
            token_bytes,
            cache_misses,
            disk_bytes,
        } = self.inner.get().totals();
        let totals = PyDict::new(py);
        totals.set_item("batches", batches)?;
        totals.set_item("samples", samples)?;
        totals.set_item("ready_when_asked", ready_when_asked)?;
        totals.set_item("queue_depth", queue_depth)?;
        totals.set_item("host_wait_s", wait.as_secs_f64())?;
        totals.set_item("gather_s", gather.as_secs_f64())?;
        totals.set_item("request_to_ready_s", request_to_ready.as_secs_f64())?;
        totals.set_item("max_wait_s", max_wait.as_secs_f64())?;
        totals.set_item("token_bytes", token_bytes)?;
        totals.set_item("cache_misses", cache_misses)?;
        totals.set_item("disk_bytes", disk_bytes)?;
        Ok(totals)
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<BatchBuffer>()?;
    module.add_class::<PyPrefetcher>()
}
