"""One job on many machines: shards by byte range or row group, each with a result of its own, joined by a merge.

A shard is a run of the inputs in reading order, so the merged result is that of one machine, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megaflow.errors import ConfigError, MissingFileError
from megaflow.inputs import CoreInput, Input, plan_shards, resolve_inputs
from megaflow.preprocessing import PairReport, PreprocessOptions, PreprocessReport, Progress, default_prefix, run_job
from megaflow.tokenizer import Tokenizer

_NO_INFLUENCE = ("output_prefix", "workers", "block_bytes", "restart", "journal_every_s", "allow_no_documents")
"""Options that do not decide a shard's bytes."""

MAX_SHARDS = 100_000
"""Shards of one job, at most: their numbers have five digits, so that names sort in their order."""


def parse_shard(text: str) -> tuple[int, int]:
    """`I/N` as numbers, I from 0.

    Raises:
        ConfigError: if it is something else, or N is more than `MAX_SHARDS`.
    """
    found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if found is None or not int(found[1]) < int(found[2]) <= MAX_SHARDS:
        raise ConfigError(
            f"--shard must be I/N with I from 0 to N-1 and N at most {MAX_SHARDS}, for example 0/8, got {text!r}"
        )
    return int(found[1]), int(found[2])


def shard_prefix(prefix: str, index: int, num_shards: int) -> str:
    """Output prefix of a shard; the names of all shards sort in their order."""
    return f"{prefix}_shard_{index:05d}-of-{num_shards:05d}"


def preprocess_shard(
    inputs: Input | Sequence[Input],
    options: PreprocessOptions,
    index: int,
    num_shards: int,
    *,
    tokenizer: Tokenizer,
    progress: Progress | None = None,
) -> PreprocessReport:
    """Does shard `index` of `num_shards`; every node of a job array calls it with its own index.

    A shard that gets nothing (fewer pieces of input than shards) writes an empty pair. One that is complete is not done
    again.

    Raises:
        ConfigError: if an input is standard input.
        Otherwise as `preprocess`.
    """
    notes: list[str] = []
    resolved = resolve_inputs(inputs, takes_text=options.input_format.startswith("text"), notes=notes)
    prefix = shard_prefix(options.output_prefix or default_prefix(inputs), index, num_shards)
    if any(name == "-" for _, name, _, _ in resolved):
        raise ConfigError("--shard cuts files: standard input cannot be read by each of the shards")
    shard = plan_shards(resolved, options.input_format, num_shards)[index]
    report = run_shard(shard, prefix, options, tokenizer, progress)
    return replace(report, warnings=[*notes, *report.warnings])


def run_shard(
    shard: Sequence[CoreInput],
    prefix: str,
    options: PreprocessOptions,
    tokenizer: Tokenizer,
    progress: Progress | None = None,
) -> PreprocessReport:
    """Does a shard, unless `PREFIX.done.json` says that it was done with the same inputs and settings.

    Raises:
        As `preprocess`.
    """
    name = _name_of(shard, options, tokenizer)
    if not options.restart:
        done = _done_before(prefix, name)
        if done is not None:
            return done
    note = done_note(prefix)
    note.unlink(missing_ok=True)
    report = run_job(shard, prefix, replace(options, allow_no_documents=True), tokenizer, progress)
    staged = note.with_name(f"{note.name}.new")
    staged.write_text(json.dumps({"shard": name, "report": asdict(report)}))
    staged.replace(note)
    return report


def done_note(prefix: str) -> Path:
    """The file that says that the shard with this output prefix is complete."""
    return Path(f"{prefix}.done.json")


def _name_of(shard: Sequence[CoreInput], options: PreprocessOptions, tokenizer: Tokenizer) -> str:
    """Digest of everything that decides a shard's bytes. Tables have no time of change: they are always read anew."""
    places = [(kind, name, *_size_and_time(kind, name, source), place) for kind, name, source, place in shard]
    settings = {field: repr(value) for field, value in asdict(options).items() if field not in _NO_INFLUENCE}
    return hashlib.sha256(repr((places, sorted(settings.items()), tokenizer.fingerprint)).encode()).hexdigest()


def _size_and_time(kind: str, name: str, source: Any) -> tuple[int, int]:
    if kind == "file":
        try:
            status = Path(name).stat()
        except OSError as error:
            raise MissingFileError(f"{name}: cannot be looked at: {error.strerror}") from None
        return status.st_size, status.st_mtime_ns
    return (source.size_bytes, 0) if kind == "remote" else (id(source), os.getpid())


def _done_before(prefix: str, name: str) -> PreprocessReport | None:
    try:
        saved = json.loads(done_note(prefix).read_text())
        report = saved["report"] | {"pairs": tuple(PairReport(**pair) for pair in saved["report"]["pairs"])}
        known = saved["shard"] == name
    except (OSError, ValueError, KeyError, TypeError):
        return None
    files = [f"{pair.prefix}{suffix}" for pair in report["pairs"] for suffix in (".bin", ".idx", ".json")]
    if not known or not all(Path(file).is_file() for file in files):
        return None
    done = sum(pair.documents for pair in report["pairs"][:1])
    return PreprocessReport(**report | {"resumed_documents": done, "wall_s": 0.0, "cpu_s": 0.0})
