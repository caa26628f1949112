"""A decoder built from its configuration: embedding, blocks, norm, output projection.

Legend: b micro-batch, s sequence, h hidden, v vocabulary (padded).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaflow_trainer.config.sections import ModelConfig
from megaflow_trainer.model.attention import Attention, LatentAttention
from megaflow_trainer.model.mlp import Mlp
from megaflow_trainer.model.norm import make_norm
from megaflow_trainer.model.rope import Rotary, make_rotary
from megaflow_trainer.model.sockets import Sockets


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, sockets: Sockets) -> None:
        super().__init__()
        self.attention_norm = make_norm(config, config.hidden_dim)
        self.attention = (LatentAttention if config.is_latent else Attention)(config, sockets)
        self.mlp_norm = make_norm(config, config.hidden_dim)
        self.mlp = Mlp(config, sockets)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, x: Tensor, rotary: Rotary | None = None) -> Tensor:
        """`[b, s, h]` to `[b, s, h]`."""
        x = x + self.dropout(self.attend(x, rotary))
        return x + self.dropout(self.feed(x))

    def attend(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        """The first half before it is added, `[b, s, h]` to `[b, s, h]`."""
        out: Tensor = self.attention(self.attention_norm(x), rotary)
        return out

    def feed(self, x: Tensor) -> Tensor:
        """The second half before it is added, `[b, s, h]` to `[b, s, h]`."""
        out: Tensor = self.mlp(self.mlp_norm(x))
        return out


class FurtherPrediction(nn.Module):
    """One depth of multi-token prediction: what is known of a token joined with the embedding of a later one."""

    def __init__(self, config: ModelConfig, sockets: Sockets) -> None:
        super().__init__()
        self.hidden_norm = make_norm(config, config.hidden_dim)
        self.embedding_norm = make_norm(config, config.hidden_dim)
        self.join = sockets.linear(2 * config.hidden_dim, config.hidden_dim, bias=False)
        self.block = Block(config, sockets)
        self.norm = make_norm(config, config.hidden_dim)

    def forward(self, x: Tensor, later: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        """Hidden states and embeddings of later tokens, both `[b, s, h]`, to hidden states as they are and normed."""
        joined = torch.cat([self.hidden_norm(x), self.embedding_norm(later)], dim=-1)  # [b, s, 2h]
        x = self.block(self.join(joined), rotary)
        return x, self.norm(x)


class GPT(nn.Module):
    """Token ids in, loss per token out."""

    def __init__(self, config: ModelConfig, sockets: Sockets) -> None:
        super().__init__()
        assert config.vocab_size is not None, "known once the data are open"
        self.config = config
        self.vocab_size = config.vocab_size
        self.embedding = nn.Embedding(config.vocab_rows, config.hidden_dim)
        self.positions = None
        if config.position_kind == "learned_absolute":
            assert config.max_positions is not None, "resolved"
            self.positions = nn.Embedding(config.max_positions, config.hidden_dim)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.blocks = nn.ModuleList(Block(config, sockets) for _ in range(config.num_layers))
        self.norm = make_norm(config, config.hidden_dim)
        self.head = None if config.tied_embeddings else nn.Linear(config.hidden_dim, config.vocab_rows, bias=False)
        self.further = nn.ModuleList(FurtherPrediction(config, sockets) for _ in range(config.num_mtp_layers))
        self.loss: Callable[..., Tensor] = sockets.loss
        self.side_losses: dict[str, Tensor] = {}
        """Losses of the last forward in training that are logged apart, by name, detached: `mtp_1` is `[b, s - 1]`."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Loss in nats per token, float32, `[b, s]`, from int64 `tokens` and `labels`, both `[b, s]`."""
        rotary = self.make_rotary(tokens)
        x = self.compute_hidden(tokens, rotary)
        loss = self.loss(self.project(self.norm(x)), labels, vocab_size=self.vocab_size)
        self.side_losses = {}
        if self.further and self.training:
            further = self.compute_further(x, labels, rotary)
            loss = loss + (further - further.detach())  # adds its gradient and the value 0
        return loss

    def compute_further(self, x: Tensor, labels: Tensor, rotary: Rotary | None) -> Tensor:
        """Weighted mean over depths of the losses of later tokens, `[b, s]`; 0 at the end, where no label is known."""
        total = torch.zeros_like(labels, dtype=torch.float32)
        for depth, part in enumerate(self.further, 1):
            later = self.embedding(labels.roll(1 - depth, dims=1))  # token i + depth
            x, normed = part(x, later, rotary)
            losses = self.loss(self.project(normed), labels.roll(-depth, dims=1), vocab_size=self.vocab_size)
            total = total + F.pad(losses[:, :-depth], (0, depth))
            self.side_losses[f"mtp_{depth}"] = losses[:, :-depth].detach()
        return total * (self.config.mtp_loss_scale / len(self.further))

    def compute_logits(self, tokens: Tensor) -> Tensor:
        """Scores over the padded vocabulary, `[b, s, v]`."""
        return self.project(self.norm(self.compute_hidden(tokens, self.make_rotary(tokens))))

    def make_rotary(self, tokens: Tensor) -> Rotary | None:
        """The table of rotary positions for a micro-batch."""
        return make_rotary(self.config, tokens.shape[1], tokens.device)

    def compute_hidden(self, tokens: Tensor, rotary: Rotary | None) -> Tensor:
        """The residual stream after the last block, before the norm, `[b, s, h]`."""
        x = self.embedding(tokens)  # [b, s, h]
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, rotary)
        return x

    def project(self, x: Tensor) -> Tensor:
        """Normed hidden states `[b, s, h]` to scores `[b, s, v]`; under mu-P divided by the width's growth."""
        scores = F.linear(x, self.embedding.weight if self.head is None else self.head.weight)
        base = self.config.mup_base_dim
        return scores if base is None else scores * (base / self.config.hidden_dim)


def build_gpt(config: ModelConfig, sockets: Sockets, *, device: torch.device, dtype: torch.dtype) -> GPT:
    """The model with memory for its weights but no values yet; `init_weights` gives them."""
    with torch.device("meta"):
        model = GPT(config, sockets).to(dtype)
    return model if device.type == "meta" else model.to_empty(device=device)
