#!/usr/bin/env python3
"""How much of a training step its measured phases explain, and where a slow source of data shows.

python benches/phases.py [--steps 12] [--model small]    a GPT on the CPU, over random tokens

Four sources: the loader as it is; one that makes its reader wait before each micro-batch (100 ms, or 3 with the small
model); the same one working ahead in a thread while the step computes; and one that does nothing but hand out the same
batch. Shares of the step, the first two steps left out.
"""

from __future__ import annotations

import argparse
import io
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "trainer"), str(ROOT / "tests")]

from helpers.pairs import write_pair  # noqa: E402
from helpers.runs import read_metrics, run_tiny  # noqa: E402
from megaflow_trainer.training import run as run_module  # noqa: E402
from megaflow_trainer.training.clock import PHASES  # noqa: E402

MODELS = {
    "middle": "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 8 --global-batch-size 16",
    "small": "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 4 --global-batch-size 4",
}
PAUSES_S = {"middle": 0.1, "small": 0.003}


class Given:
    """A batch, and whether it lay ready when it was asked for."""

    def __init__(self, batch: Any, *, was_ready: bool) -> None:
        self.batch, self.queue_depth = batch, int(was_ready)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batch, name)


class Source:
    """A loader whose batches come later: at once, after a pause, or after a pause spent ahead of need."""

    def __init__(self, loader: Any, kind: str, pause_s: float) -> None:
        self.loader, self.kind, self.pause_s, self.first = loader, kind, pause_s, None
        self.ready: queue.Queue[Any] = queue.Queue(maxsize=2)
        if kind == "hidden":
            threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        for batch in self.loader:
            time.sleep(self.pause_s)
            self.ready.put(batch)

    def __next__(self) -> Any:
        if self.kind == "hidden":
            was_ready = not self.ready.empty()
            return Given(self.ready.get(), was_ready=was_ready)
        if self.kind == "slow":
            time.sleep(self.pause_s)
            return Given(next(self.loader), was_ready=False)
        if self.kind == "fast":
            self.first = self.first or next(self.loader)
            return Given(self.first, was_ready=True)
        return next(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def measure(prefix: str, folder: Path, kind: str, model: str, num_steps: int) -> dict[str, float]:
    """Shares of the step by phase, and the seconds of a step."""
    build = run_module.build_train_loader

    @contextmanager
    def wrapped(*args: Any) -> Iterator[Source]:
        with build(*args) as loader:
            yield Source(loader, kind, PAUSES_S[model])

    run_module.build_train_loader = wrapped  # type: ignore[assignment]
    try:
        with redirect_stdout(io.StringIO()):
            run_tiny(prefix, [*MODELS[model].split(), "--train-iters", str(num_steps), "--run-dir", str(folder / kind)])
    finally:
        run_module.build_train_loader = build
    lines = read_metrics(folder / kind)[2:]
    step_s = sum(line["step_time_s"] for line in lines)
    names = (*PHASES, "other", "host_wait")
    return {**{n: sum(line[f"{n}_s"] for line in lines) / step_s for n in names}, "step_s": step_s / len(lines)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--model", choices=MODELS, default="middle")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prefix = write_pair(folder / "toy", num_documents=200, document_tokens=400)
        kinds = ("plain", "slow", "hidden", "fast")
        found = {kind: measure(prefix, folder, kind, options.model, options.steps) for kind in kinds}
    for kind, shares in found.items():
        whole = sum(shares[phase] for phase in PHASES)
        each = ", ".join(f"{name} {shares[name]:.4%}" for name in (*PHASES, "other"))
        wait = f"host wait {shares['host_wait']:.4%}"
        print(f"{kind:<7} step {shares['step_s'] * 1e3:7.1f} ms  phases {whole:.2%}: {each}; {wait}")


if __name__ == "__main__":
    main()
