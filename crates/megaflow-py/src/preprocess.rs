//! `megaflow._core.preprocess` and what plans it.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Duration;

use megaflow_build::{
    BuildError, EmptyDocuments, JobInput, JobOptions, OnBadRecord, Progress, Provenance, Report, plan_shards as plan,
    preprocess as run_job,
};
use megaflow_source::{Format, Source, SourceError, discover as find_inputs};
use megaflow_tokenize::{EncodeOptions, Tokenizer};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::ending;
use crate::errors::{IntoPyErr, error};
use crate::gil::WithoutGil;
use crate::inputs::{sentence_splitter, source_of};
use crate::parking::parked;
use crate::tokenizer::{PyTokenizer, special_policy};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(discover, module)?)?;
    module.add_function(wrap_pyfunction!(plan_shards, module)?)?;
    module.add_function(wrap_pyfunction!(preprocess, module)?)
}

/// Kind, name, object (for kinds `remote` and `arrow`), begin and end of an input.
pub(crate) type InputArgument<'py> = (String, PathBuf, Option<Bound<'py, PyAny>>, Option<(u64, u64)>);

/// Inputs of one shard: index of the input, begin and end or None for the whole.
type ShardInputs = Vec<(usize, Option<(u64, u64)>)>;

/// The settings of a job as Python names them.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Settings<'py> {
    inputs: Vec<InputArgument<'py>>,
    input_format: String,
    invalid_utf8: String,
    every: Option<(u64, u64)>,
    output_prefix: PathBuf,
    json_keys: Vec<String>,
    append_eod: bool,
    eod_token: Option<String>,
    empty_documents: String,
    on_bad_record: String,
    max_bad_records: Option<u64>,
    special_tokens_in_text: String,
    add_special_tokens: bool,
    add_bos: bool,
    add_eos: bool,
    workers: usize,
    block_bytes: usize,
    restart: bool,
    journal_every_s: f64,
    allow_no_documents: bool,
    command: Vec<String>,
    tokenizer_type: String,
    sentences: Option<Bound<'py, PyAny>>,
}

/// The files that names, folders, patterns and lists lead to, in reading order.
#[pyfunction]
fn discover(py: Python<'_>, names: Vec<PathBuf>, takes_text: bool) -> PyResult<Vec<PathBuf>> {
    py.without_gil(|| find_inputs(&names, takes_text))
}

/// Inputs of each shard as `(index of the input, begin and end or None)`.
#[pyfunction]
fn plan_shards<'py>(
    py: Python<'py>,
    inputs: Vec<InputArgument<'py>>,
    input_format: &str,
    num_shards: usize,
) -> PyResult<Vec<ShardInputs>> {
    let sources = inputs.iter().map(|(kind, name, object, _)| source_of(kind, name, object.as_ref()));
    let sources = sources.collect::<PyResult<Vec<Source>>>()?;
    let format = format_of(input_format)?;
    let shards: Vec<Vec<JobInput>> = py.without_gil(|| plan(&sources, format, num_shards))?;
    let place = |input: &JobInput| {
        let index = sources.iter().position(|source| source.name() == input.source.name()).unwrap_or(0);
        (index, input.range.as_ref().map(|range| (range.start, range.end)))
    };
    Ok(shards.iter().map(|shard| shard.iter().map(place).collect()).collect())
}

pub(crate) fn format_of(name: &str) -> PyResult<Option<Format>> {
    match Format::from_name(name) {
        None if name != "auto" => Err(error(
            "ConfigError",
            format!("input_format must be auto, jsonl, text, text-lines, parquet, arrow or arrow-stream, got {name:?}"),
        )),
        format => Ok(format),
    }
}

impl IntoPyErr for SourceError {
    fn into_py_err(self) -> PyErr {
        BuildError::from(self).into_py_err()
    }
}

/// Runs one job; `progress(bytes_done, bytes_total, documents, tokens, rejected)` is called about ten times a second.
#[pyfunction]
fn preprocess<'py>(
    py: Python<'py>,
    settings: Settings<'py>,
    tokenizer: &PyTokenizer,
    progress: Py<PyAny>,
) -> PyResult<Bound<'py, PyDict>> {
    let options = job_options(settings, tokenizer)?;
    let mut raised = None;
    let mut tell = |now: &Progress| {
        if ending::must_rest() {
            return ControlFlow::Break(());
        }
        let told = parked(|| {
            Python::attach(|py| {
                py.check_signals()?;
                progress.call1(py, (now.bytes_done, now.bytes_total, now.documents, now.tokens, now.rejected))
            })
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
    if ending::must_rest() {
        py.detach(|| ending::rest());
    }
    if let Some(error) = raised {
        return Err(error);
    }
    report_dict(py, result.map_err(IntoPyErr::into_py_err)?)
}

/// The end of document that a job appends and records.
fn find_eod(tokenizer: &Tokenizer, token: Option<&str>, is_appended: bool) -> PyResult<Option<(String, u32)>> {
    let eod = tokenizer.eod_where(is_appended, token).map_err(IntoPyErr::into_py_err)?;
    if is_appended && eod.is_none() {
        return Err(error(
            "TokenizerError",
            "the tokenizer declares no end-of-document token and has none of the known names; \
             name it with --eod-token, or write documents without one with --no-append-eod"
                .to_owned(),
        ));
    }
    Ok(eod)
}

fn job_options(settings: Settings<'_>, tokenizer: &PyTokenizer) -> PyResult<JobOptions> {
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
    let eod = find_eod(&tokenizer.tokenizer, settings.eod_token.as_deref(), settings.append_eod)?;
    let input = |(kind, name, object, range): &InputArgument<'_>| {
        let source = source_of(kind, name, object.as_ref())?;
        Ok(JobInput { source, range: range.map(|(begin, end)| begin..end) })
    };
    let replaces = [false, true][choice("invalid_utf8", &settings.invalid_utf8, ["error", "replace"])?];
    Ok(JobOptions {
        inputs: settings.inputs.iter().map(input).collect::<PyResult<_>>()?,
        format: format_of(&settings.input_format)?,
        replace_invalid_utf8: replaces,
        every: settings.every,
        sentences: settings.sentences.as_ref().map(sentence_splitter).transpose()?,
        output_prefix: settings.output_prefix,
        json_keys: settings.json_keys,
        append_eod: eod.as_ref().map(|(_, id)| *id).filter(|_| settings.append_eod),
        empty_documents,
        on_bad_record,
        max_bad_records: settings.max_bad_records,
        encode: EncodeOptions {
            special_tokens_in_text: special_policy(&settings.special_tokens_in_text)?,
            add_special_tokens: settings.add_special_tokens,
            add_bos: settings.add_bos,
            add_eos: settings.add_eos,
            ..EncodeOptions::default()
        },
        threads: settings.workers,
        block_bytes: settings.block_bytes,
        restart: settings.restart,
        journal_every: Duration::try_from_secs_f64(settings.journal_every_s).unwrap_or(Duration::MAX),
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
    let rejected: BTreeMap<String, u64> = report.rejected;
    dict.set_item("pairs", pairs)?;
    dict.set_item("input_bytes", report.input_bytes)?;
    dict.set_item("text_bytes", report.text_bytes)?;
    dict.set_item("warnings", report.warnings)?;
    dict.set_item("resumed_documents", report.resumed_documents)?;
    dict.set_item("records", report.records)?;
    dict.set_item("rejected", rejected)?;
    dict.set_item("rejects_path", report.rejects_path.map(|path| path.display().to_string()))?;
    dict.set_item("special_hits", report.special_hits)?;
    Ok(dict)
}
