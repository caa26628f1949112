"""The linear layer of blocks: a weight, a bias, and a product that can be another one than torch's.

A product is handed the weight and the bias at every call, so that whoever cuts a layer among ranks need know nothing of
how it multiplies. Where `main_grad` is set, backward adds the weight's gradient to it and the weight gets none.

Legend: t tokens, i inputs, o outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Product:
    """`x weight^T + bias` in the dtype of the weights."""

    main_grad: Tensor | None = None
    """Main gradient of the weight, `[o, i]`, wider than the weight."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`[..., i]`, `[o, i]` and `[o]` to `[..., o]`."""
        if self.main_grad is None or not torch.is_grad_enabled():
            return F.linear(x, weight, bias)
        y: Tensor = _Accumulating.apply(x, weight, bias, self.main_grad)
        return y


class Linear(nn.Linear):
    """A linear layer whose product can be replaced."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.product = Product()
        self.sharing: Callable[[Product, Tensor, Tensor, Tensor | None], Tensor] | None = None
        """How it multiplies where ranks share it: handed the product, the input, weight and bias."""

    def forward(self, x: Tensor) -> Tensor:
        """`[..., i]` to `[..., o]`."""
        if self.sharing is not None:
            return self.sharing(self.product, x, self.weight, self.bias)
        return self.product(x, self.weight, self.bias)


@torch.library.custom_op("megaflow::add_product_", mutates_args={"main_grad"})
def add_product_(main_grad: Tensor, grad: Tensor, x: Tensor) -> None:
    """`main_grad += grad^T x`: `[o, i]`, `[t, o]`, `[t, i]`; accumulated in the dtype of `main_grad`."""
    if main_grad.dtype == grad.dtype:
        main_grad.addmm_(grad.t(), x)
    elif main_grad.is_cuda and main_grad.dtype == torch.float32:
        torch.addmm(main_grad, grad.t(), x, out_dtype=torch.float32, out=main_grad)
    else:
        main_grad.add_(grad.t() @ x)


@add_product_.register_fake
def _(main_grad: Tensor, grad: Tensor, x: Tensor) -> None:
    return None


def multiply(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, main_grad: Tensor) -> Tensor:
    """Forward of a product whose weight gradient is added to `main_grad`."""
    ctx.save_for_backward(x, weight)
    ctx.main_grad, ctx.has_bias = main_grad, bias is not None
    return F.linear(x, weight, bias)


def multiply_back(
    ctx: Any, grad: Tensor, add: Callable[[Tensor, Tensor, Tensor], None]
) -> tuple[Tensor, None, Tensor | None, None]:
    """Backward of `multiply`, by an op with the arguments of `add_product_`."""
    x, weight = ctx.saved_tensors
    flat = grad.reshape(-1, grad.shape[-1])  # for both products: of two shapes the compiler writes two copies
    add(ctx.main_grad, flat, x.reshape(-1, x.shape[-1]))
    return (flat @ weight).view(x.shape), None, flat.sum(0) if ctx.has_bias else None, None


class _Accumulating(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, main_grad: Tensor) -> Tensor:
        return multiply(ctx, x, weight, bias, main_grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        return multiply_back(ctx, grad, add_product_)
