#!/usr/bin/env python3
"""The whole way on this machine: real text, tokens, a small GPT, and where the time went. Minutes on two cores.

The text is the documentation and the sources of this Python's standard library, so nothing is shipped or loaded. Every
command is shown before it runs and can be typed as it stands. All results lie in demo/.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from demo_corpus import write_corpus
from doors import ShowVersion, run_door
from setup_env import ROOT, Environment, prepare_or_exit

DEMO = Path("demo")
"""Where everything of the demo lies, seen from the checkout."""
LEAST_DECAY = 20
"""Steps that the decay of the learning rate takes at least: it must be longer than the warm-up."""
LEAST_DROP_NATS = 2.0
"""How far the loss must fall for the demo to have worked."""
CPU_MODEL = "--num-layers 4 --hidden-size 192 --num-attention-heads 6 --seq-length 128 --max-position-embeddings 128"
CPU_BATCH = "--micro-batch-size 8 --global-batch-size 8"
GPU_MODEL = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512"
GPU_BATCH = "--micro-batch-size 16 --global-batch-size 32 --bf16"
SCHEDULE = "--lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 10 --clip-grad 1.0 --weight-decay 0.1"
EXACT = "--hidden-dropout 0 --attention-dropout 0"
"""Each process drops activations of its own; without dropout one and two processes train alike."""
CADENCE = "--log-interval 1 --eval-interval 30 --eval-iters 2 --split 949,50,1"
PHASES = {
    "loader_bound_s": "loader-bound: waiting for data",
    "feed_s": "feed: taking over batches",
    "forward_s": "forward",
    "backward_s": "backward",
    "communication_s": "communication (exposed)",
    "optimizer_s": "optimizer",
    "log_s": "log",
    "other_s": "other",
}
"""Parts of a step in the run's metrics.jsonl, and what to call them here."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--version", action=ShowVersion)
    parser.add_argument("--train-iters", type=int, default=60, help="steps of the training (default: 60)")
    options = parser.parse_args()
    start = time.monotonic()
    environment = prepare_or_exit()
    make_corpus()
    headline("2. from text to tokens: corpus_text_document.bin, .idx and the .json that says where they came from")
    show_and_run(environment, "megaflow-preprocess", str(DEMO / "corpus.jsonl"))
    train(environment, options.train_iters)
    metrics = ROOT / DEMO / "run" / "metrics.jsonl"
    seconds = time.monotonic() - start
    learned = report(read_steps(metrics), seconds=seconds, valid_loss=read_validation(metrics))
    sys.exit(0 if learned else 1)


def headline(text: str) -> None:
    """A line that says what comes next."""
    print(f"\n=== {text}", flush=True)


def show_and_run(environment: Environment, program: str, *words: str) -> None:
    """Shows a command as one would type it in the checkout, then runs it; ends the demo if it fails."""
    path = environment.folder / "bin" / program
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    print(f"$ {shown} {shlex.join(words)}", flush=True)
    done = subprocess.run([str(path), *words], cwd=ROOT, env=environment.variables(), check=False)
    if done.returncode != 0:
        raise SystemExit(
            f"the demo stops here: {program} ended with exit code {done.returncode}, its words stand above"
        )


def make_corpus() -> None:
    """Writes demo/corpus.jsonl, unless an earlier demo has."""
    headline("1. text: the documentation and sources of this Python's standard library, one document a line")
    path = ROOT / DEMO / "corpus.jsonl"
    if path.exists():
        print(f"{DEMO / 'corpus.jsonl'} is there from an earlier demo and is used again (remove it to make it anew)")
        return
    path.parent.mkdir(exist_ok=True)
    documents, size = write_corpus(path)
    print(f"{DEMO / 'corpus.jsonl'}: {documents:,} documents, {size / 1e6:.1f} MB")


def has_gpu(environment: Environment) -> bool:
    """Whether torch sees a GPU."""
    program = "import torch; raise SystemExit(not torch.cuda.is_available())"
    command = [str(environment.python), "-c", program]
    return subprocess.run(command, env=environment.variables(), check=False).returncode == 0


