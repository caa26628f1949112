"""Makes `tests/golden/runs/`: one small run folder for each symptom that `tools/diagnose.py` knows.

`PYTHONPATH=tests:trainer:python python tests/helpers/recorded_runs.py [NAME ...]`, about four minutes for all. They are
runs of the trainer on a CPU, each with a trouble that is real (`troubled_runs.py`), and nothing in their lines is
changed. Two are none: `low-gpu-use` and `fp32` can only be seen on a GPU; they are `healthy` with the device, the sizes
and the times of a step put in by hand.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.troubled_runs import TROUBLES, UnexpectedEndError, record
from megaflow_trainer.training.lock_file import LOCK

RUNS = Path(__file__).resolve().parents[1] / "golden" / "runs"
Lines = list[dict[str, Any]]


def main() -> int:
    """Record the runs that are named, or all; then make the two others of `healthy`. 1 if one went otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TROUBLES)}; all if none is given")
    names = parser.parse_args().names or [*TROUBLES]
    if unknown := {*names} - {*TROUBLES}:
        parser.error(f"no recorded run is called {', '.join(sorted(unknown))}")
    RUNS.mkdir(parents=True, exist_ok=True)
    num_failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for number, name in enumerate(names, start=1):
            print(f"{number}/{len(names)} {name} ...", end=" ", flush=True)  # noqa: T201
            begin_s = time.monotonic()
            try:
                keep(record(name, Path(scratch)), RUNS / name, Path(scratch) / name)
                print(f"recorded, {time.monotonic() - begin_s:.0f} s")  # noqa: T201
            except UnexpectedEndError as error:
                num_failed += 1
                print(f"not recorded, {error}")  # noqa: T201
    for name, change in MADE.items():
        lines, manifest = read(RUNS / "healthy")
        change(lines, manifest["starts"][-1])
        manifest["name"] = name
        write(RUNS / name, lines, manifest)
    return 1 if num_failed else 0


def keep(source: Path, target: Path, scratch: Path) -> None:
    """Copy a run folder without what belongs to this machine: names, paths, versions, process ids."""
    lines, manifest = read(source)
    manifest["name"] = target.name
    for start in manifest["starts"]:
        settings = {name: value for name, value in start["environment"].items() if name.startswith("NCCL_")}
        start |= {"command": ["python", "trainer/pretrain.py"], "folder": "/runs", "packages": {}, "code": {}}
        start |= {"environment": settings, "data": {"dataset": {"kind": start["data"]["dataset"]["kind"]}}}
        start["time"] = "2026-11-29T00:00:00+0000"
        start["versions"]["system"] = "Linux"
        start["ranks"] = [{"host": "node0", "device": "cpu", "process": 1} for _ in start["ranks"]]
        start["config"]["log"]["run_dir"] = "/runs/" + target.name
        if "end" in start:
            start["end"]["time"] = start["time"]
    write(target, *(json.loads(json.dumps(part).replace(f"{scratch}/", "")) for part in (lines, manifest)))
    if "end" not in manifest["starts"][-1]:
        (target / LOCK).touch()  # nobody holds it: that is how a dead run is told from one that goes on
    for stacks in sorted((source / "stacks").glob("rank_*.txt")):
        (target / "stacks").mkdir(exist_ok=True)
        first = stacks.read_text(encoding="utf-8").splitlines()[0]
        (target / "stacks" / stacks.name).write_text(first + "\n", encoding="utf-8")


def read(folder: Path) -> tuple[Lines, dict[str, Any]]:
    """The lines and the manifest of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return lines, json.loads((folder / "run.json").read_text(encoding="utf-8"))


def write(folder: Path, lines: Lines, manifest: dict[str, Any]) -> None:
    """Write them."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (folder / "run.json").write_text(json.dumps(manifest), encoding="utf-8")


def put_on_gpus(lines: Lines, start: dict[str, Any], *, mfu: float, ranks: int = 1) -> None:
    """The same on H100s, with the phases of a step of one second."""
    start |= {"device": "NVIDIA H100 80GB HBM3", "backend": "nccl", "world_size": ranks}
    start["ranks"] = [
        {"host": f"node{rank // 8}", "device": "NVIDIA H100 80GB HBM3", "process": rank} for rank in range(ranks)
    ]
    start["config"]["step"]["dtype"] = "bf16"
    start["config"]["model"] |= {"hidden_dim": 2048, "num_heads": 16, "num_layers": 24, "ffn_dim": 8192}
    for line in lines:
        parts = {
            "loader_bound": 0.0,
            "forward": 0.3,
            "backward": 0.6,
            "communication": 0.03,
            "optimizer": 0.05,
            "feed": 0.0,
            "log": 0.0,
            "other": 0.02,
        }
        line |= {f"{name}_s": part for name, part in parts.items()}
        line |= {"step_time_s": 1.0, "mfu": mfu, "mfu_causal": 0.9 * mfu, "device_idle_share": 0.02}
        line["tokens_per_s_per_gpu"] = 1e5 * mfu


def use_little(lines: Lines, start: dict[str, Any]) -> None:
    """25 % and less: small micro-batches, tp 16 over machines, no sequence parallelism, attention written out."""
    put_on_gpus(lines, start, mfu=0.12, ranks=16)
    start["config"]["parallel"] |= {"tp": 16}
    start["config"]["model"]["attention"] = "math"
    start["config"]["step"]["micro_batch_size"] = 1


def use_fp32(lines: Lines, start: dict[str, Any]) -> None:
    """Forgotten --bf16: a tenth of the usual throughput."""
    put_on_gpus(lines, start, mfu=0.0)
    start["config"]["step"]["dtype"] = "fp32"
    for line in lines:
        del line["mfu"], line["mfu_causal"]


MADE: dict[str, Callable[[Lines, dict[str, Any]], None]] = {"low-gpu-use": use_little, "fp32": use_fp32}


if __name__ == "__main__":
    sys.exit(main())
