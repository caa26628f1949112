#!/usr/bin/env python3
"""Tables from what `train.py --rival` has measured: medians of the runs of each side, the rival's best flags.

python3 benches/gpu/merge.py benches/results/gpu-*.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TITLES = (
    "model",
    "recipe",
    "megaflow, tokens/s",
    "MFU",
    "Megatron-Core + TE, its best",
    "ratio",
    "memory, GiB",
    "exposed communication, ms",
    "loader bound",
    "loader/forward/backward/optimizer, ms",
    "other",
)


def name_recipe(result: dict[str, Any], rows: dict[str, str]) -> str:
    """`bf16` or `fp32` for weights and states, with fp8 if the products are; even load if routers choose at random."""
    flags = f"{rows.get(result['row'], '')} {result['flags']}"
    own = result.get("recipe") or ("bf16" if "--all-bf16" in flags else "fp32")
    own += " fp8" if "fp8" in result["flags"] else ""
    is_even = any(flag in flags for flag in ("--moe-router-force-load-balancing", "--force-balance"))
    return f"{own}, even load" if is_even else own


def group(results: Sequence[dict[str, Any]], rows: dict[str, str]) -> dict[tuple[str, str], dict[str, list[Any]]]:
    """Runs that are compared, by row and recipe; of each side by its flags."""
    found: dict[tuple[str, str], dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        if "error" not in result:
            side = f"{result.get('rival', 'megaflow')} {result['flags']}".strip()
            found[result["row"], name_recipe(result, rows)][side].append(result)
    return found


def take_best(sides: dict[str, list[Any]], start: str) -> tuple[float, dict[str, Any]] | None:
    """The median tokens/s of the best flags of a side, and the run that is nearest to it."""
    best: tuple[float, dict[str, Any]] | None = None
    for name, runs in sides.items():
        if name.split(" ")[0] != start:
            continue
        median = statistics.median(run["tokens_per_s"] for run in runs)
        if best is None or median > best[0]:
            best = median, min(runs, key=lambda run: abs(run["tokens_per_s"] - median))
    return best


def format_row(row: str, recipe: str, sides: dict[str, list[Any]]) -> str | None:
    """One line of the table; None without a run of megaflow."""
    own, rival = take_best(sides, "megaflow"), take_best(sides, "megatron-core")
    if own is None:
        return None
    rate, run = own
    gib = f"{run['memory_peak_bytes'] / 2**30:.1f}"
    sent = f"{run.get('exposed_communication_s', 0.0) * 1e3:.1f}"
    theirs, ratio = "-", "-"
    if rival is not None:
        theirs, ratio = f"{rival[0] / 1e3:.1f} k `{rival[1]['flags']}`", f"{rate / rival[0]:.3f}"
        gib += f" / {rival[1]['memory_peak_bytes'] / 2**30:.1f}"
        sent += f" / {rival[1]['exposed_communication_s'] * 1e3:.1f}"
    step = run["step_time_s"]
    phases = "/".join(
        f"{run[name] * 1e3:.1f}" for name in ("loader_bound_s", "forward_s", "backward_s", "optimizer_s") if name in run
    )
    bound, other = (f"{run[name] / step:.2%}" for name in ("loader_bound_s", "other_s"))
    mfu = f"{run['mfu']:.1%}" if "mfu" in run else "-"
    cells = [
        row,
        f"{recipe} `{run['flags']}`",
        f"{rate / 1e3:.1f} k",
        mfu,
        theirs,
        ratio,
        gib,
        sent,
        bound,
        phases,
        other,
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="results of train.py")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from train import ROWS

    results = [result for file in options.files for result in json.loads(file.read_text(encoding="utf-8"))]
    lines = [format_row(row, recipe, sides) for (row, recipe), sides in sorted(group(results, ROWS).items())]
    head = [f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|"]
    print("\n".join([*head, *[line for line in lines if line is not None]]))
    for result in results:
        if "error" in result:
            side = result.get("rival", "megaflow")
            print(f"\nfailed: {result['row']} {side} {result['flags']!r}\n{result['error'][-400:]}")


if __name__ == "__main__":
    main()
