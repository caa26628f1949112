"""One layer over ranks against the same layer in one process, in fp64: outputs and gradients; exact norms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from helpers.layouts import Case, find_mesh, make_config
from helpers.ranks import RankPool
from helpers.runs import one_rank
from megaflow_trainer.config.layout import Layout
from megaflow_trainer.config.sections import ModelConfig, ParallelConfig
from megaflow_trainer.model.init import init_weights
from megaflow_trainer.model.moe import MoE
from megaflow_trainer.model.sockets import Sockets
from megaflow_trainer.parallel.apply import ParallelModel
from megaflow_trainer.parallel.data import MainGradients
from megaflow_trainer.parallel.expert import shard_experts
from megaflow_trainer.parallel.fsdp import DividedGradients
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.shards import Shard, ShardMap
from megaflow_trainer.training.build import build_model

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

CONFIG = ModelConfig(
    num_layers=1, hidden_dim=8, num_heads=2, num_experts=8, expert_dim=6, router_top_k=3, shared_dim=4, vocab_size=32
)
BATCH, LENGTH = 4, 6
EP2, ZERO3 = "--expert-model-parallel-size 2", "--zero-stage 3"
HYBRID = "--num-distributed-optimizer-instances 2"


def run_layer(pool: Mesh, layout: Layout, dispatcher: str, changes: dict[str, Any], cuts: int) -> dict[str, Any] | None:
    """Output of this rank's samples, and gradients of what it holds, summed over ranks with the same; the samples go
    through the layer in `cuts` micro-batches.
    """
    mesh = find_mesh(pool, layout)
    if pool.rank >= layout.size:
        return None
    config, holder = replace(CONFIG, **changes), nn.Module()
    holder.mlp = MoE(config, Sockets(), 0).to(torch.float64)
    parts = ShardMap.of(holder)
    shard_experts(holder, mesh, parts, ParallelConfig(tp=layout.tp, ep=layout.ep, dispatcher=dispatcher))
    init_weights(holder, config, seed=4, parts=parts.shards)
    gradients = MainGradients(holder, mesh, parts)
    gradients.start(cuts)
    generator = torch.Generator().manual_seed(7)
    x, out_grad = (torch.randn(BATCH, LENGTH, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    own = slice(mesh.dp_rank * BATCH // layout.dp, (mesh.dp_rank + 1) * BATCH // layout.dp)
    x = x[own].requires_grad_()
    y = torch.cat([holder.mlp(part) for part in x.chunk(cuts)])
    y.backward(out_grad[own])
    gradients.reduce()
    found = {main.name: (parts.shards[main.name].pieces, main.main_grad.clone()) for main in gradients.parameters}
    dropped = holder.mlp.router.tally.num_dropped.item()
    norm = gradients.norm().item()
    return {"samples": own, "y": y.detach(), "x_grad": x.grad, "grads": found, "norm": norm, "dropped": dropped}


FOLDED = {
    "ep2": Layout(ep=2, dp_replicate=2),
    "ep4": Layout(ep=4, dp_replicate=4),
    "ep2.dp2": Layout(ep=2, dp_shard=4),
    "ep2.tp2": Layout(tp=2, ep=2, etp=2, dp_replicate=2),  # every matrix and bias of an expert on two ranks
    "ep4.tp2_folded": Layout(tp=2, ep=4, dp_replicate=2),
}
DROPS = {"capacity_factor": 0.5}


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("layout", FOLDED)
def test_a_layer_over_ranks_equals_one_process(eight_ranks: RankPool, layout: str, dispatcher: str) -> None:
    compare(eight_ranks, FOLDED[layout], dispatcher, {})


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("changes", [DROPS, {**DROPS, "pads_to_capacity": True}], ids=["rows", "padded"])
def test_choices_that_a_rank_drops_are_those_of_its_tokens_alone(
    eight_ranks: RankPool, changes: dict[str, Any], dispatcher: str
) -> None:
    assert compare(eight_ranks, FOLDED["ep4"], dispatcher, changes) > 0


def compare(pool: RankPool, layout: Layout, dispatcher: str, changes: dict[str, Any]) -> int:
    """Ranks against one process that takes their samples one after the other; returns how many choices are dropped."""
    one = run_layer(one_rank(), Layout(), dispatcher, changes, layout.dp)
    assert one is not None
    outcomes = pool.run(run_layer, layout, dispatcher, changes, 1)[: layout.size]
    for found in outcomes:
        close(found["y"], one["y"][found["samples"]])
        close(found["x_grad"], one["x_grad"][found["samples"]])
        for name, (pieces, grad) in found["grads"].items():
            full = one["grads"][name][1]
            assert full.abs().max() > 1e-6
            close(grad, torch.cat([full[piece.start : piece.start + piece.length] for piece in pieces]))
        if layout.tp == 1:
            assert found["norm"] == pytest.approx(one["norm"], rel=1e-14)
    dropped: int = sum(found["dropped"] for found in outcomes)
    assert dropped == one["dropped"]
    return dropped


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def measure_ones(pool: Mesh, case: Case, layout: Layout) -> tuple[float, float] | None:
    """Norms of gradients and weights that are 1 at three places of the model: in a layer, in the first expert, in the
    last one.
    """
    mesh = find_mesh(pool, layout)
    if pool.rank >= layout.size:
        return None
    model = build_model(make_config(case), mesh)
    with torch.no_grad():
        for main in model.gradients.parameters:
            main.weight.zero_()
        for weight in model.module.parameters():
            (weight.to_local() if isinstance(weight, DTensor) else weight).zero_()
    model.gradients.start()
    set_divided_ones(model) if isinstance(model.gradients, DividedGradients) else set_ones(model, mesh)
    return model.gradients.norm().item(), model.measure_norm().item()


PLACES = (("norm.weight", 0), ("blocks.0.mlp.experts.up.weight", 1), ("blocks.1.mlp.experts.up.weight", -1))


def find_place(shard: Shard, row: int) -> int | None:
    """The row of a rank's part that is `row` of the whole weight, if it has it."""
    start, at = 0, row % shard.shape[0]
    for piece in shard.pieces:
        if piece.start <= at < piece.start + piece.length:
            return start + at - piece.start
        start += piece.length
    return None


