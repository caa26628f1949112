"""A layer with experts: a router, experts that see the tokens which chose them, and one that sees all.

Tokens are put in the order of their experts (`take`), go through them, and come back as weighted sums (`combine`). Who
holds which expert is left to a dispatcher: the one here has all of them.

Legend: b micro-batch, s sequence, t = b s tokens, h hidden, k choices of a token, r rows in the order of the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megaflow_trainer.config.sections import ModelConfig
from megaflow_trainer.model.context import Context
from megaflow_trainer.model.experts import Experts
from megaflow_trainer.model.mlp import Mlp
from megaflow_trainer.model.routing import AddLoss, Router, Routing, count_chosen
from megaflow_trainer.model.sockets import Sockets
from megaflow_trainer.ops.rows import PLAIN, RowKernels

Beside = Callable[[], Tensor]
"""Something to compute while tokens travel."""
Dispatcher = Callable[[Tensor, Routing, nn.Module, Beside | None], tuple[Tensor, Tensor | None]]
"""Tokens `[t, h]`, their routing, the experts of this rank, something to compute meanwhile; to the weighted sums
`[t, h]` and what was computed meanwhile."""


class MoE(nn.Module):
    """Weighted sums of the experts that each token chose, and the expert that all tokens pass."""

    def __init__(self, config: ModelConfig, sockets: Sockets, number: int) -> None:
        super().__init__()
        self.router = Router(config, -2 - number)
        self.experts = Experts(config, sockets)
        self.shared = Mlp(config, sockets, config.shared_dim) if config.shared_dim is not None else None
        self.dispatch: Dispatcher = dispatch_local
        self.overlaps = False

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """`[b, s, h]` to `[b, s, h]`."""
        if self.shared is None:
            return self.mix(x, context, None)[0]
        shared = self.shared
        y, beside = self.mix(x, context, (lambda: shared(x)) if self.overlaps else None)
        return y + (shared(x) if beside is None else beside)

    def mix(self, x: Tensor, context: Context | None, beside: Beside | None) -> tuple[Tensor, Tensor | None]:
        """The part of the chosen experts, `[b, s, h]`, and what was computed meanwhile."""
        routing = self.router(x, context)
        y, meanwhile = self.dispatch(x.flatten(0, -2), routing, self.experts, beside)
        if routing.loss is not None:
            y = AddLoss.apply(y, routing.loss, self.router.lift)
        return y.view_as(x), meanwhile


def list_routers(model: nn.Module) -> list[Router]:
    """The routers of a model, in the order of its layers."""
    return [module for module in model.modules() if isinstance(module, Router)]


@dataclass(frozen=True, slots=True)
class Order:
    """Where rows come from and where they go.

    Args:
        slots: of each row the choice that it serves, counted through `[t, k]`; t k for a row of padding. `[r]`
        places: of each choice its row; r where it is not served. `[t, k]`
        counts: rows of each expert, int64 `[e]`.
        kernels: that move rows in this order.
        known: the counts where the host has them.
    """

    slots: Tensor
    places: Tensor
    counts: Tensor
    kernels: RowKernels = PLAIN
    known: Sequence[int] | None = None

    @property
    def sources(self) -> Tensor:
        """The token of each row; t for a row of padding."""
        return self.slots // self.places.shape[1]

    def copy_parts(self, lengths: Tensor, times: int) -> Order:
        """Each of the parts into which `lengths`, int64 `[p]`, cuts the rows `times` times in a row, as more choices:
        `[r]` becomes `[times r]` and `[t, k]` becomes `[t, times k]`; results of all copies are combined.
        """
        (t, k), r = self.places.shape, len(self.slots)
        inside = lengths.repeat_interleave(lengths, output_size=r)
        starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths, output_size=r)
        rows = torch.arange(r, device=lengths.device)
        slots = self.slots.new_empty(times * r)
        for copy in range(times):
            choice = torch.where(self.slots == t * k, 0, self.slots % k + copy * k)
            slots[rows + starts * (times - 1) + copy * inside] = self.slots // k * (k * times) + choice
        places = slots.new_full((t * k * times + 1,), len(slots))
        places[slots] = torch.arange(len(slots), device=slots.device)
        return replace(self, slots=slots, places=places[:-1].view(t, k * times))


def make_order(routing: Routing, num_experts: int, kernels: RowKernels = PLAIN) -> Order:
    """Rows by expert, those of one expert in the order of the tokens; with `num_rows` each expert has that many."""
    chosen, kept = routing.chosen, routing.kept
    flat = chosen.flatten() if kept is None else chosen.masked_fill(~kept, num_experts).flatten()
    slots = flat.to(_find_narrowest(num_experts)).sort(stable=True).indices
    counts = count_chosen(flat, num_experts + 1)[:num_experts]
    known: list[int] | None = None
    if kept is not None:
        known = counts.tolist()
        slots = slots[: sum(known)]
    if routing.num_rows is not None:
        slots, counts = _pad(slots, flat[slots], counts, routing.num_rows, len(flat))
        known = [routing.num_rows] * num_experts
    places = slots.new_full((len(flat) + 1,), len(slots))
    places[slots] = torch.arange(len(slots), device=slots.device)
    return Order(slots, places[:-1].view_as(chosen), counts, kernels, known)


def _find_narrowest(largest: int) -> torch.dtype:
    """An integer type that has 0 to `largest`: a GPU sorts numbers byte by byte."""
    return next(dtype for dtype in (torch.uint8, torch.int16, torch.int64) if largest <= torch.iinfo(dtype).max)


def _pad(slots: Tensor, experts: Tensor, counts: Tensor, num_rows: int, nothing: int) -> tuple[Tensor, Tensor]:
    """Fill up the rows of every expert to `num_rows`; those that only fill are of choice `nothing`."""
    inside = torch.arange(len(slots), device=slots.device) - (counts.cumsum(0) - counts)[experts]
    padded = slots.new_full((len(counts) * num_rows,), nothing)
    padded[experts * num_rows + inside] = slots
    return padded, torch.full_like(counts, num_rows)


def dispatch_local(
    x: Tensor, routing: Routing, experts: nn.Module, beside: Beside | None
) -> tuple[Tensor, Tensor | None]:
    """All experts are here."""
    assert isinstance(experts, Experts)
    order = make_order(routing, experts.num_experts, experts.kernels)
    known = experts.product.announce(order.counts) if order.known is None else order.known
    rows = experts(
        take(x, order), order.counts, known
    )  # the host waits for the counts, the device takes rows meanwhile
    return combine(rows, routing.weights, order), None if beside is None else beside()


def take(x: Tensor, order: Order) -> Tensor:
    """The rows of tokens `[t, h]` in an order, `[r, h]`; zeros for padding. Sums of gradients have one order."""
    rows: Tensor = _Take.apply(x, order)
    return rows


def combine(rows: Tensor, weights: Tensor, order: Order) -> Tensor:
    """Sums of the rows of each token's choices times their weights `[t, k]`, added in fp32, `[t, h]`."""
    total: Tensor = _Combine.apply(rows, weights, order)
    return total


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return order.kernels.gather(x, order.sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        order: Order = ctx.order
        return order.kernels.add_up(grad, order.places, None), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Order) -> Tensor:
        ctx.order = order
        ctx.save_for_backward(rows, weights)
        return order.kernels.add_up(rows, order.places, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights = ctx.saved_tensors
        order: Order = ctx.order
        return *order.kernels.spread(grad, rows, weights, order.slots, order.places), None
