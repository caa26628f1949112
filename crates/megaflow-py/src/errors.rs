//! Errors of the crates to the classes of `megaflow.errors`.

use std::io;

use megaflow_build::BuildError;
use megaflow_indexed::WriteError;
use megaflow_source::SourceError;
use megaflow_tokenize::TokenizeError;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyModule;

/// An error that Python users can catch by class.
pub(crate) trait IntoPyErr {
    fn into_py_err(self) -> PyErr;
}

impl IntoPyErr for PyErr {
    fn into_py_err(self) -> PyErr {
        self
    }
}

/// An instance of a class of `megaflow.errors`.
pub(crate) fn error(class: &'static str, message: String) -> PyErr {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    Python::attach(|py| {
        let module = MODULE.get_or_try_init(py, || PyModule::import(py, "megaflow.errors").map(Bound::unbind));
        match module.and_then(|module| module.bind(py).getattr(class)?.call1((&message,))) {
            Ok(instance) => PyErr::from_value(instance),
            Err(_) => PyRuntimeError::new_err(message),
        }
    })
}

/// Class for what the system said about a file.
fn io_class(source: &io::Error) -> &'static str {
    if source.kind() == io::ErrorKind::NotFound { "MissingFileError" } else { "FileAccessError" }
}

impl IntoPyErr for TokenizeError {
    fn into_py_err(self) -> PyErr {
        let class = match &self {
            Self::Missing { .. } => "MissingFileError",
            Self::Io { source, .. } => io_class(source),
            _ => "TokenizerError",
        };
        error(class, self.to_string())
    }
}

pub(crate) fn source_class(error: &SourceError) -> &'static str {
    match error {
        SourceError::Missing { .. } | SourceError::NothingFound { .. } => "MissingFileError",
        SourceError::Io { source, .. } => io_class(source),
        _ => "DataFormatError",
    }
}

pub(crate) fn write_class(error: &WriteError) -> &'static str {
    match error {
        WriteError::SequenceTooLong { .. } | WriteError::IdTooLarge { .. } => "DataFormatError",
        WriteError::Busy { .. } => "OutputBusyError",
        _ => "FileAccessError",
    }
}

impl IntoPyErr for BuildError {
    fn into_py_err(self) -> PyErr {
        let class = match &self {
            Self::Source(source) => source_class(source),
            Self::Write(write) => write_class(write),
            Self::Tokenize(TokenizeError::Missing { .. }) => "MissingFileError",
            Self::Tokenize(_) => "TokenizerError",
            Self::BadRecord { .. } | Self::TooManyBadRecords { .. } => "DataFormatError",
            Self::NoDocuments { .. } => "NoDocumentsError",
            Self::Options(_) | Self::Sentences { .. } => "ConfigError",
            Self::OtherJob { .. } => "CheckpointError",
            _ => "MegaflowError",
        };
        error(class, self.to_string())
    }
}
