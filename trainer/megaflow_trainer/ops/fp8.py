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
- delayed: one a tensor, from the largest values of past steps (`parallel/precision.py` keeps them), so that a tensor is
  read once. What has grown beyond them is cut off at the largest number.
- rowwise: one for each row of either factor. Nothing is summed over a dim with several units but in dw, which
  therefore stays in the dtype of the weights.

dw with a main gradient: the fp8 product is added in a pass of its own, since fp8 kernels cannot add to what is there.
That costs 8 more bytes a weight and micro-batch than the product in bf16 which adds by itself (4 where the main
gradient is in 16 bits), about 2 ps on an H200, where 16 k tokens save 20 ps.

Rounding (`ops/fp8_cast.py`), tensorwise and delayed: one pass over inputs and gradients writes them both ways, as they
lie and turned, and sums the gradient of the bias meanwhile. What is kept for backward is x8^T (one byte an element,
tokens filled up to a multiple of 16) and the weight itself, of which backward rounds the turned one. Rowwise keeps x.

Legend: t tokens, i inputs, o outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megaflow_trainer.ops.fp8_cast import (
    E4M3,
    E5M2,
    find_largest,
    narrow,
    narrow_,
    narrow_both,
    narrow_both_,
    narrow_turned,
)
from megaflow_trainer.ops.linear import Product, add_product_

GRADIENTS = {"hybrid": E5M2, "e4m3": E4M3}
"""The dtype of gradients by the kind of format."""
SMALLEST = 1e-12
"""What the largest value of a tensor is taken for if that is smaller."""
_FIRST_ACTIVATION = 64.0
_FIRST_GRADIENT = {E5M2: 1024.0, E4M3: 64.0}
"""What delayed units take activations and gradients to reach before any is known. Gradients are those of sums over
tokens, and norms of small inputs, as embeddings are at first, widen them: in models of 16 layers they pass 1, and what
is cut off there loses a third of them. Too wide costs less: values that are a thousandth of it keep their bits.
"""


def find_unit(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> Tensor:
    """What 1 stands for in fp8, fp32: a scalar, or one for each run along `dim`, which stays."""
    return find_largest(x, dim).clamp(min=SMALLEST) / torch.finfo(dtype).max


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


@torch.library.custom_op("megaflow::add_fp8_product_", mutates_args={"main_grad"})
def add_fp8_product_(main_grad: Tensor, grad: Tensor, x: Tensor, unit_grad: Tensor, unit_x: Tensor) -> None:
    """`main_grad += grad x^T` times the units: `[o, i]`, fp8 `[o, t]`, fp8 `[i, t]`, scalars.

    The product, summed in fp32, is rounded to the dtype of `main_grad`: 8 bytes a weight of 16 bits (2 written, 4 read,
    2 written), by kernels that torch has for equal dtypes. Left in fp32 it would be 12 in a kernel of its own. What the
    rounding of the product loses, 2^-9 of it in bf16, is of the order of what rounding the sum loses anyway.
    """
    dtype = main_grad.dtype if main_grad.element_size() == 2 else torch.float32
    main_grad.add_(multiply(grad, x, (unit_grad, unit_x), dtype))


@add_fp8_product_.register_fake
def _(main_grad: Tensor, grad: Tensor, x: Tensor, unit_grad: Tensor, unit_x: Tensor) -> None:
    return None


class _Tensorwise(torch.autograd.Function):
    """One unit a tensor, of factors that are rounded already.

    `x` and `weight` are what gradients are of. `turned_x`, `x` with its tokens last, is None where none are wanted.
    `unit_g` is that of the gradient if it is known before; `largest_g` learns what it reaches.
    """

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd and the compiler take tensors one by one
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        x8: Tensor,
        turned_x: Tensor | None,
        w8: Tensor,
        unit_x: Tensor,
        unit_w: Tensor,
        unit_g: Tensor | None,
        largest_g: Tensor | None,
        main_grad: Tensor | None,
        grad_dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(turned_x, weight, unit_x, unit_w)
        ctx.unit_g, ctx.largest_g, ctx.main_grad = unit_g, largest_g, main_grad
        ctx.grad_dtype, ctx.has_bias = grad_dtype, bias is not None
        return multiply(x8, w8, (unit_x, unit_w), x.dtype, bias=bias, is_quick=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        turned_x, weight, unit_x, unit_w = ctx.saved_tensors
        if ctx.unit_g is None:
            unit_g = find_unit(grad, ctx.grad_dtype)
            g8, turned_g, sums = narrow_both(grad, unit_g, ctx.grad_dtype, ctx.has_bias)
        else:
            unit_g = ctx.unit_g
            g8, turned_g, sums = narrow_both_(grad, unit_g, ctx.largest_g, ctx.grad_dtype, ctx.has_bias)
        grad_x = multiply(g8, narrow_turned(weight, unit_w, E4M3), (unit_g, unit_w), grad.dtype)
        grad_w = None
        if ctx.main_grad is None:
            grad_w = multiply(turned_g, turned_x, (unit_g, unit_x), weight.dtype)
        else:
            add_fp8_product_(ctx.main_grad, turned_g, turned_x, unit_g, unit_x)
        return grad_x, grad_w, sums if ctx.has_bias else None, *(None for _ in range(9))


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
        plain, own, turned_x = rows.detach(), weight.detach(), None
        units = find_unit(plain, E4M3), find_unit(own, E4M3)
        if torch.is_grad_enabled():
            x8, turned_x, _ = narrow_both(plain, units[0], E4M3)
        else:
            x8 = narrow(plain, units[0], E4M3)
        rounded = x8, turned_x, narrow(own, units[1], E4M3)
        y: Tensor = _Tensorwise.apply(rows, weight, bias, *rounded, *units, None, None, self.main_grad, self.grad_dtype)
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

    Nothing is known before the first step: what activations and gradients reach is taken to be wide, which the range of
    the formats forgives. The weight's own unit is set by whoever gives the layer its weight.
    """

    def __init__(self, kind: str, device: torch.device) -> None:
        self.grad_dtype = GRADIENTS[kind]
        reached = _FIRST_ACTIVATION, 1.0, _FIRST_GRADIENT[self.grad_dtype]
        firsts = (most / limit for most, limit in zip(reached, self.limits, strict=True))
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
        plain, own, turned_x = rows.detach(), weight.detach(), None
        if torch.is_grad_enabled():
            x8, turned_x, _ = narrow_both_(plain, self.unit_x, self.largest_x, E4M3)
            w8 = narrow_(own, self.unit_w, self.largest_w, E4M3)
        else:
            x8, w8 = narrow(plain, self.unit_x, E4M3), narrow(own, self.unit_w, E4M3)
        rounded = x8, turned_x, w8
        y: Tensor = _Tensorwise.apply(
            rows, weight, bias, *rounded, *self.units, self.largest_g, self.main_grad, self.grad_dtype
        )
        return y.view(*x.shape[:-1], -1)
