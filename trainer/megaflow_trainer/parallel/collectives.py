"""The few collectives of the trainer. A group of None is a single rank: nothing is sent.

Those with a gradient come in pairs, each the other's backward: `gather_tokens` and `scatter_sums` (tokens are divided,
each rank computes a part for all), `split_tokens` and `join_tokens` (all have all tokens, each computes for some),
`exchange` and itself. Those of tensor parallelism, which compiled blocks hold, are in `overlap.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megaflow.errors import MegaflowError, first_line
from megaflow_trainer.parallel.traffic import Meter, sending

T = TypeVar("T")


def sum_over(tensor: Tensor, group: dist.ProcessGroup | None, meter: Meter | None = None) -> None:
    """Replace `tensor` by its sum over the ranks of `group` (one all-reduce)."""
    if group is not None:
        with sending(meter, "all_reduce", tensor, group):
            dist.all_reduce(tensor, group=group)


def max_over(tensor: Tensor, group: dist.ProcessGroup | None, meter: Meter | None = None) -> None:
    """Replace `tensor` by its maximum over the ranks of `group` (one all-reduce)."""
    if group is not None:
        with sending(meter, "all_reduce", tensor, group):
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)


def copy_from_first(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    """Replace `tensor` by that of the first rank of `group` (one broadcast)."""
    if group is not None:
        dist.broadcast(tensor, group=group, group_src=0)


def gather_objects(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """The values of all ranks of `group`, in rank order, on every rank. For small things only."""
    if group is None:
        return [value]
    values: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values  # type: ignore[return-value]


def do_on_first(action: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run `action` on the first rank of `group`; every rank returns its result, or raises its error.

    Raises:
        MegaflowError: that of the action, on all ranks alike, so that none waits for one that has left. Another error,
            which is the first rank's to show, is a MegaflowError on the others.
    """
    if group is None:
        return action()
    outcome: list[object] = [None]
    fault: BaseException | None = None
    if dist.get_rank(group) == 0:
        try:
            outcome = [action()]
        except MegaflowError as error:
            outcome = [error]
        except (Exception, SystemExit) as error:  # raised again below
            fault = error
            said = f"{type(error).__name__}: {first_line(error)}"
            outcome = [MegaflowError(f"the first rank ends with a fault that it shows itself: {said}")]
    dist.broadcast_object_list(outcome, group=group, group_src=0, device=torch.device("cpu"))
    if fault is not None:
        raise fault
    if isinstance(outcome[0], MegaflowError):
        raise outcome[0]
    return outcome[0]  # type: ignore[return-value]


@contextmanager
def own_group(group: dist.ProcessGroup | None) -> Iterator[dist.ProcessGroup | None]:
    """A group of the same ranks for gloo that nothing else uses, so that a thread may; all ranks call it."""
    if group is None:
        yield None
        return
    made = dist.new_group(dist.get_process_group_ranks(group), backend="gloo")
    assert isinstance(made, dist.ProcessGroup), "this rank is in it"
    yield made
    dist.destroy_process_group(made)


@torch.compiler.disable
def gather_tokens(x: Tensor, group: dist.ProcessGroup | None, dim: int = 1, *, meter: Meter | None = None) -> Tensor:
    """Tensors of all ranks of `group` joined along `dim` (all-gather); backward adds gradients and divides them."""
    joined: Tensor = x if group is None else _GatherTokens.apply(x, group, dim, meter)
    return joined


@torch.compiler.disable
def scatter_sums(x: Tensor, group: dist.ProcessGroup | None, dim: int = 1, *, meter: Meter | None = None) -> Tensor:
    """This rank's run along `dim` of the sum over `group` (reduce-scatter); backward joins gradients (all-gather)."""
    part: Tensor = x if group is None else _ScatterSums.apply(x, group, dim, meter)
    return part


@torch.compiler.disable
def split_tokens(x: Tensor, group: dist.ProcessGroup | None, dim: int = 1, *, meter: Meter | None = None) -> Tensor:
    """This rank's run along `dim` of what all ranks of `group` have alike; backward joins gradients (all-gather)."""
    part: Tensor = x if group is None else _SplitTokens.apply(x, group, dim, meter)
    return part


