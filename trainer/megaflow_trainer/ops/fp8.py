"""Products in fp8: both factors are rounded to 8 bits, sums are in fp32, what comes out is in the dtype of the weights.

A tensor x is kept as whole units: x8 = round(x / unit) with unit = largest |x| / largest number of the format (448 in
e4m3, 57344 in e5m2), and a product is multiplied by the units of its factors. Activations and weights are e4m3;
gradients e5m2 (hybrid: more range, fewer digits) or e4m3. A layer has three products, all of which sum over the last
dim of both factors, as fp8 kernels ask for:

    y = x w^T           x8 [t, i]     w8 [o, i]       quick sums
    dx = g w            g8 [t, o]     w8^T [i, o]     exact sums in fp32
    dw = g^T x          g8^T [o, t]   x8^T [i, t]     exact sums in fp32

Where units come from (the recipe):
- tensorwise: one a tensor, from the tensor itself, which is read twice.
- delayed: one a tensor, from the largest values of past steps (`parallel/precision.py` keeps them), so that rounding
  can be part of what makes the tensor. What has grown beyond them is cut off at the largest number.
- rowwise: one for each row of either factor. Nothing is summed over a dim with several units but in dw, which
  therefore stays in the dtype of the weights.

dw with a main gradient: the fp8 product leaves fp32, which is added in a pass of its own, since fp8 kernels cannot add
to what is there. That costs 12 more bytes a weight and micro-batch than the product in bf16 which adds by itself, about
3 ps on an H200, where 16 k tokens save 20 ps.

What is kept for backward is x8 (one byte an element) and the weight itself, rounded again in backward.

Legend: t tokens, i inputs, o outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaflow_trainer.ops.linear import Product, add_product_

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRADIENTS = {"hybrid": E5M2, "e4m3": E4M3}
"""The dtype of gradients by the kind of format."""
MULTIPLE = 16
"""What the kernels ask dims of weights, and the dim that is summed over, to be a multiple of."""
_SMALLEST = 1e-12
_FIRST_ACTIVATION, _FIRST_GRADIENT = 16.0, 1.0


def find_largest(x: Tensor, dim: int | None = None) -> Tensor:
    """Largest |x|, fp32: a scalar, or along `dim`, which stays."""
    magnitude = x.abs()
    return (magnitude.amax() if dim is None else magnitude.amax(dim, keepdim=True)).float()


def find_unit(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> Tensor:
    """What 1 stands for in fp8, fp32: a scalar, or one for each run along `dim`, which stays."""
    return find_largest(x, dim).clamp(min=_SMALLEST) / torch.finfo(dtype).max


def narrow(x: Tensor, unit: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in units, rounded, row by row in memory; what is larger than the format's largest number becomes that."""
    largest = torch.finfo(dtype).max
    return (x.float() / unit).clamp(-largest, largest).to(dtype).contiguous()


def multiply(
    a: Tensor,
    b: Tensor,
    units: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    is_quick: bool = False,
) -> Tensor:
    """`a b^T` times the units, `[m, n]`.

    Args:
        a: fp8, `[m, k]`.
        b: fp8, `[n, k]`, of which at most one is e5m2.
        units: of `a`, a scalar or `[m, 1]`, and of `b`, a scalar or `[n, 1]`; both fp32 and alike.
        dtype: of the result.
        bias: `[n]`.
        is_quick: whether the kernel may add in less than fp32.
    """
    unit_a, unit_b = units
    is_rowwise = unit_a.dim() > 0
    if is_rowwise and not a.is_cuda:  # torch has no such kernel on CPUs
        y = ((a.float() * unit_a) @ (b.float() * unit_b).t()).to(dtype)
        return y if bias is None else y + bias
    fused = bias if dtype == torch.bfloat16 else None
    y = torch._scaled_mm(
        a,
        b.t(),
        scale_a=unit_a,
        scale_b=unit_b.t() if is_rowwise else unit_b,
        bias=fused,
        out_dtype=dtype,
        use_fast_accum=is_quick,
    )
    return y if bias is None or fused is not None else y + bias


@torch.library.custom_op("megaflow::keep_largest_", mutates_args={"largest"})
def keep_largest_(largest: Tensor, found: Tensor) -> None:
    """`largest = max(largest, found)`, scalars; not a number if either is."""
    torch.maximum(largest, found, out=largest)


@keep_largest_.register_fake
def _(largest: Tensor, found: Tensor) -> None:
    return None


@torch.library.custom_op("megaflow::add_fp8_product_", mutates_args={"main_grad"})
def add_fp8_product_(main_grad: Tensor, grad: Tensor, x: Tensor, unit_grad: Tensor, unit_x: Tensor) -> None:
    """`main_grad += grad x^T` times the units: fp32 `[o, i]`, fp8 `[o, t]`, fp8 `[i, t]`, scalars."""
    main_grad.add_(multiply(grad, x, (unit_grad, unit_x), torch.float32))


@add_fp8_product_.register_fake
def _(main_grad: Tensor, grad: Tensor, x: Tensor, unit_grad: Tensor, unit_x: Tensor) -> None:
    return None


def turn(x: Tensor) -> Tensor:
    """fp8 `[t, n]` to `[n, t]`, with zeros behind the last token up to a multiple of what kernels ask for."""
    missing = -x.shape[0] % MULTIPLE
    if missing:
        x = F.pad(x.view(torch.uint8), (0, 0, 0, missing)).view(x.dtype)
    return x.t().contiguous()


