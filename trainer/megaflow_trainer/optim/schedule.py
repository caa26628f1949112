"""What a step is told of its place in the run: rate, weight decay and batch, as pure functions of the samples consumed.

A step that is skipped for its gradients has consumed its samples: the schedule does not wait for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megaflow_trainer.config.batch import batch_at
from megaflow_trainer.config.sections import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """What one step does."""

    lr: float
    weight_decay: float
    num_micro_batches: int
    num_samples: int
    first_sample: int = 0
    """How many samples were consumed before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Linear warm-up from `init` to `peak`, then decay to `low`; lengths in samples, decay counted from sample 0.

    `wsd` samples at the end of the decay are those of the WSD style, which stays at the peak before.
    """

    style: str
    peak: float
    low: float
    init: float
    warmup: float
    decay: float
    batch: int
    wsd: float = 0.0
    wsd_style: str = "exponential"

    def lr_at(self, samples: int) -> float:
        """Rate of the step after which `samples` have been consumed: the first step already moves."""
        if samples <= self.warmup and self.warmup > 0:
            return self.init + (self.peak - self.init) * samples / self.warmup
        if self.style == "constant":
            return self.peak
        if samples >= self.decay:
            return self.low
        if self.style == "inverse-square-root":
            return max(self.low, self.peak * math.sqrt(max(self.warmup, self.batch) / samples))
        return self.low + (self.peak - self.low) * self._part_left(samples)

    def _part_left(self, samples: int) -> float:
        """How much of the way from low to peak is left, in [0, 1]."""
        if self.style == "WSD":
            start = self.decay - self.wsd
            return 1.0 if samples <= start else shape_decay(self.wsd_style, (samples - start) / self.wsd)
        return shape_decay(self.style, (samples - self.warmup) / (self.decay - self.warmup))


def shape_decay(style: str, done: float) -> float:
    """A decay from 1 to 0 while `done` goes from 0 to 1."""
    if style == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    if style == "exponential":
        return float(2 * 0.5**done - 1)
    return 1 - math.sqrt(done) if style == "minus_sqrt" else 1 - done


@dataclass(frozen=True, kw_only=True, slots=True)
class DecayRamp:
    """Weight decay over the samples of the run."""

    style: str
    start: float
    end: float
    length: int

    def at(self, samples: int) -> float:
        """Weight decay of the step after which `samples` have been consumed."""
        done = min(1.0, samples / self.length)
        if self.style == "constant":
            return self.end
        part = done if self.style == "linear" else 0.5 * (math.cos(math.pi * (1 - done)) + 1)
        return self.start + (self.end - self.start) * part


@dataclass(frozen=True, slots=True)
class Planner:
    """Tells each step what to do."""

    config: TrainConfig
    rate: Schedule
    decay: DecayRamp

    def plan(self, consumed: int) -> StepPlan:
        """The step that starts after `consumed` samples."""
        num_samples, sizes = batch_at(self.config.step, consumed), self.config.step.sizes
        unit = sizes.global_batch_size // sizes.num_micro_batches  # micro batch x data-parallel ranks
        after = consumed + num_samples
        return StepPlan(
            lr=self.rate.lr_at(after),
            weight_decay=self.decay.at(after),
            num_micro_batches=num_samples // unit,
            num_samples=num_samples,
            first_sample=consumed,
        )


def build_planner(config: TrainConfig) -> Planner:
    """The planner of a resolved configuration."""
    optim = config.optim
    first = optim.weight_decay if optim.start_weight_decay is None else optim.start_weight_decay
    last = optim.weight_decay if optim.end_weight_decay is None else optim.end_weight_decay
    length = config.num_samples or config.last_step * config.step.sizes.global_batch_size
    ramp = DecayRamp(style=optim.decay_style, start=first, end=last, length=length)
    return Planner(config, build_schedule(config), ramp)


def build_schedule(config: TrainConfig) -> Schedule:
    """The schedule of a resolved configuration; iterations become samples by the global batch size."""
    own, batch = config.schedule, config.step.sizes.global_batch_size
    length = config.num_samples or config.last_step * batch
    decay = own.decay_samples or (own.decay_steps * batch if own.decay_steps else length)
    if own.warmup_fraction:
        warmup: float = own.warmup_fraction * decay
    else:
        warmup = own.warmup_samples or (own.warmup_steps or 0) * batch
    return Schedule(
        style=own.style,
        peak=config.optim.lr,
        low=own.min_lr,
        init=own.warmup_init,
        warmup=warmup,
        decay=decay,
        batch=batch,
        wsd=own.wsd_samples or (own.wsd_steps or 0) * batch or 0.1 * decay,
        wsd_style=own.wsd_style,
    )
