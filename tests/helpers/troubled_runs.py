"""Runs of the trainer on a CPU that are really in trouble: throttled, starved, short of memory, fed with junk.

Each function of `TROUBLES` starts the ranks of one run, makes its trouble and waits until every rank has ended.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path

from helpers.launching import ROOT, find_port, start_rank
from helpers.pairs import write_pair
from megaflow_trainer.config.exit_codes import DIVERGED, FINISHED, HUNG, OUT_OF_MEMORY

STEPS = 24
WAIT_S = 240
BASE = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--vocab-size", "64", "--make-vocab-size-divisible-by", "48", "--split", "100,0,0", "--log-interval", "1"),
    *("--train-iters", str(STEPS), "--global-batch-size", "8", "--micro-batch-size", "4", "--lr", "3e-3"),
    *("--eval-interval", "0", "--hidden-dropout", "0", "--attention-dropout", "0", "--no-compile"),
)
"""Flags of all runs; those of a run come behind them and win."""
OWN_CODE = {"PYTHONPATH": f"{ROOT / 'python'}:{ROOT / 'trainer'}"}
BYTES = "--vocab-size 257 --seq-length 64 --max-position-embeddings 64"
"""For text as bytes."""
JUNK = {30: (0x4E00, 0x9FA0), 60: (0x0410, 0x0450), 90: (0x1200, 0x1248)}
"""Documents of the corpus of `loss-spikes` that are none, with the letters that they are made of."""


class Trial:
    """One run to be recorded.

    Args:
        scratch: a folder of its own; the run folder is `run` in it, what rank N says is `rank_N.log`.
    """

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.folder = scratch, scratch / "run"
        self.ranks: list[subprocess.Popen[str]] = []
        scratch.mkdir(parents=True)

    def start(
        self, flags: str, *, data: str | None = None, size: int = 1, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start the ranks; the data are a corpus that counts upwards if none are named."""
        data = data or write_pair(self.scratch / "toy")
        every = [*BASE, "--data-path", data, "--run-dir", str(self.folder), *flags.split()]
        port = find_port()
        for rank in range(size):
            log = self.scratch / f"rank_{rank}.log"
            own = {**OWN_CODE, **(environment or {})}
            self.ranks.append(start_rank(log, every, rank, size=size, port=port, environment=own))

    def wait(self) -> list[int]:
        """Wait for all ranks; those that do not end are killed. Returns their codes."""
        deadline = time.monotonic() + WAIT_S
        try:
            return [rank.wait(timeout=max(0.0, deadline - time.monotonic())) for rank in self.ranks]
        finally:
            self.kill()

    def kill(self) -> None:
        """End what still runs, stopped or not."""
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()

    def wait_for(self, iteration: int) -> None:
        """Wait until the run has logged an iteration, or a rank has ended."""
        deadline = time.monotonic() + WAIT_S
        while self._count() < iteration and all(rank.poll() is None for rank in self.ranks):
            if time.monotonic() > deadline:
                raise UnexpectedEndError(f"{self.folder}: no iteration {iteration} in {WAIT_S} s")
            time.sleep(0.005)

    def _count(self) -> int:
        try:
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def throttle(self, rank: int, *, run_s: float, rest_s: float) -> None:
        """Stop a rank again and again until it ends, as heat or another job on its processor would."""
        process = self.ranks[rank]
        while process.poll() is None:
            process.send_signal(signal.SIGSTOP)
            time.sleep(rest_s)
            process.send_signal(signal.SIGCONT)
            time.sleep(run_s)


def train_plainly(flags: str) -> Callable[[Trial], None]:
    """A run of one rank, whose flags are all its trouble."""
    return lambda trial: trial.start(flags)


def write_byte_tokenizer(folder: Path) -> str:
    """A vocabulary in GPT-2's files that merges nothing: 256 bytes and an end of document. Returns the flags."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + number) for number in range(len(rest))]
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    vocabulary.write_text(json.dumps({text: number for number, text in enumerate([*letters, "<|endoftext|>"])}))
    merges.write_text("#version: 0.2\n")
    return f"--tokenizer-type GPT2BPETokenizer --vocab-file {vocabulary} --merge-file {merges}"


def list_paragraphs(num_bytes: int) -> list[str]:
    """Text of this project's pages, about so much of it."""
    pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))]
    parts = [part for page in pages for part in page.split("\n\n") if 200 < len(part) < 2000]
    ends = accumulate(len(part.encode()) for part in parts)
    return [part for part, end in zip(parts, ends, strict=True) if end <= num_bytes]


def feed_junk(trial: Trial) -> None:
    """Text of this project's pages with random letters of other scripts in it; the run reads it all once."""
    num_steps, batch, length = 72, 2, 512
    texts, chance = list_paragraphs(num_steps * batch * length), random.Random(7)
    for place, (first, last) in JUNK.items():
        texts.insert(place, "".join(chr(chance.randrange(first, last)) for _ in range(500)))
    corpus = trial.scratch / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    tokenizer = write_byte_tokenizer(trial.scratch)
    command = [sys.executable, "-m", "megaflow", "preprocess", str(corpus), *tokenizer.split()]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, **OWN_CODE}, capture_output=True)
    trial.start(
        f"{BYTES} --global-batch-size {batch} --micro-batch-size {batch} --train-iters {num_steps} --log-interval 3 "
        f"--seq-length {length} --max-position-embeddings {length} --spike-window 20 {tokenizer}",
        data=str(trial.scratch / "corpus_text_document"),
    )


