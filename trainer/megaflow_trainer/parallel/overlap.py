"""Collectives of tensor parallelism that travel beside products, in backward.

Maths. Where tokens enter a pair (`tensor.py`), x is read by some matrices W (one, or a gate and its MLP), and backward
has dx = sum of dy W, the sum of dx over the ranks, and dW = dy^T x of each. The sum needs dx alone: it is started as
soon as that is there, and dW is computed while it travels. Under sequence parallelism a rank keeps its own tokens of x
for backward, 1/tp of them, and the others are gathered again for dW while dx is computed.

How. Autograd asks a linear layer for dx and dW at once. Here the entry takes the weights as inputs beside x, and gives
their gradients: a layer computes dx and leaves dy at the entry, which autograd comes to when all layers are through.

Communication. Forward nothing, or an all-gather of [b, s, h] with sequence parallelism. Backward an all-reduce of
[b, s, h], or an all-gather and a reduce-scatter: in the background.

Legend: b micro-batch, s sequence, h hidden, o outputs of a layer on this rank, tp ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megaflow_trainer.ops.linear import Linear, Product, add_product_
from megaflow_trainer.parallel.collectives import gather_along
from megaflow_trainer.parallel.traffic import Meter, sending, waiting


@dataclass(slots=True)
class Travel:
    """A collective that has been started: what it fills, and from what."""

    kind: str
    handle: Any
    result: Tensor
    given: Tensor
    """Kept until it is over."""
    meter: Meter | None

    def finish(self) -> Tensor:
        """Wait for it."""
        with waiting(self.meter, self.kind):
            self.handle.wait()
        return self.result


def start_gather(x: Tensor, group: dist.ProcessGroup, meter: Meter | None) -> Travel:
    """Begin to join the tokens of all ranks; `[b, s/tp, h]` arrives as `[tp, b, s/tp, h]`."""
    given, out = x.contiguous(), x.new_empty(dist.get_world_size(group), *x.shape)
    with sending(meter, "all_gather", out, group, is_background=True):
        handle = dist.all_gather_into_tensor(out.flatten(0, 1), given, group=group, async_op=True)
    return Travel("all_gather", handle, out, given, meter)


def start_scatter(x: Tensor, group: dist.ProcessGroup, meter: Meter | None) -> Travel:
    """Begin to add `[b, s, h]` over the ranks, of which this one gets `[b, s/tp, h]`."""
    parts = x.unflatten(1, (dist.get_world_size(group), -1)).movedim(1, 0).contiguous()
    out = x.new_empty(parts.shape[1:])
    with sending(meter, "reduce_scatter", parts, group, is_background=True):
        handle = dist.reduce_scatter_tensor(out, parts.flatten(0, 1), group=group, async_op=True)
    return Travel("reduce_scatter", handle, out, parts, meter)


def start_sum(x: Tensor, group: dist.ProcessGroup, meter: Meter | None) -> Travel:
    """Begin to add a tensor over the ranks, in a copy."""
    total = x.clone(memory_format=torch.contiguous_format)
    with sending(meter, "all_reduce", total, group, is_background=True):
        handle = dist.all_reduce(total, group=group, async_op=True)
    return Travel("all_reduce", handle, total, total, meter)


@dataclass(slots=True)
class Entry:
    """Tokens that have entered a pair once: what forward and backward of the layers that read them leave here."""

    group: dist.ProcessGroup
    is_sequence: bool
    meter: Meter | None
    main_grads: Sequence[Tensor | None]
    own: Tensor | None
    """This rank's tokens, while forward goes on."""
    tokens: Tensor | Travel | None = None
    """In backward all tokens, or those on their way."""
    slopes: dict[int, Tensor] = field(default_factory=dict)
    """In backward dy, `[b s, o]`, by number of the layer."""

    def add(self, number: int, slope: Tensor, own: Tensor) -> None:
        """Take dy of a layer; with the first one tokens set out."""
        self.slopes[number] = slope
        if self.tokens is None:
            self.tokens = start_gather(own, self.group, self.meter) if self.is_sequence else own

    def make_gradients(self) -> list[Tensor | None]:
        """The gradient of each layer's weight; None of one that was not used, or whose main gradient has it already."""
        if self.tokens is None:
            return [None] * len(self.main_grads)
        tokens = self.tokens
        if isinstance(tokens, Travel):
            tokens = tokens.finish().movedim(0, 1)
        x = tokens.reshape(-1, tokens.shape[-1])
        grads: list[Tensor | None] = []
        for number, main_grad in enumerate(self.main_grads):
            slope = self.slopes.pop(number, None)
            if slope is not None and main_grad is not None:
                add_product_(main_grad, slope, x)
            grads.append(None if slope is None or main_grad is not None else slope.t() @ x)
        self.tokens = None
        return grads


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, entry: Entry, *weights: Tensor | None) -> Tensor:
        ctx.entry = entry
        return gather_along(x, entry.group, 1, entry.meter) if entry.is_sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        entry: Entry = ctx.entry
        travel = (start_scatter if entry.is_sequence else start_sum)(grad, entry.group, entry.meter)
        grads = entry.make_gradients()
        return travel.finish(), None, *grads


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None, entry: Entry, number: int
    ) -> Tensor:
        ctx.save_for_backward(own if entry.is_sequence else x, weight)
        ctx.entry, ctx.number, ctx.has_bias = entry, number, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        own, weight = ctx.saved_tensors
        slope = grad.reshape(-1, grad.shape[-1])
        ctx.entry.add(ctx.number, slope, own)
        return grad @ weight, None, None, slope.sum(0) if ctx.has_bias else None, None, None


