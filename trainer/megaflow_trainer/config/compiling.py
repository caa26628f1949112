"""Which runs can compile their blocks, and which do so unless told otherwise."""

from __future__ import annotations

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
