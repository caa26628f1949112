"""Out of memory: what took it, and what to change, in the order in which to try it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megaflow.errors import MegaflowError, first_line
from megaflow_trainer.config.remedies import list_remedies
from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.training.memory import list_parts, measure_memory


class ShortageError(MegaflowError, MemoryError):
    """The device, or this machine, has no memory left."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def describe_shortage(config: TrainConfig, device: torch.device, error: BaseException) -> str:
    """The breakdown and the remedies, as one message."""
    parts, memory = list_parts(config, device), measure_memory(device)
    rest = max(0, memory["memory_peak_bytes"] - sum(parts.values()))
    each = ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in parts.items())
    whole = ""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        whole = f" of {total / 2**20:,.0f}, {free / 2**20:,.0f} free"
    lines = [
        f"out of memory on {device}: {first_line(error)}",
        f"  MiB: {each}, the rest {rest / 2**20:,.0f}; peak {memory['memory_peak_bytes'] / 2**20:,.0f}{whole}",
        "  change, in this order, until it fits:",
        *(f"  {number}. {remedy}" for number, remedy in enumerate(list_remedies(config), start=1)),
    ]
    return "\n".join(lines)


@contextmanager
def explain_shortage(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Turn running out of memory into an error that tells where it went.

    Raises:
        ShortageError: instead of what torch raises.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) or isinstance(error, ShortageError):
            raise
        raise ShortageError(describe_shortage(config, device, error)) from None
