//! `megaflow._core.Tokenizer`.

use std::path::PathBuf;

use megaflow_tokenize::{
    DocumentEnd, EncodeOptions, SpecialTokensInText, TokenizeError, Tokenizer, TokenizerFiles, UsedIds,
};
use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::PyDict;

use crate::errors::{IntoPyErr, error};
use crate::gil::WithoutGil;
use crate::views::array_interface;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyTokenizer>()
}

/// Ids of several texts, and where each begins.
type BatchArrays<'py> = (Bound<'py, PyArray1<u32>>, Bound<'py, PyArray1<i64>>);

/// Ids that numpy shows without a copy, writable. Once the last array on them is gone, the tokenizer may write the next
/// batch into their memory.
#[pyclass(frozen, module = "megaflow._core")]
struct IdRow {
    ids: Vec<u32>,
    address: usize,
    used: UsedIds,
}

/// Fewer ids than these are left to numpy: their memory costs nothing.
const FEW_IDS: usize = 1 << 14;

impl IdRow {
    /// An array of ids that came from `tokenizer`.
    fn array<'py>(py: Python<'py>, mut ids: Vec<u32>, tokenizer: &Tokenizer) -> PyResult<Bound<'py, PyArray1<u32>>> {
        if ids.len() < FEW_IDS {
            return Ok(ids.into_pyarray(py));
        }
        let address = ids.as_mut_ptr().expose_provenance();
        let row = Self { ids, address, used: tokenizer.used_ids() };
        let array = py.import("numpy")?.call_method1("asarray", (row,))?;
        Ok(array.cast_into()?)
    }
}

impl Drop for IdRow {
    fn drop(&mut self) {
        self.used.give_back(std::mem::take(&mut self.ids));
    }
}

#[pymethods]
impl IdRow {
    /// numpy's array interface, version 3.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        array_interface(py, "<u4", &[self.ids.len()], self.address, false)
    }
}

/// Turns text into token ids.
#[pyclass(name = "Tokenizer", module = "megaflow._core", frozen)]
pub(crate) struct PyTokenizer {
    pub(crate) tokenizer: Tokenizer,
    pub(crate) files: Vec<PathBuf>,
}

/// Policy by the name that users type.
pub(crate) fn special_policy(name: &str) -> PyResult<SpecialTokensInText> {
    match name {
        "text" => Ok(SpecialTokensInText::Text),
        "encode" => Ok(SpecialTokensInText::Encode),
        "error" => Ok(SpecialTokensInText::Error),
        other => {
            Err(error("ConfigError", format!("special_tokens_in_text must be text, encode or error, got {other:?}")))
        }
    }
}

#[pymethods]
impl PyTokenizer {
    /// From a tokenizer.json, a folder, or a vocabulary and its merges.
    #[staticmethod]
    #[pyo3(signature = (path, merges=None))]
    fn load(py: Python<'_>, path: PathBuf, merges: Option<PathBuf>) -> PyResult<Self> {
        let loaded = py.without_gil(|| match &merges {
            None => TokenizerFiles::from_path(&path),
            Some(merges) => TokenizerFiles::from_vocab_and_merges(&path, merges),
        })?;
        Ok(Self { tokenizer: loaded.tokenizer, files: loaded.files })
    }

