#!/usr/bin/env python3
"""Training steps on GPUs, rows of the tables in docs/performance-log.md: real data through the loader, whole steps.

    python3 benches/gpu/train.py --data PREFIX                       # all rows
    python3 benches/gpu/train.py --data PREFIX gpt2-124m gpt-1.3b --flags="" --flags="--no-compile"
    python3 benches/gpu/train.py --data PREFIX gpt-1.3b --rival="" --rival="--no-fusion" --rounds 3

Each row is a run of trainer/pretrain.py in a process of its own, once for every `--flags`, in turn; the figures are
the last line of its log (means over the last `--window` steps). With several `--ranks` one more step is profiled,
kernels only, for the time in which a kernel of NCCL ran and no other, as the rival measures it; with `--kernels N` too,
and the N kernels with the most time are listed. With `--rival` Megatron-Core runs in turn with them, in the same recipe
(bf16 weights and states if the flags say `--all-bf16`, else fp32 masters and sums), once for every `--rival`, which are
flags of `rival_megatron.py`. Where the flags let routers choose at random (`--moe-router-force-load-balancing`)
`--force-balance` is added for the rival, so that both sides have even load. Writes JSON to `benches/results/`;
`merge.py` makes the table.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
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
    "llama-6.7b": f"--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008 {LLAMA} "
    f"{UNTIED} --seq-length 4096 --micro-batch-size 2 --global-batch-size 4 --all-bf16",
    "moe-8x1b": f"--num-layers 12 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 5632 {LLAMA} "
    "--num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --seq-length 2048 --micro-batch-size 8 "
    "--global-batch-size 32",
}
COMMON = (
    "--bf16 --vocab-size 50257 --make-vocab-size-divisible-by 128 --hidden-dropout 0 --attention-dropout 0 --lr 3e-4 "
    "--min-lr 3e-5 --lr-warmup-iters 2 --clip-grad 1.0 --weight-decay 0.1 --eval-interval 0 --split 100,0,0"
)
RANDOM = "--moe-router-force-load-balancing"
SHOWN = (
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "mfu",
    "step_time_s",
    "loader_bound_s",
    "communication_s",
    "other_s",
    "exposed_communication_s",
    "pipeline_bubble",
    "memory_peak_bytes",
    "lm_loss",
)


def explain(done: subprocess.CompletedProcess[str]) -> str:
    """What a run that failed said: its lines with an error, else its end."""
    text = done.stderr + done.stdout
    return "\n".join(re.findall(r"^.*(?:Error|error:).*$", text, re.MULTILINE)[:8]) or text[-1500:]


def run_rival(row: str, flags: str, options: argparse.Namespace, *, recipe: str) -> dict[str, Any]:
    """One run of the rival; its line, or what it said when it failed."""
    script = str(ROOT / "benches" / "gpu" / "rival_megatron.py")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
    command = [sys.executable, *launcher, script, row, "--recipe", recipe, *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = {"row": row, "rival": "megatron-core", "recipe": recipe, "flags": flags}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {**found, "error": explain(done)}
    return {**found, **json.loads(lines[-1])}


def run_row(row: str, flags: str, options: argparse.Namespace) -> dict[str, Any]:
    """One run; the last line of its log, or what it said when it failed."""
    with tempfile.TemporaryDirectory() as folder:
        is_profiled = options.ranks > 1 or options.kernels > 0
        last = options.steps + is_profiled
        steps = ["--train-iters", str(last), "--log-interval", str(options.window), "--run-dir", folder]
        profile = f"--profile --profile-kernels-only --profile-step-start {last} --profile-step-end {last}".split()
        profile = profile if is_profiled else []
        words = [*ROWS[row].split(), *COMMON.split(), *flags.split(), "--data-path", options.data, *steps, *profile]
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
        launcher = ranks if options.ranks > 1 else []
        command = [sys.executable, *launcher, str(ROOT / "trainer" / "pretrain.py"), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"row": row, "flags": flags, "error": explain(done)}
        lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        values = [json.loads(line) for line in lines if "lm_loss" in line]
        values = [line for line in values if line["iteration"] <= options.steps]
        total = values[-1]["tokens_per_s_per_gpu"] * options.ranks
        found = {"row": row, "flags": flags, "first": values[0], "tokens_per_s": total, **values[-1]}
        if profile:
            stem = Path(folder) / "profile" / f"rank_0_to_{last}"
            table = stem.with_suffix(".txt").read_text(encoding="utf-8")
            found |= {"exposed_communication_s": read_exposed(table), "profile": table}
            if options.kernels:
                trace = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))
                found["kernels"] = list_longest(trace["traceEvents"], options.kernels)
        return found


def read_exposed(table: str) -> float:
    """Seconds of a profiled step in which a kernel of NCCL ran and no other: the last column below `NCCL kernel`."""
    below = table.partition("NCCL kernel")[2].splitlines()[1:]
    return sum(float(line.split()[-1]) for line in below if line.strip()) / 1e3


def list_longest(events: list[dict[str, Any]], count: int) -> list[tuple[str, float, int]]:
    """The kernels of a trace with the most time: name, milliseconds and calls of the step."""
    totals: dict[str, tuple[float, int]] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            time, calls = totals.get(event["name"], (0.0, 0))
            totals[event["name"]] = time + event["dur"] / 1e3, calls + 1
    longest = sorted(totals.items(), key=lambda item: -item[1][0])[:count]
    return [(name[:120], round(time, 3), calls) for name, (time, calls) in longest]


def run_round(row: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each of the runs of a row once; the rival in every recipe, and with every choice of routers, that the flags ask
    for.
    """
    kinds = []
    for flags in options.flags or [""]:
        yield run_row(row, flags, options)
        words = f"{ROWS[row]} {flags}".split()
        kinds.append(("bf16" if "--all-bf16" in words else "fp32", RANDOM in words))
    for recipe, is_random in dict.fromkeys(kinds):
        for flags in options.rival:
            forced = " --force-balance" if is_random and "--force-balance" not in flags else ""
            yield run_rival(row, f"{flags}{forced}".strip(), options, recipe=recipe)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)} (default: all but tiny)")
    parser.add_argument("--data", required=True, metavar="PREFIX", help="a .bin/.idx pair of GPT-2's vocabulary")
    parser.add_argument("--flags", action="append", default=[], help="more flags; repeated: that many runs a row")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of a run (default: 1)")
    parser.add_argument("--steps", type=int, default=30, help="steps of a run (default: 30)")
    parser.add_argument("--window", type=int, default=10, help="steps of the figures (default: 10)")
    parser.add_argument("--kernels", type=int, default=0, help="list so many kernels with the most time (default: 0)")
    parser.add_argument("--out", type=Path, default=ROOT / "benches" / "results" / "gpu-train.json")
    parser.add_argument(
        "--rival", action="append", default=[], metavar="FLAGS", help="Megatron-Core in turn, with these flags"
    )
    parser.add_argument("--rounds", type=int, default=1, help="runs of each, in turn (default: 1)")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for row in options.rows or [row for row in ROWS if row != "tiny"]:
        for _ in range(options.rounds):
            for result in run_round(row, options):
                found.append(result)
                shown = {name: round(result[name], 6) for name in SHOWN if result.get(name) is not None}
                text = json.dumps(shown) if "error" not in result else result["error"]
                print(row, result.get("rival", "megaflow"), repr(result["flags"]), text, flush=True)
                options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
