#!/usr/bin/env python3
"""Kernels of optional packages beside the native ones: forward and backward on one GPU, result and time.

    python3 benches/gpu/extras.py                  # every entry that loads
    python3 benches/gpu/extras.py liger torchao    # those whose name holds one of the words

Shapes are those of GPT 1.3B, 16,384 tokens in bf16. The error is the largest difference over the largest value, of
result and gradients, against the same in fp32 (AdamW: in fp64, written out); times are medians. Native parts are those
that a compiled run on a GPU has, compiled as blocks are, entries where a compiled graph can hold them. Prints a table,
and a line for each entry that cannot run here. Writes JSON to `benches/results/`, with GPU, versions, commit and date.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from extras_cases import SMALL, WIDE, list_cases
from extras_ways import ROOT, run_case
from machine import describe_machine

from megaflow.errors import first_line

__all__ = ["SMALL", "describe", "list_cases", "main", "run_case", "show"]


def describe(rows: list[dict[str, Any]], repeats: int) -> dict[str, Any]:
    """What is written: the rows, and what they were measured on and how."""
    return {"machine": describe_machine(), "sizes": WIDE, "repeats": repeats, "rows": rows}


def show(rows: list[dict[str, Any]]) -> str:
    """The table, and reasons below it."""
    lines = ["| entry | error (native) | tolerance | ms (native) | speed |", "|---|---|---|---|---|"]
    for row in rows:
        if "ms" in row:
            ratio = row["native_ms"] / row["ms"]
            lines.append(
                f"| {row['entry']} | {row['error']:.1e} ({row['native_error']:.1e}) | {row['tolerance']:.0e} | "
                f"{row['ms']:.3f} ({row['native_ms']:.3f}) | {ratio:.2f} x |"
            )
    return "\n".join([*lines, *(f"{row['entry']}: {row['reason']}" for row in rows if "reason" in row)])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="entries whose name holds one (default: all)")
    parser.add_argument("--repeats", type=int, default=20, help="timed passes of an entry (default: 20)")
    parser.add_argument("--out", type=Path, default=ROOT / "benches" / "results" / "extras.json")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats must be >= 1, got {options.repeats}")
    if not torch.cuda.is_available():
        parser.error("there is no GPU here")
    rows = []
    for case in list_cases():
        if options.words and not any(word in case.name for word in options.words):
            continue
        try:
            rows.append(run_case(case, WIDE, options.repeats))
        except Exception as error:  # whatever a package raises: the others are still to be seen
            reason = f"{type(error).__name__}: {first_line(error)}"
            rows.append({"entry": case.name, "tolerance": case.tolerance, "reason": reason})
        print(json.dumps(rows[-1]), flush=True)
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(describe(rows, options.repeats), indent=1), encoding="utf-8")
    print(show(rows))


if __name__ == "__main__":
    main()
