"""Turning pairs of channels by angles, their gradients, and gradients that lie among others.

Legend: b micro-batch, n heads, s sequence, d head dim, r channels that are turned (the first r of d).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megaflow_trainer.ops.trial import try_kernel


def turn(x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> Tensor:
    """The first r channels turned, in fp32 inside.

    Args:
        x: `[..., d]`.
        cos: fp32 `[..., r/2]`, of shapes that broadcast.
        sin: the same shape.
        is_interleaved: whether the channels of a pair are neighbours, else r/2 apart.
    """
    r = 2 * cos.shape[-1]
    turned, rest = x[..., :r], x[..., r:]
    wide = turned.to(torch.promote_types(x.dtype, torch.float32))
    if is_interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide[..., : r // 2], wide[..., r // 2 :]
    parts = (first * cos - second * sin, second * cos + first * sin)
    out = torch.stack(parts, -1).flatten(-2) if is_interleaved else torch.cat(parts, -1)
    return torch.cat([out.to(x.dtype), rest], -1) if rest.shape[-1] else out.to(x.dtype)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> Tensor:
    """`turn`, differentiable in x with a gradient in one expression."""
    turned: Tensor = _Rotation.apply(x, cos, sin, is_interleaved)
    return turned


class _Rotation(torch.autograd.Function):
    """Gradients are turned back by the same angles: 12.5 ms of a step of Llama 1.3B on an H200, where what autograd
    derives from slices and concatenations took 26.5. Both channels of a pair in one expression, so that a compiler can
    join rotation and the gradient of the projection's result, were slower (39 ms for 24.6 of two kernels).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.is_interleaved = is_interleaved
        return turn(x, cos, sin, is_interleaved=is_interleaved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return turn(grad, cos, -sin, is_interleaved=ctx.is_interleaved), None, None, None


def put_beside_heads(table: Tensor) -> Tensor:
    """A table `[s, r/2]` or `[b, 1, s, r/2]` for heads that come behind tokens, `[b, s, n, d]`."""
    return table[:, None] if table.dim() == 2 else table.transpose(1, 2)


def turn_back_(heads: Tensor, num_turned: int, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> None:
    """Turn gradients of the first heads back in place, by a kernel where it can be made.

    Args:
        heads: `[b, s, m, d]` without gaps.
        num_turned: how many heads of each token.
        cos: fp32 `[s, r/2]` or `[b, 1, s, r/2]`.
        sin: the same shape.
        is_interleaved: as in `turn`.
    """
    run, tables = turn_back_plainly, (cos.contiguous(), sin.contiguous())
    if heads.is_cuda:
        _, _, m, d = heads.shape
        half = cos.shape[-1]
        rows = cos.numel() // half
        kind = rows if rows == 1 else 16 if rows % 16 == 0 else 5
        run = _find_kernel(heads.device, heads.dtype, (kind, m, d, num_turned, half), is_interleaved) or run
    run(heads, num_turned, *tables, is_interleaved=is_interleaved)


def turn_back_plainly(heads: Tensor, num_turned: int, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> None:
    """`turn_back_` in plain torch."""
    part, cos, sin = heads[:, :, :num_turned], put_beside_heads(cos), put_beside_heads(sin)
    part.copy_(turn(part, cos, -sin, is_interleaved=is_interleaved))


@functools.cache
def _find_kernel(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], is_interleaved: bool
) -> Callable[..., None] | None:
    """The kernel, compiled and compared with plain torch once for each form that Triton makes of it; None, and a
    warning, where it fails.

    Args:
        device: a GPU.
        dtype: of the heads.
        shape: rows of the tables, of which Triton sees whether it is 1 or a multiple of 16; heads, d, heads that are
            turned, r/2.
        is_interleaved: as in `turn`.
    """

    def make() -> tuple[Callable[..., None], bool]:
        from megaflow_trainer.ops.rotation_kernel import turn_heads_back

        return turn_heads_back, is_right(turn_heads_back, device, dtype, shape, is_interleaved=is_interleaved)

    found, why = try_kernel(make)
    if found is None:
        _tell(f"a kernel could not be made: {why}")
        return None
    run, is_same = found
    if not is_same:
        _tell(f"the kernel that this version of Triton makes gives wrong gradients in {dtype}")
        return None
    return run


def _tell(why: str) -> None:
    warnings.warn(f"gradients of rotated heads are turned back by more passes than one, since {why}", stacklevel=4)


def is_right(
    run: Callable[..., None], device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], *, is_interleaved: bool
) -> bool:
    """Whether a kernel's results are within two units of the last place of those of plain torch, for two samples."""
    rows, m, d, num_turned, half = shape
    steps = torch.arange(2 * rows * m * d, device=device, dtype=torch.float32)
    own = (3 * (steps * 0.37).sin()).view(2, rows, m, d).to(dtype)
    angles = torch.outer(torch.arange(1, rows + 1, device=device), torch.arange(1, half + 1, device=device) * 0.11)
    wanted, tables = own.clone(), (1.1 * angles.cos(), 1.1 * angles.sin())
    run(own, num_turned, *tables, is_interleaved=is_interleaved)
    turn_back_plainly(wanted, num_turned, *tables, is_interleaved=is_interleaved)
    return torch.allclose(own.float(), wanted.float(), rtol=2 * torch.finfo(dtype).eps, atol=2e-6)