@torch.compiler.disable
def join_tokens(x: Tensor, group: dist.ProcessGroup | None, dim: int = 1, *, meter: Meter | None = None) -> Tensor:
    """Runs of all ranks of `group` joined along `dim` (all-gather), for all to go on alike; backward takes its own."""
    joined: Tensor = x if group is None else _JoinTokens.apply(x, group, dim, meter)
    return joined


@torch.compiler.disable
def exchange(x: Tensor, group: dist.ProcessGroup | None, *, cut: int, join: int, meter: Meter | None = None) -> Tensor:
    """Cut `x` along one dim into a part for each rank and join what arrives along another (all-to-all)."""
    arrived: Tensor = x if group is None else _Exchange.apply(x, group, cut, join, meter)
    return arrived


def gather_along(x: Tensor, group: dist.ProcessGroup, dim: int, meter: Meter | None = None) -> Tensor:
    """Tensors of all ranks joined along `dim`, in rank order; no gradient."""
    out = x.new_empty(dist.get_world_size(group), *x.shape)
    with sending(meter, "all_gather", out, group):
        dist.all_gather_into_tensor(out.flatten(0, 1) if x.dim() else out, x.contiguous(), group=group)
    return out.movedim(0, dim).flatten(dim, dim + 1)


def scatter_along(x: Tensor, group: dist.ProcessGroup, dim: int, meter: Meter | None = None) -> Tensor:
    """This rank's run along `dim` of the sum over the ranks; no gradient."""
    size = dist.get_world_size(group)
    parts = x.unflatten(dim, (size, -1)).movedim(dim, 0).contiguous()
    out = x.new_empty(parts.shape[1:])
    with sending(meter, "reduce_scatter", parts, group):
        dist.reduce_scatter_tensor(out, parts.flatten(0, 1), group=group)
    return out


def take_along(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """This rank's run along `dim`; nothing is sent and there is no gradient."""
    length = x.shape[dim] // dist.get_world_size(group)
    return x.narrow(dim, dist.get_rank(group) * length, length).contiguous()


def exchange_along(x: Tensor, group: dist.ProcessGroup, cut: int, join: int, meter: Meter | None = None) -> Tensor:
    """Send run i along `cut` to rank i and join what arrives along `join`; no gradient."""
    parts = x.unflatten(cut, (dist.get_world_size(group), -1)).movedim(cut, 0).contiguous()
    arrived = torch.empty_like(parts)
    with sending(meter, "all_to_all", parts, group):
        dist.all_to_all_single(arrived, parts, group=group)
    return arrived.movedim(0, join).flatten(join, join + 1)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, meter: Meter | None) -> Tensor:
        ctx.group, ctx.dim, ctx.meter = group, dim, meter
        return gather_along(x, group, dim, meter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return scatter_along(grad, ctx.group, ctx.dim, ctx.meter), None, None, None


class _ScatterSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, meter: Meter | None) -> Tensor:
        ctx.group, ctx.dim, ctx.meter = group, dim, meter
        return scatter_along(x, group, dim, meter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return gather_along(grad, ctx.group, ctx.dim, ctx.meter), None, None, None


class _SplitTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, meter: Meter | None) -> Tensor:
        ctx.group, ctx.dim, ctx.meter = group, dim, meter
        return take_along(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return gather_along(grad, ctx.group, ctx.dim, ctx.meter), None, None, None


class _JoinTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, meter: Meter | None) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return gather_along(x, group, dim, meter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return take_along(grad, ctx.group, ctx.dim), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, cut: int, join: int, meter: Meter | None) -> Tensor:
        ctx.group, ctx.cut, ctx.join, ctx.meter = group, cut, join, meter
        return exchange_along(x, group, cut, join, meter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return exchange_along(grad, ctx.group, ctx.join, ctx.cut, ctx.meter), None, None, None, None
