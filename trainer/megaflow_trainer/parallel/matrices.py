"""Whole matrices from what ranks hold of them, for an optimizer that has to see them whole (Muon).

Tensor parallelism and ZeRO leave a rank some rows, columns or a run of a matrix. Moments are kept of these alone; the
direction of a step is put together, on every rank that needs it, and each moves what it has.

Experts lie one below the other in one weight. What is whole of it is the experts that this rank has a part of: others
have the rest.

Communication. A step and matrix one all-reduce in fp32 of the tensor-parallel part among the ranks that ZeRO divides
states over, and one of the whole among tensor-parallel ranks, each where there are such ranks; of experts, among the
ranks with the same experts and among those that share each of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megaflow_trainer.parallel.buckets import MainParameter
from megaflow_trainer.parallel.collectives import sum_over
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.shards import Shard, ShardMap


class Matrices:
    """The matrices of this rank's part of the model.

    Args:
        parameters: what this rank steps; of some matrices that may be nothing.
        parts: what it holds.
        mesh: the ranks.
        is_divided: whether ZeRO divides states.
        stacks: weights of experts.
    """

    def __init__(
        self,
        parameters: Sequence[MainParameter],
        parts: ShardMap,
        mesh: Mesh,
        *,
        is_divided: bool,
        stacks: Collection[str] = (),
    ) -> None:
        self.own = {main.name: main for main in parameters}
        self.shards = {name: shard for name, shard in parts.shards.items() if len(shard.shape) > 1}
        self.mesh, self.is_divided, self.experts, self.stacks = mesh, is_divided, parts.experts, frozenset(stacks)
        self.shards |= {name: keep_experts(self.shards[name], mesh) for name in self.stacks}

    @property
    def names(self) -> list[str]:
        """All of them, in an order that is the same on all ranks with parts of the same."""
        return list(self.shards)

    def join(
        self, names: Sequence[str], runs: Mapping[str, Tensor], *, device: torch.device, dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        """One whole matrix after the other, given of each what this rank steps, as it lies in `MainParameter.weight`.

        Every rank takes part with the same names, also with those of which it steps nothing.
        """
        for name in names:
            local = self._join_runs(name, runs.get(name), device, dtype)
            yield name, self._join_parts(name, local)

    def _join_runs(self, name: str, run: Tensor | None, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The tensor-parallel part."""
        shape = self.shards[name].local_shape
        group = self.mesh.edp_shard_group if name in self.experts else self.mesh.shard_group
        if group is None or not self.is_divided:
            assert run is not None, "nobody else steps it"
            return run.view(shape)
        flat = torch.zeros(math.prod(shape), device=device, dtype=dtype)
        if run is not None:
            flat[self.own[name].start :][: run.numel()] = run.flatten()
        sum_over(flat, group, self.mesh.meter("dp"))
        return flat.view(shape)

    def _join_parts(self, name: str, local: Tensor) -> Tensor:
        shard = self.shards[name]
        if shard.local_shape == shard.shape:
            return local
        whole = local.new_zeros(shard.shape)
        shard.put(local, whole)
        is_stack = name in self.stacks
        group = self.mesh.etp_group if is_stack else self.mesh.tp_group
        sum_over(whole, group, self.mesh.meter("ep" if is_stack else "tp"))
        return whole

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """What this rank steps of a whole matrix."""
        main = self.own[name]
        local = self.shards[name].take(whole).flatten()
        return local[main.start : main.start + main.weight.numel()].view(main.weight.shape)


def keep_experts(shard: Shard, mesh: Mesh) -> Shard:
    """What a rank holds of its own experts, from what it holds of all of them."""
    rows = shard.shape[0] // mesh.layout.ep
    first = mesh.ep_rank * rows
    pieces = tuple(replace(piece, start=piece.start - first) for piece in shard.pieces)
    return Shard((rows, *shard.shape[1:]), shard.dim, pieces)
