"""Products whose inputs or outputs ranks of tensor parallelism share, with the collectives around them, as ops that a
compiled block holds: whole blocks are one graph, and what overlaps is inside of an op.

Maths. Where tokens enter a pair (`tensor.py`), x is read by some matrices W (one, or a gate and its MLP), and backward
has dx = sum of dy W, the sum of dx over the ranks, and dW = dy^T x of each. The sum needs dx alone: it is started as
soon as that is there, and dW is computed while it travels. Under sequence parallelism a rank keeps its own tokens of x
for backward, 1/tp of them, and the others are gathered again for dW while dx is computed.

Communication. Entering: forward nothing, or an all-gather of [b, s, h] with sequence parallelism; backward an
all-reduce of [b, s, h], or an all-gather and a reduce-scatter: in the background. Leaving: forward an all-reduce or a
reduce-scatter, backward nothing or an all-gather: waited for.

An op is told its ranks by name, since graphs hold no process groups.

Legend: b micro-batch, s sequence, h hidden, i inputs, o outputs of a layer on this rank, tp ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megaflow_trainer.ops.linear import Linear, Product, add_product_
from megaflow_trainer.parallel.collectives import gather_along, scatter_along, sum_over
from megaflow_trainer.parallel.traffic import Meter, sending, waiting


@dataclass(frozen=True, slots=True)
class Sharers:
    """Ranks that share every layer.

    Args:
        name: by which ops find them.
        group: the ranks.
        is_sequence: whether tokens are divided between the pairs.
        dim: along which they are: samples (0), or the tokens of each (1), which costs a copy of what is gathered.
        meter: of the group.
    """

    name: str
    group: dist.ProcessGroup
    is_sequence: bool
    dim: int
    meter: Meter | None

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return dist.get_world_size(self.group)


_SHARERS: dict[str, Sharers] = {}


def name_sharers(group: dist.ProcessGroup, *, is_sequence: bool, dim: int, meter: Meter | None) -> Sharers:
    """Make the ranks of a group known to the ops here."""
    name = f"sharers_{len(_SHARERS)}"
    _SHARERS[name] = Sharers(name, group, is_sequence, dim, meter)
    return _SHARERS[name]


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
    """Begin to join the tokens of all ranks; `[...]` arrives as `[tp, ...]`."""
    given, out = x.contiguous(), x.new_empty(dist.get_world_size(group), *x.shape)
    with sending(meter, "all_gather", out, group, is_background=True):
        handle = dist.all_gather_into_tensor(out.flatten(0, 1), given, group=group, async_op=True)
    return Travel("all_gather", handle, out, given, meter)


def start_scatter(x: Tensor, group: dist.ProcessGroup, dim: int, meter: Meter | None) -> Travel:
    """Begin to add `[b, s, h]` over the ranks, of which this one gets its run along `dim`."""
    parts = x.unflatten(dim, (dist.get_world_size(group), -1)).movedim(dim, 0).contiguous()
    out = x.new_empty(parts.shape[1:])
    with sending(meter, "reduce_scatter", parts, group, is_background=True):
        handle = dist.reduce_scatter_tensor(out, parts.flatten(0, 1), group=group, async_op=True)
    return Travel("reduce_scatter", handle, out, parts, meter)


def start_sum(x: Tensor, group: dist.ProcessGroup, meter: Meter | None) -> Travel:
    """Begin to add a tensor over the ranks, in place."""
    total = x.contiguous()
    with sending(meter, "all_reduce", total, group, is_background=True):
        handle = dist.all_reduce(total, group=group, async_op=True)
    return Travel("all_reduce", handle, total, total, meter)


@torch.library.custom_op("megaflow::join_tokens", mutates_args=())
def join_tokens(x: Tensor, name: str) -> Tensor:
    """Tokens of all ranks, `[b, s, h]`, from this rank's (all-gather)."""
    own = _SHARERS[name]
    return gather_along(x, own.group, own.dim, own.meter).contiguous()


@join_tokens.register_fake
def _(x: Tensor, name: str) -> Tensor:
    own = _SHARERS[name]
    return x.new_empty(_resize(x, own.dim, x.shape[own.dim] * own.size))


@torch.library.custom_op("megaflow::divide_sum", mutates_args=())
def divide_sum(x: Tensor, name: str) -> Tensor:
    """This rank's tokens of the sum over the ranks of `[b, s, h]` (reduce-scatter)."""
    own = _SHARERS[name]
    return scatter_along(x, own.group, own.dim, own.meter)


