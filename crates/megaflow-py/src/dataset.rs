//! Samples of a pair, in Megatron's order.

use std::path::PathBuf;
use std::sync::Arc;

use megaflow_core::{Piece, SampleError, SampleLayout, SampleSource};
use megaflow_sample::{
    BuildError, CacheOutcome, CachePlace, Column, CyclicSource, GptConfig, GptDataset, IndexConfig, Item, SampleIndex,
    ShuffleIndex, SplitMatrix, SplitName,
};
use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;

use crate::errors::{IntoPyErr, error};
use crate::gil::{DropDetached, WithoutGil};
use crate::indexed::PyIndexedDataset;
use crate::views::ArrayView;

impl IntoPyErr for BuildError {
    fn into_py_err(self) -> PyErr {
        match self {
            Self::Index(source) => source.into_py_err(),
            Self::BadLength { .. } => error("DataFormatError", self.to_string()),
            _ => error("ConfigError", self.to_string()),
        }
    }
}

impl IntoPyErr for SampleError {
    fn into_py_err(self) -> PyErr {
        let class = match self {
            Self::OutOfRange { .. } => "SampleIndexError",
            Self::Empty { .. } => "NoDocumentsError",
            _ => "DataFormatError",
        };
        error(class, self.to_string())
    }
}

/// Any source of samples, as the loader takes it.
#[pyclass(frozen, name = "SampleSource", module = "megaflow._core")]
pub(crate) struct PySampleSource {
    inner: DropDetached<Arc<dyn SampleSource>>,
}

impl PySampleSource {
    pub(crate) fn new(inner: Arc<dyn SampleSource>) -> Self {
        Self { inner: DropDetached::new(inner) }
    }

    pub(crate) fn source(&self) -> &Arc<dyn SampleSource> {
        self.inner.get()
    }
}

#[pymethods]
impl PySampleSource {
    #[getter]
    fn num_samples(&self) -> u64 {
        self.source().num_samples()
    }

    #[getter]
    fn sample_len(&self) -> usize {
        self.source().sample_len()
    }

    /// Tokens of one sample, in an array of its own.
    fn read<'py>(&self, py: Python<'py>, index: u64) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let mut tokens = vec![0; self.source().sample_len()];
        py.without_gil(|| self.source().read_sample(index, &mut tokens))?;
        Ok(tokens.into_pyarray(py))
    }

    /// What a sample is made of: pieces (dataset, sequence, first token in it, tokens), and where they start in it.
    fn layout(&self, py: Python<'_>, index: u64) -> PyResult<(Vec<PyPiece>, Vec<u32>)> {
        let mut layout = SampleLayout::default();
        py.without_gil(|| self.source().layout(index, &mut layout))?;
        let piece = |piece: Piece| (piece.dataset, piece.sequence, piece.offset, piece.length);
        Ok((layout.pieces.into_iter().map(piece).collect(), layout.starts))
    }
}

/// (dataset, sequence, first token in it, tokens)
type PyPiece = (u32, u64, u64, u64);

/// The samples of another source, again and again, each epoch in an order of its own.
#[pyclass(frozen, name = "Cyclic", module = "megaflow._core")]
pub(crate) struct PyCyclic {
    inner: Arc<CyclicSource>,
}

#[pymethods]
impl PyCyclic {
    #[new]
    #[pyo3(signature = (source, *, seed))]
    fn new(source: &PySampleSource, seed: u64) -> PyResult<Self> {
        let cyclic = CyclicSource::new(Arc::clone(source.source()), seed).map_err(IntoPyErr::into_py_err)?;
        Ok(Self { inner: Arc::new(cyclic) })
    }

    fn source(&self) -> PySampleSource {
        PySampleSource::new(Arc::clone(&self.inner) as Arc<dyn SampleSource>)
    }

    /// Samples of the source behind some positions in the endless order.
    fn locate(&self, py: Python<'_>, positions: Vec<u64>) -> PyResult<Vec<u64>> {
        py.without_gil(|| Ok::<_, PyErr>(positions.iter().map(|&at| self.inner.locate(at)).collect()))
    }
}

/// The samples of one split of one pair.
#[pyclass(frozen, name = "GptDataset", module = "megaflow._core")]
pub(crate) struct PyGptDataset {
    inner: Arc<GptDataset>,
}

