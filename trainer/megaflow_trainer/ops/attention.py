"""The attention core: softmax(q k^T / sqrt(d)) v for every head, causal.

Legend: b micro-batch, n heads, s sequence, d head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megaflow_trainer.ops.attention_mask import DocumentMask, make_mask
from megaflow_trainer.ops.attention_packages import PACKAGES
from megaflow_trainer.ops.registry import Entry, Need


def attend_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout: float,
    window: int | None = None,
    scale: float | None = None,
    documents: DocumentMask | None = None,
) -> Tensor:
    """Causal attention by torch's own choice of kernel.

    Args:
        q: `[b, n, s, d]`.
        k: `[b, g, s, d]`, the dtype of `q`; n is a multiple of g, and each key head serves n / g query heads in a row.
        v: `[b, g, s, e]`, the dtype of `q`.
        dropout: probability with which an attention weight is dropped; 0 in evaluation.
        window: each token sees this many last tokens, itself included; None for all.
        scale: what scores are multiplied by; None for 1 / sqrt(d).
        documents: of the samples, if tokens see those of their own document only.

    Returns:
        `[b, n, s, e]`.
    """
    is_grouped = q.shape[1] != k.shape[1]
    is_plain = documents is None and (window is None or window >= q.shape[2])
    mask = None if is_plain else _make_mask(q, window, documents)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale, enable_gqa=is_grouped
    )


def attend_flash(
    q: Tensor, k: Tensor, v: Tensor, *, dropout: float, window: int | None = None, scale: float | None = None
) -> Tensor:
    """The same by torch's flash-attention kernel and no other."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return attend_sdpa(q, k, v, dropout=dropout, window=window, scale=scale)


def attend_cudnn(
    q: Tensor, k: Tensor, v: Tensor, *, dropout: float, window: int | None = None, scale: float | None = None
) -> Tensor:
    """The same by cuDNN's kernel and no other."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return attend_sdpa(q, k, v, dropout=dropout, window=window, scale=scale)


def attend_math(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout: float,
    window: int | None = None,
    scale: float | None = None,
    documents: DocumentMask | None = None,
) -> Tensor:
    """The same written out: the reference for the others. Holds the `[b, n, s, s]` weights in memory."""
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = (q @ k.transpose(-2, -1)).to(wide) * factor  # [b, n, s, s]
    weights = scores.masked_fill(~_make_mask(q, window, documents), -math.inf).softmax(-1).to(v.dtype)
    return F.dropout(weights, dropout, training=dropout > 0) @ v


KERNELS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


@contextmanager
def prefer_kernels(device: torch.device) -> Iterator[None]:
    """Let torch's own choice on a GPU try cuDNN's kernel first: GPT-2 124M trained 5 % faster with it on an H200 than
    with torch's flash kernel (docs/performance-log.md). Where it cannot serve, the next one does.
    """
    if device.type != "cuda":
        yield
        return
    with sdpa_kernel(list(KERNELS), set_priority=True):
        yield


def _make_mask(q: Tensor, window: int | None, documents: DocumentMask | None) -> Tensor:
    """`[s, s]` or `[b, 1, s, s]`, true where the token of a row sees the token of a column."""
    length = q.shape[2]
    if documents is not None:
        return documents.make_mask(0, length, length, window)
    return make_mask(0, length, length, window, q.device)


def _find_fused_obstacle(need: Need, name: str, widest: int) -> str | None:
    """What all kernels lack that never hold the scores."""
    if need.device.type != "cuda":
        return f"{name} attention needs a CUDA GPU and this machine's device is {need.device.type}"
    if torch.cuda.get_device_capability(need.device) < (8, 0):
        return f"{name} attention needs compute capability 8.0, {torch.cuda.get_device_name(need.device)} has less"
    if need.dtype not in (torch.bfloat16, torch.float16):
        return f"{name} attention needs 16-bit weights, and without --bf16 they are fp32"
    if need.has_window:
        return f"torch's {name} attention has no sliding window"
    if need.has_documents:
        return f"torch's {name} attention has no bounds between documents"
    if need.head_dim > widest:
        return f"{name} attention takes heads up to {widest} wide, and these are {need.head_dim}"
    return None


def _flash_obstacle(need: Need) -> str | None:
    return _find_fused_obstacle(need, "flash", 256)


def _cudnn_obstacle(need: Need) -> str | None:
    return _find_fused_obstacle(need, "cudnn", 128)


ATTENTION: tuple[Entry, ...] = (
    Entry(name="sdpa", function=attend_sdpa),
    Entry(name="flash", function=attend_flash, obstacle=_flash_obstacle),
    Entry(name="cudnn", function=attend_cudnn, obstacle=_cudnn_obstacle),
    Entry(name="math", function=attend_math, is_timed=False),
    *PACKAGES,
)
