#!/usr/bin/env python3
"""Peak memory and speed of training steps on this GPU, against what the planner predicts for them.

    python benches/planner.py > docs/measured/planner_NAME.json
    torchrun --nproc_per_node=2 benches/planner.py > docs/measured/planner_NAME_x2.json

Needs GPUs with 80 GB or more for all cases; with two ranks the cases are layouts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "trainer"), str(ROOT / "python")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402, TID251

from megaflow.errors import first_line  # noqa: E402
from megaflow_trainer.config import read_command  # noqa: E402
from megaflow_trainer.config.layout import make_layout  # noqa: E402
from megaflow_trainer.config.memory import estimate_memory  # noqa: E402
from megaflow_trainer.parallel.mesh import Launch, build_mesh  # noqa: E402
from megaflow_trainer.training.build import build_model, build_optimizer  # noqa: E402

_LLAMA = "--preset llama2_7b --seq-length 4096 --num-layers"
_GPT = "--preset gpt3_1.3b --seq-length 2048 --micro-batch-size"
CASES = (
    "--preset gpt2_small --seq-length 1024 --micro-batch-size 16",
    f"{_GPT} 4",
    "--preset gpt3_2.7b --seq-length 2048 --micro-batch-size 2 --recompute-activations",
    f"{_LLAMA} 16 --micro-batch-size 1",
    f"{_LLAMA} 16 --micro-batch-size 4 --recompute-granularity full",
    f"{_LLAMA} 2 --micro-batch-size 4",
    f"{_GPT} 8 --hidden-dropout 0 --attention-dropout 0 --recompute-granularity full",
)
_TP = "--tensor-model-parallel-size 2 --sequence-parallel"
LAYOUTS = (
    f"{_LLAMA} 16 --micro-batch-size 1",
    f"{_LLAMA} 16 --micro-batch-size 1 --use-distributed-optimizer",
    f"{_LLAMA} 16 --micro-batch-size 1 --zero-stage 2",
    f"{_LLAMA} 16 --micro-batch-size 1 --zero-stage 3",
    f"{_LLAMA} 24 --micro-batch-size 1 {_TP}",
    f"{_LLAMA} 16 --micro-batch-size 4 {_TP} --recompute-granularity full",
    f"{_LLAMA} 16 --micro-batch-size 2 --context-parallel-size 2 --use-distributed-optimizer",
)
FLAGS = "--bf16 --no-compile"
"""Of all runs; those of compiled blocks are measured by gpu/train.py."""
STEPS, SETTLED = 6, 3


def main() -> None:
    """All cases that fit, one after the other."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if size > 1:
        dist.init_process_group("nccl", device_id=device)
    runs = []
    for flags in CASES if size == 1 else LAYOUTS:
        try:
            runs.append(measure(flags, device, Launch(rank=rank, world_size=size)))
        except torch.OutOfMemoryError as error:
            print(f"{flags}: {first_line(error)}", file=sys.stderr)
        gc.collect()
        torch.cuda.empty_cache()
    name, versions = torch.cuda.get_device_name(0), {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    if rank == 0:
        what = {"what": "whole training steps, one micro-batch each, random tokens, no loader; best of 6"}
        head = {**what, "flags": FLAGS, "device": name, "gpus": size, **versions, "command": "benches/planner.py"}
        print(json.dumps({**head, "runs": runs}, indent=1))


def measure(flags: str, device: torch.device, launch: Launch) -> dict[str, Any]:
    """Peak memory after a few steps, and the fastest step."""
    words = [*flags.split(), *FLAGS.split(), "--train-iters", "1", "--data-path", "none"]
    config, _ = read_command(words, world_size=launch.world_size)
    layout = make_layout(config.parallel, world_size=launch.world_size, num_kv_heads=config.model.kv_heads)
    mesh = build_mesh(launch, device, "nccl", layout)
    model = build_model(config, mesh)
    optimizer = build_optimizer(model, config)
    length, size = config.data.seq_len, config.step.sizes.micro_batch_size
    tokens = torch.randint(config.model.vocab_size or 1, (size, length + 1), device=device)
    inputs, labels = model.take_own(tokens[:, :-1]), model.take_own(tokens[:, 1:])
    keys, weights = torch.arange(size, device=device), torch.ones(labels.shape, device=device)
    seconds = []
    for step in range(STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        if step == SETTLED:
            torch.cuda.reset_peak_memory_stats()
        model.gradients.start()
        (model(inputs, labels, keys=keys, weights=weights) * weights).sum().backward()
        model.gradients.reduce()
        optimizer.step(1e-5)
        model.gradients.share_weights()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {
        "flags": flags,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "formula_bytes": sum(estimate_memory(config)[0].values()),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "tokens_per_s": round(layout.dp * size * length / min(seconds)),
    }


if __name__ == "__main__":
    main()