    #[pyo3(signature = (text, *, special_tokens_in_text="text", add_special_tokens=false, add_bos=false, add_eos=false))]
    fn encode<'py>(
        &self,
        py: Python<'py>,
        text: &str,
        special_tokens_in_text: &str,
        add_special_tokens: bool,
        add_bos: bool,
        add_eos: bool,
    ) -> PyResult<Bound<'py, PyArray1<u32>>> {
        let special_tokens_in_text = special_policy(special_tokens_in_text)?;
        let cache_bytes = EncodeOptions::default().cache_bytes;
        let options = EncodeOptions { special_tokens_in_text, add_special_tokens, add_bos, add_eos, cache_bytes };
        let ids = py.without_gil(|| -> Result<_, TokenizeError> {
            let (mut ids, mut encoder) = (Vec::new(), self.tokenizer.encoder(options)?);
            encoder.encode(text, &mut ids)?;
            self.tokenizer.put_back(encoder);
            Ok(ids)
        })?;
        Ok(ids.into_pyarray(py))
    }

    /// Ids of several texts, one after the other, and where each begins (the end of the last one too).
    #[pyo3(signature = (texts, *, special_tokens_in_text, add_special_tokens, add_bos, add_eos, threads, cache_bytes))]
    #[expect(clippy::too_many_arguments, reason = "keywords, each named by the caller")]
    fn encode_batch<'py>(
        &self,
        py: Python<'py>,
        texts: Vec<PyBackedStr>,
        special_tokens_in_text: &str,
        add_special_tokens: bool,
        add_bos: bool,
        add_eos: bool,
        threads: usize,
        cache_bytes: usize,
    ) -> PyResult<BatchArrays<'py>> {
        let special_tokens_in_text = special_policy(special_tokens_in_text)?;
        let options = EncodeOptions { special_tokens_in_text, add_special_tokens, add_bos, add_eos, cache_bytes };
        let batch = py.without_gil(|| {
            let texts: Vec<&str> = texts.iter().map(|text| &**text).collect();
            self.tokenizer.encode_batch(&texts, options, threads)
        })?;
        Ok((IdRow::array(py, batch.ids, &self.tokenizer)?, batch.offsets.into_pyarray(py)))
    }

    fn decode(&self, py: Python<'_>, ids: Vec<u32>) -> PyResult<String> {
        py.without_gil(|| self.tokenizer.decode(&ids))
    }

    /// Texts of the ids from each begin to its end.
    fn decode_many(
        &self,
        py: Python<'_>,
        ids: PyReadonlyArray1<'_, u32>,
        begins: PyReadonlyArray1<'_, i64>,
        ends: PyReadonlyArray1<'_, i64>,
    ) -> PyResult<Vec<String>> {
        let (ids, begins, ends) = (ids.as_slice()?, begins.as_slice()?, ends.as_slice()?);
        let outside = || error("SampleIndexError", format!("a text lies outside the {} ids given", ids.len()));
        let slice = |(&begin, &end): (&i64, &i64)| ids.get(usize::try_from(begin).ok()?..usize::try_from(end).ok()?);
        let texts: Vec<&[u32]> = begins.iter().zip(ends).map(slice).collect::<Option<_>>().ok_or_else(outside)?;
        py.without_gil(|| texts.into_iter().map(|ids| self.tokenizer.decode(ids)).collect::<Result<Vec<_>, _>>())
    }

    /// Ids of the special tokens, in rising order.
    #[getter]
    fn special_ids(&self) -> Vec<u32> {
        self.tokenizer.special_ids()
    }

    /// Ids that the post-processor adds to each text where that is asked for.
    fn added_special_tokens(&self) -> PyResult<Vec<u32>> {
        self.tokenizer.added_special_tokens().map(<[u32]>::to_vec).map_err(IntoPyErr::into_py_err)
    }

    /// Fails if documents cannot be encoded like this, or would end twice with the same token.
    #[pyo3(signature = (*, add_special_tokens, add_bos, add_eos, append_eod))]
    fn check_documents(
        &self,
        add_special_tokens: bool,
        add_bos: bool,
        add_eos: bool,
        append_eod: Option<u32>,
    ) -> PyResult<()> {
        let options = EncodeOptions { add_special_tokens, add_bos, add_eos, ..EncodeOptions::default() };
        self.tokenizer.check_documents(options, append_eod).map_err(IntoPyErr::into_py_err)
    }

    /// Text and id of the BOS.
    fn bos(&self) -> PyResult<Option<(String, u32)>> {
        self.tokenizer.end_token(DocumentEnd::Bos).map(|found| found.cloned()).map_err(IntoPyErr::into_py_err)
    }

    /// Text and id of the EOS.
    fn eos(&self) -> PyResult<Option<(String, u32)>> {
        self.tokenizer.end_token(DocumentEnd::Eos).map(|found| found.cloned()).map_err(IntoPyErr::into_py_err)
    }

    #[pyo3(signature = (token=None, *, is_needed=true))]
    fn eod(&self, token: Option<&str>, is_needed: bool) -> PyResult<Option<(String, u32)>> {
        self.tokenizer.eod_where(is_needed, token).map_err(IntoPyErr::into_py_err)
    }

    fn token_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_id(token)
    }

    #[getter]
    fn vocab_size(&self) -> u64 {
        self.tokenizer.vocab_size()
    }

    #[getter]
    fn fingerprint(&self) -> &str {
        self.tokenizer.fingerprint()
    }

    #[getter]
    fn engine(&self) -> &'static str {
        self.tokenizer.engine_kind().name()
    }

    #[getter]
    fn model_kind(&self) -> &str {
        self.tokenizer.model_kind()
    }

    #[getter]
    fn files(&self) -> Vec<PathBuf> {
        self.files.clone()
    }
}