@divide_sum.register_fake
def _(x: Tensor, name: str) -> Tensor:
    own = _SHARERS[name]
    return x.new_empty(_resize(x, own.dim, x.shape[own.dim] // own.size))


@torch.library.custom_op("megaflow::sum_over_ranks", mutates_args=())
def sum_over_ranks(x: Tensor, name: str) -> Tensor:
    """The sum over the ranks of a tensor (all-reduce)."""
    own, total = _SHARERS[name], x.clone(memory_format=torch.contiguous_format)
    sum_over(total, own.group, own.meter)
    return total


@sum_over_ranks.register_fake
def _(x: Tensor, name: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("megaflow::enter_backward", mutates_args=())
def enter_backward(slopes: Sequence[Tensor], own: Tensor, weights: Sequence[Tensor], name: str) -> list[Tensor]:
    """Gradients of what entered a pair and of the matrices that read it.

    Args:
        slopes: gradient of each layer's output, `[b s, o]`.
        own: what forward kept of the tokens: this rank's, `[b, s/tp, h]`, or all, `[b, s, h]`.
        weights: of each layer, `[o, h]`.
        name: of the ranks.

    Returns:
        The gradient of `own`, behind it those of the weights.
    """
    leaving, x = _send_back(slopes, own, weights, name)
    grads = [slope.t() @ x for slope in slopes]
    return [leaving.finish(), *grads]


@enter_backward.register_fake
def _(slopes: Sequence[Tensor], own: Tensor, weights: Sequence[Tensor], name: str) -> list[Tensor]:
    return [own.new_empty(own.shape), *(weight.new_empty(weight.shape) for weight in weights)]


@torch.library.custom_op("megaflow::enter_backward_", mutates_args={"main_grad"})
def enter_backward_(
    slopes: Sequence[Tensor], own: Tensor, weights: Sequence[Tensor], main_grad: Tensor, name: str
) -> tuple[Tensor, Tensor]:
    """As `enter_backward`, where the gradient of the first weight is added to `main_grad`.

    An op that changes two parts of one buffer loses what it writes to the second in torch 2.11's compiler.

    Returns:
        The gradient of `own`, and of two layers under sequence parallelism all tokens, `[b s, h]`, from which the
        gradient of the second weight follows.
    """
    leaving, x = _send_back(slopes, own, weights, name)
    add_product_(main_grad, slopes[0], x)
    needs_rest = len(slopes) > 1 and _SHARERS[name].is_sequence
    return leaving.finish(), x if needs_rest else x.new_empty(0)


@enter_backward_.register_fake
def _(
    slopes: Sequence[Tensor], own: Tensor, weights: Sequence[Tensor], main_grad: Tensor, name: str
) -> tuple[Tensor, Tensor]:
    needs_rest = len(slopes) > 1 and _SHARERS[name].is_sequence
    return own.new_empty(own.shape), own.new_empty(slopes[0].shape[0], own.shape[-1]) if needs_rest else own.new_empty(
        0
    )


def _send_back(slopes: Sequence[Tensor], own: Tensor, weights: Sequence[Tensor], name: str) -> tuple[Travel, Tensor]:
    """The gradient of what entered on its way to the other ranks, and all tokens, `[b s, h]`."""
    ranks = _SHARERS[name]
    arriving = start_gather(own, ranks.group, ranks.meter) if ranks.is_sequence else None
    grad = slopes[0] @ weights[0]
    for slope, weight in zip(slopes[1:], weights[1:], strict=True):
        grad.addmm_(slope, weight)
    if ranks.is_sequence:
        whole = grad.view(_resize(own, ranks.dim, own.shape[ranks.dim] * ranks.size))
        leaving = start_scatter(whole, ranks.group, ranks.dim, ranks.meter)
    else:
        leaving = start_sum(grad.view(own.shape), ranks.group, ranks.meter)
    tokens = own if arriving is None else arriving.finish().movedim(0, ranks.dim)
    return leaving, tokens.reshape(-1, own.shape[-1])


def _resize(x: Tensor, dim: int, length: int) -> list[int]:
    return [length if place == dim else size for place, size in enumerate(x.shape)]


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return join_tokens(x, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return divide_sum(grad.contiguous(), ctx.name), None


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return divide_sum(x, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return join_tokens(grad.contiguous(), ctx.name), None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_over_ranks(grad, ctx.name), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        return sum_over_ranks(x, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def enter(x: Tensor, ranks: Sharers) -> Tensor:
    """From between the pairs into one: `[b, s, h]` whichever way tokens lie outside."""
    entered: Tensor = (_Join if ranks.is_sequence else _Copy).apply(x, ranks.name)
    return entered


def leave(x: Tensor, ranks: Sharers) -> Tensor:
    """From inside a pair, where `x` is a term of a sum, to between the pairs."""
    left: Tensor = (_Divide if ranks.is_sequence else _Sum).apply(x, ranks.name)
    return left


class _Columns(torch.autograd.Function):
    """Layers that read what enters here. `parts` are weight, bias and main gradient of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, is_sequence: bool, *parts: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = parts[::3], parts[1::3]
        tokens = join_tokens(x, name) if is_sequence else x
        ctx.save_for_backward(x, *weights)
        ctx.name, ctx.is_sequence, ctx.has_bias = name, is_sequence, [bias is not None for bias in biases]
        ctx.main_grad, ctx.second_main_grad = parts[2], parts[5] if len(parts) > 3 else None
        return tuple(F.linear(tokens, weight, bias) for weight, bias in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        flat = [slope.reshape(-1, slope.shape[-1]) for slope in slopes]
        own: list[Tensor] = []
        if ctx.main_grad is None:
            grad, *own = enter_backward(flat, x, weights, ctx.name)
        else:
            grad, rest = enter_backward_(flat, x, weights, ctx.main_grad, ctx.name)
            if ctx.second_main_grad is not None:
                tokens = rest if ctx.is_sequence else x.reshape(-1, x.shape[-1])
                add_product_(ctx.second_main_grad, flat[1], tokens)
        grads: list[Tensor | None] = []
        for number, slope in enumerate(flat):
            grads += [own[number] if own else None, slope.sum(0) if ctx.has_bias[number] else None, None]
        return (grad, None, None, *grads)


class _Rows(torch.autograd.Function):
    """A layer whose product is a term of a sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, main_grad: Tensor | None, name: str, is_sequence: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grad, ctx.name, ctx.is_sequence = main_grad, name, is_sequence
        y = F.linear(x, weight)
        return divide_sum(y, name) if is_sequence else sum_over_ranks(y, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.is_sequence:
            grad = join_tokens(grad.contiguous(), ctx.name)
        slope, tokens = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        own = None
        if ctx.main_grad is None:
            own = slope.t() @ tokens
        else:
            add_product_(ctx.main_grad, slope, tokens)
        return (slope @ weight).view(x.shape), own, None, None, None


@dataclass(frozen=True, slots=True)
class Columns:
    """How linear layers multiply that hold columns: of tokens that enter a pair with them.

    Args:
        ranks: that share them.
        overlaps: whether collectives of backward travel beside products, as with torch's own product they can.
    """

    ranks: Sharers
    overlaps: bool

    def __call__(self, product: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """From between the pairs to `[b, s, o]`."""
        if not self.can_overlap(product):
            return product(enter(x, self.ranks), weight, bias)
        return self.multiply(x, weight, bias, product.main_grad)[0]

    def widen(self, up: nn.Module, gate: nn.Module | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The first products of an MLP, in whose forward they take the place of two calls."""
        assert isinstance(up, Linear), "as the plan says"
        assert gate is None or isinstance(gate, Linear), "as the plan says"
        if not self.can_overlap(up.product) or (gate is not None and not self.can_overlap(gate.product)):
            x = enter(x, self.ranks)
            return up.product(x, up.weight, up.bias), None if gate is None else gate.product(x, gate.weight, gate.bias)
        parts = [up.weight, up.bias, up.product.main_grad]
        if gate is None:
            return self.multiply(x, *parts)[0], None
        wide, narrow = self.multiply(x, *parts, gate.weight, gate.bias, gate.product.main_grad)
        return wide, narrow

    def can_overlap(self, product: Product) -> bool:
        """Whether a layer's product is the plain one, in training."""
        return self.overlaps and type(product) is Product and torch.is_grad_enabled()

    def multiply(self, x: Tensor, *parts: Tensor | None) -> tuple[Tensor, ...]:
        """Weight, bias and main gradient of each layer after the other."""
        found: tuple[Tensor, ...] = _Columns.apply(x, self.ranks.name, self.ranks.is_sequence, *parts)
        return found


@dataclass(frozen=True, slots=True)
class Rows:
    """How a linear layer multiplies that holds rows: its product is added up with those of the other ranks, and the
    bias once.
    """

    ranks: Sharers
    overlaps: bool

    def __call__(self, product: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`[b, s, i]` to between the pairs."""
        if self.overlaps and type(product) is Product and torch.is_grad_enabled():
            y: Tensor = _Rows.apply(x, weight, product.main_grad, self.ranks.name, self.ranks.is_sequence)
        else:
            y = leave(product(x, weight, None), self.ranks)
        return y if bias is None else y + bias
