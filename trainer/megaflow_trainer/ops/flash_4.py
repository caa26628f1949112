"""Attention by flash-attn 4, wrapped as ops with their backward, so that compiled blocks stay whole.

Legend: b micro-batch, n query heads, g key/value heads, s sequence, d and e head dims, r channels that are turned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megaflow_trainer.ops.packages import FLASH_4, refusing
from megaflow_trainer.ops.rotation import put_beside_heads, turn, turn_back_

FORWARD, BACKWARD = "flash_attn.cute.flash_attn_func", "flash_attn.cute.interface._flash_attn_bwd"
"""Where its functions are."""


def attend_flash_4(
    q: Tensor, k: Tensor, v: Tensor, *, dropout: float, window: int | None = None, scale: float | None = None
) -> Tensor:
    """Causal attention by flash-attn 4; arguments and result as in `ops.attention`, without dropout."""
    assert dropout == 0, "refused with the configuration"
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    left = -1 if window is None else window - 1
    out, _ = flash_4(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), factor, left)
    return out.transpose(1, 2)


def attend_flash_4_joined(
    heads: Tensor,
    groups: int,
    tables: tuple[Tensor, Tensor, bool] | None = None,
    *,
    dropout: float,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """The same of queries, keys and values that lie side by side, as one product makes them.

    Args:
        heads: all queries, all keys and all values, `[b, s, n + 2 g, d]`.
        groups: g.
        tables: cosines and sines by which queries and keys are turned before, `[s, r/2]` or `[b, 1, s, r/2]` fp32, and
            whether the channels of a pair are neighbours.
        dropout: 0.
        window: as in `ops.attention`.
        scale: as in `ops.attention`.

    Returns:
        `[b, n, s, d]`.
    """
    assert dropout == 0, "refused with the configuration"
    factor = heads.shape[-1] ** -0.5 if scale is None else scale
    left = -1 if window is None else window - 1
    out: Tensor = _Joined.apply(heads, *(tables or (None, None, False)), groups, factor, left)
    return out.transpose(1, 2)


def _bounds(left: int) -> tuple[int | None, int | None]:
    """How many tokens before and behind it a token sees, None for all; `left` is -1 for all earlier ones."""
    return (None, None) if left < 0 else (left, 0)


@torch.library.custom_op("megaflow::flash_4", mutates_args=())
def flash_4(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int) -> tuple[Tensor, Tensor]:
    """`[b, s, n, d]`, `[b, s, g, d]`, `[b, s, g, e]` to `[b, s, n, e]` and the logarithms of the sums of exponentials,
    fp32 `[b, n, s]`. A token sees `left` earlier ones, or all if that is -1.
    """
    options = {"softmax_scale": scale, "causal": True, "window_size": _bounds(left), "return_lse": True}
    with refusing(FLASH_4, q, k, v):
        out, lse = FLASH_4.load(FORWARD)(q, k, v, **options)[:2]
    return out.contiguous(), lse.contiguous()


@flash_4.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int) -> tuple[Tensor, Tensor]:
    b, s, n, _ = q.shape
    return q.new_empty(b, s, n, v.shape[-1]), q.new_empty(b, n, s, dtype=torch.float32)


@torch.library.custom_op("megaflow::flash_4_backward", mutates_args=())
def flash_4_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, left: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, without gaps and in the order of their dims."""
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))  # else they may lie as q does
    _run_backward(grad, (q, k, v), (dq, dk, dv), out, lse, scale, left)
    return dq, dk, dv


def _run_backward(
    grad: Tensor,
    parts: Sequence[Tensor],
    grads: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    scale: float,
    left: int,
) -> None:
    """Write the gradients of queries, keys and values, wherever they lie."""
    before, behind = _bounds(left)
    options = {"softmax_scale": scale, "causal": True, "window_size_left": before, "window_size_right": behind}
    made = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    with refusing(FLASH_4, grad, *parts, *grads):
        FLASH_4.load(BACKWARD)(*parts, out, grad.contiguous(), lse, **options, **made)


@flash_4_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, left: int
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale, ctx.left = inputs
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    return (*flash_4_backward(grad, q, k, v, out, lse, ctx.scale, ctx.left), None, None)


flash_4.register_autograd(_backward, setup_context=_keep)


class _Joined(torch.autograd.Function):
    """The gradient of heads side by side is written where they lie: joining three gradients reads and writes each once
    more, and so does turning back those of queries and keys apart from it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        heads: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        is_interleaved: bool,
        groups: int,
        scale: float,
        left: int,
    ) -> Tensor:
        q, k, v = heads.split([heads.shape[2] - 2 * groups, groups, groups], dim=2)
        tables = () if cos is None or sin is None else (cos, sin)
        if tables:
            beside = [put_beside_heads(table) for table in tables]
            q, k = (turn(x, *beside, is_interleaved=is_interleaved) for x in (q, k))
        out, lse = flash_4(q, k, v, scale, left)
        ctx.save_for_backward(q, k, v, out, lse, *tables)
        ctx.is_interleaved, ctx.scale, ctx.left = is_interleaved, scale, left
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        made = flash_4_joined_backward(grad, list(ctx.saved_tensors), ctx.is_interleaved, ctx.scale, ctx.left)
        return made, None, None, None, None, None, None


@torch.library.custom_op("megaflow::flash_4_joined_backward", mutates_args=())
def flash_4_joined_backward(grad: Tensor, kept: list[Tensor], is_interleaved: bool, scale: float, left: int) -> Tensor:
    """The gradient of heads side by side, `[b, s, n + 2 g, d]` without gaps.

    Args:
        grad: of the result, `[b, s, n, d]`.
        kept: queries, keys and values as attention took them, its result and logarithms; and cosines and sines if
            queries and keys were turned by them.
        is_interleaved: whether the channels of a pair are neighbours.
        scale: of scores.
        left: as in `flash_4`.
    """
    q, k, v, out, lse, *tables = kept
    made = _make_joined(q, k)
    n, g = q.shape[2], k.shape[2]
    _run_backward(grad, (q, k, v), made.split([n, g, g], dim=2), out, lse, scale, left)
    if tables:
        turn_back_(made, n + g, *tables, is_interleaved=is_interleaved)
    return made


@flash_4_joined_backward.register_fake
def _(grad: Tensor, kept: list[Tensor], is_interleaved: bool, scale: float, left: int) -> Tensor:
    return _make_joined(kept[0], kept[1])


def _make_joined(q: Tensor, k: Tensor) -> Tensor:
    b, s, n, d = q.shape
    return q.new_empty(b, s, n + 2 * k.shape[2], d)
