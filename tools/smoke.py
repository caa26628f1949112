#!/usr/bin/env python3
"""The smallest whole run, in about a minute on whatever is there: preprocess, train, save, resume, evaluate.

    python tools/smoke.py
    python tools/smoke.py --ranks 2 --flags "--tensor-model-parallel-size 2"

Every stage gets a verdict; the first that fails says why, and those that need it are not run. Exit code 0: all passed.
"""

from __future__ import annotations

import json
import math
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from doors import DeskParser, guard_start, run_door

if __name__ == "__main__":
    guard_start()

from waiting import Waiting

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 300
HALF, STEPS = 12, 20
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 4 --global-batch-size 8 --lr 5e-3 --lr-decay-iters 20 --lr-warmup-iters 2 --log-interval 1 "
    "--hidden-dropout 0 --attention-dropout 0 --eval-iters 2 --split 90,10,0"
)
SUBJECTS = ("the loader", "a rank", "the model", "a document", "every token", "the optimizer", "a gradient", "the run")
VERBS = ("waits for", "sends", "reads", "counts", "holds", "finds", "forgets", "needs")
OBJECTS = ("its samples", "the weights", "one batch", "the index", "a checkpoint", "its loss", "the next step")


class StageError(Exception):
    """A stage did not do what it should, in one sentence."""


@dataclass(slots=True)
class Verdict:
    """How a stage ended."""

    stage: str
    state: str
    """pass, fail or not run."""
    seconds: float = 0.0
    text: str = ""


@dataclass(slots=True)
class Smoke:
    """What the stages share."""

    folder: Path
    ranks: int = 1
    flags: list[str] = field(default_factory=list)
    tokenizer: list[str] = field(default_factory=list)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of the run."""
        return self.read("run")

    def read(self, name: str) -> list[dict[str, Any]]:
        """The lines of a run."""
        path = self.folder / name / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def run(self, *words: str) -> None:
        """Run a command in the checkout.

        Raises:
            StageError: with the line that tells why, if it fails.
        """
        paths = [str(ROOT / "python"), str(ROOT / "trainer"), os.environ.get("PYTHONPATH", "")]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        try:
            done = subprocess.run(
                [sys.executable, *words],
                cwd=ROOT,
                env=variables,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise StageError(f"no end within {LIMIT_S} s") from None
        if done.returncode != 0:
            raise StageError(find_reason(done.stdout + done.stderr) or f"exit code {done.returncode}")

    def train(self, name: str, steps: int, *more: str) -> None:
        """Train up to a step."""
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}"]
        places = ["--data-path", str(self.folder / "corpus"), "--run-dir", str(self.folder / name)]
        length = ["--train-iters", str(steps), "--eval-interval", str(steps)]
        script = ["trainer/pretrain.py", *MODEL.split(), *places, *length, *self.flags, *more]
        self.run(*(launch if self.ranks > 1 else []), *script)


def find_reason(output: str) -> str:
    """The line that tells why a command failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("error:")]
    return (told or [line for line in lines if "Error" in line] or lines or [""])[0 if told else -1]


