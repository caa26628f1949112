"""Turning pairs of channels back by the angles of their tokens, in place: a Triton kernel. Imported where it is used
only. A program takes pairs of one token; each channel is read once and written once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = (1024, 4)
"""Pairs of a program, and its warps."""


@triton.jit
def turn_token(  # noqa: PLR0913  # what a kernel needs
    heads: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    num_rows: tl.tensor,
    PAIRS: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Some pairs of a token, `turn_heads_back`.

    Args:
        heads: `[t, m, d]` without gaps, any floating dtype.
        cos: float32 `[num_rows, r/2]`.
        sin: float32 `[num_rows, r/2]`.
        num_rows: tokens of the tables, of which token i of the heads has row i modulo them.
        PAIRS: of a token, those of heads that are turned.
        STEP: m d.
        WIDTH: d.
        HALF: r/2.
        IS_INTERLEAVED: whether the channels of a pair are neighbours, else r/2 apart.
        BLOCK: pairs of a program.
    """
    token = tl.program_id(0).to(tl.int64)
    pairs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = pairs < PAIRS
    channel = pairs % HALF
    row = token % num_rows * HALF + channel
    place = heads + token * STEP + pairs // HALF * WIDTH
    first = place + (2 * channel if IS_INTERLEAVED else channel)
    second = first + (1 if IS_INTERLEAVED else HALF)
    c, s = tl.load(cos + row, mask=mask, other=0.0), tl.load(sin + row, mask=mask, other=0.0)
    x = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(second, mask=mask, other=0.0).to(tl.float32)
    tl.store(first, (x * c + y * s).to(heads.dtype.element_ty), mask=mask)
    tl.store(second, (y * c - x * s).to(heads.dtype.element_ty), mask=mask)


def turn_heads_back(heads: Tensor, num_turned: int, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> None:
    """Turn the first channels of the first heads back in place.

    Args:
        heads: `[b, s, m, d]` without gaps.
        num_turned: how many heads of each token.
        cos: float32 `[s, r/2]` or `[b, 1, s, r/2]` without gaps.
        sin: the same shape.
        is_interleaved: whether the channels of a pair are neighbours, else r/2 apart.
    """
    b, s, m, d = heads.shape
    half = cos.shape[-1]
    block, num_warps = TILE
    if heads.numel() and num_turned and half:
        turn_token[(b * s, triton.cdiv(num_turned * half, block))](
            heads,
            cos,
            sin,
            cos.numel() // half,
            PAIRS=num_turned * half,
            STEP=m * d,
            WIDTH=d,
            HALF=half,
            IS_INTERLEAVED=is_interleaved,
            BLOCK=block,
            num_warps=num_warps,
        )
