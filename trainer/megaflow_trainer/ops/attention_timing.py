"""Choosing the attention kernel by its time at the run's own shape. Legend as in `attention.py`; e width of values.

A kernel of an optional package is compared with torch's before it serves: releases that do not fit together have been
seen to give numbers that are no attention, quickly and without a word.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megaflow.errors import first_line
from megaflow_trainer.ops.registry import Entry, Need
from megaflow_trainer.ops.rotation import rotate_pairs

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

MARGIN = 0.03
"""By which part of its time another kernel must beat the first of the order: less is noise, and the choice should not
change from run to run."""


LARGEST_ERROR = 5e-2
"""How far a package's results may be from torch's in 16 bits, over the largest value; right ones come to 1e-2."""

SMALLEST_SCALE = 1e-6
"""What the largest value is taken for if it is smaller: a gradient that is 0 has nothing to be compared with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """One call of the core, as a rank makes it for a micro-batch."""

    b: int
    n: int
    g: int
    s: int
    d: int
    e: int
    dropout: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"b {self.b}, heads {self.n}/{self.g}, s {self.s}, d {self.d}"


@dataclass(frozen=True, slots=True)
class Choice:
    """The entry that was chosen, and milliseconds of forward and backward by entry; None where it cannot serve."""

    name: str
    times: dict[str, float | None]

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {'-' if ms is None else f'{ms:.2f} ms'}" for name, ms in self.times.items())
        return f"{self.name} ({shown})"


def choose_by_time(entries: Sequence[Entry], need: Need, timer: Callable[[Entry], float | None]) -> Choice | None:
    """The fastest of the entries that can serve; the first in order unless another one beats it by `MARGIN`.

    Args:
        entries: in order of preference.
        need: what is asked of them.
        timer: milliseconds of forward and backward of an entry; None if it fails.

    Returns:
        None if there is nothing to compare.
    """
    usable = [entry for entry in entries if entry.is_timed and entry.obstacle(need) is None]
    if len(usable) < 2:
        return None
    times = {entry.name: timer(entry) for entry in usable}
    serving = {name: ms for name, ms in times.items() if ms is not None}
    if not serving:
        return None
    best, first = min(serving, key=lambda name: serving[name]), next(iter(serving))
    return Choice(best if serving[best] < (1 - MARGIN) * serving[first] else first, times)


def time_attention(entry: Entry, shape: AttentionShape, need: Need, *, repeats: int = 5) -> float | None:
    """Median milliseconds on a GPU of forward and backward, with q, k and v as the model lays them out.

    None if the kernel refuses the shape or there is not enough memory.
    """
    try:
        found = [_time_once(entry, shape, need) for _ in range(repeats + 2)]
    except _list_refusals(entry):
        return None
    return statistics.median(found[2:])


def find_refusal(entry: Entry, shape: AttentionShape, need: Need) -> str | None:
    """Why an entry does not compute a shape, forward and backward, in a line; None if it does."""
    try:
        q, k, v, grad = _draw(shape, need)
        _run(entry, (q, k, v), grad, shape)
        if need.device.type == "cuda":
            torch.cuda.synchronize(need.device)
    except _list_refusals(entry) as error:
        return first_line(error)
    return None


def find_error(entry: Entry, reference: Entry, shape: AttentionShape, need: Need) -> float | None:
    """How far result and gradients of one sample are from those of the reference, as `measure_difference` says.

    Infinite if the entry does not compute it; None if the reference does not: there is nothing to compare with. Dropout
    must be 0.
    """
    small = replace(shape, b=1)
    try:
        q, k, v, grad = _draw(small, need)
        wanted = _run(reference, (q, k, v), grad, small)
    except _list_refusals(reference):
        return None
    try:
        found = _run(entry, (q, k, v), grad, small)
    except _list_refusals(entry):
        return math.inf
    return measure_difference(found, wanted)


