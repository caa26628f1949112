"""What every part of the model is told of the tokens of a micro-batch. Legend: b micro-batch, s sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megaflow_trainer.config.sections import ModelConfig
from megaflow_trainer.model.rope import Rotary, make_rotary
from megaflow_trainer.ops.dropout import drop, number_rows


@dataclass(frozen=True, slots=True)
class Context:
    """Places of the tokens, int64 `[s]`, their rotary table, and one number a token that decides its dropout."""

    positions: Tensor
    rotary: Rotary | None
    rows: Tensor | None


def make_context(
    config: ModelConfig, tokens: Tensor, *, keys: Tensor | None = None, positions: Tensor | None = None
) -> Context:
    """The context of a micro-batch.

    Args:
        config: the model's.
        tokens: `[b, s]`, on the model's device.
        keys: int64 `[b]`, one number a sample from which its dropout follows; 0, 1, ... if not given.
        positions: int64 `[s]` on the CPU, place of each token in its sample; 0, 1, ... if not given.
    """
    if positions is None:
        positions = torch.arange(tokens.shape[1])
    rotary = make_rotary(config, positions, tokens.device)
    positions, rows = positions.to(tokens.device), None
    if config.hidden_dropout:
        keys = torch.arange(tokens.shape[0], device=tokens.device) if keys is None else keys
        rows = number_rows(keys, positions)
    return Context(positions, rotary, rows)


class Dropout(nn.Module):
    """One of the model's dropouts; `site` tells them apart."""

    def __init__(self, p: float, site: int) -> None:
        super().__init__()
        self.p, self.site = p, site

    def forward(self, x: Tensor, context: Context | None) -> Tensor:
        """`[b, s, h]` to `[b, s, h]`; unchanged in evaluation."""
        if not self.training or self.p == 0:
            return x
        assert context is not None
        assert context.rows is not None, "made where the configuration has dropout"
        return drop(x, context.rows, self.site, self.p)
