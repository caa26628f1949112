//! Sets of samples beside Megatron's: computed orders, packing, blends, mock data, fill in the middle.

use std::sync::{Arc, Mutex};

use megaflow_core::SampleSource;
use megaflow_sample::{
    BestFitConfig, BestFitDataset, Blend, BlendOrder, BuildError, CacheOutcome, FimConfig, FimSource, GreedyIndex,
    IndexConfig, InstantConfig, InstantDataset, MockDataset, Phases, Shuffle, ShuffleIndex, TextCodec, normalized,
};
use megaflow_tokenize::{EncodeOptions, Encoder};
use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;

use crate::dataset::{CacheArguments, PySampleSource, cache_outcome, cache_place, column_view, parse_split};
use crate::errors::{IntoPyErr, error};
use crate::gil::WithoutGil;
use crate::indexed::PyIndexedDataset;
use crate::tokenizer::PyTokenizer;
use crate::views::ArrayView;

/// Samples cut in file order and handed out by a computed permutation.
#[pyclass(frozen, name = "InstantDataset", module = "megaflow._core")]
pub(crate) struct PyInstantDataset {
    inner: Arc<InstantDataset>,
}

#[pymethods]
impl PyInstantDataset {
    #[new]
    #[pyo3(signature = (
        indexed, *, seq_len, num_samples, seed, split, split_name, add_extra_token, keep_partial, shuffle, pad_id
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords, each named by the caller")]
    fn new(
        py: Python<'_>,
        indexed: &PyIndexedDataset,
        seq_len: usize,
        num_samples: Option<u64>,
        seed: u64,
        split: Option<&str>,
        split_name: &str,
        add_extra_token: bool,
        keep_partial: bool,
        shuffle: &str,
        pad_id: i64,
    ) -> PyResult<Self> {
        let (matrix, split) = parse_split(split, split_name)?;
        let shuffle = match shuffle {
            "samples" => Shuffle::Samples,
            "documents" => Shuffle::Documents,
            other => {
                let message = format!("shuffle = {other:?}: expected \"samples\" or \"documents\"");
                return Err(error("ConfigError", message));
            }
        };
        let config =
            InstantConfig { seq_len, num_samples, seed, add_extra_token, keep_partial, shuffle, matrix, split, pad_id };
        let indexed = Arc::clone(&indexed.inner);
        let inner = py.without_gil(|| InstantDataset::new(indexed, &config))?;
        Ok(Self { inner: Arc::new(inner) })
    }

    fn source(&self) -> PySampleSource {
        PySampleSource::new(Arc::clone(&self.inner) as Arc<dyn SampleSource>)
    }

    #[getter]
    fn sequences(&self) -> (usize, usize) {
        (self.inner.sequences().start, self.inner.sequences().end)
    }

    #[getter]
    fn num_epochs(&self) -> u64 {
        self.inner.num_epochs()
    }

    #[getter]
    fn tokens_per_epoch(&self) -> u64 {
        self.inner.tokens_per_epoch()
    }

    /// Samples of a window in which documents are shuffled.
    #[getter]
    fn window_samples(&self) -> Option<u64> {
        self.inner.window_samples()
    }
}

/// Samples of whole documents.
#[pyclass(frozen, name = "BestFitDataset", module = "megaflow._core")]
pub(crate) struct PyBestFitDataset {
    inner: Arc<BestFitDataset>,
}

#[pymethods]
impl PyBestFitDataset {
    #[new]
    #[pyo3(signature = (indexed, *, seq_len, num_samples, seed, split, split_name, add_extra_token, pad_id))]
    #[expect(clippy::too_many_arguments, reason = "keywords, each named by the caller")]
    fn new(
        py: Python<'_>,
        indexed: &PyIndexedDataset,
        seq_len: usize,
        num_samples: Option<u64>,
        seed: u64,
        split: Option<&str>,
        split_name: &str,
        add_extra_token: bool,
        pad_id: i64,
    ) -> PyResult<Self> {
        let (matrix, split) = parse_split(split, split_name)?;
        let config = BestFitConfig { seq_len, num_samples, seed, add_extra_token, matrix, split, pad_id };
        let indexed = Arc::clone(&indexed.inner);
        let inner = py.without_gil(|| BestFitDataset::build(indexed, &config))?;
        Ok(Self { inner: Arc::new(inner) })
    }

