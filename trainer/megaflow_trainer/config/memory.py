"""What a rank needs of memory, by formula, before anything is built."""

from __future__ import annotations

import dataclasses

from megaflow_trainer.config.activations import Kernels, count_activation_bytes
from megaflow_trainer.config.arithmetic import count_state_bytes
from megaflow_trainer.config.compiling import find_kernels
from megaflow_trainer.config.cost_table import ITEM_BYTES, choose_parts
from megaflow_trainer.config.layout import Layout, make_layout
from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.config.shares import (
    Share,
    count_held_experts,
    count_held_parameters,
    count_stack,
    count_vocabulary_rows,
    find_share,
    list_held_blocks,
    list_kinds,
)


def find_layout(config: TrainConfig) -> Layout:
    """The layout of a resolved configuration, whose batch sizes say how many ranks are data parallel."""
    sizes, own = config.step.sizes, config.parallel
    dp = sizes.global_batch_size // (sizes.micro_batch_size * sizes.num_micro_batches)
    return make_layout(own, world_size=dp * own.tp * own.cp * own.pp, num_kv_heads=config.model.kv_heads)


def estimate_memory(
    config: TrainConfig, kernels: Kernels | None = None, *, pp_rank: int | None = None
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes on the device and in the CPU's memory of a rank.

    Weights, gradients and optimizer are exact but for the padding of buckets. Activations are what the micro-batches in
    flight keep for backward, and the larger of what is computed again and what the loss needs for a moment; what other
    kernels need for a moment, buffers of collectives and the allocator's slack come on top.

    Args:
        config: a resolved configuration with the vocabulary.
        kernels: of the device; those of a GPU with the run's settings if not given.
        pp_rank: which pipeline stage; the fullest one if not given.
    """
    kernels = find_kernels(config) if kernels is None else kernels
    if pp_rank is None:
        pp_rank = find_fullest(config, kernels)
    sizes = config.step.sizes
    share = find_share(config.model, config.parallel, pp_rank=pp_rank, num_micro_batches=sizes.num_micro_batches)
    acts = count_activation_bytes(
        config.model,
        config.recompute,
        choose_parts(config),
        seq_len=config.data.seq_len,
        micro_batch_size=sizes.micro_batch_size,
        item_bytes=ITEM_BYTES[config.step.dtype],
        kernels=kernels,
        share=share,
    )
    device = divide_states(config, share)
    device["activations"] = int(acts.kept * share.in_flight) + max(acts.again, acts.moment)
    host = {"activations": int(acts.offloaded * share.in_flight)}
    if config.optim.is_offloaded:
        host["optimizer"] = device.pop("optimizer")
    return device, {name: size for name, size in host.items() if size}


def find_fullest(config: TrainConfig, kernels: Kernels | None = None) -> int:
    """The pipeline stage whose ranks need most on the device.

    Of stages with as many blocks and without ends the earliest is fullest, because it has most in flight.
    """
    kinds: dict[tuple[int, int, bool, bool], int] = {}
    for rank in range(config.parallel.pp):
        share = find_share(config.model, config.parallel, pp_rank=rank, num_micro_batches=1)
        num_experts = sum(list_kinds(config.model, share))
        kinds.setdefault((len(share.layers), num_experts, share.is_first, share.is_last), rank)
    totals = {rank: sum(estimate_memory(config, kernels, pp_rank=rank)[0].values()) for rank in kinds.values()}
    return max(totals, key=lambda rank: totals[rank])


def divide_states(config: TrainConfig, share: Share) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer on a rank, as ZeRO divides them.

    Experts that lie on other ranks than the layers around them are divided among the ranks with the same experts.
    ZeRO 2 holds one bucket of whole gradients while backward runs; ZeRO 3 keeps weights in fp32, and holds the gathered
    weights of two blocks and of what is in no block, and whole gradients of one block.
    """
    zero, layout = config.parallel.zero, find_layout(config)
    divisor = layout.dp_shard * layout.cp if zero else 1
    apart = layout.edp_shard if zero and share.has_experts_apart else divisor
    num_held, num_experts = count_held_parameters(config.model, share), count_held_experts(config.model, share)
    step = config.step
    if zero == 3 and step.dtype != "fp64" and max(divisor, apart) > 1:
        step = dataclasses.replace(step, dtype="fp32")
    whole = count_state_bytes(config.model, step, config.optim, num_parameters=num_held)
    experts = count_state_bytes(config.model, step, config.optim, num_parameters=num_experts)
    states = {
        name: (size - experts[name]) // divisor + experts[name] // apart if _is_divided(name, zero) else size
        for name, size in whole.items()
    }
    if max(divisor, apart) == 1:
        return states
    grad = whole["gradients"] // max(num_held, 1)
    if zero == 2:
        table = count_vocabulary_rows(config.model, share.tp) * config.model.hidden_dim
        largest = max(table, count_stack(config.model, share) if num_experts else 0)
        states["gradients"] += grad * min(num_held, max(config.parallel.bucket_size // share.tp, largest))
    if zero == 3:
        item, blocks = ITEM_BYTES[config.step.dtype], list_held_blocks(config.model, share)[: len(share.layers)]
        states["weights"] += item * (num_held - sum(blocks) + sum(sorted(blocks)[-2:]))
        states["gradients"] += (grad + item) * max(blocks, default=0)
    return states


def _is_divided(name: str, zero: int) -> bool:
    return zero >= {"optimizer": 1, "gradients": 2, "weights": 3}[name]


def describe_memory(config: TrainConfig, kernels: Kernels | None = None) -> str:
    """The estimate as one line, in MiB."""
    device, host = estimate_memory(config, kernels)
    text = " + ".join(f"{name} {size / 2**20:.0f}" for name, size in device.items())
    stage = f" of pipeline stage {find_fullest(config, kernels)}, the fullest," if config.parallel.pp > 1 else ""
    line = f"memory of a rank{stage} by formula (MiB): {text} = {sum(device.values()) / 2**20:.0f}"
    away = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in host.items())
    return line + (f"; in the CPU's memory: {away}" if host else "")
