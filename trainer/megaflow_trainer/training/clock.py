"""Where the time of a step goes, without waiting for the device at every step.

On the CPU a phase is the time between two readings of the clock. On a GPU it is the time between two events on the
stream that does the work; they are read when somebody asks, by then long past. A step lasts from the end of the step
before it to its own end, by the same clock as its phases.

`loader bound` is the time in which the device had nothing to do because its next batch was not on it:
max(0, batch arrived - earlier work finished). On the CPU this is the time for which the step was blocked: from asking
for a batch that did not lie ready until it did. Taking over a batch that lies there is work of the CPU (`feed`), as
checking and copying it are; beside a GPU that work runs ahead. Beside the sum stand `host wait`, for which the host was
in the loader, and `h2d`, the copying of batches: what of the two the device had to wait for is in the phases already.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.profiler import record_function

LOADER_BOUND = "loader_bound"
FEED = "feed"
FORWARD = "forward"
BACKWARD = "backward"
COMMUNICATION = "communication"
OPTIMIZER = "optimizer"
LOG = "log"
EVAL = "eval"
CHECKPOINT = "checkpoint"
HOST_WAIT = "host_wait"
H2D = "h2d"
PHASES = (LOADER_BOUND, FEED, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, LOG)
"""Parts of a step; with `other` they add up to it."""
ASIDE = (EVAL, CHECKPOINT)
"""What comes between steps and is no part of them."""
BESIDE = (HOST_WAIT, H2D)
"""What runs beside the phases and is in no sum."""


@dataclass(frozen=True, slots=True)
class Span:
    """A phase on a GPU: its events, the later of which may be the earlier one in time."""

    name: str
    begin: torch.cuda.Event
    end: torch.cuda.Event


@dataclass(slots=True)
class Phase:
    """A phase in progress; what it is may show itself before it ends."""

    name: str


@dataclass(slots=True)
class StepTimes:
    """The times of one step and of what came between it and the step before; `read` them when the device is done."""

    seconds: dict[str, float]
    spans: list[Span] = field(default_factory=list)
    wall_s: float = 0.0
    whole: Span | None = None

    def read(self) -> tuple[float, dict[str, float]]:
        """Seconds of the step without what is aside, and seconds by name; waits for the step's end on a GPU."""
        if self.whole is not None:
            self.whole.end.synchronize()
            self.wall_s = self.whole.begin.elapsed_time(self.whole.end) / 1e3
            for span in self.spans:
                self.seconds[span.name] += max(0.0, span.begin.elapsed_time(span.end)) / 1e3
            self.spans, self.whole = [], None
        return self.wall_s - sum(self.seconds[name] for name in ASIDE), self.seconds


class Clock:
    """Takes the times of one step after the other.

    Args:
        device: where the work is done; its kind decides how time is taken.
        now: the host's clock in seconds.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self.device = device
        self.now = now
        self.is_traced = False
        """Whether phases show in the profiler by name."""
        self.current = ""
        """The phase in progress, for who asks from outside where a step hangs."""
        self.step = 0
        """The step in progress."""
        self.beats = 0
        """Grows with everything that the run gets done, also outside steps."""
        self.restart()

    def restart(self) -> None:
        """Begin the next step now; what came before is forgotten."""
        self._times = StepTimes(dict.fromkeys((*PHASES, *ASIDE, *BESIDE), 0.0))
        self._begin_s = self.now()
        self._begin = self.mark() if self.device.type == "cuda" else None

    def end_step(self) -> StepTimes:
        """End the step; the next one begins. Waits for nothing."""
        times = self._times
        if self._begin is not None:
            begin, self._begin = self._begin, self.mark()
            times.whole = Span("step", begin, self._begin)
        else:
            begin_s, self._begin_s = self._begin_s, self.now()
            times.wall_s = self._begin_s - begin_s
        self._times = StepTimes(dict.fromkeys(times.seconds, 0.0))
        return times

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Count what happens inside on the stream that computes, as `name` or what the phase is called at its end."""
        outer, self.current = self.current, name
        self.beat()
        phase = Phase(name)
        with self._trace(name) if self.is_traced else _NOTHING:
            if self.device.type == "cuda":
                begin = self.mark()
                yield phase
                self._times.spans.append(Span(phase.name, begin, self.mark()))
            else:
                begin_s = self.now()
                yield phase
                self._times.seconds[phase.name] += self.now() - begin_s
        self.current = outer

    @contextmanager
    def host(self, name: str) -> Iterator[None]:
        """Count the host's time inside as `name`, whatever the device does."""
        begin_s = self.now()
        yield
        self._times.seconds[name] += self.now() - begin_s

    def beat(self) -> None:
        """Say that the run gets on."""
        self.beats += 1

    def mark(self, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        """An event on a stream of the GPU (the one that computes if none is given)."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream(self.device))
        return event

    def count(self, name: str, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Count the time from one event to another, nothing if the second came first."""
        self._times.spans.append(Span(name, begin, end))

    @contextmanager
    def _trace(self, name: str) -> Iterator[None]:
        with record_function(f"phase: {name}"):
            yield


class _Nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_NOTHING = _Nothing()
