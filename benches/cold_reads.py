#!/usr/bin/env python3
"""Samples from a file that the page cache does not hold: by faults of a map, with advice, by pread, past the cache.

    python cold_reads.py PREFIX

The pages of PREFIX.bin are dropped before each run (posix_fadvise), which needs no rights and leaves other files alone.
Every side reads the same number of random samples of 2048 uint16 tokens; the loader reads its own, in order `instant`.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from measure import save, spend

SAMPLE_BYTES, BATCH, PAGE = 2 * 2049, 8, 4096
Side = Callable[[Path, np.ndarray[Any, Any], int], None]


def drop(path: Path) -> None:
    """Takes the file's pages out of the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def mapped(advice: int | None, ahead: int = 0) -> Side:
    """Faults of a map, with advice for all of it, or asking for the pages of the batches ahead."""

    def run(path: Path, places: np.ndarray[Any, Any], num_threads: int) -> None:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            if advice is not None:
                view.madvise(advice)

            def read(batch: int) -> None:
                for place in places[batch + ahead : batch + ahead + 1].ravel() if ahead else ():
                    start = int(place) // PAGE * PAGE
                    view.madvise(mmap.MADV_WILLNEED, start, int(place) + SAMPLE_BYTES - start)
                for place in places[batch]:
                    bytes(view[place : place + SAMPLE_BYTES])

            for_each_batch(read, len(places), num_threads)

    return run


def positioned(flags: int) -> Side:
    """One `preadv` a sample; with O_DIRECT of whole pages, past the cache."""

    def run(path: Path, places: np.ndarray[Any, Any], num_threads: int) -> None:
        descriptor = os.open(path, os.O_RDONLY | flags)

        def read(batch: int) -> None:
            with mmap.mmap(-1, 3 * PAGE) as room:  # aligned, as O_DIRECT asks
                for place in places[batch]:
                    start = int(place) // PAGE * PAGE
                    size = (int(place) + SAMPLE_BYTES - start + PAGE - 1) // PAGE * PAGE
                    with memoryview(room) as whole, whole[:size] as part:
                        os.preadv(descriptor, [part], start)

        for_each_batch(read, len(places), num_threads)
        os.close(descriptor)

    return run


def loader(path: Path, places: np.ndarray[Any, Any], num_threads: int) -> None:
    from megaflow import GPTDataset, Loader

    dataset = GPTDataset(path.with_suffix(""), seq_len=2048, num_samples=places.size, order="instant")
    with Loader(dataset, BATCH, num_threads=num_threads, dtype="uint16", prefetch=8) as batches:
        for _ in batches:
            pass


def for_each_batch(read: Callable[[int], None], count: int, num_threads: int) -> None:
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(read, range(count)))


SIDES: dict[str, Side] = {
    "map, faults": mapped(None),
    "map, MADV_RANDOM": mapped(mmap.MADV_RANDOM),
    "map, WILLNEED 8 batches ahead": mapped(None, 8),
    "pread": positioned(0),
    "pread, O_DIRECT": positioned(os.O_DIRECT),
    "megaflow.Loader": loader,
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prefix", type=Path, help="a pair of at least some hundred megabytes")
    parser.add_argument("--batches", type=int, default=150, help="batches of 8 samples in one run (default: 150)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side (default: 3)")
    options = parser.parse_args()
    path = Path(f"{options.prefix}.bin")
    random = np.random.default_rng(1)
    runs: dict[str, list[tuple[float, float]]] = {}
    for _ in range(options.repeats):
        for name, side in SIDES.items():
            for num_threads in (1, 4):
                places = random.integers(0, path.stat().st_size - 3 * PAGE, (options.batches, BATCH)) // 2 * 2
                drop(path)
                spent = spend(lambda side=side, at=places, n=num_threads: side(path, at, n))  # type: ignore[misc]
                runs.setdefault(f"{name}, {num_threads} thread{'s' * (num_threads > 1)}", []).append(spent)
    count = options.batches * BATCH
    title = f"cold reads, {path.stat().st_size >> 20} MiB, {count} samples of 4 KiB, medians of {options.repeats} runs"
    print(f"\n{title}\n{'':42} {'samples/s':>10} {'CPU us/sample':>14}")
    for name, own in runs.items():
        wall, cpu = (statistics.median(run[at] for run in own) for at in (0, 1))
        print(f"{name:42} {count / wall:10,.0f} {1e6 * cpu / count:14.1f}")
    save(title, {"runs": runs})


if __name__ == "__main__":
    main()
