"""Out of memory: what took it, and what to change, in the order in which to try it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megaflow.errors import MegaflowError
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
        f"out of memory on {device}: {str(error).splitlines()[0]}",
        f"  MiB: {each}, the rest {rest / 2**20:,.0f}; peak {memory['memory_peak_bytes'] / 2**20:,.0f}{whole}",
        "  change, in this order, until it fits:",
        *(f"  {number}. {remedy}" for number, remedy in enumerate(list_remedies(config), start=1)),
    ]
    return "\n".join(lines)


def list_remedies(config: TrainConfig) -> list[str]:
    """What can still be changed, the cheapest first."""
    sizes, own = config.step.sizes, config.recompute
    found = []
    if sizes.micro_batch_size > 1:
        found.append(f"--micro-batch-size {sizes.micro_batch_size // 2}: half the activations, the same result")
    if own.granularity != "full":
        found.append("--recompute-granularity selective, then full: activations are computed again in backward")
    if config.step.dtype == "fp32":
        found.append("--bf16: half of weights and activations")
    if own.compression == "none":
        found.append("--compress-activations bf16: half of what is kept for backward")
    found.append(
        "--use-distributed-optimizer: optimizer states spread over the data-parallel ranks, where there is one"
    )
    if not config.optim.is_offloaded:
        found.append("--optimizer-cpu-offload: master weights and optimizer states in the CPU's memory")
    found.append(
        "--tensor-model-parallel-size 2 and more: each layer spread over the GPUs of a machine, where there are"
    )
    return found


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
