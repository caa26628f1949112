"""Flat buffers: where each weight's gradient lies, what a rank steps of it and what it answers for.

Weights are laid out last one first, the order of backward, in buckets that are sent at once. Under ZeRO every bucket is
cut into equal parts, one a rank; a part begins and ends anywhere in a weight, so that the optimizer sees runs of
flattened weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaflow_trainer.parallel.collectives import sum_over
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.shards import GradientSum, Shard, ShardMap

_LINE = 4096  # elements of a gradient whose norm is taken at once
_ALIGNMENT = 32  # elements: each weight starts on a 128-byte line


@dataclass(frozen=True, slots=True)
class MainParameter:
    """A weight as the optimizer sees it on this rank: whole, or the run of it that this rank steps, flat.

    Args:
        name: of the model's parameter.
        weight: what is stepped.
        main_grad: its gradient, of the same shape.
        is_matrix: whether the whole weight has more than one dim.
        start: first element of the run in the flattened weight.
    """

    name: str
    weight: Tensor
    main_grad: Tensor
    is_matrix: bool = True
    start: int = 0


@dataclass(slots=True)
class Slot:
    """A weight's place in a bucket."""

    name: str
    weight: nn.Parameter
    start: int
    shard: Shard
    sums: tuple[GradientSum, ...]
    missing: int = 0

    def view(self, flat: Tensor) -> Tensor:
        """The weight's part of a bucket's buffer."""
        return flat[self.start : self.start + self.weight.numel()].view_as(self.weight)


@dataclass(frozen=True, slots=True)
class Sharers:
    """The ranks with the same weights.

    Args:
        group: all of them, whose gradients are summed.
        shard_group: those among which ZeRO divides states.
        replicate_group: those with the same part of the states.
        divisor: into how many parts states are divided.
        place: number of this rank's part.
        is_answering: whether this rank answers for what it keeps, and not another with the same.
        is_first: whether it answers for the weights.
    """

    group: dist.ProcessGroup | None
    shard_group: dist.ProcessGroup | None
    replicate_group: dist.ProcessGroup | None
    divisor: int
    place: int
    is_answering: bool
    is_first: bool

    @classmethod
    def of(cls, mesh: Mesh, *, is_divided: bool, is_expert: bool) -> Sharers:
        """Those of dense weights (data and context), or of experts."""
        if is_expert:
            shards, first = mesh.layout.edp_shard, mesh.edp_rank == 0
            return cls(
                group=mesh.edp_group,
                shard_group=mesh.edp_shard_group,
                replicate_group=mesh.edp_replicate_group,
                divisor=shards if is_divided else 1,
                place=mesh.edp_rank % shards if is_divided else 0,
                is_answering=mesh.edp_rank < shards if is_divided else first,
                is_first=first,
            )
        has_parts = is_divided and mesh.shard_group is not None
        return cls(
            group=mesh.gradient_group,
            shard_group=mesh.shard_group,
            replicate_group=mesh.replicate_group,
            divisor=mesh.layout.dp_shard * mesh.layout.cp if is_divided else 1,
            place=dist.get_rank(mesh.shard_group) if has_parts else 0,
            is_answering=mesh.dp_rank < mesh.layout.dp_shard if has_parts else mesh.is_replica_first,
            is_first=mesh.is_replica_first,
        )


@dataclass(slots=True)
class Bucket:
    """Neighbouring gradients that travel at once.

    Args:
        slots: the weights, in the order of backward.
        sharers: the ranks with the same weights.
        size: elements of the buffer, the same on every rank of a group.
        own: the run of it that this rank reduces and steps.
    """

    slots: list[Slot]
    sharers: Sharers
    size: int
    own: slice
    is_late: bool
    waiting: int = 0
    full: Tensor | None = None
    kept: Tensor = field(default_factory=lambda: torch.empty(0))
    weights: Tensor | None = None
    received: Tensor | None = None
    handle: Any = None


