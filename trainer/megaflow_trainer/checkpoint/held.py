"""What a rank holds of a tensor, as boxes of the whole one, so that any layout can save and any other can load.

A rank may hold a run of a flattened part of a weight: tensor parallelism takes rows or columns of it, ZeRO a run of
what is left that begins and ends anywhere. Such a run is a few boxes: the rest of its first row, whole rows, the
beginning of its last row, each cut where the part takes another place in the whole tensor. Boxes are what torch's
distributed checkpoint plans with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from megaflow_trainer.parallel.shards import Shard


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a whole tensor and where it lies in the memory of the rank that holds it.

    Args:
        at: its first element in the whole tensor, an index a dim.
        shape: its size, a length a dim.
        is_owned: whether this rank answers for it.
        start: first element, in the rank's flat memory, of the row-by-row block that has the box.
        block: shape of that block.
        first: where the box begins in the block, an index a dim.
    """

    at: tuple[int, ...]
    shape: tuple[int, ...]
    is_owned: bool
    start: int
    block: tuple[int, ...]
    first: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        """The box in the rank's flat memory, in its shape."""
        found = flat[self.start : self.start + math.prod(self.block)].view(self.block)
        for dim, (start, length) in enumerate(zip(self.first, self.shape, strict=True)):
            found = found.narrow(dim, start, length)
        return found


@dataclass(frozen=True, slots=True)
class Held:
    """This rank's memory of a tensor.

    Args:
        local: the memory, of any shape.
        shape: of the whole tensor.
        boxes: what of it this rank holds.
    """

    local: Tensor
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    def view(self, number: int, memory: Tensor | None = None) -> Tensor:
        """A box in this rank's memory, or in a copy of it."""
        return self.boxes[number].view((self.local if memory is None else memory).detach().view(-1))


def hold(local: Tensor, shard: Shard | None = None, *, start: int = 0) -> Held:
    """A run of this rank's part of a tensor.

    Args:
        local: the run, in memory without gaps.
        shard: this rank's part of the whole tensor; all of it if not given.
        start: first element of the run in the flattened part.
    """
    if shard is None:
        shape = tuple(local.shape)
        return Held(local, shape, (Box((0,) * len(shape), shape, True, 0, shape, (0,) * len(shape)),))
    return Held(local, shard.shape, tuple(cut_boxes(shard, start, start + local.numel())))


def as_held(tensor: Held | Tensor) -> Held:
    """A tensor that this rank holds whole, or a DTensor's part, as what it is."""
    if isinstance(tensor, Held):
        return tensor
    if not isinstance(tensor, DTensor):
        return hold(tensor)
    own = tensor.to_local()
    _, at = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    shape = tuple(own.shape)
    boxes = (Box(tuple(at), shape, True, 0, shape, (0,) * len(shape)),) if own.numel() else ()
    return Held(own, tuple(tensor.shape), boxes)


def cut_boxes(shard: Shard, start: int, stop: int) -> Iterator[Box]:
    """The boxes of a run of a flattened part, in the order of the part's memory."""
    for at, block, begin in cut_run(shard.local_shape, start, stop):
        row = 0
        for piece in shard.pieces:
            first = max(row, at[shard.dim])
            last = min(row + piece.length, at[shard.dim] + block[shard.dim])
            if first < last:
                place, shape, inside = list(at), list(block), [0] * len(at)
                place[shard.dim] = piece.start + first - row
                shape[shard.dim] = last - first
                inside[shard.dim] = first - at[shard.dim]
                yield Box(tuple(place), tuple(shape), piece.is_owned, begin - start, block, tuple(inside))
            row += piece.length


def cut_run(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """A run of a flattened tensor as boxes: index, size and first flat element of each; at most three for a matrix."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,), start
        return
    width = math.prod(shape[1:])
    first, last = -(-start // width), stop // width  # whole rows between
    if first > last:  # inside one row
        yield from _cut_row(shape, last, start, stop, width)
        return
    if start < first * width:
        yield from _cut_row(shape, first - 1, start, first * width, width)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]), first * width
    if last * width < stop:
        yield from _cut_row(shape, last, last * width, stop, width)


def _cut_row(
    shape: Sequence[int], row: int, start: int, stop: int, width: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    for at, block, begin in cut_run(shape[1:], start - row * width, stop - row * width):
        yield (row, *at), (1, *block), row * width + begin


@torch.no_grad()
def put_whole(held: Held, whole: Tensor) -> None:
    """Fill this rank's boxes from the whole tensor, or from its first rows: later rows stay as they are."""
    for number, box in enumerate(held.boxes):
        length = len(whole) - box.at[0] if box.at else 0
        target = held.view(number)
        if box.at and length < box.shape[0]:
            if length <= 0:
                continue
            target = target[:length]
        source = whole
        for dim, (start, size) in enumerate(zip(box.at, target.shape, strict=True)):
            source = source.narrow(dim, start, size)
        target.copy_(source)
