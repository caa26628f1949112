#!/usr/bin/env python3
"""Batches in random order from a warm page cache: `megaflow.Loader` against the loaders of others, in one run.

Every side reads the same pair, one after the other, each time in a process of its own. Rivals that need packages run
under `--rivals-python` (an environment with torch, torchdata, litdata, datatrove, megatron-core); those that are absent
are named and left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from loader_side import SIDES
from measure import RESULTS

SIDE = Path(__file__).with_name("loader_side.py")
EOD = 50256


def write_pair(prefix: Path, num_tokens: int) -> None:
    """Documents of log-normal length, 900 tokens on average, each ending in EOD, of random tokens below it."""
    rng = np.random.default_rng(0)
    lengths = np.maximum(rng.lognormal(np.log(900) - 0.5, 1.0, num_tokens // 900), 2).astype("<i4")
    tokens = rng.integers(0, EOD, int(lengths.sum()), dtype=np.uint16)
    ends = np.cumsum(lengths, dtype=np.int64)
    tokens[ends - 1] = EOD
    tokens.tofile(f"{prefix}.bin")
    counts = np.array([len(lengths), len(lengths) + 1], dtype="<u8")
    header = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + b"\x08" + counts.tobytes()
    offsets = ((ends - lengths) * 2).astype("<i8")
    boundaries = np.arange(len(lengths) + 1, dtype="<i8")
    Path(f"{prefix}.idx").write_bytes(header + lengths.tobytes() + offsets.tobytes() + boundaries.tobytes())


def run_side(python: str, name: str, prefix: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What one run of a side cost, or why it is left out."""
    words = [python, str(SIDE), name, str(prefix), str(options.seq_len), str(options.batch)]
    num_batches = options.batches if name.startswith("megaflow") else max(options.batches // 8, 200)
    command = [*words, str(num_batches), str(prefix.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        return {"missing": (done.stderr.strip().splitlines() or ["no answer"])[-1]}
    answer: dict[str, Any] = json.loads(lines[-1])
    return {**answer, "samples": num_batches * options.batch}


def measure(options: argparse.Namespace, prefix: Path) -> dict[str, list[dict[str, Any]]]:
    """Runs of every side, in turn."""
    runs: dict[str, list[dict[str, Any]]] = {}
    absent: set[str] = set()
    names = [name for name in SIDES if not options.only or any(word in name for word in options.only)]
    for _ in range(options.repeats):
        for name in names:
            if name in absent:
                continue
            python = sys.executable if name.startswith("megaflow") else options.rivals_python
            answer = run_side(python, name, prefix, options)
            if "missing" in answer:
                print(f"left out: {name}: {answer['missing']}", flush=True)
                absent.add(name)
            else:
                runs.setdefault(name, []).append(answer)
                print(f"{name}: {answer['samples'] / answer['cpu_s']:,.0f} samples/CPU s", flush=True)
    return runs


def report(title: str, runs: dict[str, list[dict[str, Any]]]) -> None:
    """A table of medians, each compared with the last side."""
    rates = {
        name: [statistics.median(run["samples"] / run[key] for run in own) for key in ("wall_s", "cpu_s")]
        for name, own in runs.items()
    }
    last = list(rates.values())[-1]
    print(f"\n{title}")
    print(f"{'':40} {'samples/s wall':>15} {'samples/CPU s':>15} {'x last wall':>12} {'x last CPU':>11}")
    for name, (wall, cpu) in rates.items():
        print(f"{name:40} {wall:15,.0f} {cpu:15,.0f} {wall / last[0]:12.2f} {cpu / last[1]:11.2f}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=float, default=1e8, help="tokens of the pair (default: 1e8)")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a sample (default: 2048)")
    parser.add_argument("--batch", type=int, default=8, help="samples of a batch (default: 8)")
    parser.add_argument(
        "--batches", type=int, default=8000, help="batches of one run; rivals an eighth (default: 8000)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side (default: 3)")
    parser.add_argument("--rivals-python", default=sys.executable, help="interpreter with the rivals' packages")
    parser.add_argument("--only", nargs="*", default=[], help="words that a side's name must hold")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder, "pair")
        write_pair(prefix, int(options.tokens))
        runs = measure(options, prefix)
    size = f"{options.tokens:.3g} tokens, {options.seq_len} a sample, batches of {options.batch}"
    title = f"loader, {size}; medians of {options.repeats} alternating runs, each in a process of its own"
    report(title, runs)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "loader.json").write_text(json.dumps({"title": title, "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