class Entrance:
    """A place where tokens enter a pair, and the linear layers that read them there. Those with products of another
    kind (fp8) give both gradients at once, as elsewhere.

    Args:
        layers: each is called at most once with what has entered.
        group: the ranks that share them.
        is_sequence: whether tokens are divided outside.
        meter: of the group.
    """

    def __init__(
        self, layers: Sequence[Linear], group: dist.ProcessGroup, *, is_sequence: bool, meter: Meter | None
    ) -> None:
        self.layers, self.group, self.is_sequence, self.meter = layers, group, is_sequence, meter
        self.entry: Entry | None = None
        """Of the forward in progress."""

    def wrap(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`forward` of tokens that enter before it."""

        def run(x: Tensor, *rest: Any) -> Tensor:
            x = self.enter(x)
            try:
                return forward(x, *rest)
            finally:
                self.close()

        return run

    @torch.compiler.disable
    def enter(self, x: Tensor) -> Tensor:
        """All tokens, `[b, s, h]`, from those of this rank."""
        if not torch.is_grad_enabled():
            return gather_along(x, self.group, 1, self.meter) if self.is_sequence else x
        main_grads = [layer.product.main_grad for layer in self.layers]
        self.entry = Entry(self.group, self.is_sequence, self.meter, main_grads, x.detach())
        weights = (layer.weight if _is_plain(layer) else None for layer in self.layers)
        entered: Tensor = _Enter.apply(x, self.entry, *weights)
        return entered

    @torch.compiler.disable
    def close(self) -> None:
        """Forward is over: what backward needs autograd has saved."""
        if self.entry is not None:
            self.entry.own = None
        self.entry = None

    @torch.compiler.disable
    def multiply(self, number: int, x: Tensor) -> Tensor:
        """A layer's product with what has entered."""
        layer, entry = self.layers[number], self.entry
        if entry is None or not _is_plain(layer):
            return layer.product(x, layer.weight, layer.bias)
        y: Tensor = _Product.apply(x, entry.own, layer.weight.detach(), layer.bias, entry, number)
        return y


def _is_plain(layer: Linear) -> bool:
    """Whether a layer multiplies as `Product` does."""
    return type(layer.product) is Product