#[pymethods]
impl PyGptDataset {
    #[new]
    #[pyo3(signature = (
        indexed, *, seq_len, num_samples, seed, split, split_name, add_extra_token, keep_partial, pad_id,
        num_threads, cache
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords, each named by the caller")]
    fn new(
        py: Python<'_>,
        indexed: &PyIndexedDataset,
        seq_len: usize,
        num_samples: Option<u64>,
        seed: u32,
        split: Option<&str>,
        split_name: &str,
        add_extra_token: bool,
        keep_partial: bool,
        pad_id: i64,
        num_threads: usize,
        cache: Option<CacheArguments>,
    ) -> PyResult<Self> {
        let (matrix, split_name) = parse_split(split, split_name)?;
        let index = IndexConfig { seq_len, num_samples, seed, add_extra_token, keep_partial };
        let config = GptConfig { index, matrix, split: split_name, pad_id };
        let indexed = Arc::clone(&indexed.inner);
        let cache = cache.map(cache_place);
        let inner = py.without_gil(|| GptDataset::build_with(indexed, &config, num_threads, cache.as_ref()))?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The same samples as the loader takes them.
    fn source(&self) -> PySampleSource {
        PySampleSource::new(Arc::clone(&self.inner) as Arc<dyn SampleSource>)
    }

    /// First sequence of the split, and the sequence behind its last.
    #[getter]
    fn sequences(&self) -> (usize, usize) {
        (self.inner.sequences().start, self.inner.sequences().end)
    }

    #[getter]
    fn num_epochs(&self) -> u64 {
        self.inner.index().num_epochs
    }

    #[getter]
    fn separate_last_epoch(&self) -> bool {
        self.inner.index().separate_last_epoch
    }

    #[getter]
    fn tokens_per_epoch(&self) -> u64 {
        self.inner.index().tokens_per_epoch
    }

    /// What became of the cache, and why; None where none was named.
    #[getter]
    fn cached(&self) -> Option<(&'static str, Option<String>)> {
        self.inner.cached().map(cache_outcome)
    }

    fn document_index(&self) -> ArrayView {
        let owner = Arc::clone(&self.inner);
        column_view(owner, self.inner.index().document_index.len(), 1, |dataset| Some(&dataset.index().document_index))
    }

    fn sample_index(&self) -> ArrayView {
        let (rows, owner) = (self.inner.index().sample_index.num_rows(), Arc::clone(&self.inner));
        match &self.inner.index().sample_index {
            SampleIndex::I32(_) => column_view(owner, rows, 2, |dataset| match &dataset.index().sample_index {
                SampleIndex::I32(rows) => Some(rows),
                SampleIndex::I64(_) => None,
            }),
            SampleIndex::I64(_) => column_view(owner, rows, 2, |dataset| match &dataset.index().sample_index {
                SampleIndex::I64(rows) => Some(rows),
                SampleIndex::I32(_) => None,
            }),
        }
    }

    fn shuffle_index(&self) -> ArrayView {
        let (len, owner) = (self.inner.index().shuffle_index.len(), Arc::clone(&self.inner));
        match &self.inner.index().shuffle_index {
            ShuffleIndex::U32(_) => column_view(owner, len, 1, |dataset| match &dataset.index().shuffle_index {
                ShuffleIndex::U32(order) => Some(order),
                ShuffleIndex::I64(_) => None,
            }),
            ShuffleIndex::I64(_) => column_view(owner, len, 1, |dataset| match &dataset.index().shuffle_index {
                ShuffleIndex::I64(order) => Some(order),
                ShuffleIndex::U32(_) => None,
            }),
        }
    }
}

/// Stem of the files, Megatron's description, and what must be the same beside it.
pub(crate) type CacheArguments = (PathBuf, String, String);

pub(crate) fn cache_place((stem, description, content): CacheArguments) -> CachePlace {
    CachePlace { stem, description, content }
}

pub(crate) fn cache_outcome(outcome: &CacheOutcome) -> (&'static str, Option<String>) {
    match outcome {
        CacheOutcome::Found => ("found", None),
        CacheOutcome::Adopted => ("adopted", None),
        CacheOutcome::Built => ("built", None),
        CacheOutcome::Replaced(reason) => ("replaced", Some(reason.clone())),
        CacheOutcome::NotKept(reason) => ("not kept", Some(reason.clone())),
    }
}

/// Splits by their names and shares; without shares the named one takes everything.
pub(crate) fn parse_split(split: Option<&str>, name: &str) -> PyResult<(SplitMatrix, SplitName)> {
    let expected = || format!("split_name = {name:?}: expected \"train\", \"valid\" or \"test\"");
    let name = SplitName::parse(name).ok_or_else(|| error("ConfigError", expected()))?;
    match split {
        Some(split) => Ok((SplitMatrix::parse(split).map_err(IntoPyErr::into_py_err)?, name)),
        None => Ok((SplitMatrix::whole(name), name)),
    }
}

/// An array of an index, wherever it lies.
pub(crate) fn column_view<O, T>(
    owner: Arc<O>,
    rows: usize,
    width: usize,
    select: impl Fn(&O) -> Option<&Column<T>>,
) -> ArrayView
where
    O: std::any::Any + Send + Sync,
    T: Item,
{
    let shape = if width == 1 { vec![rows] } else { vec![rows, width] };
    if select(&owner).is_some_and(|column| column.as_slice().is_some()) {
        return ArrayView::new(owner, T::TYPESTR, &shape, |owner| {
            select(owner).and_then(Column::as_slice).unwrap_or_default()
        });
    }
    ArrayView::new(owner, T::TYPESTR, &shape, |owner| {
        select(owner).and_then(Column::as_mapped_bytes).unwrap_or_default()
    })
}

/// Share of each split: from and to, or None where it is switched off.
#[pyfunction]
fn split_matrix(split: &str) -> PyResult<Vec<Option<(f64, f64)>>> {
    SplitMatrix::parse(split).map(|matrix| matrix.rows().to_vec()).map_err(IntoPyErr::into_py_err)
}

/// Sequences of each split: from and to, or None where it is switched off.
#[pyfunction]
fn split_sequences(split: &str, num_sequences: usize) -> PyResult<Vec<Option<(usize, usize)>>> {
    let matrix = SplitMatrix::parse(split).map_err(IntoPyErr::into_py_err)?;
    let ends = |name| matrix.sequences(name, num_sequences).map(|range| (range.start, range.end));
    Ok(SplitName::ALL.map(ends).to_vec())
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PySampleSource>()?;
    module.add_class::<PyCyclic>()?;
    module.add_class::<PyGptDataset>()?;
    module.add_function(wrap_pyfunction!(split_matrix, module)?)?;
    module.add_function(wrap_pyfunction!(split_sequences, module)?)
}
