"""Initial weights: a pure function of the seed and a weight's name, so no layout and no device changes them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn

from megaflow_trainer.config.sections import ModelConfig
from megaflow_trainer.model.norm import NORMS


class Part(Protocol):
    """What this rank holds of a weight."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full weight."""

    def take(self, full: Tensor) -> Tensor:
        """This rank's part of the full weight."""


def init_weights(
    model: nn.Module, config: ModelConfig, *, seed: int, parts: Mapping[str, Part] = MappingProxyType({})
) -> None:
    """Fill every weight: norms 1, biases 0, matrices N(0, std), those that write into the residual stream
    N(0, std / sqrt(2 L)). Under mu-P the std of matrices inside the blocks falls with the root of the width's growth.

    A weight of which this rank holds a part is drawn in full and the part is taken, one weight at a time.
    """
    norms = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, NORMS)}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name in norms:
                weight.fill_(1.0)
            elif name.endswith(".bias"):
                weight.zero_()
            else:
                part = parts.get(name)
                full = _draw(weight.shape if part is None else part.shape, choose_std(name, config), name, seed)
                weight.copy_(full if part is None else part.take(full))


def choose_std(name: str, config: ModelConfig) -> float:
    """Standard deviation of the initial values of a matrix."""
    std = config.init_std
    if is_inner(name) and config.mup_base_dim is not None:
        std *= math.sqrt(config.mup_base_dim / config.hidden_dim)
    if config.is_output_scaled and name.endswith(("attention.proj.weight", "mlp.down.weight")):
        std /= math.sqrt(2 * config.num_layers)
    return std


def is_inner(name: str) -> bool:
    """Whether a weight is in a block, where both of a matrix's sides grow with the width."""
    return name.startswith(("blocks.", "further."))


def _draw(shape: Sequence[int], std: float, name: str, seed: int) -> Tensor:
    """Normal values on the CPU in fp32, from a generator of this weight's own."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(tuple(shape), dtype=torch.float32).normal_(0.0, std, generator=generator)