    fn source(&self) -> PySampleSource {
        PySampleSource::new(Arc::clone(&self.inner) as Arc<dyn SampleSource>)
    }

    #[getter]
    fn sequences(&self) -> (usize, usize) {
        (self.inner.sequences().start, self.inner.sequences().end)
    }

    #[getter]
    fn num_epochs(&self) -> u64 {
        self.inner.num_epochs()
    }

    #[getter]
    fn tokens_per_epoch(&self) -> u64 {
        self.inner.tokens_per_epoch()
    }

    #[getter]
    fn samples_per_epoch(&self) -> u64 {
        self.inner.samples_per_epoch()
    }
}

/// Samples of made-up documents.
#[pyclass(frozen, name = "MockDataset", module = "megaflow._core")]
pub(crate) struct PyMockDataset {
    inner: Arc<MockDataset>,
}

#[pymethods]
impl PyMockDataset {
    #[new]
    #[pyo3(signature = (lengths, *, vocab_size, eod_id, seq_len, num_samples, seed, split, split_name, add_extra_token))]
    #[expect(clippy::too_many_arguments, reason = "keywords, each named by the caller")]
    fn new(
        py: Python<'_>,
        lengths: Vec<i32>,
        vocab_size: u32,
        eod_id: i64,
        seq_len: usize,
        num_samples: Option<u64>,
        seed: u32,
        split: Option<&str>,
        split_name: &str,
        add_extra_token: bool,
    ) -> PyResult<Self> {
        let part = parse_split(split, split_name)?;
        let config = IndexConfig { seq_len, num_samples, seed, add_extra_token, keep_partial: false };
        let inner = py.without_gil(|| MockDataset::build(lengths, (vocab_size, eod_id), part, &config))?;
        Ok(Self { inner: Arc::new(inner) })
    }

    fn source(&self) -> PySampleSource {
        PySampleSource::new(Arc::clone(&self.inner) as Arc<dyn SampleSource>)
    }

    #[getter]
    fn num_epochs(&self) -> u64 {
        self.inner.index().num_epochs
    }

    #[getter]
    fn sequences(&self) -> (usize, usize) {
        (self.inner.sequences().start, self.inner.sequences().end)
    }

    #[getter]
    fn tokens_per_epoch(&self) -> u64 {
        self.inner.index().tokens_per_epoch
    }

    fn shuffle_index(&self) -> ArrayView {
        let (len, owner) = (self.inner.index().shuffle_index.len(), Arc::clone(&self.inner));
        column_view(owner, len, 1, |dataset| match &dataset.index().shuffle_index {
            ShuffleIndex::U32(order) => Some(order),
            ShuffleIndex::I64(_) => None,
        })
    }
}

/// Several datasets as one.
#[pyclass(frozen, name = "Blend", module = "megaflow._core")]
pub(crate) struct PyBlend {
    inner: Arc<Blend>,
    cached: Option<CacheOutcome>,
}

impl PyBlend {
    fn join(
        sources: Vec<Arc<dyn SampleSource>>,
        order: BlendOrder,
        cached: Option<CacheOutcome>,
    ) -> Result<Self, BuildError> {
        Ok(Self { inner: Arc::new(Blend::new(sources, order)?), cached })
    }
}

fn inner_sources(sources: Vec<PyRef<'_, PySampleSource>>) -> Vec<Arc<dyn SampleSource>> {
    sources.iter().map(|source| Arc::clone(source.source())).collect()
}

