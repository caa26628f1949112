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
from megaflow_trainer.model.context import Context, Dropout, Places, make_context
from megaflow_trainer.model.mlp import Mlp
from megaflow_trainer.model.moe import MoE
from megaflow_trainer.model.norm import make_norm
from megaflow_trainer.model.sockets import Sockets


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), where the MLP may be experts. `number` counts blocks from 0."""

    def __init__(self, config: ModelConfig, sockets: Sockets, number: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(config, config.hidden_dim)
        self.attention = (LatentAttention if config.is_latent else Attention)(config, sockets)
        self.mlp_norm = make_norm(config, config.hidden_dim)
        self.mlp = MoE(config, sockets, number) if config.has_experts(number) else Mlp(config, sockets)
        self.attention_dropout = Dropout(config.hidden_dropout, 2 * number + 1)
        self.mlp_dropout = Dropout(config.hidden_dropout, 2 * number + 2)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """`[b, s, h]` to `[b, s, h]`."""
        x = x + self.attention_dropout(self.attend(x, context), context)
        return x + self.mlp_dropout(self.feed(x, context), context)

    def attend(self, x: Tensor, context: Context | None) -> Tensor:
        """The first half before it is added, `[b, s, h]` to `[b, s, h]`."""
        out: Tensor = self.attention(self.attention_norm(x), context)
        return out

    def feed(self, x: Tensor, context: Context | None) -> Tensor:
        """The second half before it is added, `[b, s, h]` to `[b, s, h]`."""
        out: Tensor = self.mlp(self.mlp_norm(x), context)
        return out


class FurtherPrediction(nn.Module):
    """One depth of multi-token prediction: what is known of a token joined with the embedding of a later one."""

    def __init__(self, config: ModelConfig, sockets: Sockets, number: int) -> None:
        super().__init__()
        self.hidden_norm = make_norm(config, config.hidden_dim)
        self.embedding_norm = make_norm(config, config.hidden_dim)
        self.join = sockets.linear(2 * config.hidden_dim, config.hidden_dim, bias=False)
        self.block = Block(config, sockets, number)
        self.norm = make_norm(config, config.hidden_dim)

    def forward(self, x: Tensor, later: Tensor, context: Context | None) -> tuple[Tensor, Tensor]:
        """Hidden states and embeddings of later tokens, both `[b, s, h]`, to hidden states as they are and normed."""
        joined = torch.cat([self.hidden_norm(x), self.embedding_norm(later)], dim=-1)  # [b, s, 2h]
        x = self.block(self.join(joined), context)
        return x, self.norm(x)


class Absent(nn.Module):
    """The place of a part that another stage of the pipeline holds: hands on what it gets."""

    def forward(self, x: Tensor, *_: object) -> Tensor:
        """`x` as it is."""
        return x


class GPT(nn.Module):
    """Token ids in, loss per token out."""

    def __init__(self, config: ModelConfig, sockets: Sockets) -> None:
        super().__init__()
        assert config.vocab_size is not None, "known once the data are open"
        self.config, self.places = config, Places(config)
        self.vocab_size = config.vocab_size
        self.embedding = nn.Embedding(config.vocab_rows, config.hidden_dim)
        self.positions = None
        if config.position_kind == "learned_absolute":
            assert config.max_positions is not None, "resolved"
            self.positions = nn.Embedding(config.max_positions, config.hidden_dim)
        self.dropout = Dropout(config.hidden_dropout, 0)
        self.blocks = nn.ModuleList(Block(config, sockets, number) for number in range(config.num_layers))
        self.norm = make_norm(config, config.hidden_dim)
        self.head = None if config.tied_embeddings else nn.Linear(config.hidden_dim, config.vocab_rows, bias=False)
        self.further = nn.ModuleList(
            FurtherPrediction(config, sockets, config.num_layers + depth) for depth in range(config.num_mtp_layers)
        )
        self.loss: Callable[..., Tensor] = sockets.loss
        self.accumulating_loss: Callable[..., Tensor] | None = None
        """Takes the place of `loss` where the weights of the sum are known before it (`ops/accumulate.py`)."""
        self.side_losses: dict[str, tuple[Tensor, Tensor]] = {}
        """Losses of the last forward in training that are logged apart, by name, detached, and where there are any,
        both `[b, s]`."""

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        *,
        keys: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        weights: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Loss in nats per token, float32, `[b, s]`.

        Args:
            tokens: int64 `[b, s]`.
            labels: int64 `[b, s]`, or as `stack_labels` gives them, where tokens do not stand side by side.
            keys: int64 `[b]`, one number a sample from which its dropout follows; 0, 1, ... if not given.
            positions: int64 `[s]` on the CPU, place of each token in its sample; 0, 1, ... if not given.
            documents: int64 `[b, S]`, document of each token of the whole samples; see `make_context`.
            weights: float32 `[b, s]`, with which the losses will be summed; backward must then be of that sum.
            mask: float32 `[b, s]`, how much each token counts in the losses of routers; all alike if not given.
        """
        context = make_context(self.places, tokens, keys=keys, positions=positions, documents=documents, weights=mask)
        return self.compute_loss(self.run_blocks(self.embed(tokens, context), context), labels, context, weights)

    def embed(self, tokens: Tensor, context: Context) -> Tensor:
        """The residual stream before the first block, `[b, s, h]`."""
        x = self.embedding(tokens)  # [b, s, h]
        if self.positions is not None:
            x = x + self.positions(context.positions)
        return self.dropout(x, context)

    def run_blocks(self, x: Tensor, context: Context) -> Tensor:
        """The residual stream after the last block, before the norm, `[b, s, h]`."""
        for block in self.blocks:
            x = block(x, context)
        return x

    def compute_loss(self, x: Tensor, labels: Tensor, context: Context, weights: Tensor | None = None) -> Tensor:
        """Loss per token, `[b, s]`, from the residual stream after the last block."""
        is_stacked = labels.dim() == 3
        loss = self.project_loss(self.norm(x), labels[..., 0] if is_stacked else labels, weights)
        self.side_losses = {}
        if self.further and self.training:
            further = self.compute_further(
                x, labels if is_stacked else stack_labels(labels, len(self.further)), context
            )
            loss = loss + (further - further.detach())  # adds its gradient and the value 0
        return loss

    def compute_further(self, x: Tensor, labels: Tensor, context: Context) -> Tensor:
        """Weighted mean over depths of the losses of later tokens, `[b, s]`; 0 where no label is known.

        Args:
            x: the residual stream after the last block.
            labels: `[b, s, 1 + d]`, see `stack_labels`.
            context: of the micro-batch.
        """
        total = torch.zeros(labels.shape[:2], dtype=torch.float32, device=labels.device)
        for depth, part in enumerate(self.further, 1):
            later = self.embedding(labels[..., depth - 1].clamp(min=0))  # token i + depth
            x, normed = part(x, later, context)
            wanted = labels[..., depth]
            losses = self.project_loss(normed, wanted.clamp(min=0)).masked_fill(wanted < 0, 0)
            total = total + losses
            self.side_losses[f"mtp_{depth}"] = losses.detach(), wanted >= 0
        return total * (self.config.mtp_loss_scale / len(self.further))

    def project_loss(self, x: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Loss per token, `[b, s]`, from normed hidden states; the projection is left to the loss socket."""
        if self.accumulating_loss is not None and weights is not None and torch.is_grad_enabled():
            return self.accumulating_loss(
                x, self.output_weight, labels, weights, vocab_size=self.vocab_size, scale=self.score_scale
            )
        return self.loss(x, self.output_weight, labels, vocab_size=self.vocab_size, scale=self.score_scale)

    def compute_logits(self, tokens: Tensor) -> Tensor:
        """Scores over the padded vocabulary, `[b, s, v]`."""
        context = make_context(self.places, tokens)
        return self.project(self.norm(self.run_blocks(self.embed(tokens, context), context)))

    def project(self, x: Tensor) -> Tensor:
        """Normed hidden states `[b, s, h]` to scores `[b, s, v]`."""
        scores = F.linear(x, self.output_weight)
        return scores if self.score_scale == 1 else scores * self.score_scale

    @property
    def output_weight(self) -> Tensor:
        """The output projection, `[v, h]`."""
        return self.embedding.weight if self.head is None else self.head.weight

    @property
    def score_scale(self) -> float:
        """What scores are multiplied by: 1, or under mu-P the inverse of the width's growth."""
        base = self.config.mup_base_dim
        return 1.0 if base is None else base / self.config.hidden_dim


def stack_labels(labels: Tensor, num_further: int) -> Tensor:
    """Of each token of whole samples its label, given as `[b, S]`, and those of the `num_further` tokens behind it, -1
    where there is none; int64 `[b, S, 1 + num_further]`.
    """
    padded = F.pad(labels, (0, num_further), value=-1)
    return padded.unfold(1, 1 + num_further, 1)


def build_gpt(config: ModelConfig, sockets: Sockets, *, device: torch.device, dtype: torch.dtype) -> GPT:
    """The model with memory for its weights but no values yet; `init_weights` gives them."""
    with torch.device("meta"):
        model = GPT(config, sockets).to(dtype)
    return model if device.type == "meta" else model.to_empty(device=device)