def stop_a_rank(trial: Trial) -> None:
    """The second of two ranks stands still; the first waits for it in vain."""
    trial.start("--hang-timeout 4 --hidden-size 256", size=2)
    trial.wait_for(12)
    trial.ranks[1].send_signal(signal.SIGSTOP)
    trial.ranks[0].wait(timeout=WAIT_S)
    trial.kill()


def kill_a_run(trial: Trial) -> None:
    """What the kernel does when memory runs out: the process is gone and has said nothing."""
    trial.start("")
    trial.wait_for(STEPS // 2)
    trial.ranks[0].kill()


def run_short_of_memory(trial: Trial) -> None:
    """The process may have 3 GiB of data; the activations of its micro-batch alone are more."""
    trial.start(
        "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512 "
        "--micro-batch-size 8"
    )
    resource.prlimit(trial.ranks[0].pid, resource.RLIMIT_DATA, (3 << 30, 3 << 30))


def throttle_a_rank(trial: Trial) -> None:
    """The last of three ranks may run a third of the time."""
    trial.start("--hidden-size 128 --global-batch-size 12", size=3)
    trial.wait_for(2)
    trial.throttle(2, run_s=0.02, rest_s=0.08)


def throttle_late(trial: Trial) -> None:
    """From two thirds on the run may use a tenth of the time."""
    trial.start("--hidden-size 128 --seq-length 32 --max-position-embeddings 32")
    trial.wait_for(2 * STEPS // 3)
    trial.throttle(0, run_s=0.01, rest_s=0.12)


def starve_a_pipeline(trial: Trial) -> None:
    """Two micro-batches on two stages."""
    trial.start(
        "--pipeline-model-parallel-size 2 --hidden-size 256 --seq-length 64 --max-position-embeddings 64", size=2
    )


def send_much(trial: Trial) -> None:
    """Gradients of a wide model after a step of few tokens."""
    trial.start(
        "--hidden-size 512 --micro-batch-size 1 --global-batch-size 2",
        size=2,
        environment={"NCCL_IB_DISABLE": "1"},
    )


def feed_slowly(trial: Trial) -> None:
    """Text that comes through a pipe, a paragraph every quarter of a second."""
    pipe = trial.scratch / "corpus.jsonl"
    os.mkfifo(pipe)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in list_paragraphs(2000)[:1]).encode()
    trial.start(f"{BYTES} {write_byte_tokenizer(trial.scratch)}", data=str(pipe))
    threading.Thread(target=_feed, args=(trial.ranks[0], pipe, lines), daemon=True).start()


def _feed(reader: subprocess.Popen[str], pipe: Path, lines: bytes) -> None:
    while reader.poll() is None:
        try:
            with pipe.open("wb") as file:  # once for each time that the corpus is read
                time.sleep(0.25)
                file.write(lines)
        except BrokenPipeError:
            continue


TROUBLES: dict[str, Callable[[Trial], None]] = {
    "healthy": train_plainly(""),
    "flat-loss": train_plainly("--lr 1e-9"),
    "nan": train_plainly("--lr 3 --clip-grad 0 --optimizer sgd --init-method-std 0.05"),
    "overflow": train_plainly("--fp16 --initial-loss-scale 1e30 --lr 1e-3 --max-nonfinite-steps 100"),
    "divergence": train_plainly(
        "--lr 0.6 --clip-grad 0 --lr-warmup-iters 20 --lr-decay-iters 40 --lr-decay-style constant"
    ),
    "loss-spikes": feed_junk,
    "stopped": stop_a_rank,
    "killed": kill_a_run,
    "out-of-memory": run_short_of_memory,
    "straggler": throttle_a_rank,
    "slowdown": throttle_late,
    "pipeline-bubble": starve_a_pipeline,
    "slow-communication": send_much,
    "slow-loader": feed_slowly,
}


ENDS = {"nan": DIVERGED, "stopped": HUNG, "out-of-memory": OUT_OF_MEMORY, "killed": -signal.SIGKILL}
"""How the first rank of a run ends, if not well."""


class UnexpectedEndError(Exception):
    """A run did not come to the trouble that it was started for."""


def record(name: str, scratch: Path) -> Path:
    """Make one run; returns its folder.

    Raises:
        UnexpectedEndError: with the end of what its first rank said.
    """
    trial = Trial(scratch / name)
    try:
        TROUBLES[name](trial)
        code = trial.wait()[0]
    except subprocess.TimeoutExpired:
        raise UnexpectedEndError(f"{name}: not at its end after {WAIT_S} s") from None
    finally:
        trial.kill()
    if code != ENDS.get(name, FINISHED):
        said = (trial.scratch / "rank_0.log").read_text(encoding="utf-8", errors="replace")
        raise UnexpectedEndError(f"{name}: ended with {code} instead of {ENDS.get(name, FINISHED)}: {said[-2000:]}")
    return trial.folder