#[pymethods]
impl PyBlend {
    /// Megatron's order: `size` samples in the ratio of the weights.
    #[staticmethod]
    fn greedy(
        py: Python<'_>,
        sources: Vec<PyRef<'_, PySampleSource>>,
        weights: Vec<f64>,
        size: u64,
        cache: Option<CacheArguments>,
    ) -> PyResult<Self> {
        let (sources, cache) = (inner_sources(sources), cache.map(cache_place));
        py.without_gil(|| {
            let (index, cached) = match &cache {
                Some(cache) => {
                    GreedyIndex::weighted_with(&weights, size, cache).map(|(index, cached)| (index, Some(cached)))?
                }
                None => (GreedyIndex::weighted(&weights, size)?, None),
            };
            Self::join(sources, BlendOrder::Greedy(index), cached)
        })
    }

    /// Megatron's order of every sample of every dataset.
    #[staticmethod]
    fn exhaustive(
        py: Python<'_>,
        sources: Vec<PyRef<'_, PySampleSource>>,
        cache: Option<CacheArguments>,
    ) -> PyResult<Self> {
        let (sources, cache) = (inner_sources(sources), cache.map(cache_place));
        py.without_gil(|| {
            let sizes: Vec<u64> = sources.iter().map(|source| source.num_samples()).collect();
            let (index, cached) = match &cache {
                Some(cache) => {
                    GreedyIndex::exhaustive_with(&sizes, cache).map(|(index, cached)| (index, Some(cached)))?
                }
                None => (GreedyIndex::exhaustive(&sizes)?, None),
            };
            Self::join(sources, BlendOrder::Greedy(index), cached)
        })
    }

    /// Exact shares: phases of (first sample, weights).
    #[staticmethod]
    fn shares(
        py: Python<'_>,
        sources: Vec<PyRef<'_, PySampleSource>>,
        phases: Vec<(u64, Vec<f64>)>,
        num_samples: u64,
    ) -> PyResult<Self> {
        let sources = inner_sources(sources);
        py.without_gil(|| {
            let phases = Phases::new(&phases)?;
            Self::join(sources, BlendOrder::Shares { phases, num_samples }, None)
        })
    }

    fn source(&self) -> PySampleSource {
        PySampleSource::new(Arc::clone(&self.inner) as Arc<dyn SampleSource>)
    }

    #[getter]
    fn cached(&self) -> Option<(&'static str, Option<String>)> {
        self.cached.as_ref().map(cache_outcome)
    }

    /// (dataset, sample of it) of a sample.
    fn locate(&self, index: u64) -> PyResult<(usize, u64)> {
        let place = self.inner.locate(index).map_err(IntoPyErr::into_py_err)?;
        Ok((place.dataset, place.sample))
    }

    /// Samples that each dataset gives to the first `count`.
    fn counts(&self, py: Python<'_>, count: u64) -> Vec<u64> {
        py.detach(|| self.inner.counts(count))
    }

    /// Dataset of each sample; None where it is computed.
    fn dataset_index(&self) -> Option<ArrayView> {
        let BlendOrder::Greedy(index) = self.inner.order() else { return None };
        Some(column_view(Arc::clone(&self.inner), index.len(), 1, |blend: &Blend| match blend.order() {
            BlendOrder::Greedy(index) => Some(&index.dataset_index),
            BlendOrder::Shares { .. } => None,
        }))
    }

    /// Number of each sample in its dataset; None where it is computed.
    fn dataset_sample_index(&self) -> Option<ArrayView> {
        let BlendOrder::Greedy(index) = self.inner.order() else { return None };
        Some(column_view(Arc::clone(&self.inner), index.len(), 1, |blend: &Blend| match blend.order() {
            BlendOrder::Greedy(index) => Some(&index.dataset_sample_index),
            BlendOrder::Shares { .. } => None,
        }))
    }
}

/// Samples that each dataset gives to the first `count` of a blend with exact shares.
#[pyfunction]
fn share_counts(phases: Vec<(u64, Vec<f64>)>, count: u64) -> PyResult<Vec<u64>> {
    Ok(Phases::new(&phases).map_err(IntoPyErr::into_py_err)?.counts(count))
}

