"""What a rank holds of a weight: runs of the full tensor along one dim.

A plain shard is one run; a matrix of several blocks (queries, keys, values) is one run of each block; what is copied to
several ranks is held by all and answered for by one of them, so that norms and files count every element once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `start` to `start + length` of the full tensor, and whether this rank answers for them."""

    start: int
    length: int
    is_owned: bool = True


@dataclass(frozen=True, slots=True)
class Shard:
    """A weight on this rank.

    Args:
        shape: of the full tensor, the same in every layout.
        dim: along which it is cut.
        pieces: what this rank holds, in the order in which it lies in the local tensor.
    """

    shape: tuple[int, ...]
    dim: int
    pieces: tuple[Piece, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        length = sum(piece.length for piece in self.pieces)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    @property
    def is_owned(self) -> bool:
        """Whether this rank answers for all that it holds."""
        return all(piece.is_owned for piece in self.pieces)

    def take(self, full: Tensor) -> Tensor:
        """The local tensor, from the full one."""
        return torch.cat([full.narrow(self.dim, piece.start, piece.length) for piece in self.pieces], self.dim)

    def put(self, local: Tensor, full: Tensor) -> None:
        """Write what this rank answers for into the full tensor."""
        for piece, part in zip(self.pieces, self.cut(local), strict=True):
            if piece.is_owned:
                full.narrow(self.dim, piece.start, piece.length).copy_(part)

    def list_owned(self, local: Tensor) -> Sequence[Tensor]:
        """The pieces of the local tensor that this rank answers for, as views; in a tensor of one dim or more."""
        return [part for piece, part in zip(self.pieces, self.cut(local), strict=True) if piece.is_owned]

    def cut(self, local: Tensor) -> Sequence[Tensor]:
        """The local tensor by pieces, as views."""
        return local.split([piece.length for piece in self.pieces], self.dim)


@dataclass(frozen=True, slots=True)
class GradientSum:
    """Part of a weight whose gradient on this rank is only a term: the others are on the ranks of `group`.

    Args:
        group: ranks whose terms are added.
        dim: along which the part is a run of the local tensor.
        start: its first row.
        length: its rows.
        is_late: whether the ranks are other stages of the pipeline, whose terms come at the end of a step.
    """

    group: dist.ProcessGroup
    dim: int
    start: int
    length: int
    is_late: bool = False


def whole(shape: Sequence[int], *, is_owned: bool = True) -> Shard:
    """A weight that this rank holds in full."""
    return Shard(tuple(shape), 0, (Piece(0, shape[0], is_owned),))


def run(shape: Sequence[int], dim: int, rows: range) -> Shard:
    """One run of rows along `dim`."""
    return Shard(tuple(shape), dim, (Piece(rows.start, len(rows)),))


@dataclass(slots=True)
class ShardMap:
    """All weights of this rank's part of the model, by name."""

    shards: dict[str, Shard]
    sums: dict[str, tuple[GradientSum, ...]]
    experts: frozenset[str] = frozenset()
    """Weights of experts where these lie on other ranks than the layers around them: their gradients are summed over
    the ranks with the same experts.
    """

    @classmethod
    def of(cls, model: nn.Module, *, is_owned: bool = True) -> ShardMap:
        """A model that this rank holds in full."""
        return cls({name: whole(weight.shape, is_owned=is_owned) for name, weight in model.named_parameters()}, {})


@torch.no_grad()
def gather_full(
    weights: Mapping[str, Tensor], shards: Mapping[str, Shard], group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """Full weights on every rank of `group` from their parts, for comparison and for files of small models.

    Every element is answered for by one rank of `group`. Sends one all-reduce a weight that any rank has.
    """
    kinds = {name: (shards[name].shape, weight.dtype) for name, weight in weights.items()}  # routers are wider
    if group is not None:
        gathered: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(gathered, kinds, group=group)
        kinds = {name: kind for part in gathered for name, kind in part.items()}
    device = next(weight.device for weight in weights.values())
    full = {name: torch.zeros(shape, device=device, dtype=dtype) for name, (shape, dtype) in sorted(kinds.items())}
    for name, target in full.items():
        if name in weights:
            shards[name].put(weights[name], target)
        if group is not None:
            dist.all_reduce(target, group=group)
    return full
