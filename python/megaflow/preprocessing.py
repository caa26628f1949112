"""Text of any source to `.bin/.idx` pairs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from megaflow import _core
from megaflow.errors import ConfigError
from megaflow.inputs import ArrowStream, CoreInput, Input, resolve_inputs
from megaflow.processors import count_processors
from megaflow.sentences import splitter_for
from megaflow.tokenizer import Tokenizer

Progress = Callable[[int, int, int, int, int], None]
"""Called with bytes done, bytes in all, documents, tokens, bad records; about ten times a second."""

_INPUT_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".pq", ".arrow", ".arrows", ".feather", ".txt")
_PACKED_SUFFIXES = (".gz", ".gzip", ".zst", ".zstd", ".bz2", ".xz")


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessOptions:
    """What a job is to do. The defaults are those of `megaflow-preprocess`."""

    output_prefix: str | None = None
    """The pairs are named PREFIX_KEY_document (with split_sentences PREFIX_KEY_sentence); by default the one input's
    name without its suffix."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys (of tables: columns) that hold text; each makes a pair. A key with dots is a path, if none has that name."""
    input_format: Literal["auto", "jsonl", "text", "text-lines", "parquet", "arrow", "arrow-stream"] = "auto"
    """What the inputs are; with auto their first bytes decide. text is a document a file, text-lines one a line."""
    invalid_utf8: Literal["error", "replace"] = "error"
    """Whether bytes that are not UTF-8 make a record bad, or become U+FFFD."""
    append_eod: bool = True
    """Whether the end-of-document token is appended to each document."""
    eod_token: str | None = None
    """Text of the end-of-document token; by default the declared one, else the first known name."""
    split_sentences: bool = False
    """Whether each text is cut into sentences, a sequence each, by NLTK's Punkt; needs the extra `sentences`."""
    keep_newlines: bool = False
    """With split_sentences: whether the white space behind a sentence stays in it."""
    language: str = "english"
    """With split_sentences: the Punkt model."""
    empty_documents: Literal["boundary", "eod"] = "boundary"
    """What an empty document becomes: a boundary without a sequence, or just the end-of-document token."""
    on_bad_record: Literal["error", "skip"] = "error"
    """Whether a record without text stops the job, or goes to PREFIX.rejects.jsonl and is counted."""
    max_bad_records: int | None = None
    """With skip: how many bad records are allowed."""
    special_tokens_in_text: Literal["text", "encode", "error"] = "text"
    """What text that spells a special token becomes: ordinary text, the token, or a bad record."""
    add_special_tokens: bool = False
    """Whether the tokenizer's post-processor adds its tokens (often a BOS) to each text; an error if it has none."""
    add_bos: bool = False
    """Whether the tokenizer's BOS goes before each document; an error if it has none. Empty documents get none."""
    add_eos: bool = False
    """Whether the tokenizer's EOS goes behind each document, before the end-of-document token; an error if it has none,
    or if that token is the EOS."""
    workers: int = field(default_factory=count_processors)
    """Threads that tokenize; by default one for each processor."""
    block_bytes: int = 1 << 20
    """Bytes of input that a thread takes at a time. The result does not depend on it."""
    restart: bool = False
    """Whether what an interrupted job of the same output has done is thrown away."""
    journal_every_s: float = 15.0
    """Seconds between two entries of the journal from which a killed job goes on."""
    every: tuple[int, int] | None = None
    """(index, modulo): only lines whose number, from 0, leaves `index` divided by `modulo`: Megatron's partitions."""
    allow_no_documents: bool = False
    """Whether an input without documents gives an empty pair, as in Megatron, and not an error."""

    @property
    def level(self) -> str:
        """What a pair's name ends with."""
        return "sentence" if self.split_sentences else "document"


@dataclass(frozen=True, kw_only=True, slots=True)
class PairReport:
    """One pair that was written."""

    prefix: str
    dtype: str
    documents: int
    empty_documents: int
    sequences: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessReport:
    """What a job did."""

    pairs: tuple[PairReport, ...]
    input_bytes: int
    """Bytes of the inputs, compressed as they are."""
    text_bytes: int
    """Bytes of the texts that were tokenized, in UTF-8."""
    warnings: list[str]
    """Sentences about inputs that are named twice, or whose names promise something else than they hold."""
    resumed_documents: int
    """Documents that an interrupted job had done before."""
    records: int
    rejected: dict[str, int]
    """Bad records by reason."""
    rejects_path: str | None
    special_hits: int
    """Places where text spelled a special token."""
    wall_s: float
    cpu_s: float
    """Processor seconds of all threads."""
    workers: int

    @property
    def tokens(self) -> int:
        """Tokens of all pairs."""
        return sum(pair.tokens for pair in self.pairs)

    @property
    def num_rejected(self) -> int:
        """Bad records of all reasons."""
        return sum(self.rejected.values())


