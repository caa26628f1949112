"""Initial weights: a pure function of the seed and a weight's name, so no layout and no device changes them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn

from megaflow_trainer.config.sections import ModelConfig
from megaflow_trainer.model.experts import ExpertWeight
from megaflow_trainer.model.norm import NORMS

_OUTPUTS = ("attention.proj.weight", "mlp.down.weight", "experts.down.weight", "shared.down.weight")
"""Weights that write into the residual stream."""
_HELD_BYTES = 8 << 30
"""What weights may take that are drawn at a time and not yet where they belong."""


class Rows(Protocol):
    """A run of rows."""

    @property
    def start(self) -> int:
        """The first one."""

    @property
    def length(self) -> int:
        """How many there are."""


class Part(Protocol):
    """What this rank holds of a weight."""

    @property
    def pieces(self) -> Sequence[Rows]:
        """The runs of rows it has, along the dim in which the weight is cut."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full weight."""

    def take(self, full: Tensor) -> Tensor:
        """This rank's part of the full weight."""


def init_weights(
    model: nn.Module,
    config: ModelConfig,
    *,
    seed: int,
    parts: Mapping[str, Part] = MappingProxyType({}),
    threads: int = 1,
) -> None:
    """Fill every weight: norms 1, biases 0, matrices N(0, std), those that write into the residual stream
    N(0, std / sqrt(2 L)). Under mu-P the std of matrices inside the blocks falls with the root of the width's growth.

    A weight of which this rank holds a part is drawn in full and the part is taken, as many weights at a time as there
    are threads, fewer where 8 GiB do not hold them; the matrices of experts are drawn expert by expert, those that this
    rank holds something of.
    """
    stacked = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, ExpertWeight)}
    norms = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, NORMS)}

    @torch.no_grad()  # holds in the thread that enters it
    def fill(name: str, weight: Tensor) -> None:
        if name in norms:
            weight.fill_(1.0)
        elif name.endswith(".bias"):
            weight.zero_()
        elif name in stacked:
            _draw_experts(weight, parts.get(name), config, name, seed)
        else:
            part = parts.get(name)
            full = _draw(weight.shape if part is None else part.shape, choose_std(name, config), name, seed)
            weight.copy_(full if part is None else part.take(full))

    def count_drawn(name: str, weight: Tensor) -> int:
        if name in stacked:
            return config.expert_width * weight.shape[1]
        return math.prod(parts[name].shape if name in parts else weight.shape)

    for buffer in model.buffers():  # the biases of routers
        buffer.zero_()
    named = list(model.named_parameters())
    largest = max((4 * count_drawn(name, weight) for name, weight in named), default=1)
    with ThreadPoolExecutor(max(1, min(threads, _HELD_BYTES // largest))) as pool:
        for _ in pool.map(lambda pair: fill(*pair), named):
            pass


def choose_std(name: str, config: ModelConfig) -> float:
    """Standard deviation of the initial values of a matrix."""
    std = config.init_std
    if is_inner(name) and config.mup_base_dim is not None:
        std *= math.sqrt(config.mup_base_dim / config.hidden_dim)
    if config.is_output_scaled and name.endswith(_OUTPUTS):
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


def _draw_experts(weight: Tensor, part: Part | None, config: ModelConfig, name: str, seed: int) -> None:
    """Rows of stacked experts, of those experts only that have some here."""
    f, start = config.expert_width, 0
    pieces = [(0, len(weight))] if part is None else [(piece.start, piece.length) for piece in part.pieces]
    for first, length in pieces:
        for expert in range(first // f, -(-(first + length) // f)):
            low, high = max(first, expert * f), min(first + length, (expert + 1) * f)
            full = _draw((f, weight.shape[1]), choose_std(name, config), f"{name}/{expert}", seed)
            weight[start : start + high - low].copy_(full[low - expert * f : high - expert * f])
            start += high - low