def sum_squares(runs: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum of the squares of all elements, a float64 scalar: norms of lines in fp32 (fp64 in fp64), added in fp64.

    One fp32 sum over millions of elements would be off by 1e-5 on a CPU, as far as two layouts may be apart.
    """
    norms = []
    for run in runs:
        flat, wide = run.flatten(), torch.promote_types(run.dtype, torch.float32)
        length = flat.numel() // _LINE * _LINE
        pieces = (flat[:length].view(-1, _LINE), flat[length:].view(1, -1))
        norms += [torch.linalg.vector_norm(lines, dim=1, dtype=wide) for lines in pieces if lines.numel()]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.cat(norms).to(torch.float64).square().sum()


def make_buckets(
    named: Sequence[tuple[str, nn.Parameter]], parts: ShardMap, bucket_size: int, mesh: Mesh, *, is_divided: bool
) -> list[Bucket]:
    """Cut the weights, last one first, into buckets of about `bucket_size` elements.

    Sizes are those of full weights, so that ranks that hold unequal parts cut at the same weights. Weights of a bucket
    have one dtype and the same sharers. A weight with terms on other stages of the pipeline has a bucket of its own, at
    the end.
    """
    sharers = [Sharers.of(mesh, is_divided=is_divided, is_expert=is_expert) for is_expert in (False, True)]
    open_runs: dict[tuple[bool, torch.dtype], list[Slot]] = {}
    sizes: dict[tuple[bool, torch.dtype], int] = {}
    full: list[list[Slot]] = []
    late: list[list[Slot]] = []
    for name, weight in reversed(named):
        slot = Slot(name, weight, 0, parts.shards[name], parts.sums.get(name, ()))
        if any(term.is_late for term in slot.sums):
            late.append([slot])
            continue
        kind, length = (name in parts.experts, weight.dtype), torch.Size(slot.shard.shape).numel()
        if kind in open_runs and sizes[kind] + length > bucket_size:
            full.append(open_runs.pop(kind))
        open_runs.setdefault(kind, []).append(slot)
        sizes[kind] = (sizes[kind] if len(open_runs[kind]) > 1 else 0) + length
    runs = [*full, *open_runs.values(), *late]
    return [_make_bucket(slots, sharers[slots[0].name in parts.experts]) for slots in runs]


def _make_bucket(slots: list[Slot], sharers: Sharers) -> Bucket:
    size, divisor, own = 0, sharers.divisor, sharers.place
    for slot in slots:
        slot.start = size
        size += -(-slot.weight.numel() // _ALIGNMENT) * _ALIGNMENT
    length = -(-size // (divisor * _ALIGNMENT)) * _ALIGNMENT
    is_late = any(term.is_late for slot in slots for term in slot.sums)
    return Bucket(slots, sharers, length * divisor, slice(own * length, (own + 1) * length), is_late)


def expose(bucket: Bucket, slot: Slot) -> MainParameter | None:
    """What this rank steps of a weight: all of it, the run inside its part of the bucket, or nothing."""
    is_matrix = slot.weight.dim() > 1
    if bucket.weights is None:
        assert bucket.full is not None
        return MainParameter(slot.name, slot.weight, slot.view(bucket.full), is_matrix)
    first = max(slot.start, bucket.own.start)
    last = min(slot.start + slot.weight.numel(), bucket.own.stop)
    if first >= last:
        return None
    grad = bucket.kept[first - bucket.own.start : last - bucket.own.start]
    return MainParameter(slot.name, bucket.weights[first:last], grad, is_matrix, first - slot.start)


def add_terms(views: Iterable[tuple[Tensor, tuple[GradientSum, ...]]], mesh: Mesh) -> None:
    """Add the terms of gradients that other ranks hold: one all-reduce a group."""
    found: dict[tuple[dist.ProcessGroup, str], list[Tensor]] = {}
    for view, sums in views:
        for term in sums:
            axis = "pp" if term.is_late else "tp"
            found.setdefault((term.group, axis), []).append(view.narrow(term.dim, term.start, term.length))
    for (group, axis), terms in found.items():
        flat = torch.cat([own.flatten() for own in terms])
        sum_over(flat, group, mesh.meter(axis))
        for own, total in zip(terms, flat.split([own.numel() for own in terms]), strict=True):
            own.copy_(total.view_as(own))


def find_owned(buckets: Sequence[Bucket]) -> Iterable[Tensor]:
    """Runs of the kept gradients that this rank answers for; none where another rank has the same."""
    for bucket in buckets:
        if not bucket.sharers.is_answering:
            continue
        if all(slot.shard.is_owned for slot in bucket.slots):
            yield bucket.kept
            continue
        for slot in bucket.slots:
            yield from _find_owned_runs(bucket, slot)


def _find_owned_runs(bucket: Bucket, slot: Slot) -> Iterable[Tensor]:
    """A weight's owned pieces inside this rank's part of the bucket; pieces along rows are runs of the buffer."""
    pieces, start = slot.shard.pieces, slot.start
    if slot.shard.is_owned:
        lengths = [slot.weight.numel()]
    else:
        assert slot.shard.dim == 0, "only copied rows have owners"
        width = slot.weight.numel() // max(slot.weight.shape[0], 1)
        lengths = [piece.length * width for piece in pieces]
    owned = [True] if slot.shard.is_owned else [piece.is_owned for piece in pieces]
    for length, is_owned in zip(lengths, owned, strict=True):
        first, last = max(start, bucket.own.start), min(start + length, bucket.own.stop)
        if is_owned and first < last:
            yield bucket.kept[first - bucket.own.start : last - bucket.own.start]
        start += length
