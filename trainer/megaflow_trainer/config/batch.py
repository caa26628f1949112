"""global batch = micro batch x data-parallel ranks x accumulation: any consistent part determines the rest."""

from __future__ import annotations

from megaflow.errors import ConfigError
from megaflow_trainer.config.sections import BatchSizes, StepConfig


def solve_batch(step: StepConfig, *, dp: int) -> BatchSizes:
    """Fill in the sizes that are not given. An undetermined micro batch or accumulation is 1, micro batch first.

    Raises:
        ConfigError: if no whole numbers satisfy the equation; the message shows it with the numbers.
    """
    micro, total, accumulation = step.micro_batch_size, step.global_batch_size, step.num_micro_batches
    if total is None:
        micro, accumulation = micro or 1, accumulation or 1
        return BatchSizes(micro, micro * dp * accumulation, accumulation)
    if accumulation is None:
        micro = micro or 1
        accumulation = total // (micro * dp)
    if micro is None:
        micro = total // (dp * accumulation)
    if micro * dp * accumulation != total or total == 0:
        raise ConfigError(_contradiction(step, dp=dp, micro=micro, total=total, accumulation=accumulation))
    return BatchSizes(micro, total, accumulation)


def _contradiction(step: StepConfig, *, dp: int, micro: int, total: int, accumulation: int) -> str:
    unit = (step.micro_batch_size or 1) * dp * (step.num_micro_batches or 1)
    below, above = total // unit * unit, -(-total // unit) * unit
    if step.micro_batch_size is not None and step.num_micro_batches is not None:
        product = micro * dp * accumulation
        return (
            f"global batch = micro batch x data-parallel ranks x accumulation does not hold: {total} != "
            f"{micro} x {dp} x {accumulation} = {product}; give two of the three, or --global-batch-size {product}"
        )
    known = f"{micro} x {dp} x accumulation" if step.num_micro_batches is None else f"micro x {dp} x {accumulation}"
    nearest = f"{below} or {above}" if below else f"{above}"
    return (
        f"global batch = micro batch x data-parallel ranks x accumulation has no solution: {total} = {known}; "
        f"choose a multiple of {unit} for --global-batch-size, such as {nearest}"
    )
