"""How a figure is taken: ours and the rival in turn, wall time and CPU seconds, medians, one table at the end."""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).parent / "results"


class Spent(NamedTuple):
    """What one run cost."""

    wall_s: float
    cpu_s: float


def spend(work: Callable[[], object]) -> Spent:
    """Runs `work`; counts the CPU seconds of all threads and of child processes that have ended."""
    before, start = _cpu_seconds(), time.perf_counter()
    work()
    return Spent(time.perf_counter() - start, _cpu_seconds() - before)


def _cpu_seconds() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def compare(
    title: str, unit: str, amount: float, sides: Mapping[str, Callable[[], object]], *, repeats: int
) -> dict[str, Spent]:
    """Runs the sides in turn and prints a table of medians, each compared with the last side, the rival.

    Args:
        title: what is measured, with the input.
        unit: of `amount`, such as "MB".
        amount: what one run gets through.
        sides: name and work; the first is ours, the last the rival that ratios refer to.
        repeats: runs of each side, after one that is not counted.

    Returns:
        Medians of each side.
    """
    spent: dict[str, list[Spent]] = {name: [] for name in sides}
    for work in sides.values():
        work()  # page cache, lazy imports
    for _ in range(repeats):
        for name, work in sides.items():
            spent[name].append(spend(work))
    rows = {name: _median(runs) for name, runs in spent.items()}
    rival = rows[list(rows)[-1]]
    print(f"\n{title}; medians of {repeats} alternating runs")
    print(f"{'':32} {unit + '/s wall':>14} {unit + '/CPU s':>14} {'x rival wall':>13} {'x rival CPU':>12}")
    for name, row in rows.items():
        speeds = f"{amount / row.wall_s:14.4g} {amount / row.cpu_s:14.4g}"
        print(f"{name:32} {speeds} {rival.wall_s / row.wall_s:13.2f} {rival.cpu_s / row.cpu_s:12.2f}", flush=True)
    save(title, {"unit": unit, "amount": amount, "runs": spent, "machine": machine()})
    return rows


def _median(runs: list[Spent]) -> Spent:
    return Spent(statistics.median(run.wall_s for run in runs), statistics.median(run.cpu_s for run in runs))


def machine() -> dict[str, object]:
    """What ran it."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def save(title: str, values: Mapping[str, object]) -> None:
    """Writes figures to benches/results, under the title up to its first comma."""
    RESULTS.mkdir(exist_ok=True)
    name = "".join(letter if letter.isalnum() else "-" for letter in title.split(",")[0].lower())
    (RESULTS / f"{name}.json").write_text(json.dumps({"title": title, **values}, indent=1))
