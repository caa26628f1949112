"""ZeRO 3: weights are divided too, by torch's FSDP2; optionally only inside each of several replicas.

Every block is a unit, and what is left of the model, or of each of its pipeline chunks, another one. A unit's weights
lie divided along their first dim; they are all-gathered before the unit's forward and again before its backward, the
next unit's while this one computes, and its gradients are reduce-scattered as soon as its backward is done. With
replicas, parts of gradients are then all-reduced among the ranks that have the same one.

Weights are kept in fp32 and cast to the compute dtype when they are gathered, so that they are their own masters;
gradients are reduced and accumulated in the main gradient's dtype, as sums: dividing by tokens is left to the step.

Bytes a step, micro-batch and weight (n ranks): all-gather 2 (n-1)/n x the compute dtype's (without pipeline once for
the last unit, which is not gathered again), reduce-scatter (n-1)/n x 4, rows padded to a multiple of n. FSDP2 sends
them by itself, so they are counted by this formula.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megaflow_trainer.model.gpt import GPT, Block
from megaflow_trainer.model.moe import list_routers
from megaflow_trainer.model.routing import Router
from megaflow_trainer.parallel.buckets import MainParameter, add_terms, sum_squares
from megaflow_trainer.parallel.collectives import sum_over
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.shards import GradientSum, Shard, ShardMap


def divide_weights(
    model: GPT,
    mesh: Mesh,
    *,
    compute_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    chunks: Sequence[nn.Module] = (),
) -> None:
    """Divide the weights of a model among the shard ranks of `mesh`, of which there are several.

    What is called is the model, or its `chunks` on a rank of a pipeline. These have other micro-batches between forward
    and backward of one, so that nothing of them stays gathered meanwhile.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=grad_dtype)
    as_it_is = MixedPrecisionPolicy(cast_forward_inputs=False)  # routers compute in fp32
    ranks = make_fsdp_mesh(mesh)
    units = [module for module in model.modules() if isinstance(module, Block)]
    for unit in (*list_routers(model), *units, *(chunks or (model,))):
        own = as_it_is if isinstance(unit, Router) else policy
        fully_shard(unit, mesh=ranks, mp_policy=own, reshard_after_forward=True if chunks else None)
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def make_fsdp_mesh(mesh: Mesh) -> DeviceMesh:
    """Replicas and shards (data and context) of this rank's part of the model, over the groups that there are."""
    layout = mesh.layout
    ranks = torch.tensor(layout.peers(mesh.rank, ("dp_replicate", "dp_shard", "cp"))) + mesh.base
    assert mesh.shard_group is not None, "weights are divided among several ranks"
    kind = "cpu" if mesh.device.type == "meta" else mesh.device.type  # shapes alone: no device of a mesh
    if mesh.replicate_group is None:
        return DeviceMesh.from_group(mesh.shard_group, kind, mesh=ranks, mesh_dim_names=("shard",))
    groups = [mesh.replicate_group, mesh.shard_group]
    table = ranks.view(layout.dp_replicate, -1)
    return DeviceMesh.from_group(groups, kind, mesh=table, mesh_dim_names=("replicate", "shard"))


