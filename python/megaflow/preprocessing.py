"""Text files to `.bin/.idx` pairs."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megaflow import _core
from megaflow.errors import ConfigError
from megaflow.tokenizer import Tokenizer

Progress = Callable[[int, int, int, int, int], None]
"""Called with bytes done, bytes in all, documents, tokens, bad records; about ten times a second."""

_INPUT_SUFFIXES = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessOptions:
    """What a job is to do. The defaults are those of `megaflow-preprocess`."""

    output_prefix: str | None = None
    """The pairs are named PREFIX_KEY_document; by default the one input's name without its suffix."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of the records that hold text; each makes a pair."""
    append_eod: bool = True
    """Whether the end-of-document token is appended to each document."""
    eod_token: str | None = None
    """Text of the end-of-document token; by default the declared one, else the first known name."""
    empty_documents: Literal["boundary", "eod"] = "boundary"
    """What an empty document becomes: a boundary without a sequence, or just the end-of-document token."""
    on_bad_record: Literal["error", "skip"] = "error"
    """Whether a record without text stops the job, or goes to PREFIX.rejects.jsonl and is counted."""
    max_bad_records: int | None = None
    """With skip: how many bad records are allowed."""
    special_tokens_in_text: Literal["text", "encode", "error"] = "text"
    """What text that spells a special token becomes: ordinary text, the token, or a bad record."""
    add_special_tokens: bool = False
    """Whether the tokenizer's post-processor may add its tokens (often a BOS) to each text."""
    workers: int = field(
        default_factory=lambda: (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        )
    )
    """Threads that tokenize; by default one for each processor."""
    block_bytes: int = 1 << 20
    """Bytes of input that a thread takes at a time. The result does not depend on it."""
    allow_no_documents: bool = False
    """Whether an input without documents gives an empty pair, as in Megatron, and not an error."""


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
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    options: PreprocessOptions | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    progress: Progress | None = None,
) -> PreprocessReport:
    """Turns files of JSON lines into `.bin/.idx` pairs with their sidecars, in input order.

    The result does not depend on the number of threads. Files appear under their final names only when complete.

    Args:
        inputs: one file or several, read in this order.
        options: what to do; the defaults are those of `megaflow-preprocess`.
        tokenizer: GPT-2's by default.
        progress: called about ten times a second on the calling thread.

    Raises:
        ConfigError: if the options make no sense.
        MissingFileError, FileAccessError: an input or the output cannot be used.
        DataFormatError: a record is not a document; the message names file, line and byte.
        NoDocumentsError: the input holds no document.
    """
    options = options or PreprocessOptions()
    paths = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
    tokenizer = tokenizer or Tokenizer.gpt2()
    wall, cpu = time.perf_counter(), time.process_time()
    settings = {
        **{name: getattr(options, name) for name in PreprocessOptions.__slots__},
        "inputs": [Path(path) for path in paths],
        "output_prefix": Path(options.output_prefix or default_prefix(paths)),
        "json_keys": list(options.json_keys),
        "command": list(sys.argv),
        "tokenizer_type": tokenizer.type,
    }
    report = _core.preprocess(settings, tokenizer._core, progress or _ignore)
    report["pairs"] = tuple(PairReport(**pair) for pair in report["pairs"])
    return PreprocessReport(
        **report,
        wall_s=time.perf_counter() - wall,
        cpu_s=time.process_time() - cpu,
        workers=options.workers,
    )


def default_prefix(paths: Sequence[str | os.PathLike[str]]) -> str:
    """Output prefix of a single input: its path without `.jsonl`, `.ndjson` or `.json`."""
    if len(paths) != 1:
        raise ConfigError(f"{len(paths)} inputs need a name for their output: --output-prefix")
    path = os.fspath(paths[0])
    return next((path.removesuffix(suffix) for suffix in _INPUT_SUFFIXES if path.endswith(suffix)), path)


def _ignore(*_: int) -> None:
    return None
