"""Cross entropy per token. Legend: b micro-batch, s sequence, h hidden, v vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, *, vocab_size: int, scale: float) -> Tensor:
    """Cross entropy of the scores `scale * x weight^T`.

    Args:
        x: normed hidden states, `[b, s, h]`.
        weight: output projection, `[v_padded, h]`.
        target: token ids, int64, `[b, s]`.
        vocab_size: rows of `weight` that are real tokens.
        scale: what scores are multiplied by.

    Returns:
        Loss in nats per token, float32 (float64 from float64), `[b, s]`.
    """
    logits = F.linear(x, weight)
    return cross_entropy(logits if scale == 1 else logits * scale, target, vocab_size=vocab_size)


def cross_entropy(logits: Tensor, target: Tensor, *, vocab_size: int) -> Tensor:
    """Cross entropy over the first `vocab_size` columns; what lies behind them is padding and takes no part.

    Args:
        logits: scores, `[b, s, v_padded]`, any float dtype.
        target: token ids, int64, `[b, s]`.
        vocab_size: columns that are real tokens.

    Returns:
        Loss in nats per token, float32 (float64 from float64), `[b, s]`.
    """
    scores = logits[..., :vocab_size]  # [b, s, v]
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return F.cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="none").view_as(target)
