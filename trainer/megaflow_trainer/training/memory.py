"""Where the memory of a device goes: what is there now and was at the peak, and its parts by formula."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

from megaflow_trainer.config.activations import CPU
from megaflow_trainer.config.memory import estimate_memory
from megaflow_trainer.config.sections import TrainConfig


def list_parts(config: TrainConfig, device: torch.device) -> dict[str, int]:
    """Bytes of weights, gradients, optimizer and activations on the device of a rank: the first three exact, the last
    by formula.
    """
    return estimate_memory(config, None if device.type == "cuda" else CPU)[0]


def measure_memory(device: torch.device) -> dict[str, int]:
    """Bytes now and at the peak: allocated on a GPU, resident in this process on a CPU."""
    if device.type == "cuda":
        now, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    else:
        unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts in bytes there, in KiB elsewhere
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        now = min(_read_resident() or peak, peak)
    return {"memory_now_bytes": now, "memory_peak_bytes": peak}


def _read_resident() -> int | None:
    """Resident bytes of this process; None where the system has no /proc."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None
