"""Where the time of a step goes, without waiting for the device at every step.

On the CPU a phase is the time between two readings of the clock. On a GPU it is the time between two events on the
stream that does the work, read when the interval is collected.

`data wait` is the time in which the device had nothing to do because its next batch was not on it:
max(0, batch arrived - earlier work finished). On the CPU this is the time for which the step was blocked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

DATA_WAIT = "data_wait"
COMPUTE = "compute"
COMMUNICATION = "communication"
OPTIMIZER = "optimizer"
EVAL = "eval"
CHECKPOINT = "checkpoint"
PHASES = (DATA_WAIT, COMPUTE, COMMUNICATION, OPTIMIZER)
ASIDE = (EVAL, CHECKPOINT)


class Clock:
    """Seconds by phase since the last `collect`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host_wait_s = 0.0
        self._seconds = dict.fromkeys(PHASES + ASIDE, 0.0)
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens inside as `name`."""
        if self.device.type == "cuda":
            begin = self.mark()
            yield
            self._spans.append((name, begin, self.mark()))
        else:
            begin_s = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - begin_s

    def mark(self, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        """An event on a stream of the GPU (the one that computes if none is given)."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream(self.device))
        return event

    def count_arrival(self, earlier_work: torch.cuda.Event, arrived: torch.cuda.Event) -> None:
        """Count the data wait of a batch on a GPU: from the end of earlier work to the batch's arrival, if later."""
        self._spans.append((DATA_WAIT, earlier_work, arrived))

    def collect(self) -> tuple[float, dict[str, float]]:
        """Wall seconds and seconds by phase since the last call; waits for the device, then starts anew."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for name, begin, end in self._spans:
            self._seconds[name] += max(0.0, begin.elapsed_time(end)) / 1e3
        now = time.perf_counter()
        wall, seconds = now - self._start, self._seconds
        seconds["host_wait"] = self.host_wait_s
        self.host_wait_s, self._start, self._spans = 0.0, now, []
        self._seconds = dict.fromkeys(PHASES + ASIDE, 0.0)
        return wall, seconds
