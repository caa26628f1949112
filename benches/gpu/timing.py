"""How kernels are timed on a GPU, and how a line of it is printed."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch


def need_gpu(what: str = "a kernel") -> torch.device:
    """The first GPU; where there is none the program ends with a sentence."""
    if not torch.cuda.is_available():
        sys.exit(f"error: there is no GPU here, and this times {what} on one")
    return torch.device("cuda", 0)


def time_ms(work: Callable[[], object], *, launches: int = 10, repeats: int = 7, warm: int = 1) -> float:
    """Median milliseconds of one call on the device; several in a row, so that the host is ahead.

    Args:
        work: is called.
        launches: calls that are timed together.
        repeats: times of which the median is taken.
        warm: more of them before, which do not count.
    """
    found = []
    for _ in range(warm + repeats):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(launches):
            work()
        ended.record()
        torch.cuda.synchronize()
        found.append(began.elapsed_time(ended) / launches)
    return statistics.median(found[warm:])


def show(name: str, ms: float, num_bytes: int, *, width: int = 38) -> None:
    """A line of the table: what it is, milliseconds, and the bytes that must move over them."""
    print(f"  {name:{width}} {ms:8.4f} ms {num_bytes / ms / 1e6:6.0f} GB/s", flush=True)
