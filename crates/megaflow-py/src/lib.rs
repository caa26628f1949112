//! `megaflow._core`: the only crate that knows Python.
//!
//! Every function extracts its arguments, releases the GIL, calls a crate, and maps the error to a class of
//! `megaflow.errors`. `unsafe` is in `inputs` (an Arrow stream is taken over) and `parking`.

#![deny(unsafe_code)]

use pyo3::prelude::*;

mod dataset;
mod ending;
mod errors;
mod gil;
mod indexed;
mod inputs;
mod loader;
mod pairs;
mod parking;
mod preprocess;
mod samples;
mod stream;
mod tokenizer;
mod views;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    tokenizer::register(module)?;
    preprocess::register(module)?;
    views::register(module)?;
    indexed::register(module)?;
    pairs::register(module)?;
    dataset::register(module)?;
    samples::register(module)?;
    stream::register(module)?;
    loader::register(module)
}
