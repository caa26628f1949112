"""What is checked and said once the device is known, before anything is built on it."""

from __future__ import annotations

import torch

from megaflow.errors import ConfigError
from megaflow_trainer.config.activations import CPU, GPU
from megaflow_trainer.config.checks import Device, check_device
from megaflow_trainer.config.cost_table import describe_plan
from megaflow_trainer.config.memory import describe_memory
from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.training.manifest import describe_device


def refuse_device(config: TrainConfig, device: torch.device) -> None:
    """Refuse what this rank's device cannot do.

    Raises:
        ConfigError: naming flag, reason and remedy.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    faults = check_device(config, Device(describe_device(device), capability))
    if faults:
        raise ConfigError("\n".join(faults))


def describe_needs(config: TrainConfig, device: torch.device) -> list[str]:
    """Lines about memory: the estimate, and the parts that a budget of recompute has chosen."""
    lines = [describe_memory(config, GPU if device.type == "cuda" else CPU)]
    return lines + ([describe_plan(config)] if config.recompute.budget is not None else [])