class _Tensorwise(torch.autograd.Function):
    """One unit a tensor. `unit_g` is that of the gradient if it is known before; `largest_g` learns what it reaches."""

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd and the compiler take tensors one by one
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        unit_x: Tensor,
        unit_w: Tensor,
        unit_g: Tensor | None,
        largest_g: Tensor | None,
        main_grad: Tensor | None,
        grad_dtype: torch.dtype,
    ) -> Tensor:
        x8, w8 = narrow(x, unit_x, E4M3), narrow(weight, unit_w, E4M3)
        ctx.save_for_backward(x8, weight, unit_x, unit_w)
        ctx.unit_g, ctx.largest_g, ctx.main_grad = unit_g, largest_g, main_grad
        ctx.grad_dtype, ctx.has_bias = grad_dtype, bias is not None
        return multiply(x8, w8, (unit_x, unit_w), x.dtype, bias=bias, is_quick=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x8, weight, unit_x, unit_w = ctx.saved_tensors
        unit_g = ctx.unit_g
        if unit_g is None:
            unit_g = find_unit(grad, ctx.grad_dtype)
        else:
            keep_largest_(ctx.largest_g, find_largest(grad))
        g8, turned_w = narrow(grad, unit_g, ctx.grad_dtype), narrow(weight.t(), unit_w, E4M3)
        grad_x = multiply(g8, turned_w, (unit_g, unit_w), grad.dtype)
        grad_w, turned_g, turned_x = None, turn(g8), turn(x8)
        if ctx.main_grad is None:
            grad_w = multiply(turned_g, turned_x, (unit_g, unit_x), weight.dtype)
        else:
            add_fp8_product_(ctx.main_grad, turned_g, turned_x, unit_g, unit_x)
        grad_bias = grad.sum(0) if ctx.has_bias else None
        return grad_x, grad_w, grad_bias, None, None, None, None, None, None


class _Rowwise(torch.autograd.Function):
    """One unit a row of either factor; the weight's gradient in the dtype of the weights."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, main_grad: Tensor | None, grad_dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grad, ctx.grad_dtype, ctx.has_bias = main_grad, grad_dtype, bias is not None
        units = find_unit(x, E4M3, 1), find_unit(weight, E4M3, 1)
        w8 = narrow(weight, units[1], E4M3)
        return multiply(narrow(x, units[0], E4M3), w8, units, x.dtype, bias=bias, is_quick=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        turned = weight.t()
        units = find_unit(grad, ctx.grad_dtype, 1), find_unit(turned, E4M3, 1)
        g8 = narrow(grad, units[0], ctx.grad_dtype)
        grad_x, grad_w = multiply(g8, narrow(turned, units[1], E4M3), units, grad.dtype), None
        if ctx.main_grad is None:
            grad_w = grad.t() @ x
        else:
            add_product_(ctx.main_grad, grad, x)
        return grad_x, grad_w, grad.sum(0) if ctx.has_bias else None, None, None


class TensorwiseProduct(Product):
    """Units from the tensors themselves. `kind`: hybrid or e4m3."""

    def __init__(self, kind: str) -> None:
        self.grad_dtype = GRADIENTS[kind]

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As `Product`."""
        rows = x.reshape(-1, x.shape[-1])
        units = find_unit(rows.detach(), E4M3), find_unit(weight.detach(), E4M3)
        y: Tensor = _Tensorwise.apply(rows, weight, bias, *units, None, None, self.main_grad, self.grad_dtype)
        return y.view(*x.shape[:-1], -1)


class RowwiseProduct(Product):
    """Units from the rows of the tensors themselves. `kind`: hybrid or e4m3."""

    def __init__(self, kind: str) -> None:
        self.grad_dtype = GRADIENTS[kind]

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As `Product`."""
        rows = x.reshape(-1, x.shape[-1])
        y: Tensor = _Rowwise.apply(rows, weight, bias, self.main_grad, self.grad_dtype)
        return y.view(*x.shape[:-1], -1)


class DelayedProduct(Product):
    """Units that are set from outside; what each tensor reaches meanwhile is kept where gradients are wanted.

    Nothing is known before the first step: activations are taken to reach 16 and gradients 1, and the format's range
    forgives that. The weight's own unit is set by whoever gives the layer its weight.
    """

    def __init__(self, kind: str, device: torch.device) -> None:
        self.grad_dtype = GRADIENTS[kind]
        firsts = (_FIRST_ACTIVATION / self.limits[0], 1 / self.limits[1], _FIRST_GRADIENT / self.limits[2])
        self.unit_x, self.unit_w, self.unit_g = (torch.tensor(first, device=device) for first in firsts)
        self.largest_x, self.largest_w, self.largest_g = (torch.zeros((), device=device) for _ in range(3))

    @property
    def limits(self) -> tuple[float, float, float]:
        """Largest numbers of the formats of inputs, weight and gradient."""
        return torch.finfo(E4M3).max, torch.finfo(E4M3).max, torch.finfo(self.grad_dtype).max

    @property
    def units(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of inputs, weight and gradient: fp32 scalars."""
        return self.unit_x, self.unit_w, self.unit_g

    @property
    def largest(self) -> tuple[Tensor, Tensor, Tensor]:
        """What inputs, weight and gradient have reached since these were set to 0: fp32 scalars."""
        return self.largest_x, self.largest_w, self.largest_g

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As `Product`."""
        rows = x.reshape(-1, x.shape[-1])
        if torch.is_grad_enabled():
            keep_largest_(self.largest_x, find_largest(rows.detach()))
            keep_largest_(self.largest_w, find_largest(weight.detach()))
        y: Tensor = _Tensorwise.apply(rows, weight, bias, *self.units, self.largest_g, self.main_grad, self.grad_dtype)
        return y.view(*x.shape[:-1], -1)
