"""The attention core: softmax(q k^T / sqrt(d)) v for every head, causal.

Legend: b micro-batch, n heads, s sequence, d head dim.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megaflow_trainer.ops.registry import Entry, Need


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor, *, dropout: float) -> Tensor:
    """Causal attention by torch's own choice of kernel.

    Args:
        q: `[b, n, s, d]`.
        k: `[b, n, s, d]`, the dtype of `q`.
        v: `[b, n, s, d]`, the dtype of `q`.
        dropout: probability with which an attention weight is dropped; 0 in evaluation.

    Returns:
        `[b, n, s, d]`.
    """
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


def attend_flash(q: Tensor, k: Tensor, v: Tensor, *, dropout: float) -> Tensor:
    """The same by torch's flash-attention kernel and no other."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return attend_sdpa(q, k, v, dropout=dropout)


def attend_math(q: Tensor, k: Tensor, v: Tensor, *, dropout: float) -> Tensor:
    """The same written out: the reference for the others. Holds the `[b, n, s, s]` weights in memory."""
    scores = (q @ k.transpose(-2, -1)).float() / math.sqrt(q.shape[-1])  # [b, n, s, s]
    is_future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(is_future, -math.inf).softmax(-1).to(v.dtype)
    return F.dropout(weights, dropout, training=dropout > 0) @ v


def _flash_obstacle(need: Need) -> str | None:
    if need.device.type != "cuda":
        return "flash attention needs a CUDA GPU and this machine's device is " + need.device.type
    if torch.cuda.get_device_capability(need.device) < (8, 0):
        return f"flash attention needs compute capability 8.0, {torch.cuda.get_device_name(need.device)} has less"
    if need.dtype not in (torch.bfloat16, torch.float16):
        return "flash attention needs 16-bit weights, and without --bf16 they are fp32"
    return f"flash attention takes heads up to 256 wide, and these are {need.head_dim}" if need.head_dim > 256 else None


ATTENTION: tuple[Entry, ...] = (
    Entry(name="sdpa", function=attend_sdpa),
    Entry(name="flash", function=attend_flash, obstacle=_flash_obstacle),
    Entry(name="math", function=attend_math),
)
