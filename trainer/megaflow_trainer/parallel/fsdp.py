"""ZeRO 3: weights are divided too, by torch's FSDP2; optionally only inside each of several replicas.

Every block is a unit, its router and its experts (where they lie apart) are others, and what is left of the model, or
of each of its pipeline chunks, is another one. A unit's weights lie divided along their first dim; they are
all-gathered before the unit's forward and again before its backward, the next unit's while this one computes, and its
gradients are reduce-scattered as soon as its backward is done. With replicas, parts of gradients are then all-reduced
among the ranks that have the same one.

Weights are kept in fp32 and cast to the compute dtype when they are gathered, so that they are their own masters;
gradients are reduced and accumulated in the main gradient's dtype, as sums: dividing by tokens is left to the step.

Who divides. Layers: the ranks with the same layers, data and context. Experts that lie on other ranks than the layers
around them: the ranks with the same experts (edp). An expert's gradient is already that of the tokens of all ranks that
share the experts, since tokens travel (`expert.py`), so that its sum over edp counts every token once, as a layer's sum
over data and context does: neither has a factor. Where only one rank has them it is a group of one, which casts,
accumulates and sends nothing. Experts are gathered as soon as their block begins, so that they travel beside attention:
their own forward begins when the host has waited for the numbers of rows.

Bytes a step, micro-batch and weight (n ranks): all-gather 2 (n-1)/n x the compute dtype's (without pipeline once for
the last unit, which is not gathered again), reduce-scatter (n-1)/n x 4, rows padded to a multiple of n. FSDP2 sends
them by itself, so they are counted by this formula, unit by unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megaflow_trainer.config.layout import EXPERT_AXES
from megaflow_trainer.config.sections import ModelConfig
from megaflow_trainer.model.experts import Experts
from megaflow_trainer.model.gpt import GPT, Block
from megaflow_trainer.model.moe import MoE, list_routers
from megaflow_trainer.model.routing import Router
from megaflow_trainer.parallel.buckets import MainParameter, add_terms, sum_squares
from megaflow_trainer.parallel.collectives import sum_over
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.shards import GradientSum, Shard, ShardMap


def can_divide(mesh: Mesh, model: ModelConfig) -> bool:
    """Whether there are ranks to divide weights among: those with the same layers, or those with the same experts."""
    has_experts_apart = model.num_experts is not None and mesh.layout.has_experts_apart
    return mesh.shard_group is not None or (has_experts_apart and mesh.edp_shard_group is not None)


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights that travel at once.

    Args:
        ranks: they are divided among.
        replicas: with the same parts of them.
        gathers: of them for a micro-batch.
        gathered_bytes: of one rank's part as it is gathered, padded.
        reduced_bytes: of one rank's part of the gradients as it is reduced, padded.
    """

    ranks: int
    replicas: int
    gathers: int
    gathered_bytes: int
    reduced_bytes: int


def divide_weights(
    model: GPT,
    mesh: Mesh,
    parts: ShardMap,
    *,
    compute_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    chunks: Sequence[nn.Module] = (),
) -> list[Unit]:
    """Divide the weights of a model among the ranks of `mesh` with the same; `can_divide` says that there are several.

    What is called is the model, or its `chunks` on a rank of a pipeline. These have other micro-batches between forward
    and backward of one, so that nothing of them stays gathered meanwhile.
    """
    reduce_dtype = torch.float64 if compute_dtype == torch.float64 else grad_dtype
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    as_it_is = MixedPrecisionPolicy(cast_forward_inputs=False)  # routers compute in fp32
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    experts = [module for module in model.modules() if isinstance(module, Experts)] if parts.experts else []
    layer_ranks, expert_ranks = make_layer_mesh(mesh), make_expert_mesh(mesh)
    roots = chunks or (model,)
    units, taken = [], set[nn.Parameter]()
    for module in (*list_routers(model), *experts, *blocks, *roots):
        own = as_it_is if isinstance(module, Router) else policy
        ranks = expert_ranks if isinstance(module, Experts) else layer_ranks
        fully_shard(module, mesh=ranks, mp_policy=own, reshard_after_forward=True if chunks else None)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        weights = [weight for weight in module.parameters() if weight not in taken]
        taken.update(weights)
        gathers = 1 if module in roots and not chunks else 2
        units.append(_describe(weights, ranks, own, gathers))
    for block in blocks:
        if experts and isinstance(block.mlp, MoE):
            inner = block.mlp.experts
            assert isinstance(block, FSDPModule)
            assert isinstance(inner, FSDPModule)
            block.set_modules_to_forward_prefetch([inner])
    return units


