#!/usr/bin/env python3
"""One page about a run, or about several side by side: `python tools/report.py RUN [RUN ...] [--output report.html]`.

The page holds everything it shows, and opens without a network: curves, where the time went, what happened, and the
manifest. RUN is a run folder, with metrics.jsonl and run.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from doors import ShowVersion, run_door

TEMPLATE = Path(__file__).with_name("report_page.html")
PLACE = "/*DATA*/"
MOST_POINTS = 2000
"""Points of a curve in the page; of a longer one the lowest and the highest of each stretch are kept."""
CURVES = (
    ("lm_loss", "training loss", "nats a token"),
    ("valid_loss", "validation loss", "nats a token"),
    ("lr", "learning rate", ""),
    ("grad_norm", "gradient norm", ""),
    ("param_norm", "norm of the weights", ""),
    ("tokens_per_s_per_gpu", "throughput", "tokens/s/GPU"),
    ("mfu", "MFU, all of attention counted", "of the peak"),
    ("step_time_s", "time of a step", "s"),
    ("loader_bound_share", "loader-bound", "of the step"),
    ("host_wait_s", "host waited for the loader", "s a step"),
    ("device_idle_share", "device idle", "of the step"),
    ("memory_peak_bytes", "memory at the peak", "GiB"),
    ("memory_now_bytes", "memory", "GiB"),
    ("loss_scale", "loss scale", ""),
)
"""Values that get a curve: name in metrics.jsonl, title, unit."""
PHASES = ("loader_bound", "feed", "forward", "backward", "communication", "optimizer", "log", "other")


class ReportError(Exception):
    """A run that cannot be shown, in one sentence."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 1 if a run cannot be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--version", action=ShowVersion)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--output", type=Path, help="the page (default: report.html in the first run folder)")
    options = parser.parse_args(argv)
    output = options.output or options.runs[0] / "report.html"
    try:
        runs = [read_run(folder) for folder in options.runs]
        output.write_text(make_page(runs), encoding="utf-8")
    except (ReportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {output}")
    return 0


def read_run(folder: Path) -> dict[str, Any]:
    """Everything of a run that the page shows, in plain types.

    Raises:
        ReportError: if the folder holds no run.
    """
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise ReportError(f"{folder}: not a run folder: there is no metrics.jsonl in it")
    rows = read_rows(metrics)
    manifest = read_manifest(folder / "run.json")
    steps = [row for row in rows if "lm_loss" in row]
    starts = manifest.get("starts", [])
    return {
        "name": manifest.get("name") or folder.name,
        "folder": str(folder),
        "curves": {name: thin(points) for name, points in list_curves(rows).items() if points},
        "phases": share_phases(steps),
        "summary": summarise(steps, rows),
        "events": [row for row in rows if row.get("event") in ("nonfinite", "spike")],
        "checkpoints": [row["iteration"] for row in rows if row.get("event") == "checkpoint"],
        "starts": [describe_start(start) for start in starts],
        "manifest": flatten(starts[-1] if starts else {}),
    }


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; one that was cut off when its writer was killed is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "iteration" in row:
            rows.append(row)
    return rows


def read_manifest(path: Path) -> dict[str, Any]:
    """run.json; empty if there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def list_curves(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Points (iteration, value) of each curve; a value that is missing or not finite leaves a gap."""
    curves: dict[str, list[tuple[float, float]]] = {name: [] for name, _, _ in CURVES}
    for row in rows:
        own = dict(row)
        if own.get("step_time_s"):
            own["loader_bound_share"] = own.get("loader_bound_s", 0.0) / own["step_time_s"]
        for name in ("memory_peak_bytes", "memory_now_bytes"):
            if name in own:
                own[name] /= 2**30
        for name, points in curves.items():
            if isinstance(own.get(name), int | float):
                points.append((own["iteration"], own[name]))
    return curves


def thin(points: list[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most about `most` points: of each stretch of a longer curve the lowest and the highest, in their order."""
    if len(points) <= most:
        return points
    size = -(-2 * len(points) // most)
    kept = []
    for first in range(0, len(points), size):
        stretch = points[first : first + size]
        ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def share_phases(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of a mean step by phase, the first line left out: it warms up."""
    timed = steps[1:] or steps
    if not timed:
        return {}
    weights = [row.get("num_steps", 1) for row in timed]
    return {
        name: sum(row.get(f"{name}_s", 0.0) * weight for row, weight in zip(timed, weights, strict=True)) / sum(weights)
        for name in PHASES
    }


def summarise(steps: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the table at the top says of a run."""
    valid = [row["valid_loss"] for row in rows if isinstance(row.get("valid_loss"), int | float)]
    found: dict[str, Any] = {}
    if steps:
        last, timed = steps[-1], steps[1:] or steps
        step_s = sum(row["step_time_s"] for row in timed)
        found = {
            "iterations": last["iteration"],
            "samples": last.get("consumed_samples"),
            "last loss": last["lm_loss"],
            "tokens/s/GPU": sum(row["tokens_per_s_per_gpu"] * row["step_time_s"] for row in timed) / step_s,
            "MFU": last.get("mfu"),
            "loader-bound": sum(row.get("loader_bound_s", 0.0) for row in timed) / step_s,
            "peak memory (GiB)": last.get("memory_peak_bytes", 0) / 2**30,
            "skipped steps": sum(row.get("skipped_steps") or 0 for row in steps),
        }
    return {**found, "last validation loss": valid[-1] if valid else None}


def describe_start(start: Mapping[str, Any]) -> dict[str, Any]:
    """A start of a run in the words of the page."""
    end = start.get("end") or {}
    return {
        "time": start.get("time"),
        "from iteration": start.get("from_iteration"),
        "ranks": start.get("world_size"),
        "device": start.get("device"),
        "ended at": end.get("iteration"),
        "exit code": end.get("exit_code"),
        "how it ended": end.get("reason", "it did not say: killed, or still running"),
        "command": " ".join(map(str, start.get("command", []))),
    }


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested mappings as dotted names and texts."""
    if isinstance(value, Mapping):
        found: dict[str, str] = {}
        for name, item in value.items():
            found |= flatten(item, f"{prefix}.{name}" if prefix else str(name))
        return found
    return {prefix: value if isinstance(value, str) else json.dumps(value)}


def make_page(runs: Sequence[Mapping[str, Any]]) -> str:
    """The page of some runs."""
    curves = [{"name": name, "title": title, "unit": unit} for name, title, unit in CURVES]
    text = json.dumps({"runs": list(runs), "curves": curves, "phases": PHASES}, allow_nan=False)
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACE, text.replace("<", "\\u003c"), 1)


if __name__ == "__main__":
    sys.exit(run_door(main))
