#!/usr/bin/env python3
"""Samples straight from text, against `megaflow.preprocess` of the same text: what packing on the fly costs."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import megaflow
from demo_corpus import write_corpus
from measure import compare
from megaflow import Loader, StreamingDataset
from megaflow.preprocessing import PreprocessOptions, preprocess


def stream(corpus: Path, num_threads: int) -> None:
    """One epoch as batches of 8 samples of 2048 tokens, uint16 as the pair is."""
    dataset = StreamingDataset(corpus, seq_len=2048, epochs=1, num_threads=num_threads)
    for _ in Loader(dataset, 8, dtype="uint16"):
        pass


def build(corpus: Path, folder: Path, num_threads: int) -> None:
    """The pair of the same documents."""
    options = PreprocessOptions(output_prefix=str(folder / "pair"), workers=num_threads, restart=True)
    preprocess(corpus, options)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, help="JSONL or Parquet with the key text (default: the demo's)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each side (default: 5)")
    parser.add_argument("--threads", type=int, default=1, help="threads that tokenize (default: 1)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = options.corpus or folder / "corpus.jsonl"
        if not options.corpus:
            write_corpus(corpus)
        size = corpus.stat().st_size / 1e6
        sides = {
            f"megaflow {megaflow.__version__} stream": lambda: stream(corpus, options.threads),
            "preprocess": lambda: build(corpus, folder, options.threads),
        }
        title = f"stream, {corpus.name}, {size:.1f} MB, GPT-2, {options.threads} threads"
        compare(title, "MB", size, sides, repeats=options.repeats)


if __name__ == "__main__":
    main()
