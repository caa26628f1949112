"""Runs of either side in processes of their own, and what is read from what they leave."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from facts import ROOT
from rows import COMMON, ROWS

HERE = Path(__file__).resolve().parent


def explain(done: subprocess.CompletedProcess[str]) -> str:
    """What a run that failed said: its lines with an error, else its end."""
    text = done.stderr + done.stdout
    return "\n".join(re.findall(r"^.*(?:Error|error:).*$", text, re.MULTILINE)[:8]) or text[-1500:]


def start(script: Path, words: list[str], *, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a script, under torchrun if `ranks` is above 0."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    command = [sys.executable, *launcher, str(script), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def measure_machine() -> dict[str, Any]:
    """What `machine.py` says, in a process of its own, so that nothing of it stays on the GPU."""
    done = start(HERE / "machine.py", [])
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines and not done.returncode else {"error": explain(done)}


def run_rival(script: str, flags: str, facts: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """One run of a rival on the sizes of a run of megaflow; its line, or what it said when it failed."""
    words = [facts["row"], f"--sizes={facts['sizes']}", *flags.split()]
    if options.kernels:
        words += ["--kernels", str(options.kernels)]
    done = start(HERE / script, words, ranks=options.ranks if script == "rival_megatron.py" else 0)
    side = {"rival_megatron.py": "megatron-core", "rival_torch.py": "torch"}[script]
    found = {name: facts[name] for name in ("row", "recipe", "ranks", "sizes")}
    found |= {"side": side, "flags": flags}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {**found, "error": explain(done)}
    flops = {name: facts[name] for name in ("flops_per_token", "flops_per_token_causal")}
    return {**found, **flops, **json.loads(lines[-1])}


def run_row(facts: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """One run of megaflow; the last line of its log, or what it said when it failed."""
    with tempfile.TemporaryDirectory() as folder:
        is_profiled = options.ranks > 1 or options.kernels > 0
        last = options.steps + is_profiled
        steps = ["--train-iters", str(last), "--log-interval", str(options.window), "--run-dir", folder]
        profile = f"--profile --profile-kernels-only --profile-step-start {last} --profile-step-end {last}".split()
        profile = profile if is_profiled else []
        flags = f"{ROWS[facts['row']].shape} {COMMON} {facts['flags']}".split()
        words = [*flags, "--data-path", options.data, *steps, *profile]
        done = start(ROOT / "trainer" / "pretrain.py", words, ranks=options.ranks if options.ranks > 1 else 0)
        log = Path(folder) / "metrics.jsonl"
        if done.returncode or not log.is_file():
            return {**facts, "error": explain(done)}
        values = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if "lm_loss" in line]
        values = [line for line in values if line["iteration"] <= options.steps]
        if not values:
            return {**facts, "error": f"no line of its log is of the first {options.steps} steps"}
        total = values[-1]["tokens_per_s_per_gpu"] * options.ranks
        found = {**facts, "first": values[0], "tokens_per_s": total, **values[-1]}
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
