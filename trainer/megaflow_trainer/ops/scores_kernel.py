"""Cross entropy and its gradient, one row of scores a program: a Triton kernel. Imported where it is used only.

A row is read twice: for the largest score and the sum of exponentials, which are corrected whenever a larger score
turns up (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018), and again, last block first, for the
gradient, which is written in the place of the scores. A row of 50 k tokens has 100 KB in bf16, so that what was read
last is still in the cache. Bytes a score of 16 bits: 2 read and 2 written, and up to 2 read again.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = (4096, 8)
"""Columns that are taken at once, and warps of a program. `benches/gpu/scores.py` times others."""


@triton.jit
def _load(
    row: tl.tensor, columns: tl.tensor, scale: tl.tensor, vocab_size: tl.tensor, COLUMNS: tl.constexpr
) -> tl.tensor:
    """Scaled scores, float32; -inf beyond the vocabulary. The mask is of all columns, a multiple of 16 as a rule, so
    that accesses are wide.
    """
    x = tl.load(row + columns, mask=columns < COLUMNS, other=0.0).to(tl.float32) * scale
    return tl.where(columns < vocab_size, x, float("-inf"))


@triton.jit
def score_rows(
    scores: tl.tensor,
    target: tl.tensor,
    weights: tl.tensor,
    losses: tl.tensor,
    scale: tl.tensor,
    vocab_size: tl.tensor,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row of `score_in_place`.

    Args:
        scores: `[t, v]`, any floating dtype.
        target: int64 `[t]`.
        weights: float32 `[t]`.
        losses: float32 `[t]`.
        scale: what scores are multiplied by, positive.
        vocab_size: columns that are real tokens.
        COLUMNS: v.
        BLOCK: columns that are taken at once.
    """
    number = tl.program_id(0).to(tl.int64)
    row = scores + number * COLUMNS
    place = tl.load(target + number)
    own = tl.load(row + place).to(tl.float32) * scale
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        x = _load(row, start + tl.arange(0, BLOCK), scale, vocab_size, COLUMNS)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    tl.store(losses + number, top - own + tl.log(total))
    slope = tl.load(weights + number) * scale
    share = slope / total
    last: tl.constexpr = (COLUMNS - 1) // BLOCK * BLOCK
    for start in range(0, COLUMNS, BLOCK):
        columns = last - start + tl.arange(0, BLOCK)
        x = _load(row, columns, scale, vocab_size, COLUMNS)
        grad = tl.exp(x - top) * share - tl.where(columns == place, slope, 0.0)
        tl.store(row + columns, grad.to(scores.dtype.element_ty), mask=columns < COLUMNS)


def score_in_place(
    scores: Tensor,
    target: Tensor,
    weights: Tensor,
    losses: Tensor,
    scale: float,
    vocab_size: int,
    *,
    tile: tuple[int, int] = TILE,
) -> None:
    """Write the losses of a chunk of tokens, and the gradient of their weighted sum in the place of the scores.

    Args:
        scores: before scaling, `[t, v]` without gaps.
        target: token ids, int64 `[t]`.
        weights: with which losses are summed, float32 `[t]`.
        losses: float32 `[t]`.
        scale: what scores are multiplied by.
        vocab_size: columns that are real tokens.
        tile: columns that are taken at once, a power of 2, and warps.
    """
    block, num_warps = tile
    if len(scores):
        score_rows[(len(scores),)](
            scores, target, weights, losses, scale, vocab_size, scores.shape[1], BLOCK=block, num_warps=num_warps
        )