def preprocess(smoke: Smoke) -> str:
    """Text to tokens."""
    random.seed(7)
    lines = []
    for _ in range(400):
        words = (f"{random.choice(SUBJECTS)} {random.choice(VERBS)} {random.choice(OBJECTS)}." for _ in range(20))
        lines.append(json.dumps({"text": " ".join(words)}))
    smoke.folder.mkdir(parents=True, exist_ok=True)
    (smoke.folder / "corpus.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    output = ["--output-prefix", str(smoke.folder / "corpus")]
    smoke.run("-m", "megaflow.cli.preprocess", str(smoke.folder / "corpus.jsonl"), *output, *smoke.tokenizer)
    size = (smoke.folder / "corpus_text_document.bin").stat().st_size
    return f"400 documents, {size // 2:,} tokens"


def train(smoke: Smoke) -> str:
    """The loss falls."""
    smoke.train("whole", STEPS)
    losses = [row["lm_loss"] for row in smoke.read("whole") if "lm_loss" in row]
    if not all(isinstance(loss, float) and math.isfinite(loss) for loss in losses) or losses[-1] > losses[0] - 1:
        raise StageError(f"the loss did not fall: {losses[0]} at first, {losses[-1]} at last")
    return f"{STEPS} steps, loss {losses[0]:.2f} to {losses[-1]:.2f}"


def save(smoke: Smoke) -> str:
    """A checkpoint is published."""
    smoke.train("run", HALF, "--save", str(smoke.folder / "checkpoints"))
    pointer = smoke.folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    if not pointer.is_file() or pointer.read_text(encoding="utf-8").strip() != str(HALF):
        raise StageError(f"{pointer} does not name iteration {HALF}")
    size = sum(path.stat().st_size for path in (smoke.folder / "checkpoints").rglob("*") if path.is_file())
    return f"iteration {HALF}, {size / 1e6:.1f} MB"


def resume(smoke: Smoke) -> str:
    """Going on gives the losses of the run that was never interrupted."""
    smoke.train("run", STEPS, "--save", str(smoke.folder / "checkpoints"))
    resumed, whole = (
        {row["iteration"]: row["lm_loss"] for row in rows if "lm_loss" in row}
        for rows in (smoke.metrics, smoke.read("whole"))
    )
    if sorted(resumed) != list(range(1, STEPS + 1)):
        raise StageError(f"the resumed run has iterations {sorted(resumed)}")
    worst = max(abs(resumed[step] - whole[step]) for step in range(HALF + 1, STEPS + 1))
    if worst > 2e-3:
        raise StageError(f"losses after the resume differ by up to {worst:.2e} from the uninterrupted run")
    return "to the bit like the uninterrupted run" if worst == 0 else f"within {worst:.1e} of the uninterrupted run"


def evaluate(smoke: Smoke) -> str:
    """The validation loss is that of a model that learned."""
    found = [row["valid_loss"] for row in smoke.metrics if "valid_loss" in row]
    if not found or not isinstance(found[-1], float) or found[-1] > 10:
        raise StageError(f"validation losses: {found}")
    return f"validation loss {found[-1]:.2f}, perplexity {math.exp(found[-1]):.1f}"


STAGES: dict[str, Callable[[Smoke], str]] = {
    "preprocess": preprocess,
    "train": train,
    "save": save,
    "resume": resume,
    "evaluate": evaluate,
}


def run_stages(
    smoke: Smoke,
    tell: Callable[[Verdict], None] = lambda verdict: None,
    begin: Callable[[str], None] = lambda stage: None,
) -> list[Verdict]:
    """All stages; after one that fails the others are not run. `begin` is told each stage before it, `tell` how it
    ended.
    """
    verdicts: list[Verdict] = []
    for number, (name, stage) in enumerate(STAGES.items(), start=1):
        begin(f"{name} ({number} of {len(STAGES)})")
        start = time.monotonic()
        if any(verdict.state == "fail" for verdict in verdicts):
            verdict = Verdict(name, "not run")
        else:
            try:
                text = stage(smoke)
                verdict = Verdict(name, "pass", time.monotonic() - start, text)
            except (StageError, OSError, ValueError, KeyError) as error:
                verdict = Verdict(name, "fail", time.monotonic() - start, str(error))
        verdicts.append(verdict)
        tell(verdict)
    return verdicts


def format_verdict(verdict: Verdict) -> str:
    """A line for people."""
    state = {"pass": "pass", "fail": "FAIL", "not run": "--"}[verdict.state]
    return f"{verdict.stage:<11} {state:<5} {verdict.seconds:5.1f} s  {verdict.text}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = DeskParser(__doc__)
    parser.add_argument("--ranks", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--flags", default="", help="further flags of the trainer, as one text")
    parser.add_argument("--vocab-file", help="vocabulary of the tokenizer (GPT-2's own if not given)")
    parser.add_argument("--merge-file", help="its merges")
    parser.add_argument(
        "--folder", type=Path, help="where everything is written and kept (a temporary one if not given)"
    )
    parser.add_json()
    options = parser.parse_args(argv)
    if options.ranks < 1:
        parser.error(f"--ranks must be >= 1, got {options.ranks}")
    try:
        flags = shlex.split(options.flags)
    except ValueError as error:
        parser.error(f"--flags cannot be read: {error}: {options.flags}")
    if options.folder is not None and options.folder.exists() and not options.folder.is_dir():
        parser.error(f"--folder {options.folder}: expected a folder, or a name that is free, found a file")
    names = {"--vocab-file": options.vocab_file, "--merge-file": options.merge_file}
    tokenizer = [word for flag, value in names.items() if value for word in (flag, value)]
    with tempfile.TemporaryDirectory(prefix="megaflow_smoke_") as scratch, Waiting("smoke") as waiting:
        folder = options.folder or Path(scratch)
        smoke = Smoke(folder.resolve(), options.ranks, flags, tokenizer)

        def tell(verdict: Verdict) -> None:
            if not options.json:
                waiting.print(format_verdict(verdict))

        verdicts = run_stages(smoke, tell, waiting.begin)
    if options.json:
        print(json.dumps([asdict(verdict) for verdict in verdicts], indent=1))
    failed = [verdict for verdict in verdicts if verdict.state == "fail"]
    if failed and not options.json:
        print("\npython tools/doctor.py looks at the machine")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(run_door(main))
