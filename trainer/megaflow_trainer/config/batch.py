"""global batch = micro batch x data-parallel ranks x accumulation: any consistent part determines the rest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from megaflow.errors import ConfigError
from megaflow_trainer.config.sections import BatchSizes, StepConfig

MOST_GROWTHS = 10_000
"""Increments of a ramp-up: each is counted, here and where samples are laid out."""
_MOST_DIGITS = 15


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


def read_ramp_up(step: StepConfig) -> tuple[int, int, int] | None:
    """First batch, increment and samples of a batch ramp-up; None if there is none.

    Raises:
        ConfigError: if it is not three positive whole numbers.
    """
    if not step.ramp_up:
        return None
    is_whole = all(word.isdecimal() and len(word) <= _MOST_DIGITS and int(word) > 0 for word in step.ramp_up)
    if len(step.ramp_up) != 3 or not is_whole:
        raise ConfigError(
            "step.ramp_up takes three whole numbers, first batch, increment and samples, got "
            + " ".join(step.ramp_up)[:60]
        )
    first, increment, samples = map(int, step.ramp_up)
    return first, increment, samples


def batch_at(step: StepConfig, consumed: int) -> int:
    """Global batch of the step that starts after `consumed` samples: it grows in equal parts of the ramp-up's samples,
    one for each increment.
    """
    full, ramp = step.sizes.global_batch_size, read_ramp_up(step)
    if ramp is None:
        return full
    first, increment, samples = ramp
    num_growths = (full - first) // increment
    if num_growths == 0 or consumed >= samples:
        return full
    return min(full, first + consumed * num_growths // samples * increment)


def batch_phases(step: StepConfig) -> list[tuple[int, int]]:
    """Size of the global batch from each number of consumed samples on: what `batch_at` gives, as a table."""
    ramp = read_ramp_up(step)
    if ramp is None:
        return [(0, batch_at(step, 0))]
    first, increment, samples = ramp
    growths = max((step.sizes.global_batch_size - first) // increment, 0)
    starts = [-(-growth * samples // growths) for growth in range(growths)] if growths else [0]
    return [(start, batch_at(step, start)) for start in [*starts, samples]]


def count_steps(step: StepConfig, num_samples: int) -> int:
    """Whole steps in `num_samples` samples, ramp-up included."""
    steps = consumed = 0
    for batch, end in _list_spans(step):
        own = max(0, min(-(-(end - consumed) // batch), (num_samples - consumed) // batch))
        steps, consumed = steps + own, consumed + own * batch
        if consumed < end:  # the next step would be one too many
            return steps
    return steps + (num_samples - consumed) // step.sizes.global_batch_size


def _list_spans(step: StepConfig) -> Iterator[tuple[int, int]]:
    """Each size of a ramp-up's batch with the consumed samples up to which steps have it."""
    phases = batch_phases(step)
    yield from ((batch, end) for (_, batch), (end, _) in itertools.pairwise(phases))


def count_samples(step: StepConfig, num_steps: int) -> int:
    """Samples that the first `num_steps` steps consume, ramp-up included."""
    consumed = 0
    for batch, end in _list_spans(step):
        own = max(0, min(-(-(end - consumed) // batch), num_steps))
        consumed, num_steps = consumed + own * batch, num_steps - own
    return consumed + num_steps * step.sizes.global_batch_size


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
