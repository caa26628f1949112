"""What the rivals share: times of steps, what ran on the GPU in one, and the JSON line. No megaflow."""

from __future__ import annotations

import itertools
import json
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from machine import describe_machine

Kernels = list[tuple[str, float, float]]
"""Name, start and end in microseconds."""


def time_steps(step: Callable[[], None], count: int, *, warm: int = 4) -> float:
    """Median seconds of `count` steps, behind `warm` others.

    On a GPU a step lasts from one event to the next, and nothing waits in between: the host may be ahead, as in a run.
    """
    for _ in range(warm):
        step()
    if not torch.cuda.is_available():
        moments = [time.perf_counter()]
        for _ in range(count):
            step()
            moments.append(time.perf_counter())
        return statistics.median(after - before for before, after in itertools.pairwise(moments))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    spans = itertools.pairwise(events)
    return statistics.median(before.elapsed_time(after) / 1e3 for before, after in spans)


def measure_memory() -> int:
    """Peak bytes: those that torch allocated on the GPU, or those of the process without one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def profile_step(step: Callable[[], None]) -> Kernels:
    """What ran on the GPU in one step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        step()
        torch.cuda.synchronize()
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def measure_exposed(kernels: Kernels) -> float:
    """Seconds in which a kernel of NCCL ran and no other."""
    spans = [(start, end, "nccl" in name.lower()) for name, start, end in kernels]
    moments = sorted([(a, 1, is_nccl) for a, _, is_nccl in spans] + [(b, -1, is_nccl) for _, b, is_nccl in spans])
    running, last, exposed = {True: 0, False: 0}, 0.0, 0.0
    for moment, change, is_nccl in moments:
        if running[True] and not running[False]:
            exposed += moment - last
        running[is_nccl] += change
        last = moment
    return exposed / 1e6


def list_longest(kernels: Kernels, count: int) -> list[tuple[str, float, int]]:
    """The kernels with the most time: name, milliseconds and calls of the step."""
    totals: dict[str, tuple[float, int]] = {}
    for name, start, end in kernels:
        spent, calls = totals.get(name, (0.0, 0))
        totals[name] = spent + (end - start) / 1e3, calls + 1
    longest = sorted(totals.items(), key=lambda item: -item[1][0])[:count]
    return [(name[:120], round(spent, 3), calls) for name, (spent, calls) in longest]


def print_line(facts: dict[str, Any], tokens: int, seconds: float, **more: Any) -> None:
    """What a rival found, as one JSON line.

    Args:
        facts: what the run is found by (`keys.py`).
        tokens: of a step, over all ranks.
        seconds: of a step.
        more: is added.
    """
    line = {**facts, "tokens_per_s": tokens / seconds, "step_time_s": seconds, "memory_peak_bytes": measure_memory()}
    print(json.dumps({**line, **more, "machine": describe_machine()}), flush=True)
