#!/usr/bin/env python3
"""Batches in random order from a warm page cache: `megaflow.Loader` against a numpy memory map in a Python loop."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import megaflow
from measure import compare
from megaflow import GPTDataset, Loader
from megaflow.preprocessing import PreprocessOptions, preprocess

SEQ_LEN = 2048
BATCH = 8


def write_pair(folder: Path, num_tokens: int) -> str:
    """A pair with at least `num_tokens` tokens of made-up words; the prefix."""
    words = np.random.default_rng(0).integers(0, 10**6, size=num_tokens // 2)
    with (folder / "words.jsonl").open("w") as file:
        for part in np.array_split(words, max(1, len(words) // 500)):
            file.write(json.dumps({"text": " ".join(map(str, part))}) + "\n")
    report = preprocess(folder / "words.jsonl", PreprocessOptions())
    return report.pairs[0].prefix


def rival(tokens: NDArray[np.uint16], starts: NDArray[np.int64], num_batches: int) -> None:
    """What small training scripts do: one slice of the map a sample, stacked and widened."""
    for batch in range(num_batches):
        rows = [tokens[start : start + SEQ_LEN + 1] for start in starts[batch * BATCH : (batch + 1) * BATCH]]
        np.stack(rows).astype(np.int64)


def ours(dataset: GPTDataset, num_batches: int, num_threads: int) -> None:
    """The same number of batches from the loader."""
    with Loader(dataset, BATCH, num_threads=num_threads) as loader:
        for _ in range(num_batches):
            next(loader)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=4000, help="batches of one run (default: 4000)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each side (default: 5)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prefix = write_pair(Path(folder), 4_000_000)
        dataset = GPTDataset(prefix, seq_len=SEQ_LEN, num_samples=options.batches * BATCH)
        tokens = np.memmap(f"{prefix}.bin", dtype=dataset.indexed.dtype, mode="r")
        starts = np.random.default_rng(1).integers(0, len(tokens) - SEQ_LEN - 1, size=options.batches * BATCH)
        sides = {
            f"megaflow {megaflow.__version__}, 1 thread": lambda: ours(dataset, options.batches, 1),
            f"megaflow {megaflow.__version__}, 2 threads": lambda: ours(dataset, options.batches, 2),
            f"numpy {np.__version__} memmap loop": lambda: rival(tokens, starts, options.batches),
        }
        title = f"loader, {SEQ_LEN} tokens a sample, batches of {BATCH}"
        compare(title, "samples", options.batches * BATCH, sides, repeats=options.repeats)


if __name__ == "__main__":
    main()
