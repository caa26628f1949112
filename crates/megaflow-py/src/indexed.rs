//! `.bin/.idx` pairs.

use std::io::ErrorKind;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use megaflow_core::TokenDtype;
use megaflow_indexed::{IndexError, IndexedDataset, OpenOptions};
use pyo3::prelude::*;

use crate::errors::{IntoPyErr, error};
use crate::gil::WithoutGil;
use crate::views::ArrayView;

impl IntoPyErr for IndexError {
    fn into_py_err(self) -> PyErr {
        let class = match &self {
            Self::Missing { .. } => "MissingFileError",
            Self::Io { source, .. } if source.kind() == ErrorKind::NotFound => "MissingFileError",
            Self::Io { .. } => "FileAccessError",
            Self::NoSuchSequence { .. } | Self::NoSuchDocument { .. } | Self::NoSuchTokens { .. } => "SampleIndexError",
            _ => "DataFormatError",
        };
        error(class, self.to_string())
    }
}

/// An open pair.
#[pyclass(frozen, name = "IndexedDataset", module = "megaflow._core")]
pub(crate) struct PyIndexedDataset {
    pub(crate) inner: Arc<IndexedDataset>,
}

#[pymethods]
impl PyIndexedDataset {
    #[new]
    #[pyo3(signature = (prefix, *, with_modes = false))]
    fn new(py: Python<'_>, prefix: PathBuf, with_modes: bool) -> PyResult<Self> {
        let inner = py.without_gil(|| IndexedDataset::open_with(&prefix, OpenOptions { with_modes }))?;
        Ok(Self { inner: Arc::new(inner) })
    }

    #[getter]
    fn prefix(&self) -> PathBuf {
        self.inner.prefix().to_path_buf()
    }

    #[getter]
    fn num_sequences(&self) -> usize {
        self.inner.num_sequences()
    }

    #[getter]
    fn num_documents(&self) -> usize {
        self.inner.num_documents()
    }

    #[getter]
    fn num_tokens(&self) -> u64 {
        self.inner.num_tokens()
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.inner.dtype().name()
    }

    /// First token of a sequence in the data, and the token behind its last.
    fn sequence_tokens(&self, index: usize) -> PyResult<(usize, usize)> {
        self.inner.sequence_tokens(index).map(ends).map_err(IntoPyErr::into_py_err)
    }

    /// First token of a document in the data, and the token behind its last.
    fn document_tokens(&self, index: usize) -> PyResult<(usize, usize)> {
        self.inner.document_tokens(index).map(ends).map_err(IntoPyErr::into_py_err)
    }

    /// All tokens: one array over the mapped `.bin`.
    fn tokens(&self) -> ArrayView {
        let typestr = match self.inner.dtype() {
            TokenDtype::U8 => "|u1",
            TokenDtype::I8 => "|i1",
            TokenDtype::I16 => "<i2",
            TokenDtype::U16 => "<u2",
            TokenDtype::I32 => "<i4",
            TokenDtype::I64 => "<i8",
        };
        let shape = [self.inner.num_tokens() as usize];
        ArrayView::new(Arc::clone(&self.inner), typestr, &shape, IndexedDataset::data_bytes)
    }

    /// Lengths of all sequences.
    fn sequence_lengths(&self) -> ArrayView {
        let shape = [self.inner.num_sequences()];
        ArrayView::new(Arc::clone(&self.inner), "<i4", &shape, IndexedDataset::length_bytes)
    }

    /// First sequence of every document, and the number of sequences at the end.
    fn document_boundaries(&self) -> ArrayView {
        let shape = [self.inner.num_documents() + 1];
        ArrayView::new(Arc::clone(&self.inner), "<i8", &shape, IndexedDataset::boundary_bytes)
    }

    /// Modes of all sequences, if the pair was opened with them.
    fn sequence_modes(&self) -> ArrayView {
        let shape = [self.inner.mode_bytes().len()];
        ArrayView::new(Arc::clone(&self.inner), "|i1", &shape, IndexedDataset::mode_bytes)
    }

    /// A key of the content, the same wherever the pair lies.
    fn content_key(&self, py: Python<'_>) -> PyResult<String> {
        py.without_gil(|| self.inner.content_key().map(str::to_owned))
    }
}

fn ends(tokens: Range<usize>) -> (usize, usize) {
    (tokens.start, tokens.end)
}

/// The prefix of the pair that a path names.
#[pyfunction]
fn resolve_prefix(path: PathBuf) -> PyResult<PathBuf> {
    megaflow_indexed::resolve_prefix(path).map_err(IntoPyErr::into_py_err)
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<ArrayView>()?;
    module.add_class::<PyIndexedDataset>()?;
    module.add_function(wrap_pyfunction!(resolve_prefix, module)?)
}