/// Samples that each dataset gives to a weighted blend of `size` samples in Megatron's order.
#[pyfunction]
fn greedy_counts(py: Python<'_>, weights: Vec<f64>, size: u64) -> PyResult<Vec<u64>> {
    let index = py.without_gil(|| GreedyIndex::weighted(&weights, size))?;
    let mut counts = vec![0; weights.len()];
    for dataset in index.dataset_index.iter() {
        counts[dataset as usize] += 1;
    }
    Ok(counts)
}

/// Weights divided by their sum, in numpy's order of addition.
#[pyfunction]
fn normalized_weights<'py>(py: Python<'py>, weights: Vec<f64>) -> Bound<'py, PyArray1<f64>> {
    normalized(&weights).into_pyarray(py)
}

/// A tokenizer as the cutter of text. Encoders are made as they are needed and kept.
struct TokenizerCodec {
    tokenizer: Py<PyTokenizer>,
    encoders: Mutex<Vec<Encoder>>,
}

impl TextCodec for TokenizerCodec {
    fn decode(&self, ids: &[i64]) -> Option<String> {
        let ids: Vec<u32> = ids.iter().map(|&id| u32::try_from(id)).collect::<Result<_, _>>().ok()?;
        let text = self.tokenizer.get().tokenizer.decode(&ids).ok()?;
        // The stand-in for bytes that are no text.
        (!text.contains(char::REPLACEMENT_CHARACTER)).then_some(text)
    }

    fn encode(&self, text: &str, out: &mut Vec<i64>) {
        let kept = self.encoders.lock().ok().and_then(|mut encoders| encoders.pop());
        let Some(mut encoder) = kept.or_else(|| self.tokenizer.get().tokenizer.encoder(EncodeOptions::default()).ok())
        else {
            return;
        };
        let mut ids = Vec::new();
        if encoder.encode(text, &mut ids).is_ok() {
            out.extend(ids.into_iter().map(i64::from));
        }
        if let Ok(mut encoders) = self.encoders.lock() {
            encoders.push(encoder);
        }
    }
}

/// The samples of another source with documents reordered for filling in the middle.
#[pyfunction]
#[pyo3(signature = (source, *, rate, spm_rate, seed, prefix_id, middle_id, suffix_id, eod_id, pad_id, tokenizer))]
#[expect(clippy::too_many_arguments, reason = "keywords, each named by the caller")]
fn fill_in_middle(
    source: &PySampleSource,
    rate: f64,
    spm_rate: f64,
    seed: u64,
    prefix_id: i64,
    middle_id: i64,
    suffix_id: i64,
    eod_id: Option<i64>,
    pad_id: i64,
    tokenizer: Option<Py<PyTokenizer>>,
) -> PyResult<PySampleSource> {
    let config = FimConfig { rate, spm_rate, seed, prefix_id, middle_id, suffix_id, eod_id, pad_id };
    let codec = tokenizer.map(|tokenizer| {
        Arc::new(TokenizerCodec { tokenizer, encoders: Mutex::new(Vec::new()) }) as Arc<dyn TextCodec>
    });
    let reordered = FimSource::new(Arc::clone(source.source()), config, codec).map_err(IntoPyErr::into_py_err)?;
    Ok(PySampleSource::new(Arc::new(reordered)))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyInstantDataset>()?;
    module.add_class::<PyBestFitDataset>()?;
    module.add_class::<PyMockDataset>()?;
    module.add_class::<PyBlend>()?;
    module.add_function(wrap_pyfunction!(share_counts, module)?)?;
    module.add_function(wrap_pyfunction!(greedy_counts, module)?)?;
    module.add_function(wrap_pyfunction!(normalized_weights, module)?)?;
    module.add_function(wrap_pyfunction!(fill_in_middle, module)?)
}
