//! Inputs that Python hands over: names, remote objects, Arrow streams.

use std::ffi::CStr;
use std::io;
use std::path::Path;
use std::sync::Arc;

use arrow_array::RecordBatchReader;
use arrow_array::ffi_stream::{ArrowArrayStreamReader, FFI_ArrowArrayStream};
use megaflow_build::SplitSentences;
use megaflow_source::{RandomAccess, Source};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyCapsule};

use crate::errors::error;

/// Name under which the Arrow PyCapsule interface hands over a stream.
const STREAM_CAPSULE: &CStr = c"arrow_array_stream";

/// The input that a kind, a name and an object stand for.
pub(crate) fn source_of(kind: &str, name: &Path, object: Option<&Bound<'_, PyAny>>) -> PyResult<Source> {
    let name_path = name.to_owned();
    match (kind, object) {
        ("file", _) if name == Path::new("-") => Ok(Source::stdin()),
        ("file", _) => Ok(Source::file(name_path)),
        ("remote", Some(object)) => Ok(Source::remote(name_path, Arc::new(RemoteObject::new(object)?))),
        ("arrow", Some(object)) => Ok(Source::batches(name_path, Box::new(arrow_stream(object)?))),
        _ => Err(error("ConfigError", format!("{}: an input of unknown kind {kind:?}", name.display()))),
    }
}

/// As [`source_of`], for a reader that comes back: a table is asked for its record batches anew each time.
pub(crate) fn repeatable_source_of(kind: &str, name: &Path, object: Option<&Bound<'_, PyAny>>) -> PyResult<Source> {
    match (kind, object) {
        ("arrow", Some(object)) => {
            let object = object.clone().unbind();
            let open = move || {
                Python::attach(|py| arrow_stream(object.bind(py)))
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
    Ok(Arc::new(SentenceSplitter { object: object.clone().unbind(), name: object.getattr("name")?.extract()? }))
}

impl SplitSentences for SentenceSplitter {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn split(&self, text: &str) -> Result<Vec<String>, String> {
        let split = |py: Python<'_>| self.object.bind(py).call_method1("split", (text,))?.extract();
        Python::attach(split).map_err(|error: PyErr| Python::attach(|py| error.value(py).to_string()))
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
        Python::attach(|py| {
            let bytes = self.object.bind(py).call_method1("read_at", (offset, buffer.len()))?;
            let bytes = bytes.cast::<PyBytes>()?.as_bytes();
            let got = bytes.len().min(buffer.len());
            buffer[..got].copy_from_slice(&bytes[..got]);
            Ok(got)
        })
        .map_err(|error: PyErr| io::Error::other(error.to_string()))
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
