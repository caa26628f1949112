#!/usr/bin/env python3
"""Kills a job at random times, again and again; every time the same command must go on, and end in the same bytes.

A round is: start the job, SIGKILL it after a random time (some kills hit it before it has begun, some while it gives
files their names), look that no `.idx` has its final name before the pair is complete, start it again. Up to
`--kills-in-a-row` kills hit the same job before it may end. Ends with exit code 1 at the first byte that differs.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from memory import write_tiny_documents

SUFFIXES = (".bin", ".idx")


class Job:
    """One job over one input, in a folder of its own."""

    def __init__(self, corpus: Path, folder: Path, workers: int) -> None:
        self.prefix = folder / "out"
        command = [sys.executable, "-m", "megaflow.cli.preprocess", str(corpus), "--output-prefix", str(self.prefix)]
        self.command = [*command, "--workers", str(workers), "--journal-every", "0"]

    def finish(self) -> tuple[float, str]:
        """Runs it to its end; seconds, and what it printed."""
        start = time.perf_counter()
        run = subprocess.run(self.command, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            raise SystemExit(f"the job failed: {run.stderr}")
        return time.perf_counter() - start, run.stdout

    def kill_after(self, delay_s: float) -> bool:
        """Whether the kill came before the end."""
        job = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(delay_s)
        job.send_signal(signal.SIGKILL)
        return job.wait() == -signal.SIGKILL

    def result(self) -> list[bytes]:
        """Bytes of the pair."""
        return [Path(f"{self.prefix}_text_document{suffix}").read_bytes() for suffix in SUFFIXES]

    def has_index(self) -> bool:
        """Whether an index has its final name."""
        return Path(f"{self.prefix}_text_document.idx").exists()

    def clear(self) -> None:
        """Removes all that it wrote."""
        for path in self.prefix.parent.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", type=Path, help="a file for megaflow-preprocess (default: tiny documents)")
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs in all (default: 200)")
    parser.add_argument("--kills-in-a-row", type=int, default=3, help="at most, before the job may end (default: 3)")
    parser.add_argument("--seed", type=int, default=1, help="of the times (default: 1)")
    parser.add_argument("--workers", type=int, default=2, help="threads (default: 2)")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        corpus, place = options.input or Path(folder, "in.jsonl"), Path(folder, "job")
        place.mkdir()
        if options.input is None:
            write_tiny_documents(corpus, 1_000_000)
        job = Job(corpus, place, options.workers)
        whole_s, _ = job.finish()
        expected = job.result()
        kills = late = rounds = resumed = 0
        while kills < options.kills:
            job.clear()
            for _ in range(draw.randint(1, options.kills_in_a_row)):
                was_killed = job.kill_after(draw.uniform(0, whole_s))
                kills, late = kills + was_killed, late + (not was_killed)
                if job.has_index() and job.result() != expected:
                    raise SystemExit(f"after kill {kills}: an index has its final name, and the pair is not complete")
                if not was_killed:
                    break
            _, said = job.finish()
            rounds, resumed = rounds + 1, resumed + ("documents were done before" in said)
            if job.result() != expected:
                raise SystemExit(f"after kill {kills}: the bytes differ from those of an undisturbed job")
            if list(place.glob("*.partial")):
                raise SystemExit(f"after kill {kills}: work in progress was left behind")
        print(
            f"{kills} SIGKILLs in {rounds} jobs of about {whole_s:.2f} s ({late} more came after the end), seed ",
            end="",
        )
        print(f"{options.seed}: {resumed} jobs went on from a journal; every result has the same bytes")


if __name__ == "__main__":
    main()
