"""One layer over ranks against the same layer in one process, in fp64: outputs and gradients; exact norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.layouts import Case, find_mesh, make_config
from helpers.ranks import RankPool
from helpers.runs import one_rank
from megaflow_trainer.config.layout import Layout
from megaflow_trainer.config.sections import ModelConfig, ParallelConfig
from megaflow_trainer.model.init import init_weights
from megaflow_trainer.model.moe import MoE
from megaflow_trainer.model.sockets import Sockets
from megaflow_trainer.parallel.data import MainGradients
from megaflow_trainer.parallel.expert import shard_experts
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.shards import ShardMap
from megaflow_trainer.training.build import build_model

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

CONFIG = ModelConfig(
    num_layers=1, hidden_dim=8, num_heads=2, num_experts=8, expert_dim=6, router_top_k=3, shared_dim=4, vocab_size=32
)
BATCH, LENGTH = 4, 6


def run_layer(pool: Mesh, layout: Layout, dispatcher: str) -> dict[str, Any] | None:
    """Output of this rank's samples, and gradients of what it holds, summed over ranks with the same."""
    mesh = find_mesh(pool, layout)
    if pool.rank >= layout.size:
        return None
    holder = nn.Module()
    holder.mlp = MoE(CONFIG, Sockets(), 0).to(torch.float64)
    parts = ShardMap.of(holder)
    shard_experts(holder, mesh, parts, ParallelConfig(ep=layout.ep, dispatcher=dispatcher))
    init_weights(holder, CONFIG, seed=4, parts=parts.shards)
    gradients = MainGradients(holder, mesh, parts)
    gradients.start()
    generator = torch.Generator().manual_seed(7)
    x, out_grad = (torch.randn(BATCH, LENGTH, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    own = slice(mesh.dp_rank * BATCH // layout.dp, (mesh.dp_rank + 1) * BATCH // layout.dp)
    x = x[own].requires_grad_()
    y = holder.mlp(x)
    y.backward(out_grad[own])
    gradients.reduce()
    found = {main.name: (parts.shards[main.name].pieces, main.main_grad.clone()) for main in gradients.parameters}
    return {"samples": own, "y": y.detach(), "x_grad": x.grad, "grads": found, "norm": gradients.norm().item()}


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize(
    "layout", [Layout(ep=2, dp_replicate=2), Layout(ep=4, dp_replicate=4), Layout(ep=2, dp_shard=4)]
)
def test_a_layer_over_ranks_equals_one_process(eight_ranks: RankPool, layout: Layout, dispatcher: str) -> None:
    one = run_layer(one_rank(), Layout(), dispatcher)
    assert one is not None
    for found in eight_ranks.run(run_layer, layout, dispatcher)[: layout.size]:
        close(found["y"], one["y"][found["samples"]])
        close(found["x_grad"], one["x_grad"][found["samples"]])
        for name, (pieces, grad) in found["grads"].items():
            full = one["grads"][name][1]
            assert full.abs().max() > 1e-6
            close(grad, torch.cat([full[piece.start : piece.start + piece.length] for piece in pieces]))
        assert found["norm"] == pytest.approx(one["norm"], rel=1e-14)


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
    assert isinstance(model.gradients, MainGradients)
    with torch.no_grad():
        for weight in model.module.parameters():
            weight.zero_()
    model.gradients.start()
    for name, row in (
        ("norm.weight", 0),
        ("blocks.0.mlp.experts.up.weight", 1),
        ("blocks.1.mlp.experts.up.weight", -1),
    ):
        weight, shard = dict(model.module.named_parameters())[name], model.parts.shards[name]
        start, at = 0, row % shard.shape[0]
        for piece in shard.pieces:
            if piece.start <= at < piece.start + piece.length:
                place = (start + at - piece.start, *(0,) * (weight.dim() - 1))
                weight.data[place] = 1.0
                is_first = name != "norm.weight" or (mesh.is_replica_first and mesh.tp_rank == 0)
                if is_first and (mesh.edp_rank == 0 or name == "norm.weight"):
                    weight.grad = torch.zeros_like(weight)
                    weight.grad[place] = 1.0
            start += piece.length
    model.gradients.reduce()
    return model.gradients.norm().item(), model.measure_norm().item()


NORMS = {
    "ep2": (Case("moe", "--expert-model-parallel-size 2", 2), Layout(ep=2, dp_replicate=2)),
    "ep4": (Case("moe", "--expert-model-parallel-size 4 --zero-stage 1", 4), Layout(ep=4, dp_shard=4)),
    "ep2.dp2": (Case("moe", "--expert-model-parallel-size 2 --zero-stage 1", 4), Layout(ep=2, dp_shard=4)),
    "ep2.tp2": (
        Case("moe", "--expert-model-parallel-size 2 --tensor-model-parallel-size 2", 4),
        Layout(tp=2, ep=2, etp=2, dp_replicate=2),
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_counts_every_expert_once(eight_ranks: RankPool, name: str) -> None:
    case, layout = NORMS[name]
    root = torch.tensor(3.0).sqrt().item()
    assert eight_ranks.run(measure_ones, case, layout)[: layout.size] == [(root, root)] * layout.size