def set_ones(model: ParallelModel, mesh: Mesh) -> None:
    """Gradients as backward leaves them, on one of the ranks that have the same, and their sums."""
    for name, row in PLACES:
        weight, at = dict(model.module.named_parameters())[name], find_place(model.parts.shards[name], row)
        if at is not None:
            place = (at, *(0,) * (weight.dim() - 1))
            weight.data[place] = 1.0
            if mesh.is_replica_first and mesh.tp_rank == 0 if name == "norm.weight" else mesh.edp_rank == 0:
                weight.grad = torch.zeros_like(weight)
                weight.grad[place] = 1.0
    model.gradients.reduce()


def set_divided_ones(model: ParallelModel) -> None:
    """Gradients as they are behind backward, on the rank that has the row."""
    for name, row in PLACES:
        main = next(main for main in model.gradients.parameters if main.name == name)
        shard = model.parts.shards[name]
        place, width = find_place(shard, row), torch.Size(shard.shape[1:]).numel()
        at = -1 if place is None else place * width - main.start
        if 0 <= at < main.weight.numel():
            main.weight.view(-1)[at] = main.main_grad.view(-1)[at] = 1.0


NORMS = {
    "ep2": (Case("moe", "--expert-model-parallel-size 2", 2), Layout(ep=2, dp_replicate=2)),
    "ep4": (Case("moe", "--expert-model-parallel-size 4 --zero-stage 1", 4), Layout(ep=4, dp_shard=4)),
    "ep2.dp2": (Case("moe", "--expert-model-parallel-size 2 --zero-stage 1", 4), Layout(ep=2, dp_shard=4)),
    "ep2.tp2": (
        Case("moe", "--expert-model-parallel-size 2 --tensor-model-parallel-size 2", 4),
        Layout(tp=2, ep=2, etp=2, dp_replicate=2),
    ),
    "ep2_zero3": (Case("moe", f"{EP2} {ZERO3}", 2), Layout(ep=2, dp_shard=2)),
    "ep2.dp2_zero3": (Case("moe", f"{EP2} {ZERO3}", 4), Layout(ep=2, dp_shard=4)),
    "ep2.tp2_zero3": (
        Case("moe", f"{EP2} --tensor-model-parallel-size 2 {ZERO3}", 4),
        Layout(tp=2, ep=2, etp=2, dp_shard=2),
    ),
    "ep2_hybrid_zero3": (Case("moe", f"{EP2} {ZERO3} {HYBRID}", 4), Layout(ep=2, dp_shard=2, dp_replicate=2)),
    "ep4_hybrid_zero3": (  # experts of the other replica
        Case("moe", f"--expert-model-parallel-size 4 {ZERO3} {HYBRID}", 4),
        Layout(ep=4, dp_shard=2, dp_replicate=2),
    ),
    "ep2_hybrid_zero1": (
        Case("moe", f"{EP2} --zero-stage 1 {HYBRID}", 4),
        Layout(ep=2, dp_shard=2, dp_replicate=2),
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_counts_every_expert_once(eight_ranks: RankPool, name: str) -> None:
    case, layout = NORMS[name]
    root = torch.tensor(3.0).sqrt().item()
    assert eight_ranks.run(measure_ones, case, layout)[: layout.size] == [(root, root)] * layout.size
