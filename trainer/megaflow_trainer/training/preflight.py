"""What is checked and said once the device is known, before anything is built on it."""

from __future__ import annotations

import torch

from megaflow.errors import ConfigError
from megaflow_trainer.config.activations import CPU, GPU
from megaflow_trainer.config.checks import Device, check_device
from megaflow_trainer.config.cost_table import describe_plan
from megaflow_trainer.config.flags import find_spelling
from megaflow_trainer.config.memory import describe_memory
from megaflow_trainer.config.sections import KernelConfig, TrainConfig
from megaflow_trainer.ops.layer_packages import PARTS
from megaflow_trainer.parallel.kernels import list_parts
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
    refuse_parts(config.kernels, device)


def describe_needs(config: TrainConfig, device: torch.device) -> list[str]:
    """Lines about memory: the estimate, and the parts that a budget of recompute has chosen."""
    lines = [describe_memory(config, GPU if device.type == "cuda" else CPU)]
    return lines + ([describe_plan(config)] if config.recompute.budget is not None else [])


def refuse_parts(config: KernelConfig, device: torch.device) -> None:
    """Refuse what optional packages cannot compute here.

    Raises:
        ConfigError: naming flag, reason and remedy, a line each.
    """
    faults = []
    for name, value in list_parts(config):
        reason = PARTS[name, value].find_obstacle(device)
        if reason is not None:
            flag = find_spelling(f"kernels.{name}")
            faults.append(f"{flag} {value} cannot run here: {reason}; drop {flag}")
    if faults:
        raise ConfigError("\n".join(faults))