def find_joined_error(entry: Entry, shape: AttentionShape, need: Need, *, is_turned: bool) -> float:
    """How far result and gradient of heads side by side are from those of the same entry of three tensors, in one
    sample; infinite if the entry does not compute it. Dropout must be 0.
    """
    assert entry.joined is not None, "asked before"
    q, k, v, grad = _draw(replace(shape, b=1), need)
    heads = torch.cat([x.detach().transpose(1, 2) for x in (q, k, v)], dim=2).requires_grad_()
    tables, turned = None, (q, k)
    if is_turned:
        angles = torch.arange(shape.s * (shape.d // 2), device=need.device).view(shape.s, -1) * 0.37
        tables = angles.cos(), angles.sin(), False
        turned = rotate_pairs(q, *tables[:2], is_interleaved=False), rotate_pairs(k, *tables[:2], is_interleaved=False)
    y = entry.function(*turned, v, dropout=0.0, **shape.options)
    wanted = y.detach(), *torch.autograd.grad(y, (q, k, v), grad)
    try:
        y = entry.joined(heads, shape.g, tables, dropout=0.0, **shape.options)
        (found,) = torch.autograd.grad(y, heads, grad)
    except _list_refusals(entry):
        return math.inf
    sizes = [shape.n, shape.g, shape.g]
    return measure_difference((y.detach(), *found.transpose(1, 2).split(sizes, dim=1)), wanted)


def measure_difference(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest difference of tensors from those that are wanted, each over the largest value that is wanted of it.

    Infinite if any value is not finite: Python's `max` would pass over what is not a number.
    """
    largest = 0.0
    for own, other in zip(found, wanted, strict=True):
        scale = other.float().abs().max().clamp(min=SMALLEST_SCALE)
        difference = ((own.float() - other.float()).abs().max() / scale).item()
        if not math.isfinite(difference):
            return math.inf
        largest = max(largest, difference)
    return largest


def _list_refusals(entry: Entry) -> type[Exception]:
    """What an entry raises where it refuses a shape or lacks memory: torch's kernels a RuntimeError ("No available
    kernel", a cuDNN error); packages an AssertionError, a ValueError or a kind of their own, in backward too.
    """
    return RuntimeError if entry.package is None else Exception


def _run(entry: Entry, inputs: Inputs, grad: torch.Tensor, shape: AttentionShape) -> tuple[torch.Tensor, ...]:
    y = entry.function(*inputs, dropout=shape.dropout, **shape.options)
    return y.detach(), *torch.autograd.grad(y, inputs, grad)


def _draw(shape: AttentionShape, need: Need) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys, values and the gradient of the result."""

    def make(heads: int, width: int) -> torch.Tensor:
        x = torch.randn(shape.b, shape.s, heads, width, dtype=need.dtype, device=need.device)
        return x.transpose(1, 2).requires_grad_()  # [b, heads, s, width], tokens apart by all heads

    grad = torch.randn(shape.b, shape.s, shape.n, shape.e, dtype=need.dtype, device=need.device).transpose(1, 2)
    return make(shape.n, shape.d), make(shape.g, shape.d), make(shape.g, shape.e), grad


_WIDTH, _PRODUCTS = 4096, 30  # 5 ms on an H200 in 16 bits


def keep_busy(dtype: torch.dtype, device: torch.device) -> None:
    """Give a GPU work for longer than the host takes to launch what is timed: in a run the host is ahead, and a package
    whose launches cost it much is none the slower. A CPU would take seconds for it and is never ahead.
    """
    if device.type != "cuda":
        return
    x = torch.ones(_WIDTH, _WIDTH, dtype=dtype, device=device)
    y = torch.empty_like(x)
    for _ in range(_PRODUCTS):
        torch.mm(x, x, out=y)


def _time_once(entry: Entry, shape: AttentionShape, need: Need) -> float:
    q, k, v, grad = _draw(shape, need)
    keep_busy(need.dtype, need.device)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    _run(entry, (q, k, v), grad, shape)
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended)