def train(environment: Environment, num_steps: int) -> None:
    """Trains from scratch; the run of an earlier demo is removed, because the same command would go on from its end."""
    gpu = has_gpu(environment)
    headline(f"3. from tokens to a GPT: {num_steps} steps on {'one GPU' if gpu else 'the CPU'}")
    run = DEMO / "run"
    if (ROOT / run).exists():
        print(f"removing {run} of an earlier demo: the same command would go on from its last checkpoint")
        shutil.rmtree(ROOT / run)
    flags = f"{GPU_MODEL} {GPU_BATCH}" if gpu else f"{CPU_MODEL} {CPU_BATCH}"
    flags = f"{flags} {list_flags(num_steps)}"
    places = f"--data-path {DEMO / 'corpus'} --run-dir {run} --save {run / 'checkpoints'} --save-interval {num_steps}"
    launcher = ["--standalone", "--nproc_per_node=1", "trainer/pretrain.py"]
    show_and_run(environment, "torchrun", *launcher, *flags.split(), *places.split())


def list_flags(num_steps: int) -> str:
    """The flags that do not depend on the device; the decay's length is named, so that it stays in a longer run."""
    return f"--train-iters {num_steps} --lr-decay-iters {max(num_steps, LEAST_DECAY)} {SCHEDULE} {EXACT} {CADENCE}"


def read_validation(path: Path) -> float | None:
    """The last validation loss of a run; None if there is none."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return next((float(row["valid_loss"]) for row in reversed(rows) if "valid_loss" in row), None)


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The training steps of a run, in order; validation lines are left out."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "lm_loss" in row]


def report(steps: list[dict[str, Any]], *, seconds: float, valid_loss: float | None = None) -> bool:
    """Prints what was reached, where the time went and what to try next; returns whether the model learned enough."""
    first, last = steps[0]["lm_loss"], mean(steps[-10:], "lm_loss")
    drop = first - last
    headline(f"what came out, after {seconds / 60:.1f} minutes in all")
    print(f"loss   {first:.4f} at the first step, in nats a token")
    print(f"       {last:.4f} as the mean of the last {len(steps[-10:])} of {len(steps)} steps: {drop:.4f} nats lower")
    if valid_loss is not None:
        print(f"       {valid_loss:.4f} on the validation part, which was not trained on")
    timed = steps[1:] or steps  # the first step allocates and is no measure
    step_s = mean(timed, "step_time_s")
    print(f"time   {step_s * 1e3:.1f} ms a step, {mean(timed, 'tokens_per_s_per_gpu'):,.0f} tokens/s; of each step")
    for key, name in PHASES.items():
        part_s = mean(timed, key)
        print(f"       {part_s / step_s:7.2%}  {part_s * 1e3:9.2f} ms  {name}")
    print(f"files  {DEMO}/corpus_text_document.*: tokens; {DEMO}/run: metrics.jsonl, run.json, checkpoints")
    print(NEXT)
    if drop < LEAST_DROP_NATS:
        print(
            f"the loss fell by {drop:.2f} nats, less than {LEAST_DROP_NATS}: something is wrong here", file=sys.stderr
        )
    return drop >= LEAST_DROP_NATS


def mean(rows: list[dict[str, Any]], key: str) -> float:
    """Mean of one value over rows; a phase that a run does not have counts as zero."""
    return sum(float(row.get(key, 0.0)) for row in rows) / len(rows)


NEXT = f"""
what to try next
  longer:               the last command with --train-iters 200 goes on from its checkpoint, at its last learning rate
  two processes:        the same with --nproc_per_node=2 --micro-batch-size 4 --run-dir {DEMO}/two --save {DEMO}/two:
                        the same losses to six digits for the first steps, to two at the end (sums in another order)
  your own text:        megaflow-preprocess FILE.jsonl, one {{"text": "..."}} a line; then --data-path FILE
  every flag:           megaflow-preprocess --help, python trainer/pretrain.py --help (first `. .venv/bin/activate`)
  your own loop:        docs/plain-pytorch-loop.md: ten lines of PyTorch on the same tokens"""


if __name__ == "__main__":
    sys.exit(run_door(main))
