"""The experts of a layer: MLPs that see some of the tokens each, computed together.

The matrices of all experts lie one above the other: `[e f, h]`, the rows of expert 0 first, each row a channel of an
expert's inner width, in `down` as in `gate` and `up`. So whole experts, and channels of an expert, are runs of rows.

Legend: r rows (tokens in the order of their experts), h hidden, e experts that this rank has, f inner width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaflow_trainer.config.sections import ModelConfig
from megaflow_trainer.model.sockets import Sockets
from megaflow_trainer.ops.grouped import Known
from megaflow_trainer.ops.rows import PLAIN


class ExpertWeight(nn.Module):
    """One matrix of every expert, `[e rows, columns]`, and a bias row for each, `[e bias_rows]` or `[e, h]`."""

    def __init__(self, rows: int, columns: int, bias_shape: tuple[int, ...] | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.bias = nn.Parameter(torch.empty(bias_shape)) if bias_shape is not None else None
        self.main_grad: Tensor | None = None
        """Where products add the gradient of `weight` themselves, `[e rows, columns]`; they do not if not given."""

    def forward(self, num_experts: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The matrices expert by expert, `[e, rows / e, columns]`, the biases, `[e, ...]`, and the main gradient."""
        bias = None if self.bias is None else self.bias.view(num_experts, -1)
        shape = (num_experts, -1, self.weight.shape[1])
        return self.weight.view(shape), bias, None if self.main_grad is None else self.main_grad.view(shape)


class Experts(nn.Module):
    """h -> f -> h in each expert, with the model's activation."""

    def __init__(self, config: ModelConfig, sockets: Sockets) -> None:
        super().__init__()
        assert config.num_experts is not None, "asked where there are experts"
        e, f, h = config.num_experts, config.expert_width, config.hidden_dim
        self.num_experts, self.activation = e, config.activation
        inner = (e * f,) if config.linear_bias else None
        self.gate = ExpertWeight(e * f, h, inner) if config.activation == "swiglu" else None
        self.up = ExpertWeight(e * f, h, inner)
        self.down = ExpertWeight(e * f, h, (e, h) if config.linear_bias else None)
        self.product = sockets.product
        self.kernels = PLAIN
        """How tokens are put in the order of experts and come back."""
        self.has_bias_turn = True
        """Whether this rank adds the bias of `down`: one of those that share an expert does."""

    def forward(self, rows: Tensor, counts: Tensor, known: Known = None) -> Tensor:
        """`[r, h]` to `[r, h]`; `counts`, int64 `[e]`, says how many rows each expert has, the first ones first, and
        `known` the same where the host knows it already or will.
        """
        sizes = self.product.prepare(counts, known)
        up = self._widen(self.up, rows, counts, sizes)
        gate = None if self.gate is None else self._widen(self.gate, rows, counts, sizes)
        return self.narrow(up, gate, counts, sizes)

    def narrow(self, up: Tensor, gate: Tensor | None, counts: Tensor, sizes: Any) -> Tensor:
        """The activation function and the last product, `[r, f]` to `[r, h]`; `sizes` are the product's."""
        inner = self.activate(up, gate)
        matrices, bias, main_grad = self.down(self.num_experts)
        y = self.product.multiply(inner, matrices, sizes, is_transposed=False, main_grad=main_grad)
        return y if bias is None else y + self._spread(bias * float(self.has_bias_turn), counts, len(y))

    def activate(self, up: Tensor, gate: Tensor | None) -> Tensor:
        """The activation function, `[r, f]`."""
        if gate is not None:
            return F.silu(gate) * up
        return F.relu(up).square() if self.activation == "squared_relu" else F.gelu(up, approximate="tanh")

    def _widen(self, stack: ExpertWeight, rows: Tensor, counts: Tensor, sizes: Any) -> Tensor:
        matrices, bias, main_grad = stack(self.num_experts)
        y = self.product.multiply(rows, matrices, sizes, is_transposed=True, main_grad=main_grad)  # [r, f]
        return y if bias is None else y + self._spread(bias, counts, len(y))

    def _spread(self, bias: Tensor, counts: Tensor, num_rows: int) -> Tensor:
        """The bias of each row's expert, `[e, ...]` to `[r, ...]`."""
        return bias.repeat_interleave(counts, dim=0, output_size=num_rows)


def count_stacked(model: nn.Module) -> dict[str, int]:
    """Weights of `model` in which matrices of experts lie one below the other, and how many lie in each here."""
    return {
        f"{name}.{key}.weight": module.num_experts
        for name, module in model.named_modules()
        if isinstance(module, Experts)
        for key, _ in module.named_children()
    }
