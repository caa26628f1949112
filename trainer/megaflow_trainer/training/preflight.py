"""What is checked and said once the device is known, before anything is built on it."""

from __future__ import annotations

import os

import torch

from megaflow.errors import ConfigError
from megaflow_trainer.config.activations import CPU
from megaflow_trainer.config.checks import Device, check_device
from megaflow_trainer.config.cost_table import describe_plan
from megaflow_trainer.config.flags import find_spelling
from megaflow_trainer.config.memory import describe_memory, estimate_memory
from megaflow_trainer.config.sections import KernelConfig, TrainConfig
from megaflow_trainer.ops.attention import ATTENTION
from megaflow_trainer.ops.layer_packages import PARTS
from megaflow_trainer.ops.registry import choose
from megaflow_trainer.parallel.kernels import list_parts
from megaflow_trainer.training.kernels import find_attention_need
from megaflow_trainer.training.manifest import describe_device


def refuse_device(config: TrainConfig, device: torch.device) -> None:
    """Refuse what this rank's device cannot do, and what the packages that are named lack here.

    Raises:
        ConfigError: naming flag, reason and remedy, a line each.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    faults = check_device(config, Device(describe_device(device), capability)) + list_part_faults(
        config.kernels, device
    )
    try:
        choose("attention", ATTENTION, config.model.attention, find_attention_need(config, device))
    except ConfigError as error:
        faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(faults))


def describe_needs(config: TrainConfig, device: torch.device) -> list[str]:
    """Lines about memory: the estimate, and the parts that a budget of recompute has chosen."""
    kernels = None if device.type == "cuda" else CPU
    lines = [describe_memory(config, kernels)]
    shortage = describe_shortage(sum(estimate_memory(config, kernels)[0].values()), find_capacity(device))
    if shortage is not None:
        lines.append(shortage)
    return lines + ([describe_plan(config)] if config.recompute.budget is not None else [])


def find_capacity(device: torch.device) -> int:
    """Bytes of memory that a device has; the CPU's is shared by all ranks of a machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe_shortage(needed_bytes: float, capacity_bytes: int) -> str | None:
    """A warning before a run that the system may kill without a word; None if the estimate fits."""
    if needed_bytes <= capacity_bytes:
        return None
    return (
        f"note: that is more than the {capacity_bytes / 2**20:.0f} MiB of the device: expect to run out of memory; a "
        "smaller --micro-batch-size or --recompute-granularity full takes less, tools/plan.py shows what fits"
    )


def refuse_parts(config: KernelConfig, device: torch.device) -> None:
    """Refuse what optional packages cannot compute here.

    Raises:
        ConfigError: naming flag, reason and remedy, a line each.
    """
    faults = list_part_faults(config, device)
    if faults:
        raise ConfigError("\n".join(faults))


def list_part_faults(config: KernelConfig, device: torch.device) -> list[str]:
    """A line for each part of a model that a package cannot compute here."""
    faults = []
    for name, value in list_parts(config):
        reason = PARTS[name, value].find_obstacle(device)
        if reason is not None:
            flag = find_spelling(f"kernels.{name}")
            faults.append(f"{flag} {value} cannot run here: {reason}; drop {flag}")
    return faults
