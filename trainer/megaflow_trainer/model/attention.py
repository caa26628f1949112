"""Causal self-attention: one head of keys and values for each query head or for a group of them, or a latent vector.

Legend: b micro-batch, s sequence, h hidden, n query heads, g key/value heads, d head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megaflow_trainer.config.sections import ModelConfig
from megaflow_trainer.model.context import Context
from megaflow_trainer.model.norm import make_norm
from megaflow_trainer.model.rope import Rotary, rotate, rotate_both, score_growth
from megaflow_trainer.model.sockets import Sockets
from megaflow_trainer.ops.attention_mask import DocumentMask


class Attention(nn.Module):
    """Multi-head, grouped or multi-query attention. Rows of `qkv`: all query heads, all key heads, all value heads."""

    def __init__(self, config: ModelConfig, sockets: Sockets) -> None:
        super().__init__()
        self.head_dim, self.num_kv_heads = config.head_width, config.kv_heads
        self.dropout = config.attention_dropout
        width = config.num_heads * self.head_dim
        qkv_width = width + 2 * self.num_kv_heads * self.head_dim
        self.qkv = sockets.linear(config.hidden_dim, qkv_width, bias=config.has_qkv_bias)
        self.q_norm = make_norm(config, self.head_dim) if config.qk_norm else None
        self.k_norm = make_norm(config, self.head_dim) if config.qk_norm else None
        self.proj = sockets.linear(width, config.hidden_dim, bias=config.linear_bias)
        self.turn: Callable[[Tensor, Tensor, Rotary], tuple[Tensor, Tensor]] = rotate_both
        self.core: Callable[..., Tensor] = sockets.attention
        self.joined = sockets.joined
        self.options = core_options(config)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """`[b, s, h]` to `[b, s, h]`; where ranks divide tokens, their own before and behind, all between."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # [b, s, n + 2g, d]
        rotary, documents = (None, None) if context is None else (context.rotary, context.documents)
        is_plain = self.q_norm is None and documents is None and (rotary is None or self.turn is rotate_both)
        if self.joined is not None and is_plain:
            tables = None if rotary is None else (rotary.cos, rotary.sin, rotary.is_interleaved)
            y = self.joined(heads, self.num_kv_heads, tables, dropout=self._dropout_now(), **self.options)
            return self.proj(y.transpose(1, 2).flatten(2))
        g = self.num_kv_heads
        q, k, v = heads.transpose(1, 2).split([heads.shape[2] - 2 * g, g, g], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = self.turn(q, k, rotary)
        return self.mix(q, k, v, documents)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, documents: DocumentMask | None = None) -> Tensor:
        """The core and the last product: queries `[b, n, s, d]`, keys and values `[b, g, s, d]` to `[b, s, h]`."""
        options = self.options if documents is None else self.options | {"documents": documents}
        y = self.core(q, k, v, dropout=self._dropout_now(), **options)  # [b, n, s, d]
        return self.proj(y.transpose(1, 2).flatten(2))

    def _dropout_now(self) -> float:
        return self.dropout if self.training else 0.0


class LatentAttention(nn.Module):
    """Multi-latent attention: queries, keys and values grow from narrow vectors; a part of each head is rotated.

    The rotated key part is one for all heads, and comes beside the latent vector from the same projection.
    """

    def __init__(self, config: ModelConfig, sockets: Sockets) -> None:
        super().__init__()
        h, n, bias = config.hidden_dim, config.num_heads, config.linear_bias
        self.num_heads, self.dropout = n, config.attention_dropout
        self.qk_dim, self.rotary_dim, self.v_dim = config.qk_dim, config.qk_rotary_dim, config.v_dim
        self.latent_dim = config.kv_latent_dim
        q_width = n * (self.qk_dim + self.rotary_dim)
        self.q_down = self.q_norm = None
        if config.q_latent_dim is not None:
            self.q_down = sockets.linear(h, config.q_latent_dim, bias=bias)
            self.q_norm = make_norm(config, config.q_latent_dim)
        self.q_up = sockets.linear(config.q_latent_dim or h, q_width, bias=bias)
        self.kv_down = sockets.linear(h, self.latent_dim + self.rotary_dim, bias=bias)
        self.kv_norm = make_norm(config, self.latent_dim)
        self.kv_up = sockets.linear(self.latent_dim, n * (self.qk_dim + self.v_dim), bias=bias)
        self.proj = sockets.linear(n * self.v_dim, h, bias=bias)
        self.core: Callable[..., Tensor] = sockets.attention
        self.options = core_options(config)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """`[b, s, h]` to `[b, s, h]`."""
        assert context is not None
        assert context.rotary is not None, "checked with the configuration"
        rotary = context.rotary
        q_in = x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x))
        q = self.q_up(q_in)
        b, s, _ = q.shape
        q = q.view(b, s, self.num_heads, -1).transpose(1, 2)  # [b, n, s, qk + r]
        latent, k_turned = self.kv_down(x).split([self.latent_dim, self.rotary_dim], dim=-1)
        kv = self.kv_up(self.kv_norm(latent)).view(b, s, self.num_heads, -1).transpose(1, 2)
        k, v = kv.split([self.qk_dim, self.v_dim], dim=-1)  # [b, n, s, qk], [b, n, s, v]
        q_plain, q_turned = q.split([self.qk_dim, self.rotary_dim], dim=-1)
        k_turned = rotate(k_turned.unsqueeze(1), rotary).expand(-1, self.num_heads, -1, -1)
        q = torch.cat([q_plain, rotate(q_turned, rotary)], dim=-1)
        k = torch.cat([k, k_turned], dim=-1)
        return self.mix(q, k, v, context.documents)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, documents: DocumentMask | None = None) -> Tensor:
        """The core and the last product: queries and keys `[b, n, s, qk + r]`, values `[b, n, s, v]` to `[b, s, h]`."""
        options = self.options if documents is None else self.options | {"documents": documents}
        y = self.core(q, k, v, dropout=self.dropout if self.training else 0.0, **options)  # [b, n, s, v]
        return self.proj(y.transpose(1, 2).flatten(2))


def core_options(config: ModelConfig) -> dict[str, Any]:
    """What an attention core is told beyond q, k, v: nothing for plain causal attention."""
    options: dict[str, Any] = {} if config.window is None else {"window": config.window}
    growth = score_growth(config)
    if growth != 1.0:
        options["scale"] = growth / math.sqrt(config.qk_dim + config.qk_rotary_dim)
    return options
