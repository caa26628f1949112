"""A GPT-2 style decoder: learned positions, pre-LayerNorm, GELU, biases, tied embedding.

Legend: b micro-batch, s sequence, h hidden, n heads, d head dim, f ffn, v vocabulary (padded).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaflow_trainer.config.sections import ModelConfig
from megaflow_trainer.model.sockets import Sockets


class Attention(nn.Module):
    """Multi-head causal self-attention."""

    def __init__(self, config: ModelConfig, sockets: Sockets) -> None:
        super().__init__()
        self.head_dim = config.hidden_dim // config.num_heads
        self.dropout = config.attention_dropout
        self.qkv = sockets.linear(config.hidden_dim, 3 * config.hidden_dim)
        self.proj = sockets.linear(config.hidden_dim, config.hidden_dim)
        self.core: Callable[..., Tensor] = sockets.attention

    def forward(self, x: Tensor) -> Tensor:
        """`[b, s, h]` to `[b, s, h]`."""
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, -1, self.head_dim).permute(2, 0, 3, 1, 4)  # each [b, n, s, d]
        y = self.core(q, k, v, dropout=self.dropout if self.training else 0.0)  # [b, n, s, d]
        return self.proj(y.transpose(1, 2).reshape(b, s, -1))  # [b, s, h]


class Mlp(nn.Module):
    """h -> f -> h with GELU (the tanh form, as GPT-2 was trained)."""

    def __init__(self, config: ModelConfig, sockets: Sockets) -> None:
        super().__init__()
        ffn_dim = config.ffn_dim or 4 * config.hidden_dim
        self.up = sockets.linear(config.hidden_dim, ffn_dim)
        self.down = sockets.linear(ffn_dim, config.hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        """`[b, s, h]` to `[b, s, h]`."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, sockets: Sockets) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_dim, eps=config.norm_eps)
        self.attention = Attention(config, sockets)
        self.mlp_norm = nn.LayerNorm(config.hidden_dim, eps=config.norm_eps)
        self.mlp = Mlp(config, sockets)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """`[b, s, h]` to `[b, s, h]`."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Token ids in, loss per token out."""

    def __init__(self, config: ModelConfig, sockets: Sockets) -> None:
        super().__init__()
        assert config.vocab_size is not None, "known once the data are open"
        assert config.max_positions is not None, "resolved"
        self.vocab_size = config.vocab_size
        self.embedding = nn.Embedding(config.vocab_rows, config.hidden_dim)
        self.positions = nn.Embedding(config.max_positions, config.hidden_dim)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.blocks = nn.ModuleList(Block(config, sockets) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_dim, eps=config.norm_eps)
        self.head = None if config.tied_embeddings else nn.Linear(config.hidden_dim, config.vocab_rows, bias=False)
        self.loss: Callable[..., Tensor] = sockets.loss

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Loss in nats per token, float32, `[b, s]`, from int64 `tokens` and `labels`, both `[b, s]`."""
        return self.loss(self.compute_logits(tokens), labels, vocab_size=self.vocab_size)

    def compute_logits(self, tokens: Tensor) -> Tensor:
        """Scores over the padded vocabulary, `[b, s, v]`."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]  # [b, s, h]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        weight = self.embedding.weight if self.head is None else self.head.weight
        return F.linear(self.norm(x), weight)  # [b, s, v]


def build_gpt(config: ModelConfig, sockets: Sockets, *, device: torch.device, dtype: torch.dtype) -> GPT:
    """The model with memory for its weights but no values yet; `init_weights` gives them."""
    with torch.device("meta"):
        model = GPT(config, sockets).to(dtype)
    return model if device.type == "meta" else model.to_empty(device=device)