class DividedGradients:
    """The gradients of a model whose weights are divided; the interface of `MainGradients`."""

    def __init__(
        self, model: nn.Module, mesh: Mesh, parts: ShardMap, compute_dtype: torch.dtype, num_roots: int = 1
    ) -> None:
        self.mesh, self.parts, self.compute_dtype, self.num_roots = mesh, parts, compute_dtype, num_roots
        self.blocks = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Block))
        self.parameters: list[MainParameter] = []
        self.rows: dict[str, range] = {}
        self.lengths: dict[str, int] = {}
        """Elements of a shard of each weight, padded as they travel."""
        for name, weight in model.named_parameters():
            assert isinstance(weight, DTensor)
            weight.grad = torch.zeros_like(weight)  # backward adds to it in place
            assert isinstance(weight.grad, DTensor)
            self.rows[name] = find_rows(weight)
            self.lengths[name] = -(-weight.shape[0] // weight.device_mesh.size(-1)) * (
                weight.numel() // weight.shape[0]
            )
            local = weight.to_local().detach()
            start = self.rows[name].start * (weight.numel() // weight.shape[0])
            self.parameters.append(MainParameter(name, local, weight.grad.to_local(), weight.dim() > 1, start))
        self.dtype = self.parameters[0].main_grad.dtype

    @property
    def kept(self) -> list[Tensor]:
        """The gradients of this rank's parts."""
        return [main.main_grad for main in self.parameters]

    def start(self, num_micro_batches: int = 1) -> None:
        """Forget the last step."""
        torch._foreach_zero_(self.kept)
        self._count_traffic(num_micro_batches)

    def _count_traffic(self, num_micro_batches: int) -> None:
        """Count what FSDP2 will send in the step, which it does by itself: by formula, and without its waiting."""
        layout, traffic = self.mesh.layout, self.mesh.traffic
        size, item, grad_item = layout.dp_shard * layout.cp, self.compute_dtype.itemsize, self.dtype.itemsize
        has_stages = layout.pp > 1
        own = sum(self.lengths.values())
        again = sum(length for name, length in self.lengths.items() if has_stages or name.startswith(self.blocks))
        calls, sent = (len(self.blocks) + self.num_roots) * num_micro_batches, (size - 1) * num_micro_batches
        gathers = calls + (len(self.blocks) + has_stages * self.num_roots) * num_micro_batches
        traffic.count("dp", "all_gather", sent * (own + again) * item, calls=gathers, is_background=True)
        traffic.count("dp", "reduce_scatter", sent * own * grad_item, calls=calls, is_background=True)
        if layout.dp_replicate > 1:
            share = 2 * (layout.dp_replicate - 1) / layout.dp_replicate * num_micro_batches
            traffic.count("dp", "all_reduce", share * own * grad_item, calls=calls, is_background=True)

    def sweep(self) -> None:
        """Nothing: FSDP2 takes every gradient in by itself."""

    def reduce(self) -> None:
        """Add terms of gradients on other ranks; sums over samples are complete after backward."""
        add_terms(((main.main_grad, tuple(self._find_terms(main))) for main in self.parameters), self.mesh)

    def _find_terms(self, main: MainParameter) -> Iterator[GradientSum]:
        rows = self.rows[main.name]
        for term in self.parts.sums.get(main.name, ()):
            assert term.dim == 0, "weights are divided along their first dim"
            own = intersect(rows, term.start, term.length)
            yield GradientSum(term.group, 0, own.start - rows.start, len(own), term.is_late)

    def norm(self) -> Tensor:
        """Global 2-norm, fp32 scalar on the device (fp64 in fp64). Every element of the model is counted once."""
        return self._measure({main.name: main.main_grad for main in self.parameters})

    def list_weights(self) -> list[tuple[str, Tensor, int]]:
        """This rank's rows of each weight: name, memory, first element in the flattened tensor-parallel part."""
        return [(main.name, main.weight, main.start) for main in self.parameters]

    def measure_weights(self) -> Tensor:
        """2-norm of the weights, as `norm` is of the gradients."""
        return self._measure({main.name: main.weight for main in self.parameters})

    def _measure(self, tensors: Mapping[str, Tensor]) -> Tensor:
        is_answering = self.mesh.dp_rank < self.mesh.layout.dp_shard
        square = sum_squares(self._find_owned(tensors) if is_answering else (), self.mesh.device)
        sum_over(square, self.mesh.world_group, self.mesh.meter("world"))
        return square.sqrt().to(torch.promote_types(self.dtype, torch.float32))

    def _find_owned(self, tensors: Mapping[str, Tensor]) -> Iterable[Tensor]:
        for name, tensor in tensors.items():
            shard, rows = self.parts.shards[name], self.rows[name]
            for own in find_owned_rows(shard, rows):
                yield tensor[own.start - rows.start : own.stop - rows.start]

    def share_weights(self) -> None:
        """Nothing: weights are gathered when they are needed."""

    def receive_weights(self) -> None:
        """Nothing to wait for."""


def find_rows(weight: DTensor) -> range:
    """This rank's rows of a divided weight; the first ranks hold equal numbers, the last ones fewer or none."""
    size = weight.device_mesh.size(-1)
    length = -(-weight.shape[0] // size)
    first = min(weight.device_mesh.get_local_rank(weight.device_mesh.ndim - 1) * length, weight.shape[0])
    return range(first, min(first + length, weight.shape[0]))


def intersect(rows: range, start: int, length: int) -> range:
    """The rows that are also among `length` from `start` on; empty ranges begin inside `rows`."""
    first = min(max(rows.start, start), rows.stop)
    return range(first, max(first, min(rows.stop, start + length)))


def find_owned_rows(shard: Shard, rows: range) -> Iterator[range]:
    """Of this rank's rows of a tensor-parallel part, those that it answers for."""
    if shard.is_owned:
        yield rows
        return
    assert shard.dim == 0, "only copied rows have owners"
    start = 0
    for piece in shard.pieces:
        if piece.is_owned:
            yield intersect(rows, start, piece.length)
        start += piece.length
