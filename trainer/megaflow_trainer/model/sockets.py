"""Where something else can be plugged into the model without editing its maths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from megaflow_trainer.ops.attention import attend_sdpa
from megaflow_trainer.ops.cross_entropy import linear_cross_entropy
from megaflow_trainer.ops.grouped import LOOP, Product
from megaflow_trainer.ops.linear import Linear


@dataclass(frozen=True, kw_only=True, slots=True)
class Sockets:
    """The linear layer, the attention core, the products of experts and the loss with the output projection, each with
    its local default. The dispatcher of experts is the socket of a layer (`MoE.dispatch`).
    """

    linear: Callable[..., nn.Module] = Linear
    attention: Callable[..., Tensor] = attend_sdpa
    joined: Callable[..., Tensor] | None = None
    """The same of heads side by side, where the core has it (`ops.registry.Entry`)."""
    product: Product = LOOP
    loss: Callable[..., Tensor] = linear_cross_entropy
