"""What a run wrote down, read as if by a stranger: what is of a wrong type is left out and told, and ends nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from megaflow.errors import ConfigError
from megaflow_trainer.config import fields
from megaflow_trainer.config.sections import TrainConfig
from report import ReportError

METRICS, MANIFEST = "metrics.jsonl", "run.json"
MOST_LINE_BYTES = 64 << 20
MOST_MANIFEST_BYTES = 256 << 20
MOST_PARTS = 100_000
LARGEST = 1e300
"""A larger number is taken for none: sums of such have no end."""

_NUMBERS = (
    *("lr", "skipped_steps", "num_steps", "loss_scale", "step_time_s", "loader_bound_s", "forward_s", "backward_s"),
    *("communication_s", "device_idle_share", "mfu", "tokens_per_s_per_gpu", "pipeline_bubble", "deviations"),
)
_LOSSES = ("lm_loss", "loss")
"""Numbers that may be missing for a reason: they were not finite."""
_LISTS = ("work_by_rank_s", "loader_bound_by_rank_s")
_TEXTS = ("event", "kind")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What a run wrote down."""

    folder: Path
    rows: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    """Lines of training steps."""
    start: dict[str, Any]
    """The last start; empty if there is no manifest."""
    config: TrainConfig | None
    missing: frozenset[str] = frozenset()
    """Which of METRICS and MANIFEST are not there."""
    notes: tuple[str, ...] = ()
    """Sentences about what could not be used."""

    @property
    def end(self) -> Mapping[str, Any]:
        """How the last start ended; empty if it did not say."""
        return self.start.get("end") or {}

    @property
    def reason(self) -> str:
        """Why the last start ended, in its own words."""
        lines = str(self.end.get("reason") or "no reason is written").splitlines()
        return lines[0][:500] if lines else "no reason is written"

    def describe_end(self) -> str:
        """The end in words."""
        if MANIFEST in self.missing:
            return "how it ended is not known"
        return f"ended: {self.reason}" if self.end else "no end written: running, or killed"

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Lines of one kind of event."""
        return [row for row in self.rows if row.get("event") == kind]

    def usual(self, name: str) -> float:
        """Median of a value over the settled part of the run."""
        values = [row[name] for row in self.settled if name in row]
        return float(median(values)) if values else 0.0

    def total(self, name: str) -> float:
        """Sum of a value over the settled part of the run."""
        return float(sum(row.get(name, 0.0) for row in self.settled))

    @property
    def settled(self) -> list[dict[str, Any]]:
        """The lines without those in which a run warms up."""
        return self.steps[max(1, len(self.steps) // 4) :]

    @property
    def losses(self) -> list[float]:
        """Losses that are finite."""
        return [row["lm_loss"] for row in self.steps if row["lm_loss"] is not None]

    @property
    def hosts(self) -> list[str]:
        """The machine of each rank."""
        return [str(rank.get("host")) for rank in self.start.get("ranks", [])]

    @property
    def is_on_gpu(self) -> bool:
        """Whether it ran on a GPU."""
        return bool(self.start) and not str(self.start.get("device", "")).startswith("cpu")


def read_record(folder: Path) -> Record:
    """What is in a run folder.

    Raises:
        ReportError: if it is none, or what it holds cannot be read: nothing may be concluded from that.
    """
    metrics, manifest = folder / METRICS, folder / MANIFEST
    missing = frozenset(path.name for path in (metrics, manifest) if not path.is_file())
    if len(missing) == 2:
        raise ReportError(f"{folder}: not a run folder: there is neither metrics.jsonl nor run.json in it")
    reader = _Reader(metrics)
    rows = [] if METRICS in missing else list(reader.read_rows())
    if not rows and reader.num_whole:
        raise ReportError(f"{metrics}: not one line of a run can be read in it; is the file whole?")
    start = {} if MANIFEST in missing else _read_start(manifest)
    config, faults = _read_config(start.get("config"), manifest)
    return Record(
        folder=folder,
        rows=rows,
        steps=[row for row in rows if "lm_loss" in row],
        start=start,
        config=config,
        missing=missing,
        notes=(*reader.describe(), *faults),
    )


@dataclass(slots=True)
class _Reader:
    """Reads metrics.jsonl, and counts what it cannot use."""

    path: Path
    num_lines: int = 0
    num_whole: int = 0
    """Lines with an end: the last one may have been cut off when its writer was killed."""
    num_left_out: int = 0
    first: str = ""
    taken: dict[str, Callable[[Any], bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.taken = {
            **dict.fromkeys(_NUMBERS, _is_amount),
            **dict.fromkeys(_LOSSES, _is_number),
            **dict.fromkeys(_LISTS, _are_numbers),
            **dict.fromkeys(_TEXTS, lambda value: isinstance(value, str)),
            "samples": lambda value: isinstance(value, list),
        }

    def read_rows(self) -> Iterator[dict[str, Any]]:
        """The lines that can be used, each with what is used of it."""
        with self.path.open("rb") as file:
            while line := file.readline(MOST_LINE_BYTES):
                is_too_long = len(line) == MOST_LINE_BYTES and not line.endswith(b"\n")
                row = None if is_too_long else _parse(line)
                while len(line) == MOST_LINE_BYTES and not line.endswith(b"\n"):
                    line = file.readline(MOST_LINE_BYTES)
                self.num_lines += 1
                self.num_whole += line.endswith(b"\n")
                if isinstance(row, dict) and _is_count(row.get("iteration")):
                    yield self._clean(row)
                elif is_too_long or line.endswith(b"\n"):
                    self._leave_out("it is no line of a run")

    def _clean(self, row: dict[str, Any]) -> dict[str, Any]:
        kept: dict[str, Any] = {"iteration": row["iteration"]}
        for name, value in row.items():
            if name not in self.taken:
                continue
            if value is None or _is_not_finite(value):
                if name in _LOSSES:
                    kept[name] = None
            elif self.taken[name](value):
                kept[name] = value if name != "samples" else [_clean_sample(item) for item in value]
            else:
                self._leave_out(f"{name} is {_shorten(value)}")
        return kept

    def _leave_out(self, what: str) -> None:
        self.first = self.first or f"line {self.num_lines}: {what}"
        self.num_left_out += 1

    def describe(self) -> list[str]:
        """What was left out, as a sentence."""
        count = self.num_left_out
        if not count:
            return []
        return [
            f"{self.path}: {count} {'entry' if count == 1 else 'entries'} cannot be used, the first in {self.first}"
        ]


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST < value < LARGEST


def _is_amount(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_amount(value)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_amount, value))


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def _clean_sample(item: Any) -> dict[str, Any]:
    """Loss and documents of a sample, as far as they can be used."""
    own = item if isinstance(item, dict) else {}
    loss, documents = own.get("loss"), own.get("documents")
    named = documents if isinstance(documents, list) else []
    return {
        "loss": loss if _is_number(loss) else None,
        "documents": [document for document in named if isinstance(document, dict)],
    }


def _read_start(manifest: Path) -> dict[str, Any]:
    """The last start, with nothing in it that is of a wrong type.

    Raises:
        ReportError: if there is none.
    """
    if manifest.stat().st_size > MOST_MANIFEST_BYTES:
        raise ReportError(f"{manifest}: larger than {MOST_MANIFEST_BYTES >> 20} MiB, which no manifest of a run is")
    found = _parse(manifest.read_bytes())
    starts = found.get("starts") if isinstance(found, dict) else None
    if not (isinstance(starts, list) and starts and isinstance(starts[-1], dict) and starts[-1]):
        raise ReportError(f"{manifest}: no start of a run can be read in it; is the file whole?")
    start, kinds = dict(starts[-1]), {"end": dict, "environment": dict, "data": dict, "ranks": list}
    for name, kind in kinds.items():
        if not isinstance(start.get(name), kind):
            start.pop(name, None)
    start["ranks"] = [rank if isinstance(rank, dict) else {} for rank in start.get("ranks", [])]
    return start


def _read_config(content: Any, manifest: Path) -> tuple[TrainConfig | None, list[str]]:
    """The configuration; none, and why, if it holds what a configuration cannot hold."""
    if not isinstance(content, dict):
        return None, []
    values = {}
    try:
        for name, known in fields.list_fields().items():
            section, _, leaf = name.rpartition(".")
            owner = content.get(section, {}) if section else content
            if isinstance(owner, dict) and leaf in owner:
                empty = known.kind == tuple[str, ...] and owner[leaf] == []
                values[name] = () if empty else fields.convert(known, owner[leaf], name)
        config, faults = fields.build(values)
        faults += _check_sizes(config)
    except ConfigError as error:
        faults = [str(error)]
    if faults:
        where = f"{manifest}: the configuration of the last start cannot be used: {_shorten(faults[0])}"
        return None, [f"{where}; remedies are named without this run's values"]
    return config, []


def _check_sizes(config: TrainConfig) -> list[str]:
    step, own = config.step, config.parallel
    if not (step.micro_batch_size and step.global_batch_size and step.num_micro_batches):
        return ["step: batch sizes are missing, which every run writes"]
    sizes = (config.model.num_layers, step.num_micro_batches, own.pp, own.virtual_stages)
    return [] if max(sizes) <= MOST_PARTS else [f"{max(sizes)} layers, stages or micro-batches are no run's"]
