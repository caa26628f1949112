"""What ranks send to each other in a step, by axis and kind, and how long this rank waited for it.

Bytes are those that one rank sends where a collective of n ranks goes round a ring, S the bytes of the whole tensor:
all-reduce 2 (n-1)/n S, reduce-scatter, all-gather and all-to-all (n-1)/n S, a message between two ranks S, and an
all-to-all of unequal parts what goes to other ranks. They are counted where the call is made and wait for nothing.
Objects that ranks exchange between steps are not counted.

Time is what the stream that computes waited: the time inside calls that block and in waiting for those that were
started early. On a GPU it is taken by events, read when the step is over, and only in steps that are timed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

LABEL = "sent: "
"""How a profile names what is counted here."""
_TIMES = {"all_reduce": 2.0, "reduce_scatter": 1.0, "all_gather": 1.0, "all_to_all": 1.0}


@dataclass(slots=True)
class Flow:
    """Messages of one kind along one axis in a step."""

    calls: int = 0
    sent_bytes: float = 0.0
    background_bytes: float = 0.0
    """Those of them that travelled while something else was computed, unless it was waited for."""
    waited_s: float = 0.0
    spans: list[tuple[Any, Any]] = field(default_factory=list)


class Traffic:
    """Counts the messages of one step after the other."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.is_timed = True
        self.is_traced = False
        """Whether messages show in the profiler by name."""
        self.flows: dict[tuple[str, str], Flow] = {}

    def start(self, *, is_timed: bool = True) -> None:
        """Forget the last step."""
        self.flows, self.is_timed = {}, is_timed

    def take(self) -> dict[tuple[str, str], Flow]:
        """What was sent since `start`, by axis and kind; `read_flows` reads its times."""
        flows, self.flows = self.flows, {}
        return flows

    def count(self, axis: str, kind: str, sent_bytes: float, *, calls: int = 1, is_background: bool = False) -> None:
        """Count messages by the bytes that this rank sends."""
        flow = self.flows.setdefault((axis, kind), Flow())
        flow.calls += calls
        flow.sent_bytes += sent_bytes
        flow.background_bytes += sent_bytes if is_background else 0

    @contextmanager
    def wait(self, axis: str, kind: str) -> Iterator[None]:
        """Count what happens inside as waiting."""
        if not self.is_timed and not self.is_traced:
            yield
            return
        flow = self.flows.setdefault((axis, kind), Flow())
        with record_function(f"{LABEL}{axis} {kind}") if self.is_traced else nullcontext():
            begin = self._mark()
            yield
            flow.spans.append((begin, self._mark()))

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


def read_flows(flows: Mapping[tuple[str, str], Flow]) -> dict[str, dict[str, dict[str, float]]]:
    """Calls, bytes and seconds by axis and kind; waits for the GPU to be done with the step."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for (axis, kind), flow in flows.items():
        for begin, end in flow.spans:
            if not isinstance(end, float):
                end.synchronize()
            flow.waited_s += end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3
        flow.spans = []
        table.setdefault(axis, {})[kind] = {
            "calls": flow.calls,
            "sent_bytes": round(flow.sent_bytes),
            "background_bytes": round(flow.background_bytes),
            "waited_s": flow.waited_s,
        }
    return table


@dataclass(frozen=True, slots=True)
class Meter:
    """Counts messages along one axis."""

    traffic: Traffic
    axis: str

    def send(
        self, kind: str, tensor: Tensor, group: dist.ProcessGroup, *, is_background: bool = False
    ) -> AbstractContextManager[None]:
        """The context of a collective over `tensor`, the whole one: counts its bytes, and if it blocks its time."""
        size = dist.get_world_size(group)
        share = _TIMES[kind] * (size - 1) / size
        self.traffic.count(self.axis, kind, tensor.numel() * tensor.element_size() * share, is_background=is_background)
        return nullcontext() if is_background else self.traffic.wait(self.axis, kind)

    def send_rows(
        self, rows: Tensor, counts: Sequence[int], group: dist.ProcessGroup, *, is_background: bool = False
    ) -> None:
        """Count an all-to-all that is started early and sends `counts` rows to each rank; this one's own stay."""
        sent = sum(counts) - counts[dist.get_rank(group)]
        row_bytes = rows.shape[1] * rows.element_size()
        self.traffic.count(self.axis, "all_to_all", sent * row_bytes, is_background=is_background)

    def wait(self, kind: str) -> AbstractContextManager[None]:
        """The context in which something is waited for that was started early."""
        return self.traffic.wait(self.axis, kind)


def sending(
    meter: Meter | None, kind: str, tensor: Tensor, group: dist.ProcessGroup, *, is_background: bool = False
) -> AbstractContextManager[None]:
    """As `Meter.send`, nothing without a meter."""
    return nullcontext() if meter is None else meter.send(kind, tensor, group, is_background=is_background)


def waiting(meter: Meter | None, kind: str) -> AbstractContextManager[None]:
    """As `Meter.wait`, nothing without a meter."""
    return nullcontext() if meter is None else meter.wait(kind)
