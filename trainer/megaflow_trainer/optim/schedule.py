"""Learning rate as a pure function of the samples consumed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megaflow_trainer.config.sections import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Linear warm-up from `init` to `peak`, then decay to `low`; lengths in samples, decay counted from sample 0."""

    style: str
    peak: float
    low: float
    init: float
    warmup: float
    decay: float

    def lr_at(self, samples: int) -> float:
        """Rate of the step after which `samples` have been consumed: the first step already moves."""
        if samples <= self.warmup and self.warmup > 0:
            return self.init + (self.peak - self.init) * samples / self.warmup
        if self.style == "constant":
            return self.peak
        if samples >= self.decay:
            return self.low
        done = (samples - self.warmup) / (self.decay - self.warmup)
        left = 0.5 * (1 + math.cos(math.pi * done)) if self.style == "cosine" else 1 - done
        return self.low + (self.peak - self.low) * left


def build_schedule(config: TrainConfig) -> Schedule:
    """The schedule of a resolved configuration; iterations become samples by the global batch size."""
    own, batch = config.schedule, config.step.sizes.global_batch_size
    decay = own.decay_samples or (own.decay_steps or config.last_step) * batch
    if own.warmup_fraction is not None:
        warmup: float = own.warmup_fraction * decay
    else:
        warmup = own.warmup_samples or (own.warmup_steps or 0) * batch
    return Schedule(
        style=own.style, peak=config.optim.lr, low=own.min_lr, init=own.warmup_init, warmup=warmup, decay=decay
    )
