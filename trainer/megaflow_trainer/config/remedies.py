"""What to change when memory runs out, in the order in which to try it."""

from __future__ import annotations

from megaflow_trainer.config.sections import TrainConfig


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
    parallel = config.parallel
    if parallel.zero == 0:
        found.append("--use-distributed-optimizer: optimizer states divided among the data-parallel ranks, if several")
    elif parallel.zero < 3:
        found.append(f"--zero-stage {parallel.zero + 1}: more of the states divided among the data-parallel ranks")
    if not config.optim.is_offloaded:
        found.append("--optimizer-cpu-offload: master weights and optimizer states in the CPU's memory")
    found.append(
        f"--tensor-model-parallel-size {2 * parallel.tp} and more: each layer divided among the GPUs of a machine"
    )
    return found
