//! Inputs that Python hands over: names, remote objects, Arrow streams.

use std::ffi::CStr;
use std::io;
use std::path::Path;
use std::sync::Arc;

use arrow_array::ffi_stream::{ArrowArrayStreamReader, FFI_ArrowArrayStream};
use arrow_array::{RecordBatch, RecordBatchReader};
use arrow_schema::{ArrowError, SchemaRef};
use megaflow_build::SplitSentences;
use megaflow_source::{RandomAccess, Source};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyCapsule};

use crate::ending;
use crate::errors::error;

/// Name under which the Arrow PyCapsule interface hands over a stream.
const STREAM_CAPSULE: &CStr = c"arrow_array_stream";

/// The input that a kind, a name and an object stand for.
pub(crate) fn source_of(kind: &str, name: &Path, object: Option<&Bound<'_, PyAny>>) -> PyResult<Source> {
    let name_path = name.to_owned();
    if let Some(object) = object {
        ending::expect_calls(object.py())?;
    }
    match (kind, object) {
        ("file", _) if name == Path::new("-") => Ok(Source::stdin()),
        ("file", _) => Ok(Source::file(name_path)),
        ("remote", Some(object)) => Ok(Source::remote(name_path, Arc::new(RemoteObject::new(object)?))),
        ("arrow", Some(object)) => Ok(Source::batches(name_path, Box::new(PythonBatches::of(object)?))),
        _ => Err(error("ConfigError", format!("{}: an input of unknown kind {kind:?}", name.display()))),
    }
}

/// As [`source_of`], for a reader that comes back: a table is asked for its record batches anew each time.
pub(crate) fn repeatable_source_of(kind: &str, name: &Path, object: Option<&Bound<'_, PyAny>>) -> PyResult<Source> {
    match (kind, object) {
        ("arrow", Some(object)) => {
            ending::expect_calls(object.py())?;
            let object = object.clone().unbind();
            let open = move || {
                ending::call(|| Python::attach(|py| PythonBatches::of(object.bind(py))))
                    .ok_or_else(refused)?
                    .map(|reader| Box::new(reader) as Box<dyn RecordBatchReader + Send>)
                    .map_err(|error: PyErr| io::Error::other(error.to_string()))
            };
            Ok(Source::table(name.to_owned(), Arc::new(open)))
        }
        _ => source_of(kind, name, object),
    }
}

/// A Python object with `name` and `split(text)`, which may be called from several threads at once.
struct SentenceSplitter {
    object: Py<PyAny>,
    name: String,
}

pub(crate) fn sentence_splitter(object: &Bound<'_, PyAny>) -> PyResult<Arc<dyn SplitSentences>> {
    ending::expect_calls(object.py())?;
    Ok(Arc::new(SentenceSplitter { object: object.clone().unbind(), name: object.getattr("name")?.extract()? }))
}

impl SplitSentences for SentenceSplitter {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn split(&self, text: &str) -> Result<Vec<String>, String> {
        let split = |py: Python<'_>| self.object.bind(py).call_method1("split", (text,))?.extract();
        let attached = || Python::attach(|py| split(py).map_err(|error: PyErr| error.value(py).to_string()));
        ending::call(attached).unwrap_or_else(|| Err(ending::REFUSED.to_owned()))
    }
}

/// A Python object with `size_bytes` and `read_at(offset, size)`.
struct RemoteObject {
    object: Py<PyAny>,
    size_bytes: u64,
}

impl RemoteObject {
    fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self { object: object.clone().unbind(), size_bytes: object.getattr("size_bytes")?.extract()? })
    }
}

impl RandomAccess for RemoteObject {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let read = |py: Python<'_>| {
            let bytes = self.object.bind(py).call_method1("read_at", (offset, buffer.len()))?;
            let bytes = bytes.cast::<PyBytes>()?.as_bytes();
            let got = bytes.len().min(buffer.len());
            buffer[..got].copy_from_slice(&bytes[..got]);
            Ok(got)
        };
        ending::call(|| Python::attach(read))
            .ok_or_else(refused)?
            .map_err(|error: PyErr| io::Error::other(error.to_string()))
    }
}

fn refused() -> io::Error {
    io::Error::other(ending::REFUSED)
}

/// Record batches that Python makes as they are asked for.
struct PythonBatches {
    reader: Option<ArrowArrayStreamReader>,
    schema: SchemaRef,
}

impl PythonBatches {
    fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let reader = arrow_stream(object)?;
        Ok(Self { schema: reader.schema(), reader: Some(reader) })
    }
}

impl Iterator for PythonBatches {
    type Item = Result<RecordBatch, ArrowError>;

    fn next(&mut self) -> Option<Self::Item> {
        let reader = self.reader.as_mut()?;
        ending::call(|| reader.next()).unwrap_or_else(|| Some(Err(ArrowError::ExternalError(Box::new(refused())))))
    }
}

impl RecordBatchReader for PythonBatches {
    fn schema(&self) -> SchemaRef {
        Arc::clone(&self.schema)
    }
}

impl Drop for PythonBatches {
    fn drop(&mut self) {
        ending::release(self.reader.take());
    }
}

/// The record batches of an object with `__arrow_c_stream__` (pyarrow, polars, duckdb, datasets): taken over, not copied.
fn arrow_stream(object: &Bound<'_, PyAny>) -> PyResult<ArrowArrayStreamReader> {
    let capsule = object.call_method0("__arrow_c_stream__")?;
    let capsule = capsule.cast::<PyCapsule>()?;
    let pointer = capsule.pointer_checked(Some(STREAM_CAPSULE))?.cast::<FFI_ArrowArrayStream>();
    let stream = take_stream(pointer.as_ptr());
    ArrowArrayStreamReader::try_new(stream).map_err(|fault| error("DataFormatError", format!("Arrow stream: {fault}")))
}

#[expect(unsafe_code, reason = "the Arrow C stream interface hands over a pointer")]
fn take_stream(pointer: *mut FFI_ArrowArrayStream) -> FFI_ArrowArrayStream {
    // SAFETY: the capsule's name was checked, so by the Arrow PyCapsule interface the pointer leads to an ArrowArrayStream that the
    // capsule keeps alive. `from_raw` moves it out and marks the original as released, which the interface asks of a consumer.
    unsafe { FFI_ArrowArrayStream::from_raw(pointer) }
}
