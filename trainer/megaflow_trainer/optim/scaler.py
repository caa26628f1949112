"""The loss scale of fp16: it lifts small gradients above fp16's smallest number, and must not lift large ones above its
largest.

Dynamic scale: a step whose gradients are not finite is skipped, and costs one unit of patience; with the patience gone
(after `hysteresis` such steps) the scale is halved, and by each further one too, down to `low`. After `window` good
steps in a row the scale is doubled and the patience restored. A static scale skips such steps and stays.
"""

from __future__ import annotations

from typing import Any

from megaflow_trainer.config.sections import StepConfig


class LossScaler:
    """The scale and what decides about its next value."""

    def __init__(self, config: StepConfig) -> None:
        self.is_static = config.loss_scale is not None
        self.scale = config.initial_loss_scale if config.loss_scale is None else config.loss_scale
        self.low, self.window, self.hysteresis = config.min_loss_scale, config.loss_scale_window, config.hysteresis
        self.patience, self.num_good, self.num_skipped = self.hysteresis, 0, 0

    def update(self, *, is_finite: bool) -> None:
        """Take note of a step's gradients."""
        if not is_finite:
            self.num_skipped += 1
            self.num_good = 0
            self.patience -= 1
            if self.patience <= 0 and not self.is_static:
                self.scale = max(self.scale / 2, self.low)
            return
        self.num_good += 1
        if self.num_good == self.window:
            self.num_good, self.patience = 0, self.hysteresis
            if not self.is_static:
                self.scale *= 2

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {name: getattr(self, name) for name in ("scale", "patience", "num_good", "num_skipped")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; a static scale stays the one of the command line."""
        for name, value in state.items():
            if name != "scale" or not self.is_static:
                setattr(self, name, value)


def build_scaler(config: StepConfig) -> LossScaler | None:
    """The scaler of an fp16 run; None in other precisions."""
    return LossScaler(config) if config.dtype == "fp16" else None
