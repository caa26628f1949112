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
from megaflow_trainer.model.context import Context
from megaflow_trainer.model.init import init_weights
from megaflow_trainer.model.moe import MoE
from megaflow_trainer.model.routing import Router
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
BATCH, LENGTH = 4, 8
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


LOSSES: dict[str, Any] = {"aux_loss_scale": 0.3, "z_loss_scale": 0.07}
COUNTED = (8, 0, 1, 6)
"""Tokens of each sample that count in the loss: no two ranks, halves of a batch or of its samples have as many."""


def run_losses(pool: Mesh, layout: Layout, kind: str, cuts: int, fault: str = "") -> dict[str, Any] | None:
    """Gradients that the losses of a router have, times 2, and their sums; the samples in `cuts` micro-batches."""
    mesh = find_mesh(pool, layout)
    if pool.rank >= layout.size:
        return None
    config, holder = replace(CONFIG, **LOSSES, balance_kind=kind), nn.Module()
    layer = holder.mlp = MoE(config, Sockets(), 0).to(torch.float64)
    layer.router.lift = 2.0
    parts = ShardMap.of(holder)
    shard_experts(holder, mesh, parts, ParallelConfig(tp=layout.tp, ep=layout.ep, cp=layout.cp))
    init_weights(holder, replace(config, init_std=0.5), seed=4, parts=parts.shards)
    gradients = MainGradients(holder, mesh, parts)
    gradients.start(cuts)
    x, masks = make_unequal()
    rows = slice(mesh.dp_rank * BATCH // layout.dp, (mesh.dp_rank + 1) * BATCH // layout.dp)
    own = (rows, slice(mesh.cp_rank * LENGTH // layout.cp, (mesh.cp_rank + 1) * LENGTH // layout.cp))
    x, masks = x[own].requires_grad_(), masks[own]
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            patch.setattr(Router, "_measure", FAULTS[fault])
        for part, weights in zip(x.chunk(cuts), masks.chunk(cuts), strict=True):
            (layer(part, Context(torch.arange(part.shape[1]), None, None, weights=weights)) * 0).sum().backward()
    gradients.reduce()
    router = next(main for main in gradients.parameters if main.name == "mlp.router.weight")
    tally = layer.router.tally
    sums = torch.stack([tally.aux_loss, tally.z_loss])
    return {"own": own, "x_grad": x.grad, "router": router.main_grad.clone(), "sums": sums}


def make_unequal() -> tuple[Tensor, Tensor]:
    """Tokens of samples, `[b, s, h]`, and which of them count."""
    x = torch.randn(BATCH, LENGTH, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return x, (torch.arange(LENGTH) < torch.tensor(COUNTED)[:, None]).to(torch.float64)


def compute_plainly(kind: str, cuts: int) -> dict[str, Any]:
    """The same by the definition of both losses, with nothing but autograd."""
    holder = nn.Module()
    holder.mlp = MoE(CONFIG, Sockets(), 0).to(torch.float64)
    init_weights(holder, replace(CONFIG, init_std=0.5), seed=4)
    weight, (x, masks) = holder.mlp.router.weight, make_unequal()
    logits = x.requires_grad_() @ weight.T
    z = (logits.logsumexp(dim=2).square() * masks).sum()
    balance = torch.zeros((), dtype=torch.float64)
    pieces = BATCH if kind == "seq_aux_loss" else 1 if kind == "global_aux_loss" else cuts
    for unit, counted in zip(logits.chunk(pieces), masks.chunk(pieces), strict=True):
        chosen = torch.bincount(unit.topk(3, dim=2).indices.flatten(), minlength=8).double() / (
            unit.shape[0] * LENGTH * 3
        )
        balance = balance + counted.sum() * 8 * (chosen * unit.softmax(dim=2).mean(dim=(0, 1))).sum()
    grads = torch.autograd.grad(2 * (0.3 * balance + 0.07 * z), [x, weight])
    return {"x_grad": grads[0], "router": grads[1].flatten(), "sums": torch.stack([balance, z]).detach()}


def measure_own_mean(router: Router, logits: Tensor, chosen: Tensor, masks: Tensor) -> tuple[Tensor | None, Tensor]:
    """The fault of a z-loss that is a mean over a rank's own tokens."""
    balance, z = MEASURE(router, logits, chosen, masks)
    assert z is not None
    return balance, z / masks.sum().clamp(min=1) * (sum(COUNTED) / (BATCH * LENGTH)) * masks.numel()


def measure_all_tokens(router: Router, logits: Tensor, chosen: Tensor, masks: Tensor) -> tuple[Tensor | None, Tensor]:
    """The fault of a z-loss that takes tokens for its own that do not count."""
    balance, _ = MEASURE(router, logits, chosen, masks)
    return balance, logits.logsumexp(dim=1).square().sum()


def measure_parts(router: Router, logits: Tensor, chosen: Tensor, masks: Tensor) -> tuple[Tensor | None, Tensor]:
    """The fault of a z-loss that is divided by the ranks that share the tokens of a micro-batch."""
    balance, z = MEASURE(router, logits, chosen, masks)
    assert z is not None
    return balance, z * (masks.numel() / (BATCH * LENGTH))


MEASURE = Router._measure
FAULTS = {"mean of its own": measure_own_mean, "masked tokens": measure_all_tokens, "part": measure_parts}
SHARED = FOLDED | {
    "tp2": Layout(tp=2, etp=1, ep=2),
    "ep2.cp2": Layout(cp=2, ep=2, dp_replicate=2),
    "ep2.cp2.tp2": Layout(cp=2, tp=2, ep=2, etp=2, dp_replicate=2),
}


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
@pytest.mark.parametrize("layout", SHARED)
def test_losses_of_routers_over_ranks_are_sums_over_the_tokens_that_count(
    eight_ranks: RankPool, layout: str, kind: str
) -> None:
    assert find_gap(eight_ranks, SHARED[layout], kind) < 1e-13


def test_cuts_into_micro_batches_are_no_part_of_the_losses() -> None:
    assert find_gap(None, Layout(), "aux_loss", cuts=2) < 1e-13
    assert find_gap(None, Layout(), "seq_aux_loss", cuts=4) < 1e-13


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("layout", SHARED)
def test_a_loss_of_another_scale_is_noticed(eight_ranks: RankPool, layout: str, fault: str) -> None:
    assert find_gap(eight_ranks, SHARED[layout], "seq_aux_loss", fault=fault) > 1e-2


def find_gap(pool: RankPool | None, layout: Layout, kind: str, *, cuts: int = 1, fault: str = "") -> float:
    """The largest difference from the definition, as a part of the largest number."""
    wanted = compute_plainly(kind, cuts * layout.dp)
    one = () if pool is not None else [run_losses(one_rank(), layout, kind, cuts, fault)]
    outcomes = pool.run(run_losses, layout, kind, cuts, fault)[: layout.size] if pool is not None else one
    pairs = [(sum(found["sums"] for found in outcomes), wanted["sums"])]
    for found in outcomes:
        pairs += [(found["x_grad"], wanted["x_grad"][found["own"]]), (found["router"].flatten(), wanted["router"])]
    return max(((one - other).abs().max() / other.abs().max().clamp(min=1e-300)).item() for one, other in pairs)


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
