"""Which runs can compile their blocks, and which do so unless told otherwise."""

from __future__ import annotations

import dataclasses

from megaflow_trainer.config.activations import GPU, Kernels
from megaflow_trainer.config.sections import TrainConfig


def find_compile_obstacle(config: TrainConfig) -> str | None:
    """Why this version cannot compile the blocks of a run, or None."""
    own = config.parallel
    if own.zero == 3:
        return "parallel.zero 3 gathers weights inside of blocks, and this version does not compile those"
    if own.pp > 1 and own.schedule in ("zero_bubble", "zbv"):
        return f"parallel.schedule {own.schedule} takes backward apart, which compiled blocks do not allow"
    return None


def find_default_obstacle(config: TrainConfig) -> str | None:
    """Why the blocks of a run are not compiled unless it is asked for, or None."""
    own = config.recompute
    if own.compression != "none" or own.is_offloaded:
        return (
            "recompute.compression and is_offloaded change what blocks keep, which is not tried with compiled blocks "
            "(--compile asks for it)"
        )
    return find_compile_obstacle(config)


def find_kernels(config: TrainConfig) -> Kernels:
    """What the kernels of a run on a GPU keep, where torch's compiler can serve it and everything fits that is asked
    for. Products in fp8 whose units are of rows keep their inputs as they are; those of packages, and those of a model
    with blocks in 16 bits, are taken for such.
    """
    own, recompute, step = config.parallel, config.recompute, config.step
    is_compiled = find_default_obstacle(config) is None if step.is_compiled is None else step.is_compiled
    is_chained = recompute.method == "uniform" and (recompute.num_layers or 1) > 1
    is_native = config.kernels.fp8 == "native" and config.kernels.layers == "local"
    has_fp8 = step.fp8 != "none" and is_native and config.precision.recipe != "rowwise"
    return dataclasses.replace(
        GPU,
        is_compiled=is_compiled,
        has_chunked_loss=is_compiled
        and step.dtype in ("bf16", "fp16")
        and step.accumulates_in_products
        and own.zero < 2
        and own.pp == 1
        and not is_chained
        and config.kernels.loss == "native",
        has_fp8=has_fp8 and not config.precision.keeps_ends,
        input_copies=1 if is_compiled and config.precision.recipe == "tensorwise" else 2,
    )


def check_graphs(config: TrainConfig) -> list[str]:
    """A CUDA graph of a micro-batch holds what is the same in all of them, and one rank's work."""
    own, model, step, recompute = config.parallel, config.model, config.step, config.recompute
    if step.cuda_graph == "none":
        return []
    axes = [name for name in ("tp", "pp", "cp", "ep") if getattr(own, name) > 1]
    obstacles = [
        (bool(axes), f"parallel.{' and parallel.'.join(axes)}: ranks talk to each other inside of micro-batches"),
        (own.zero > 1, f"parallel.zero {own.zero}: buffers of gradients come and go"),
        (step.dtype == "fp16", "step.dtype fp16: the loss scale changes from step to step"),
        (step.fp8 != "none", "step.fp8: scales change from step to step"),
        (model.num_experts is not None, "model.num_experts: how many tokens an expert gets changes"),
        (model.attention_dropout > 0, "model.attention_dropout: the kernel draws from a stream of the host"),
        (model.num_mtp_layers > 0, "model.num_mtp_layers: its losses are read between micro-batches"),
        (model.tells_documents, "model.resets_positions or resets_attention: documents end anywhere"),
        (recompute.granularity != "none", "recompute.granularity: random streams are replayed by the host"),
        (recompute.compression != "none" or recompute.is_offloaded, "what is kept for backward is handled by the host"),
    ]
    return [
        f"step.cuda_graph {step.cuda_graph} does not go with {why}; drop one of them"
        for is_in, why in obstacles
        if is_in
    ]
