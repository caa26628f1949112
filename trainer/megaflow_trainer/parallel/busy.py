"""When a stage of a pipeline computes, and so for which part of a step it does not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class StepSpans:
    """When a rank computed in one step: marks of the host on the CPU, events of the device on a GPU."""

    def __init__(self) -> None:
        self.spans: list[tuple[Any, Any]] = []
        self.whole: tuple[Any, Any] | None = None

    @property
    def idle(self) -> float:
        """Part of the step in which nothing was computed; waits for a GPU to end it."""
        return self.idle_s / _length(self._end())

    @property
    def idle_s(self) -> float:
        """The same in seconds."""
        return _length(self._end()) - sum(map(_length, self.spans))

    def _end(self) -> tuple[Any, Any]:
        """The whole step; waits for a GPU to end it."""
        assert self.whole is not None, "a step was measured"
        if not isinstance(self.whole[1], float):
            self.whole[1].synchronize()
        return self.whole


def _length(span: tuple[Any, Any]) -> float:
    """Seconds."""
    begin, end = span
    return float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3)


class Busy:
    """Measures when this rank computes; each step has spans of its own, to be read when the device is done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.step = StepSpans()

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count what runs inside."""
        start = self._mark()
        yield
        self.step.spans.append((start, self._mark()))

    @contextmanager
    def measure_step(self) -> Iterator[None]:
        """The span of which `idle` is a part."""
        self.step, start = StepSpans(), self._mark()
        yield
        self.step.whole = (start, self._mark())