def _describe(weights: Sequence[nn.Parameter], ranks: DeviceMesh, policy: MixedPrecisionPolicy, gathers: int) -> Unit:
    gathered = reduced = 0
    for weight in weights:
        length = -(-weight.shape[0] // ranks.size(-1)) * (weight.numel() // weight.shape[0])
        gathered += length * (policy.param_dtype or weight.dtype).itemsize
        reduced += length * (policy.reduce_dtype or weight.dtype).itemsize
    return Unit(ranks.size(-1), ranks.size() // ranks.size(-1), gathers, gathered, reduced)


def make_layer_mesh(mesh: Mesh) -> DeviceMesh:
    """Replicas and shards (data and context) of the layers that this rank has a part of."""
    ranks = mesh.layout.peers(mesh.rank, ("dp_replicate", "dp_shard", "cp"))
    return _make_mesh(mesh, ranks, mesh.replicate_group, mesh.shard_group)


def make_expert_mesh(mesh: Mesh) -> DeviceMesh:
    """Replicas and shards of the experts that this rank has a part of."""
    ranks = mesh.layout.peers(mesh.rank, ("edp_replicate", "edp_shard"), EXPERT_AXES)
    return _make_mesh(mesh, ranks, mesh.edp_replicate_group, mesh.edp_shard_group)


def _make_mesh(
    mesh: Mesh, peers: Sequence[int], replicates: dist.ProcessGroup | None, shards: dist.ProcessGroup | None
) -> DeviceMesh:
    """Ranks with the same weights, over the groups that there are; shards are a group even where they are one rank."""
    ranks, shards = torch.tensor(peers) + mesh.base, shards or mesh.own_group
    assert shards is not None, "weights are divided among several ranks"
    kind = "cpu" if mesh.device.type == "meta" else mesh.device.type  # shapes alone: no device of a mesh
    if replicates is None:
        return DeviceMesh.from_group(shards, kind, mesh=ranks, mesh_dim_names=("shard",))
    table = ranks.view(-1, shards.size())
    return DeviceMesh.from_group([replicates, shards], kind, mesh=table, mesh_dim_names=("replicate", "shard"))


class DividedGradients:
    """The gradients of a model whose weights are divided; the interface of `MainGradients`."""

    def __init__(self, model: nn.Module, mesh: Mesh, parts: ShardMap, units: Sequence[Unit]) -> None:
        self.mesh, self.parts, self.units = mesh, parts, units
        self.parameters: list[MainParameter] = []
        self.rows: dict[str, range] = {}
        for name, weight in model.named_parameters():
            assert isinstance(weight, DTensor)
            weight.grad = torch.zeros_like(weight)  # backward adds to it in place
            assert isinstance(weight.grad, DTensor)
            self.rows[name] = find_rows(weight)
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

    def _count_traffic(self, count: int) -> None:
        """Count what FSDP2 will send by itself for `count` micro-batches: by formula, and without its waiting."""
        for unit in self.units:
            sent = {
                "all_gather": (unit.gathers, (unit.ranks - 1) * unit.gathered_bytes),
                "reduce_scatter": (1, (unit.ranks - 1) * unit.reduced_bytes),
                "all_reduce": (1, 2 * (unit.replicas - 1) / unit.replicas * unit.reduced_bytes),
            }
            for kind, (times, size) in sent.items():
                if size:
                    calls = times * count
                    self.mesh.traffic.count("dp", kind, calls * size, calls=calls, is_background=True)

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
        square = sum_squares(self._find_owned(tensors), self.mesh.device)
        sum_over(square, self.mesh.world_group, self.mesh.meter("world"))
        return square.sqrt().to(torch.promote_types(self.dtype, torch.float32))

    def _find_owned(self, tensors: Mapping[str, Tensor]) -> Iterable[Tensor]:
        mesh, layout = self.mesh, self.mesh.layout
        answers_for_layers, answers_for_experts = mesh.dp_rank < layout.dp_shard, mesh.edp_rank < layout.edp_shard
        for name, tensor in tensors.items():
            if not (answers_for_experts if name in self.parts.experts else answers_for_layers):
                continue
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
