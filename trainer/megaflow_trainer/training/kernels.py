"""What a run computes with on its device: whether blocks are compiled."""

from __future__ import annotations

import importlib.util

import torch

from megaflow_trainer.config.compiling import find_default_obstacle
from megaflow_trainer.config.sections import TrainConfig


def choose_compile(config: TrainConfig, device: torch.device) -> tuple[bool, str | None]:
    """Whether blocks are compiled, and on a GPU why not, unless a flag says so."""
    if config.step.is_compiled is not None or device.type != "cuda":
        return bool(config.step.is_compiled), None
    obstacle = find_default_obstacle(config) or find_compiler_obstacle(device)
    return obstacle is None, obstacle


def find_compiler_obstacle(device: torch.device) -> str | None:
    """Why torch's compiler cannot serve a GPU, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if torch.cuda.get_device_capability(device) < (7, 0):
        return f"triton needs compute capability 7.0, and {torch.cuda.get_device_name(device)} has less"
    return None
