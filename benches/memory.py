#!/usr/bin/env python3
"""Anonymous memory of `megaflow-preprocess` on gigabytes of input, and on millions of tiny documents.

The input is a file that you name (`--input`), or one of tiny documents that is made for the run (`--tiny-documents N`).
What is sampled, every 20 ms, is `RssAnon` of /proc/PID/status: heap and stacks, without the mapped files that the
system can take back at any time. Linux only.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SAMPLE_EVERY_S = 0.02
LINES_AT_ONCE = 100_000


def write_tiny_documents(path: Path, count: int) -> None:
    """`count` documents of one word each."""
    with path.open("w", encoding="ascii") as file:
        for begin in range(0, count, LINES_AT_ONCE):
            end = min(count, begin + LINES_AT_ONCE)
            file.write("".join(f'{{"text": "word{number % 5000}"}}\n' for number in range(begin, end)))


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process; 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:")]
    return int(found[0]) * 1024 if found else 0


def run_sampled(command: list[str]) -> dict[str, float]:
    """Runs a command to its end.

    Raises:
        SystemExit: if it fails.
    """
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    samples: list[tuple[float, int]] = []
    while job.poll() is None:
        samples.append((time.perf_counter() - start, anonymous_bytes(job.pid)))
        time.sleep(SAMPLE_EVERY_S)
    if job.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {job.returncode}")
    after, wall_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
    halves = [max((size for at, size in samples if (at < wall_s / 2) == first), default=0) for first in (True, False)]
    return {
        "wall_s": wall_s,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_anonymous_mb": max(halves) / 1e6,
        "peak_first_half_mb": halves[0] / 1e6,
        "peak_second_half_mb": halves[1] / 1e6,
        "samples": len(samples),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", type=Path, help="a file for megaflow-preprocess")
    parser.add_argument("--tiny-documents", type=int, default=1_000_000, help="without --input: documents of one word")
    parser.add_argument("--workers", type=int, default=2, help="threads (default: 2)")
    parser.add_argument("--folder", type=Path, help="where input and output are made (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = options.input or Path(folder, "tiny.jsonl")
        if options.input is None:
            write_tiny_documents(path, options.tiny_documents)
        prefix = Path(folder, "out")
        command = [sys.executable, "-m", "megaflow.cli.preprocess", str(path), "--output-prefix", str(prefix)]
        found = run_sampled([*command, "--workers", str(options.workers)])
        size = {name: Path(f"{prefix}_text_document{name}").stat().st_size for name in (".bin", ".idx")}
        sidecar = json.loads(Path(f"{prefix}_text_document.json").read_text())
        print(f"{path.name}: {path.stat().st_size / 1e9:.3f} GB, {sidecar['num_documents']:,} documents, ", end="")
        print(f"{sidecar['num_tokens']:,} tokens, .bin {size['.bin'] / 1e9:.3f} GB, .idx {size['.idx'] / 1e9:.3f} GB")
        print(f"anonymous memory at most {found['peak_anonymous_mb']:.1f} MB on {options.workers} threads ", end="")
        print(f"(first half {found['peak_first_half_mb']:.1f}, second {found['peak_second_half_mb']:.1f}; ", end="")
        print(f"{found['samples']:,.0f} samples); {found['wall_s']:.1f} s, {found['cpu_s']:.1f} CPU s")


if __name__ == "__main__":
    main()
