#!/usr/bin/env python3
"""Training steps on GPUs, rows of the tables in docs/performance-log.md: real data through the loader, whole steps.

    python3 benches/gpu/train.py --data PREFIX                       # all rows
    python3 benches/gpu/train.py --data PREFIX gpt2-124m gpt-1.3b --flags="--compile" --flags=""

Each row is a run of trainer/pretrain.py in a process of its own, once for every `--flags`, in turn; the figures are the
last line of its log (means over the last `--window` steps). Writes JSON to `benches/results/`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
UNTIED = "--untie-embeddings-and-output-weights"
ROWS = {
    "tiny": "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 4",
    "gpt2-124m": "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --micro-batch-size 32 "
    "--global-batch-size 64",
    "gpt-1.3b": "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 16 "
    "--global-batch-size 32",
    "gpt-1.3b-mbs8": "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
    "--micro-batch-size 8 --global-batch-size 32",
    "llama-1.3b": f"--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 5632 {LLAMA} "
    f"{UNTIED} --seq-length 2048 --micro-batch-size 8 --global-batch-size 32",
    "gpt-6.7b": "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --micro-batch-size 2 "
    "--global-batch-size 4 --all-bf16",
}
COMMON = (
    "--bf16 --vocab-size 50257 --make-vocab-size-divisible-by 128 --hidden-dropout 0 --attention-dropout 0 --lr 3e-4 "
    "--min-lr 3e-5 --lr-warmup-iters 2 --clip-grad 1.0 --weight-decay 0.1 --eval-interval 0 --split 100,0,0"
)
SHOWN = (
    "tokens_per_s_per_gpu",
    "mfu",
    "step_time_s",
    "loader_bound_s",
    "communication_s",
    "other_s",
    "memory_peak_bytes",
    "lm_loss",
)


def run_row(row: str, flags: str, options: argparse.Namespace) -> dict[str, Any]:
    """One run; the last line of its log, or what it said when it failed."""
    with tempfile.TemporaryDirectory() as folder:
        steps = ["--train-iters", str(options.steps), "--log-interval", str(options.window), "--run-dir", folder]
        words = [*ROWS[row].split(), *COMMON.split(), *flags.split(), "--data-path", options.data, *steps]
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
        launcher = ranks if options.ranks > 1 else []
        command = [sys.executable, *launcher, str(ROOT / "trainer" / "pretrain.py"), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"row": row, "flags": flags, "error": (done.stderr or done.stdout)[-1500:]}
        lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        values = [json.loads(line) for line in lines if "lm_loss" in line]
        return {"row": row, "flags": flags, "first": values[0], **values[-1]}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)} (default: all but tiny)")
    parser.add_argument("--data", required=True, metavar="PREFIX", help="a .bin/.idx pair of GPT-2's vocabulary")
    parser.add_argument("--flags", action="append", default=[], help="more flags; repeated: that many runs a row")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of a run (default: 1)")
    parser.add_argument("--steps", type=int, default=30, help="steps of a run (default: 30)")
    parser.add_argument("--window", type=int, default=10, help="steps of the figures (default: 10)")
    parser.add_argument("--out", type=Path, default=ROOT / "benches" / "results" / "gpu-train.json")
    options = parser.parse_args()
    found = []
    for row in options.rows or [row for row in ROWS if row != "tiny"]:
        for flags in options.flags or ["--compile"]:
            found.append(run_row(row, flags, options))
            result = found[-1]
            shown = {name: round(result[name], 6) for name in SHOWN if result.get(name) is not None}
            print(row, repr(flags), json.dumps(shown) if "error" not in result else result["error"], flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
