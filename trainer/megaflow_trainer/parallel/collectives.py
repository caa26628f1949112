"""The few collectives of the trainer. A group of None is a single rank: nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megaflow.errors import MegaflowError

T = TypeVar("T")


def sum_over(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    """Replace `tensor` by its sum over the ranks of `group` (one all-reduce)."""
    if group is not None:
        dist.all_reduce(tensor, group=group)


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
        MegaflowError: that of the action, on all ranks alike, so that none waits for one that has left.
    """
    if group is None:
        return action()
    outcome: list[object] = [None]
    if dist.get_rank(group) == 0:
        try:
            outcome = [action()]
        except MegaflowError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, group=group, group_src=0, device=torch.device("cpu"))
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
