"""Tiny runs of the trainer inside the test process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megaflow_trainer.checkpoint.dcp import read_tensors as read_saved
from megaflow_trainer.config import read_command
from megaflow_trainer.parallel.mesh import Launch, Mesh, build_mesh
from megaflow_trainer.training.run import train

SHAPE = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--make-vocab-size-divisible-by", "48", "--lr", "1e-3", "--log-interval", "1"),
    *("--eval-interval", "0", "--split", "90,10,0", "--hidden-dropout", "0", "--attention-dropout", "0"),
)
TINY = (*SHAPE, "--vocab-size", "64")


def one_rank() -> Mesh:
    """A mesh of one rank on the CPU."""
    return build_mesh(Launch(), torch.device("cpu"), "gloo")


def run_tiny(prefix: str, flags: Sequence[str], mesh: Mesh | None = None, base: Sequence[str] = TINY) -> int:
    """Train in this process; later flags override those of `base`. Returns the exit code.

    Blocks are compiled, which takes a minute, only if a flag says so.
    """
    mesh = mesh or one_rank()
    if not {"--compile", "--no-compile"} & {*flags}:
        base = [*base, "--no-compile"]
    config, notes = read_command([*base, "--data-path", prefix, *flags], world_size=mesh.world_size)
    return train(config, mesh, notes)


def read_metrics(folder: Path, key: str = "lm_loss") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that hold `key`."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [values for values in map(json.loads, lines) if key in values]


def read_curve(folder: Path) -> list[tuple[int, float, float, float, int]]:
    """What must be the same in two equal runs, by iteration."""
    keys = ("iteration", "lm_loss", "grad_norm", "lr", "consumed_samples")
    return [tuple(values[key] for key in keys) for values in read_metrics(folder)]


def read_tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by kind and name: model/..., optimizer/..., rng/..."""
    return read_saved(folder / f"iter_{step:07d}", "")
