"""What a rank needs of memory, by formula, before anything is built."""

from __future__ import annotations

from megaflow_trainer.config.activations import GPU, Kernels, count_activation_bytes
from megaflow_trainer.config.arithmetic import count_state_bytes
from megaflow_trainer.config.cost_table import ITEM_BYTES, choose_parts
from megaflow_trainer.config.sections import TrainConfig


def estimate_memory(config: TrainConfig, kernels: Kernels = GPU) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes on the device and in the CPU's memory of a rank that holds the whole model.

    Weights, gradients and optimizer are exact. Activations are what one micro-batch keeps for backward and the largest
    part that is computed again; what a kernel needs for a moment and the allocator's slack come on top.

    Args:
        config: a resolved configuration with the vocabulary.
        kernels: of the device.
    """
    states = count_state_bytes(config.model, config.step, config.optim)
    acts = count_activation_bytes(
        config.model,
        config.recompute,
        choose_parts(config),
        seq_len=config.data.seq_len,
        micro_batch_size=config.step.sizes.micro_batch_size,
        item_bytes=ITEM_BYTES[config.step.dtype],
        kernels=kernels,
    )
    device, host = {**states, "activations": acts.peak}, {"activations": acts.offloaded}
    if config.optim.is_offloaded:
        host["optimizer"] = device.pop("optimizer")
    return device, {name: size for name, size in host.items() if size}


def describe_memory(config: TrainConfig, kernels: Kernels = GPU) -> str:
    """The estimate as one line, in MiB; it says so where ranks divide the model and each needs less."""
    device, host = estimate_memory(config, kernels)
    text = " + ".join(f"{name} {size / 2**20:.0f}" for name, size in device.items())
    own = config.parallel
    is_divided = own.tp * own.pp * own.cp > 1 or own.zero > 0
    whose = "a rank with the whole model (here ranks divide it)" if is_divided else "a rank"
    line = f"memory of {whose} by formula (MiB): {text} = {sum(device.values()) / 2**20:.0f}"
    away = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in host.items())
    return line + (f"; in the CPU's memory: {away}" if host else "")
