"""Products of rows with one matrix a group of them: `rows[i] @ matrix[group of i]`.

Two ways. `LOOP` multiplies group by group, anywhere, and is the reference; the host reads the sizes of the groups once
for all products of a layer, and each weight gradient may be added to its main gradient by its product, in fp32
(`ops/accumulate.py`). `GROUPED` is torch's grouped product, one kernel whose sizes stay on the device. A group of many
rows fills a GPU by itself: there the loop is the faster one, of few rows the grouped kernel is.

Legend: r rows, e groups, i inputs, o outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaflow.errors import ConfigError
from megaflow_trainer.ops.accumulate import add_product_
from megaflow_trainer.ops.host_copy import HostCopy

ROWS_FOR_LOOP = 1024
"""Rows of a group from which `auto` takes the loop on a GPU."""
_LINE_BYTES = 16  # what the grouped kernel reads at once


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, sizes: Sequence[int], is_transposed: bool, main_grad: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.sizes, ctx.is_transposed, ctx.main_grad = sizes, is_transposed, main_grad
        return _multiply(rows, weight, sizes, is_transposed=is_transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        rows, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = _multiply(grad, weight, ctx.sizes, is_transposed=not ctx.is_transposed)
        left, right = (grad, rows) if ctx.is_transposed else (rows, grad)
        if ctx.needs_input_grad[1] and ctx.main_grad is None:
            grad_weight = torch.zeros_like(weight)
            for group, run in _runs(ctx.sizes):
                torch.mm(left[run].t(), right[run], out=grad_weight[group])
        elif ctx.needs_input_grad[1]:
            for group, run in _runs(ctx.sizes):
                add_product_(ctx.main_grad[group], left[run], right[run])
        return grad_rows, grad_weight, None, None, None


def _runs(sizes: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """The groups that have rows, and which those are."""
    start = 0
    for group, size in enumerate(sizes):
        if size:
            yield group, slice(start, start + size)
        start += size


def _multiply(rows: Tensor, weight: Tensor, sizes: Sequence[int], *, is_transposed: bool) -> Tensor:
    out = rows.new_empty(len(rows), weight.shape[1 if is_transposed else 2])
    for group, run in _runs(sizes):
        torch.mm(rows[run], weight[group].t() if is_transposed else weight[group], out=out[run])
    return out


def multiply_loop(
    rows: Tensor, weight: Tensor, sizes: Sequence[int], *, is_transposed: bool, main_grad: Tensor | None = None
) -> Tensor:
    """One product a group; groups without rows give their matrix a gradient of zeros."""
    y: Tensor = _Loop.apply(rows, weight, sizes, is_transposed, main_grad)
    return y


def multiply_grouped(
    rows: Tensor, weight: Tensor, ends: Tensor, *, is_transposed: bool, main_grad: Tensor | None = None
) -> Tensor:
    """One kernel for all groups. Rows behind the last group are not computed."""
    return F.grouped_mm(rows, weight.transpose(1, 2) if is_transposed else weight, offs=ends)


Known = Sequence[int] | HostCopy | None
"""Rows of each group where the host has them, or will have them; None if they are on the device alone."""


def _find_sizes(counts: Tensor, known: Known = None) -> Sequence[int]:
    if known is None:
        known = HostCopy(counts)
    return known.read() if isinstance(known, HostCopy) else known  # for which the host waits


def _find_ends(counts: Tensor, known: Known = None) -> Tensor:
    return counts.cumsum(0).to(torch.int32)


def _announce_nothing(counts: Tensor) -> None:
    """The grouped kernel reads the counts where they are."""


@dataclass(frozen=True, slots=True)
class Product:
    """A way to multiply groups.

    Args:
        name: of the configuration.
        announce: begins to hand the host the rows of each group, int64 `[e]`, if it will want them.
        prepare: what `multiply` wants to know of the rows of each group, int64 `[e]`, from the numbers on the device
            and, if the host has or gets them, from these.
        multiply: rows `[r, i]`, matrices `[e, i, o]` (or, `is_transposed`, `[e, o, i]`) and what was prepared, to
            `[r, o]`. With a main gradient `[e, ...]`, shaped like the matrices, the loop adds to it and leaves the
            matrices without a gradient.
        accumulates: whether it does that.
    """

    name: str
    announce: Callable[[Tensor], Known]
    prepare: Callable[..., Any]
    multiply: Callable[..., Tensor]
    accumulates: bool


LOOP = Product("loop", HostCopy, _find_sizes, multiply_loop, True)
GROUPED = Product("grouped", _announce_nothing, _find_ends, multiply_grouped, False)


def choose_product(
    wanted: str, device: torch.device, dtype: torch.dtype, *, rows_per_group: float, widths: Sequence[int]
) -> Product:
    """The product that the configuration names; `auto` is grouped on GPUs in bf16 if groups have few rows on average.

    Args:
        wanted: auto, loop or grouped.
        device: of the experts.
        dtype: of rows and matrices.
        rows_per_group: expected, on average.
        widths: the numbers of inputs and outputs of the products on this rank; the grouped kernel reads 16 bytes at
            once, so its rows have a multiple of that.

    Raises:
        ConfigError: if the grouped product cannot run on this device in this dtype or with these widths.
    """
    dtypes = (torch.bfloat16,) if device.type == "cuda" else (torch.bfloat16, torch.float32)
    can_group = hasattr(F, "grouped_mm") and dtype in dtypes
    if wanted == "grouped" and not can_group:
        raise ConfigError(
            f"the grouped product of experts cannot run on {device.type} in {str(dtype).removeprefix('torch.')}; use "
            "bf16, or --moe-expert-kernel loop"
        )
    step = _LINE_BYTES // dtype.itemsize
    odd = [width for width in widths if width % step]
    if wanted == "grouped" and odd:
        raise ConfigError(
            f"the grouped product of experts needs widths that are multiples of {step} in "
            f"{str(dtype).removeprefix('torch.')}, and a rank's experts are {widths[0]} (hidden size) by {widths[1]} "
            "(their width over the ranks that share one) wide; choose other ones, or --moe-expert-kernel loop"
        )
    is_small = device.type == "cuda" and rows_per_group < ROWS_FOR_LOOP
    return GROUPED if wanted == "grouped" or (wanted == "auto" and can_group and not odd and is_small) else LOOP
