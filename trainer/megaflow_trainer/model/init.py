"""Initial weights: a pure function of the seed and a weight's name, so no layout and no device changes them."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from megaflow_trainer.config.sections import ModelConfig


def init_weights(model: nn.Module, config: ModelConfig, *, seed: int) -> None:
    """Fill every weight: norms 1, biases 0, matrices N(0, std), those that write into the residual stream
    N(0, std / sqrt(2 L)).
    """
    norms = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    scaled = config.init_std / math.sqrt(2 * config.num_layers)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name in norms:
                weight.fill_(1.0)
            elif name.endswith(".bias"):
                weight.zero_()
            else:
                is_residual = name.endswith(("attention.proj.weight", "mlp.down.weight"))
                weight.copy_(_draw(weight, scaled if is_residual else config.init_std, name, seed))


def _draw(weight: Tensor, std: float, name: str, seed: int) -> Tensor:
    """Normal values on the CPU in fp32, from a generator of this weight's own."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(weight.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