def preprocess(
    inputs: Input | Sequence[Input],
    options: PreprocessOptions | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    progress: Progress | None = None,
) -> PreprocessReport:
    """Turns text into `.bin/.idx` pairs with their sidecars, in input order.

    The result does not depend on the number of threads, nor on the container or compression of the inputs. Files appear
    under their final names only when complete. A job that was killed goes on where it was when the same call is made
    again.

    Args:
        inputs: one input or several, read in this order: a file, a folder, a pattern, `@list`, `-` (standard input), a
            URL, or any object with `__arrow_c_stream__` (tables of pyarrow, polars, duckdb, datasets; their data is not
            copied).
        options: what to do; the defaults are those of `megaflow-preprocess`.
        tokenizer: GPT-2's by default.
        progress: called about ten times a second on the calling thread.

    Raises:
        ConfigError: if the options make no sense.
        MissingFileError, FileAccessError: an input or the output cannot be used.
        DataFormatError: a record is not a document, or an input is damaged; the message names file and place.
        NoDocumentsError: the input holds no document.
        CheckpointError: an interrupted job of the same output was another one; `restart` throws it away.
    """
    options = options or PreprocessOptions()
    notes: list[str] = []
    resolved = resolve_inputs(inputs, takes_text=options.input_format.startswith("text"), notes=notes)
    prefix = options.output_prefix or default_prefix(inputs)
    report = run_job(resolved, prefix, options, tokenizer or Tokenizer.gpt2(), progress)
    return replace(report, warnings=[*notes, *report.warnings])


def run_job(
    inputs: Sequence[CoreInput],
    prefix: str,
    options: PreprocessOptions,
    tokenizer: Tokenizer,
    progress: Progress | None = None,
) -> PreprocessReport:
    """Runs a job over resolved inputs; see `preprocess`."""
    wall, cpu = time.perf_counter(), time.process_time()
    settings = {
        **{name: getattr(options, name) for name in PreprocessOptions.__slots__},
        "inputs": list(inputs),
        "output_prefix": Path(prefix),
        "json_keys": list(options.json_keys),
        "command": [argument.encode(errors="backslashreplace").decode() for argument in sys.argv],
        "tokenizer_type": tokenizer.type,
    }
    with splitter_for(options) as splitter:
        settings["sentences"] = splitter
        report = _core.preprocess(settings, tokenizer._core, progress or _ignore)
    report["pairs"] = tuple(PairReport(**pair) for pair in report["pairs"])
    return PreprocessReport(
        **report,
        wall_s=time.perf_counter() - wall,
        cpu_s=time.process_time() - cpu,
        workers=options.workers,
    )


def check_tokenizer(options: PreprocessOptions, tokenizer: Tokenizer) -> None:
    """Whether the tokenizer has what a job would put around its documents, for jobs whose work begins far away.

    Raises:
        TokenizerError: if it lacks a token, or one would be put there twice.
    """
    eod = tokenizer._core.eod(options.eod_token) if options.append_eod else None
    tokenizer._core.check_documents(
        add_special_tokens=options.add_special_tokens,
        add_bos=options.add_bos,
        add_eos=options.add_eos,
        append_eod=None if eod is None else eod[1],
    )


def default_prefix(inputs: Input | Sequence[Input]) -> str:
    """Output prefix of a single input: its path without the endings of its format and compression.

    Raises:
        ConfigError: if there are several inputs, or one that has no name for an output.
    """
    several = [inputs] if isinstance(inputs, (str, os.PathLike, ArrowStream)) else list(inputs)
    if len(several) != 1:
        raise ConfigError(f"{len(several)} inputs need a name for their output: --output-prefix")
    path = os.fspath(several[0]) if isinstance(several[0], (str, os.PathLike)) else ""
    if not path or path == "-" or path.startswith("@") or "://" in path or any(mark in path for mark in "*?["):
        raise ConfigError(f"{path or 'a table'} gives no name for the output: --output-prefix")
    if Path(path).is_dir():
        return str(Path(path))
    for suffixes in (_PACKED_SUFFIXES, _INPUT_SUFFIXES):
        path = next((path.removesuffix(suffix) for suffix in suffixes if path.endswith(suffix)), path)
    return path


def _ignore(*_: int) -> None:
    return None
