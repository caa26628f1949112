"""Dropout whose mask is a pure function of the element's place, so that no layout of ranks and no restart changes it.

A number per token (`rows`, which holds run, sample and position) and one per channel are mixed to 31 random bits; the
element is dropped where they are below p 2^31. Whoever holds a slice of the tokens makes that slice of the mask.

Legend: b micro-batch, s sequence, h channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_GOLDEN = 0x1E3779B97F4A7C15
"""Odd, about 2^61 times the golden ratio's fraction: multiples of it are spread evenly."""


def mix(x: Tensor) -> Tensor:
    """A one-to-one scramble of int64 numbers in which every bit depends on every other (Murmur's finaliser)."""
    for factor in (-0xAE502812AA7333, -0x3B314601E57A13AD):
        x = (x ^ _shift(x, 33)) * factor
    return x ^ _shift(x, 33)


def number_rows(keys: Tensor, positions: Tensor) -> Tensor:
    """One number a token, `[b, s]` int64, from a key per sample `[b]` and the tokens' places `[s]`, both int64."""
    return mix(mix(keys)[:, None] + positions * _GOLDEN)


def drop(x: Tensor, rows: Tensor, site: int, p: float) -> Tensor:
    """Dropout of `x`, `[b, s, h]`, with probability p; what is kept is divided by 1 - p.

    Args:
        x: any float dtype.
        rows: `[b, s]` int64 from `number_rows`.
        site: which of the model's dropouts this is; each has a mask of its own.
        p: in [0, 1); 0 returns `x`.
    """
    if p == 0:
        return x
    kept: Tensor = _Drop.apply(x, rows, site, p)
    return kept


def jitter(x: Tensor, rows: Tensor, site: int, size: float) -> Tensor:
    """`x`, `[b, s, h]`, each element times a random number in [1 - size, 1 + size) that follows from its place."""
    bits = draw_bits(rows, site, x.shape[-1])
    return x * (1 - size + bits.to(x.dtype) * (2 * size / 2**31))


def draw_scores(rows: Tensor, site: int, num_channels: int, dtype: torch.dtype) -> Tensor:
    """Random numbers between -1 and 1, evenly spread, that follow from their places, `[b, s, h]`."""
    return draw_bits(rows, site, num_channels).to(dtype) * (2 / 2**31) - 1


def make_mask(rows: Tensor, site: int, num_channels: int, p: float) -> Tensor:
    """`[b, s, h]` bool, true where an element is kept."""
    return draw_bits(rows, site, num_channels) >= round(p * 2**31)


def draw_bits(rows: Tensor, site: int, num_channels: int) -> Tensor:
    """31 random bits for each place, `[b, s, h]` int32."""
    row = mix(rows + _wrap((site + 1) * _GOLDEN)).to(torch.int32)  # [b, s]
    channel = mix(_count(num_channels, rows.device) * _GOLDEN + 1).to(torch.int32)  # [h]
    x = row[..., None] ^ channel
    for shift, factor in ((16, 0x7FEB352D), (15, -0x7B935975)):  # a 32-bit scramble: products wrap
        x = (x ^ _shift(x, shift)) * factor
    return (x ^ _shift(x, 16)) & 0x7FFFFFFF


def _count(length: int, device: torch.device) -> Tensor:
    """0, 1, ..., whose products wrap: of a plain `arange` torch's compiler makes indices, which it takes never to."""
    return torch.arange(length, device=device) & (2**62 - 1)


def _wrap(number: int) -> int:
    """A whole number as 64 signed bits hold it."""
    return (number + 2**63) % 2**64 - 2**63


def _shift(x: Tensor, count: int) -> Tensor:
    """Logical shift to the right: zeros come in, whatever the sign."""
    width = torch.iinfo(x.dtype).bits
    return (x >> count) & ((1 << (width - count)) - 1)


class _Drop(torch.autograd.Function):
    """Keeps one byte an element for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, site: int, p: float) -> Tensor:
        mask = make_mask(rows, site, x.shape[-1], p)
        ctx.save_for_backward(mask)
        ctx.scale = 1 / (1 - p)
        return x * mask * ctx.scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (mask,) = ctx.saved_tensors
        return grad * mask * ctx.scale, None, None, None
