"""The MLP: h -> f -> h. Legend: b micro-batch, s sequence, h hidden, f ffn."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from megaflow_trainer.config.sections import ModelConfig
from megaflow_trainer.model.context import Context
from megaflow_trainer.model.sockets import Sockets


def multiply_gate(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) up`."""
    return F.silu(gate) * up


def widen(up: nn.Module, gate: nn.Module | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The first products."""
    return up(x), None if gate is None else gate(x)


class Mlp(nn.Module):
    """h -> f -> h with GELU (the tanh form, as GPT-2 was trained) or squared ReLU; with SwiGLU a gate multiplies.

    f is that of the configuration, or `width`.
    """

    def __init__(self, config: ModelConfig, sockets: Sockets, width: int | None = None) -> None:
        super().__init__()
        h, f, bias = config.hidden_dim, width or config.ffn_width, config.linear_bias
        self.activation = config.activation
        self.multiply_gate: Callable[[Tensor, Tensor], Tensor] = multiply_gate
        self.widen: Callable[[nn.Module, nn.Module | None, Tensor], tuple[Tensor, Tensor | None]] = widen
        self.gate = sockets.linear(h, f, bias=bias) if config.activation == "swiglu" else None
        self.up = sockets.linear(h, f, bias=bias)
        self.down = sockets.linear(f, h, bias=bias)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """`[b, s, h]` to `[b, s, h]`."""
        return self.narrow(*self.widen(self.up, self.gate, x))

    def narrow(self, up: Tensor, gate: Tensor | None) -> Tensor:
        """The activation function and the last product, `[b, s, f]` to `[b, s, h]`."""
        if gate is not None:
            return self.down(self.multiply_gate(gate, up))
        if self.activation == "squared_relu":
            return self.down(F.relu(up).square())
        return self.down(F.gelu(up, approximate="tanh"))
