"""Whether a loss is a spike: far above the usual, measured by the last losses themselves."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

_LEAST = 16
"""Losses that must be known before one can be called unusual."""
_NORMAL = 1.4826
"""Standard deviation over median absolute deviation, of a normal distribution."""


class SpikeWatch:
    """Remembers the last losses.

    A loss is a spike if it lies more than `threshold` deviations above their median. The deviation is 1.4826 times the
    median absolute deviation, at least a thousandth of the median: a spike moves neither much.

    Args:
        window: losses to remember.
        threshold: deviations; 0 for never.
    """

    def __init__(self, *, window: int, threshold: float) -> None:
        self.threshold = threshold
        self._losses: deque[float] = deque(maxlen=window)

    def judge(self, loss: float) -> float | None:
        """Take note of a loss. If it is a spike: how many deviations it lies above the median."""
        height = self._measure(loss)
        if math.isfinite(loss):
            self._losses.append(loss)
        return height if height is not None and 0 < self.threshold < height else None

    def _measure(self, loss: float) -> float | None:
        if len(self._losses) < _LEAST or not math.isfinite(loss):
            return None
        usual = median(self._losses)
        deviation = _NORMAL * median(abs(other - usual) for other in self._losses)
        return (loss - usual) / max(deviation, 1e-3 * abs(usual), 1e-12)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"losses": list(self._losses)}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint; None: it holds nothing of this."""
        self._losses.clear()
        self._losses.extend((state or {}).get("losses", ()))
