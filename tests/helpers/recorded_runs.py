"""Makes `tests/golden/runs/`: one small run folder for each symptom that `tools/diagnose.py` knows.

`PYTHONPATH=tests:trainer:python python tests/helpers/recorded_runs.py`. Five are runs of the trainer on a CPU; the
others are one of these in whose lines the values of the symptom were put by hand, since they need GPUs or hours.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.pairs import write_pair
from helpers.runs import run_tiny
from megaflow.errors import MegaflowError

RUNS = Path(__file__).resolve().parents[1] / "golden" / "runs"
STEPS = 24
BASE = (
    *("--train-iters", str(STEPS), "--global-batch-size", "8", "--micro-batch-size", "4"),
    *("--hidden-size", "64", "--eval-interval", "0"),
)
REAL = {
    "healthy": "--lr 3e-3",
    "flat-loss": "--lr 1e-9",
    "nan": "--lr 3 --clip-grad 0 --optimizer sgd --init-method-std 0.05",
    "overflow": "--fp16 --initial-loss-scale 1e30 --lr 1e-3 --max-nonfinite-steps 100",
    "divergence": "--lr 0.6 --clip-grad 0 --lr-warmup-iters 20 --lr-decay-iters 40 --lr-decay-style constant",
}
Lines = list[dict[str, Any]]


def main() -> None:
    """Record the real ones, then make the others of `healthy`."""
    RUNS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        prefix = write_pair(Path(scratch) / "toy")
        for name, flags in REAL.items():
            folder = Path(scratch) / name
            try:
                run_tiny(prefix, [*BASE, "--run-dir", str(folder), "--run-name", name, *flags.split()])
            except MegaflowError as error:
                print(f"{name}: {type(error).__name__}")  # noqa: T201
            keep(folder, RUNS / name)
    for name, change in MADE.items():
        lines, manifest = read(RUNS / "healthy")
        change(lines, manifest["starts"][-1])
        manifest["name"] = name
        write(RUNS / name, lines, manifest)


def keep(source: Path, target: Path) -> None:
    """Copy a run folder without what belongs to this machine."""
    lines, manifest = read(source)
    for line in lines:
        if "loader_bound_s" in line:
            line["loader_bound_s"] = 0.0  # what other work on this machine made it wait
    for start in manifest["starts"]:
        start |= {"command": ["python", "trainer/pretrain.py"], "folder": "/runs", "packages": {}, "environment": {}}
        start |= {"code": {}, "data": {}, "time": "2026-11-29T00:00:00+0000"}
        start["ranks"] = [{"host": f"node{rank}", "device": "cpu", "process": 1} for rank in range(len(start["ranks"]))]
        start["config"]["data"]["path"] = ["toy"]
        start["config"]["log"]["run_dir"] = "/runs/" + target.name
    write(target, lines, manifest)


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


def put_on_gpus(lines: Lines, start: dict[str, Any], *, mfu: float, step_s: float = 1.0, ranks: int = 1) -> None:
    """The same on H100s, with the phases of a step of `step_s` seconds."""
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
            "other": 0.02,
        }
        line |= {f"{name}_s": part * step_s for name, part in parts.items()}
        line |= {"step_time_s": step_s, "mfu": mfu, "mfu_causal": 0.9 * mfu, "device_idle_share": 0.02}
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


def wait_for_data(lines: Lines, start: dict[str, Any]) -> None:
    """A third of each step is waiting for the loader."""
    put_on_gpus(lines, start, mfu=0.35)
    for line in lines:
        line |= {"loader_bound_s": 0.5, "step_time_s": 1.5, "device_idle_share": 0.35}


def wait_for_ranks(lines: Lines, start: dict[str, Any]) -> None:
    """Half of each step is exposed communication, with InfiniBand turned off."""
    put_on_gpus(lines, start, mfu=0.35, ranks=16)
    start["environment"] = {"NCCL_IB_DISABLE": "1"}
    for line in lines:
        line |= {"communication_s": 1.0, "step_time_s": 2.0}


def slow_down(lines: Lines, start: dict[str, Any]) -> None:
    """Two thirds of the way in, speed falls to a tenth."""
    put_on_gpus(lines, start, mfu=0.42)
    for line in lines[2 * len(lines) // 3 :]:
        line |= {"step_time_s": 10.0, "forward_s": 3.0, "backward_s": 6.9, "tokens_per_s_per_gpu": 4200.0}


def lag_behind(lines: Lines, start: dict[str, Any]) -> None:
    """Rank 11 works twice as long as the others."""
    put_on_gpus(lines, start, mfu=0.36, ranks=16)
    for line in lines:
        line["work_by_rank_s"] = [1.9 if rank == 11 else 0.95 for rank in range(16)]
        line["loader_bound_by_rank_s"] = [0.0] * 16


def wait_for_stages(lines: Lines, start: dict[str, Any]) -> None:
    """Two micro-batches on eight stages."""
    put_on_gpus(lines, start, mfu=0.31, ranks=8)
    start["config"]["parallel"]["pp"] = 8
    for line in lines:
        line["pipeline_bubble"] = 0.77


def run_out_of_memory(lines: Lines, start: dict[str, Any]) -> None:
    """It ends with code 79 before the first step."""
    put_on_gpus(lines, start, mfu=0.4)
    lines.clear()
    reason = "ShortageError: out of memory on cuda:0: CUDA out of memory. Tried to allocate 1.95 GiB."
    start["end"] = {"time": "2026-11-29T00:01:00+0000", "iteration": 0, "exit_code": 79, "reason": reason}


def spike(lines: Lines, start: dict[str, Any]) -> None:
    """Two losses far above the usual, told with their documents."""
    put_on_gpus(lines, start, mfu=0.42)
    for step, loss in ((14, 6.1), (20, 5.2)):
        lines[step - 1]["lm_loss"] = loss
        document = {"document": 7, "origin": "corpus.jsonl:8"}
        samples = [{"sample": 8 * step - 8, "rank": 0, "loss": 11.0, "documents": [document]}]
        event = {
            "event": "spike",
            "loss": loss,
            "deviations": 30.0 - step,
            "iteration": step,
            "consumed_samples": 8 * step,
        }
        lines.append({**event, "samples": samples})


def hang(lines: Lines, start: dict[str, Any]) -> None:
    """No progress; every rank wrote where it stands."""
    put_on_gpus(lines, start, mfu=0.42)
    end = {"iteration": STEPS, "exit_code": 77, "reason": "HangError: no progress for 1800 s"}
    start["end"] = {"time": "2026-11-29T00:31:00+0000", **end}


MADE: dict[str, Callable[[Lines, dict[str, Any]], None]] = {
    "low-gpu-use": use_little,
    "fp32": use_fp32,
    "slow-loader": wait_for_data,
    "slow-communication": wait_for_ranks,
    "slowdown": slow_down,
    "straggler": lag_behind,
    "pipeline-bubble": wait_for_stages,
    "out-of-memory": run_out_of_memory,
    "loss-spikes": spike,
    "stopped": hang,
}


if __name__ == "__main__":
    main()
