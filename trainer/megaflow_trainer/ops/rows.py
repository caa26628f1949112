"""Rows of tokens in another order, and their weighted sums: what lies around the experts of a layer.

A row that stands for nothing (padding, a choice that is not served) has the number behind the last one, and is zeros.
Each function is one pass over its rows once it is compiled; sums are in fp32 and have one order.

Legend: t tokens, h hidden, k choices of a token, c copies of each choice, r rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def gather_rows(x: Tensor, sources: Tensor) -> Tensor:
    """`x[sources]`, `[t, h]` and int64 `[r]` to `[r, h]`."""
    if not len(x):
        return x.new_zeros(len(sources), *x.shape[1:])
    found = x.index_select(0, sources.clamp(max=len(x) - 1))
    is_real = (sources < len(x)).view(-1, *[1] * (x.dim() - 1))
    return torch.where(is_real, found, torch.zeros((), dtype=x.dtype, device=x.device))


def sum_rows(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """Sums of the rows of each token, one choice after the other; `[t, h]` in the rows' dtype.

    Args:
        rows: `[r, h]`.
        places: the row of each choice, int64 `[t, c k]`.
        weights: what rows are multiplied by, `[t, k]`; 1 if not given.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros(len(places), rows.shape[1], dtype=wide, device=rows.device)
    for choice in range(places.shape[1]):
        part = gather_rows(rows, places[:, choice]).to(wide)
        total = total + (part if weights is None else part * weights[:, choice % weights.shape[1], None].to(wide))
    return total.to(rows.dtype)


def spread_grad(grad: Tensor, rows: Tensor, weights: Tensor, slots: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of what `sum_rows` took with weights: of the rows, `[r, h]`, and of the weights, `[t, k]`.

    Args:
        grad: of the sums, `[t, h]`.
        rows: `[r, h]`.
        weights: `[t, k]`.
        slots: the choice that each row serves, int64 `[r]`, counted through `[t, c k]`.
        places: the row of each choice, `[t, c k]`.
    """
    (t, k), per_token = weights.shape, places.shape[1]
    sent = gather_rows(grad, slots // per_token)  # [r, h]
    choices = torch.where(slots < t * per_token, slots // per_token * k + slots % per_token % k, t * k)
    own = gather_rows(weights.flatten(), choices)
    products = (sent.to(weights.dtype) * rows).sum(dim=1)
    by_choice = gather_rows(products, places.flatten()).view(t, -1, k).sum(dim=1)
    return (sent * own[:, None]).to(rows.dtype), by_choice


@dataclass(frozen=True, slots=True)
class RowKernels:
    """The functions above, as they are or compiled."""

    gather: Callable[..., Tensor] = gather_rows
    add_up: Callable[..., Tensor] = sum_rows
    spread: Callable[..., tuple[Tensor, Tensor]] = spread_grad


PLAIN = RowKernels()


def compile_rows(compiler: Callable[..., Callable[..., Any]]) -> RowKernels:
    """Each function in one pass, compiled by `compiler`, for sizes that may change from call to call."""
    return RowKernels(compiler(gather_rows), compiler(sum_rows), compiler(spread_grad))
