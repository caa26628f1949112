#!/usr/bin/env python3
"""Time and memory until the first sample: Megatron's order against Megatron's own builder, and the order without index.

Every side runs in a process of its own on the same `.idx`; the `.bin` is a sparse file, no token of it is read but the
first sample's. The rival needs `--helpers`, the folder of Megatron-LM's compiled `helpers_cpp` (in its Python package:
`megatron/core/datasets`); the steps around it are numpy's, as in its `GPTDataset`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from measure import machine, save

SEQ_LEN, SEED, HEADER_BYTES = 2048, 1234, 34


def write_index(prefix: Path, num_documents: int, mean: int) -> None:
    """An `.idx` of documents of log-normal length, and a `.bin` of holes."""
    rng = np.random.default_rng(0)
    with Path(f"{prefix}.idx").open("wb") as index:
        index.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, num_documents, num_documents + 1))
        lengths = rng.lognormal(np.log(mean) - 0.5, 1.0, num_documents).clip(1, 100_000).astype("<i4")
        lengths.tofile(index)
        offsets = np.cumsum(lengths, dtype="<i8")
        total = int(offsets[-1]) * 2
        offsets -= lengths
        offsets *= 2
        offsets.tofile(index)
        np.arange(num_documents + 1, dtype="<i8").tofile(index)
    with Path(f"{prefix}.bin").open("wb") as data:
        data.truncate(total)


def write_sparse(prefix: Path, num_documents: int, length: int) -> None:
    """Documents of one length whose files hold no more than their first and last entry: any size on any disk."""
    offsets_at = HEADER_BYTES + 4 * num_documents
    boundaries_at, last = offsets_at + 8 * num_documents, num_documents - 1
    with Path(f"{prefix}.idx").open("wb") as index, Path(f"{prefix}.bin").open("wb") as data:
        index.truncate(boundaries_at + 8 * (num_documents + 1))
        data.truncate(2 * num_documents * length)
        entries = [(0, b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, num_documents, num_documents + 1))]
        entries += [(HEADER_BYTES + 4 * at, struct.pack("<i", length)) for at in (0, last)]
        entries += [(offsets_at + 8 * at, struct.pack("<q", 2 * length * at)) for at in (0, last)]
        entries += [(boundaries_at + 8 * num_documents, struct.pack("<q", num_documents))]
        for place, content in entries:
            index.seek(place)
            index.write(content)


def read_lengths(prefix: str) -> NDArray[np.int32]:
    """Lengths of the sequences, as Megatron's reader maps them."""
    with Path(f"{prefix}.idx").open("rb") as index:
        count = struct.unpack("<Q", index.read(HEADER_BYTES)[18:26])[0]
    raw = np.memmap(f"{prefix}.idx", dtype="u1", mode="r")
    return np.frombuffer(raw[HEADER_BYTES : HEADER_BYTES + 4 * count], dtype="<i4")


def megatron(prefix: str, helpers: str) -> Callable[[], Any]:
    """One epoch by Megatron's helper and numpy's shuffles."""
    sys.path.insert(0, helpers)
    import helpers_cpp  # type: ignore[import-not-found]

    lengths = read_lengths(prefix)

    def build() -> tuple[Any, ...]:
        random, ids = np.random.RandomState(SEED), np.arange(len(lengths), dtype=np.int32)
        tokens = int(np.sum(lengths[ids]))
        documents = np.mgrid[0:1, 0 : len(ids)][1]
        documents[:] = ids
        documents = documents.reshape(-1).astype(np.int32)
        random.shuffle(documents)
        samples = helpers_cpp.build_sample_idx_int32(lengths.copy(), documents, SEQ_LEN, 1, tokens, True, 1)
        shuffle = np.arange(len(samples) - 1, dtype=np.uint32)
        random.shuffle(shuffle)
        return documents, samples, shuffle

    return build


def ours(prefix: str, order: str, num_threads: int) -> Callable[[], Any]:
    """One epoch by megaflow."""
    from megaflow import GPTDataset

    def build() -> tuple[Any, ...]:
        options: dict[str, Any] = {"num_threads": num_threads} if order == "megatron" else {"num_samples": 10**9}
        dataset = GPTDataset(prefix, seq_len=SEQ_LEN, seed=SEED, order=order, **options)
        dataset.tokens(0)
        if order == "instant":
            return ()
        return dataset.document_index, dataset.sample_index, dataset.shuffle_index

    return build


def run_side(options: argparse.Namespace) -> None:
    """One side, once, in this process: prints what it cost and sums of what it made."""
    name, _, threads = options.side.partition("-")
    work = (
        megatron(options.prefix, options.helpers) if name == "rival" else ours(options.prefix, name, int(threads or 1))
    )
    before, start, base = time.process_time(), time.perf_counter(), peak_mb()
    arrays = work()
    spent = {"wall_s": time.perf_counter() - start, "cpu_s": time.process_time() - before, "peak_mb": peak_mb() - base}
    sums = [int(array.astype(np.int64, copy=False)[:: max(len(array) // 999, 1)].sum()) for array in arrays]
    print(json.dumps({**spent, "sums": sums}))


def peak_mb() -> float:
    """Largest resident set so far. What getrusage says begins with that of the process that started this one."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=1_000_000, help="documents of the set (default: 1000000)")
    parser.add_argument("--mean", type=int, default=500, help="tokens of a document on average (default: 500)")
    parser.add_argument("--helpers", help="folder of Megatron-LM's helpers_cpp; without it there is no rival")
    parser.add_argument("--sparse", action="store_true", help="one repeated length, sparse files, order instant only")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each side (default: 5)")
    parser.add_argument("--folder", help="where the .idx is written (default: a temporary folder)")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--prefix", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        run_side(options)
        return
    sides = ["megatron-1", "megatron-2", "instant", *(["rival"] if options.helpers else [])]
    sides = ["instant"] if options.sparse else sides
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        prefix = Path(folder) / "set"
        (write_sparse if options.sparse else write_index)(prefix, options.documents, options.mean)
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for _ in range(options.repeats):
            for side in sides:
                command = [sys.executable, __file__, "--side", side, "--prefix", str(prefix)]
                command += ["--helpers", options.helpers] if options.helpers else []
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    sys.exit(f"{side}: {done.stderr}")
                runs[side].append(json.loads(done.stdout))
    made = {tuple(run["sums"]) for side in sides if side != "instant" for run in runs[side]}
    if len(made) > 1:
        sys.exit("the sides made different arrays")
    title = f"index of {options.documents:,} documents, one epoch, seq {SEQ_LEN}"
    print(
        f"\n{title}; medians of {options.repeats} alternating runs, equal bits\n"
        f"{'':12} {'wall ms':>10} {'CPU ms':>10} {'peak MB':>9}"
    )
    for side in sides:
        wall, cpu, peak = (statistics.median(run[key] for run in runs[side]) for key in ("wall_s", "cpu_s", "peak_mb"))
        print(f"{side:12} {1e3 * wall:10.1f} {1e3 * cpu:10.1f} {peak:9.0f}")
    save(title, {"runs": runs, "machine": machine()})


if __name__ == "__main__":
    main()
