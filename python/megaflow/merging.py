"""Several `.bin/.idx` pairs to one."""

import glob
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaflow import _core
from megaflow.errors import ConfigError, DataFormatError, MissingFileError
from megaflow.preprocessing import PairReport, PreprocessOptions, PreprocessReport

StrPath = str | os.PathLike[str]
BytesProgress = Callable[[int, int], None]
"""Called with bytes done and bytes in all, about ten times a second."""
_SUFFIXES = (".idx", ".bin", ".json")


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeReport:
    """What was merged."""

    prefix: str
    dtype: str
    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    bin_bytes: int
    num_widened: int
    """Pairs whose tokens were stored in a larger type than theirs."""
    no_sidecar: str | None
    """Why the merged pair has no sidecar; None if it has one."""


def merge(
    prefixes: Sequence[StrPath],
    output_prefix: StrPath,
    *,
    widen: bool = False,
    force: bool = False,
    progress: BytesProgress | None = None,
) -> MergeReport:
    """Merges pairs, in this order, into `output_prefix.bin` and `.idx`: the bytes of one job over all their inputs.

    Memory does not depend on the sizes. The result appears under its name only when complete. Its sidecar names the
    sources of all pairs, each shifted by the documents before it.

    Args:
        prefixes: the pairs, as `resolve_prefix` takes them; none twice.
        output_prefix: of the result, without `.bin`; nothing is appended to it.
        widen: pairs of different token types become the smallest type that holds them all, instead of being refused.
        force: pairs of different tokenizers are merged, without a sidecar, instead of being refused.
        progress: called on the calling thread.

    Raises:
        ConfigError: if no pair is named, one is named twice, or the output is one of them.
        MissingFileError, FileAccessError: a pair or the output cannot be used.
        DataFormatError: a pair is damaged, or token types differ.
        TokenizerError: tokenizers differ.
    """
    report = _core.merge(
        [Path(prefix) for prefix in prefixes],
        os.fspath(output_prefix),
        widen=widen,
        force=force,
        command=list(sys.argv),
        progress=progress or _ignore,
    )
    return MergeReport(**report)


def merge_pairs(
    prefix: str,
    reports: Sequence[PreprocessReport],
    total: Mapping[str, Any],
    *,
    options: PreprocessOptions,
    keep_parts: bool = False,
) -> PreprocessReport:
    """Merges what the parts of a job have written, key by key, and removes the parts.

    Args:
        prefix: output prefix of the whole job.
        reports: of the parts, in their order.
        total: fields of the whole job's report, but for pairs and rejects.
        options: of the job.
        keep_parts: leave the parts where they are.

    Raises:
        As `merge`; the parts stay then.
    """
    pairs = []
    for place, key in enumerate(options.json_keys):
        merged = merge([report.pairs[place].prefix for report in reports], f"{prefix}_{key}_{options.level}")
        names = ("prefix", "dtype", "documents", "empty_documents", "sequences", "tokens")
        pairs.append(PairReport(**{name: getattr(merged, name) for name in names}))
    rejects = [Path(report.rejects_path) for report in reports if report.rejects_path is not None]
    rejects_path = f"{prefix}.rejects.jsonl" if rejects else None
    if rejects_path is not None:
        staged = Path(f"{rejects_path}.partial")
        with staged.open("wb") as joined:
            for path in rejects:
                with path.open("rb") as source:
                    shutil.copyfileobj(source, joined)
            joined.flush()
            os.fsync(joined.fileno())
        staged.replace(rejects_path)
    parts = [f"{pair.prefix}{suffix}" for report in reports for pair in report.pairs for suffix in _SUFFIXES]
    for part in [] if keep_parts else [*map(Path, parts), *rejects]:
        part.unlink(missing_ok=True)
    return PreprocessReport(pairs=tuple(pairs), rejects_path=rejects_path, **total)


def sum_reports(reports: Sequence[PreprocessReport], wall_s: float) -> dict[str, Any]:
    """Fields of the report of a job whose parts have these reports, but for its pairs and rejects."""
    rejected: dict[str, int] = {}
    for report in reports:
        for reason, count in report.rejected.items():
            rejected[reason] = rejected.get(reason, 0) + count
    names = ("input_bytes", "text_bytes", "resumed_documents", "records", "special_hits", "cpu_s", "workers")
    totals = {name: sum(getattr(report, name) for report in reports) for name in names}
    warnings = [warning for report in reports for warning in report.warnings]
    return {**totals, "rejected": rejected, "wall_s": wall_s, "warnings": warnings}


def expand(prefixes: Sequence[str]) -> list[str]:
    """Prefixes, with each pattern such as `corpus_shard_*` replaced by the pairs that it names, by name."""
    found: list[str] = []
    for prefix in prefixes:
        pattern = f"{prefix.removesuffix('.idx')}.idx"
        matches = sorted(glob.glob(pattern)) if any(mark in prefix for mark in "*?[") else []  # noqa: PTH207 - keeps the spelling
        found += [match.removesuffix(".idx") for match in matches] or [prefix]
    return found


def prefixes_in(folder: StrPath) -> list[str]:
    """Prefixes of all pairs in a folder, by name, as Megatron-LM's merge takes them.

    Raises:
        MissingFileError: if there is no such folder.
        ConfigError: if it holds no pair.
        DataFormatError: if a file of a pair lacks the other one.
    """
    path = Path(folder)
    if not path.is_dir():
        raise MissingFileError(f"{path}: no such folder of pairs to merge")
    names: dict[str, set[str]] = {}
    for file in path.iterdir():
        if file.suffix in (".bin", ".idx") and file.is_file():
            names.setdefault(file.name.removesuffix(file.suffix), set()).add(file.suffix)
    for name, suffixes in sorted(names.items()):
        if len(suffixes) == 1:
            (there,) = suffixes
            gone = ".idx" if there == ".bin" else ".bin"
            raise DataFormatError(
                f"{path / name}{there} is there, but {name}{gone} is not; "
                "complete the pair or take it out of the folder"
            )
    if not names:
        raise ConfigError(f"{path} holds no .bin/.idx pair to merge")
    return [str(path / name) for name in sorted(names)]


def _ignore(*_: int) -> None:
    return None
