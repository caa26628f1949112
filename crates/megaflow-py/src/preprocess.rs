//! `megaflow._core.preprocess`.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::PathBuf;

use megaflow_build::{EmptyDocuments, JobOptions, OnBadRecord, Progress, Provenance, Report, preprocess as run_job};
use megaflow_tokenize::EncodeOptions;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{IntoPyErr, error};
use crate::tokenizer::{PyTokenizer, special_policy};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(preprocess, module)?)
}

/// The settings of a job as Python names them.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Settings {
    inputs: Vec<PathBuf>,
    output_prefix: PathBuf,
    json_keys: Vec<String>,
    append_eod: bool,
    eod_token: Option<String>,
    empty_documents: String,
    on_bad_record: String,
    max_bad_records: Option<u64>,
    special_tokens_in_text: String,
    add_special_tokens: bool,
    workers: usize,
    block_bytes: usize,
    allow_no_documents: bool,
    command: Vec<String>,
    tokenizer_type: String,
}

/// Runs one job; `progress(bytes_done, bytes_total, documents, tokens, rejected)` is called about ten times a second.
#[pyfunction]
fn preprocess<'py>(
    py: Python<'py>,
    settings: Settings,
    tokenizer: &PyTokenizer,
    progress: Py<PyAny>,
) -> PyResult<Bound<'py, PyDict>> {
    let options = job_options(settings, tokenizer)?;
    let mut raised = None;
    let mut tell = |now: &Progress| {
        let told = Python::attach(|py| {
            py.check_signals()?;
            progress.call1(py, (now.bytes_done, now.bytes_total, now.documents, now.tokens, now.rejected))
        });
        match told {
            Ok(_) => ControlFlow::Continue(()),
            Err(error) => {
                raised = Some(error);
                ControlFlow::Break(())
            }
        }
    };
    let result = py.detach(|| run_job(&options, &tokenizer.tokenizer, &mut tell));
    if let Some(error) = raised {
        return Err(error);
    }
    report_dict(py, result.map_err(IntoPyErr::into_py_err)?)
}

fn job_options(settings: Settings, tokenizer: &PyTokenizer) -> PyResult<JobOptions> {
    let choice = |name: &str, value: &str, allowed: [&str; 2]| {
        let place = allowed.iter().position(|allowed| *allowed == value);
        place.ok_or_else(|| {
            error("ConfigError", format!("{name} must be {} or {}, got {value:?}", allowed[0], allowed[1]))
        })
    };
    let empty_documents = [EmptyDocuments::Boundary, EmptyDocuments::Eod]
        [choice("empty_documents", &settings.empty_documents, ["boundary", "eod"])?];
    let on_bad_record =
        [OnBadRecord::Error, OnBadRecord::Skip][choice("on_bad_record", &settings.on_bad_record, ["error", "skip"])?];
    let eod = tokenizer.tokenizer.eod(settings.eod_token.as_deref()).map_err(IntoPyErr::into_py_err)?;
    if settings.append_eod && eod.is_none() {
        return Err(error(
            "TokenizerError",
            "the tokenizer declares no end-of-document token and has none of the known names; \
             name it with --eod-token, or write documents without one with --no-append-eod"
                .to_owned(),
        ));
    }
    Ok(JobOptions {
        inputs: settings.inputs,
        output_prefix: settings.output_prefix,
        json_keys: settings.json_keys,
        append_eod: eod.as_ref().map(|(_, id)| *id).filter(|_| settings.append_eod),
        empty_documents,
        on_bad_record,
        max_bad_records: settings.max_bad_records,
        encode: EncodeOptions {
            special_tokens_in_text: special_policy(&settings.special_tokens_in_text)?,
            add_special_tokens: settings.add_special_tokens,
        },
        threads: settings.workers,
        block_bytes: settings.block_bytes,
        allow_no_documents: settings.allow_no_documents,
        provenance: Provenance {
            command: settings.command,
            tokenizer_type: settings.tokenizer_type,
            tokenizer_files: tokenizer.files.clone(),
            eod,
        },
    })
}

fn report_dict<'py>(py: Python<'py>, report: Report) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let mut pairs = Vec::new();
    for (prefix, dtype, counts) in &report.pairs {
        let pair = PyDict::new(py);
        pair.set_item("prefix", prefix.display().to_string())?;
        pair.set_item("dtype", dtype)?;
        pair.set_item("documents", counts.documents)?;
        pair.set_item("empty_documents", counts.empty_documents)?;
        pair.set_item("sequences", counts.sequences)?;
        pair.set_item("tokens", counts.tokens)?;
        pairs.push(pair);
    }
    let rejected: BTreeMap<&str, u64> = report.rejected;
    dict.set_item("pairs", pairs)?;
    dict.set_item("input_bytes", report.input_bytes)?;
    dict.set_item("records", report.records)?;
    dict.set_item("rejected", rejected)?;
    dict.set_item("rejects_path", report.rejects_path.map(|path| path.display().to_string()))?;
    dict.set_item("special_hits", report.special_hits)?;
    Ok(dict)
}
