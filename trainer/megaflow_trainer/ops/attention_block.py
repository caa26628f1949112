"""Attention of a run of queries to a run of keys, with what is needed to merge several such blocks.

A block gives the result and the logarithm of its sum of exponentials, `lse`; its backward takes both of the *whole*
attention. torch's flash kernels have exactly that; where they cannot be used (fp32 on a GPU, fp64, a window, bounds
between documents) the block is written out, which holds its `[b, n, queries, keys]` weights in memory.

Legend: b micro-batch, n query heads, g key/value heads, d and e head dims.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ATEN = torch.ops.aten

Numbers = tuple[Tensor, Tensor]
"""The documents of a block's queries and of its keys, int64 `[b, s]` each."""


def attend_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    offset: int,
    window: int | None,
    scale: float,
    documents: Numbers | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of one run of tokens to an equally long one.

    Args:
        q: `[b, n, s, d]`.
        k: `[b, g, s, d]`; n is a multiple of g.
        v: `[b, g, s, e]`.
        offset: how many tokens the queries begin after the keys: 0, or at least s (all keys are seen).
        window: each token sees this many last tokens, itself included; None for all.
        scale: what scores are multiplied by.
        documents: if tokens see those of their own document only.

    Returns:
        Result `[b, n, s, e]` and lse `[b, n, s]`, both fp32 (fp64 from fp64).
    """
    k, v = _repeat(q, k, v)
    wide = torch.promote_types(q.dtype, torch.float32)
    if documents is None and _has_flash(q, v, window):
        out, lse = _flash(q, k, v, is_causal=offset == 0, scale=scale)
        return out.to(wide), lse.to(wide)
    scores = _score(q, k, offset, window, scale, documents)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.clamp(min=torch.finfo(wide).min)[..., None]).exp()
    return weights @ v.to(wide), lse


def attend_block_backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    whole: tuple[Tensor, Tensor],
    *,
    offset: int,
    window: int | None,
    scale: float,
    documents: Numbers | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a block adds to the gradients of its queries, keys and values, fp32 (fp64 from fp64).

    Args:
        grad: of the whole result, `[b, n, s, e]`.
        inputs: the block's queries, keys and values.
        whole: result `[b, n, s, e]` and lse `[b, n, s]` of the whole attention of these queries.
        offset: as in `attend_block`.
        window: as in `attend_block`.
        scale: as in `attend_block`.
        documents: as in `attend_block`.
    """
    q, k_given, v_given = inputs
    k, v = _repeat(q, k_given, v_given)
    out, lse = whole
    wide = torch.promote_types(q.dtype, torch.float32)
    if documents is None and _has_flash(q, v, window):
        parts = _flash_backward(grad, (q, k, v), whole, is_causal=offset == 0, scale=scale)
        grad_q, grad_k, grad_v = (part.to(wide) for part in parts)
    else:
        weights = (_score(q, k, offset, window, scale, documents) - lse[..., None]).exp()  # [b, n, s, s]
        wide_grad = grad.to(wide)
        grad_v = weights.transpose(-2, -1) @ wide_grad
        slope = wide_grad @ v.to(wide).transpose(-2, -1) - (wide_grad * out.to(wide)).sum(-1, keepdim=True)
        slope = weights * slope * scale
        grad_q, grad_k = slope @ k.to(wide), slope.transpose(-2, -1) @ q.to(wide)
    return grad_q, _fold(grad_k, k_given), _fold(grad_v, v_given)


def _repeat(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, one head for each query head."""
    copies = q.shape[1] // k.shape[1]
    return (k, v) if copies == 1 else (k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1))


def _fold(grad: Tensor, given: Tensor) -> Tensor:
    """Gradients of the copies of a key/value head, added."""
    return grad.unflatten(1, (given.shape[1], -1)).sum(2)


def _score(q: Tensor, k: Tensor, offset: int, window: int | None, scale: float, documents: Numbers | None) -> Tensor:
    """Scores, -inf where a key is not seen, `[b, n, s, s]` fp32 (fp64 from fp64)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-2, -1)).to(wide) * scale
    distance = torch.arange(q.shape[2], device=q.device)[:, None] + offset - torch.arange(k.shape[2], device=q.device)
    is_hidden = distance < 0
    if window is not None:
        is_hidden = is_hidden | (distance >= window)
    if documents is not None:
        is_hidden = is_hidden | (documents[0][:, None, :, None] != documents[1][:, None, None, :])
    return scores.masked_fill(is_hidden, -math.inf)


def _has_flash(q: Tensor, v: Tensor, window: int | None) -> bool:
    if window is not None or q.shape[-1] != v.shape[-1]:
        return False
    if q.device.type == "cuda":
        return q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256
    return q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16)


def _flash(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
        return out, lse
    found = _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)
    return found[0], found[1][..., : q.shape[2]]


def _flash_backward(
    grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], whole: tuple[Tensor, Tensor], *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = inputs
    out, lse = whole
    if q.device.type == "cpu":
        parts = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse.float(), 0.0, is_causal, scale=scale
        )
    else:
        length, state = q.shape[2], torch.zeros((), dtype=torch.int64, device=q.device)
        packed = (None, None)  # bounds of packed sequences; an empty tensor would be taken for some
        parts = _ATEN._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), *packed, length, length, 0.0, is_causal, state, state, scale=scale
        )
    return parts[0], parts[1], parts[2]
