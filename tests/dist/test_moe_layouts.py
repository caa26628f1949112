"""Experts on other ranks give the losses, gradient norms and weights of one process; and the test notices when not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from helpers.layouts import Case, find_difference, run_case
from helpers.ranks import RankPool
from helpers.runs import one_rank
from megaflow_trainer.config.layout import EXPERT_AXES
from megaflow_trainer.model.experts import Experts
from megaflow_trainer.optim import optimizer
from megaflow_trainer.optim.rules import orthogonalise
from megaflow_trainer.parallel import apply, data, expert, fsdp, load, matrices
from megaflow_trainer.parallel.mesh import Mesh

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

EP2, EP4 = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4"
ETP1 = "--expert-tensor-parallel-size 1"
TP4 = "--tensor-model-parallel-size 4"
TP2, PP2, CP2 = (f"--{name}-parallel-size 2" for name in ("tensor-model", "pipeline-model", "context"))
SP, ZERO1, ZERO2, ZERO3 = "--sequence-parallel", "--use-distributed-optimizer", "--zero-stage 2", "--zero-stage 3"
GATHER = "--moe-token-dispatcher-type allgather"
HYBRID = "--num-distributed-optimizer-instances 2"
PART = "--recompute-activations --recompute-modules mlp"
CHUNKS = "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2"
SMALL = "--ddp-bucket-size 4000"
BALANCE = "--moe-aux-loss-coeff 1 --moe-router-load-balancing-type"
EVEN, GLOBALLY = f"{BALANCE} aux_loss", f"{BALANCE} global_aux_loss"
MUON = "--optimizer muon"
RANDOM = "--moe-router-force-load-balancing"
UNEVEN = (0, 1, 2, 5)
"""Samples with few tokens that count: neither micro-batches of one or two nor ranks have equally many."""
PRECISION = {"losses": 2e-5, "norms": 1e-5, "weights": 1e-4}


@cache
def run_alone(case: Case) -> dict[str, Any]:
    """The same training by one process."""
    outcome = run_case(one_rank(), replace(case, flags="", num_ranks=1))
    assert outcome is not None
    return outcome


def compare(pool: RankPool, case: Case) -> None:
    outcomes = pool.run(run_case, case)[: case.num_ranks]
    one = run_alone(replace(case, flags="", num_ranks=1, micro=2))
    for outcome in outcomes:
        difference = find_difference(one, outcome)
        assert all(difference[name] <= largest for name, largest in PRECISION.items()), difference
    held: dict[tuple[str, int, int], str] = {}
    for outcome in outcomes:
        for place, digest in outcome["pieces"].items():
            assert held.setdefault(place, digest) == digest, place
    assert all(outcome["losses"] == outcomes[0]["losses"] for outcome in outcomes)


CASES = {
    "micro1": Case("moe", "", 1, micro=1),
    "micro8": Case("moe_bias", "", 1, micro=8),
    "dp2": Case("moe", SMALL, 2),
    "ep2": Case("moe", EP2, 2),
    "ep2_masked": Case("moe", EP2, 2, micro=1, common="--moe-z-loss-coeff 0.1", few=UNEVEN),
    "ep2_bias": Case("moe_bias", EP2, 2, micro=1),
    "ep2_gather": Case("moe", f"{EP2} {GATHER}", 2),
    "ep4": Case("moe", f"{EP4} {SMALL}", 4),
    "ep4_gather": Case("moe_bias", f"{EP4} {GATHER}", 4),
    "tp2": Case("moe", f"{TP2} {SP}", 2),
    "tp2_etp1": Case("moe", f"{TP2} {ETP1}", 2),
    "ep2.tp2_folded": Case("moe", f"{EP2} {TP2} {SP} {ETP1}", 2),
    "ep2.tp2": Case("moe", f"{EP2} {TP2} {SP}", 4),
    "ep2.tp2_plain_bias": Case("moe_bias", f"{EP2} {TP2}", 4),
    "ep2.tp2_gather": Case("moe", f"{EP2} {TP2} {SP} {GATHER}", 4),
    "ep2_padded": Case("moe_padded", EP2, 2),
    "ep2.tp2_padded": Case("moe_padded", f"{EP2} {TP2} {SP}", 4),
    "ep2.tp2_padded_gather": Case("moe_padded", f"{EP2} {TP2} {SP} {GATHER}", 4),
    "ep2.cp2": Case("moe", f"{EP2} {CP2}", 2),
    "ep2.pp2": Case("moe", f"{EP2} {PP2}", 4),
    "ep2.pp2_bias": Case("moe_bias", f"{EP2} {PP2}", 4, micro=1),
    "ep2.pp2_documents": Case("moe_documents", f"{EP2} {PP2}", 4),
    "ep2.tp2_documents": Case("moe_documents", f"{EP2} {TP2} {SP}", 4),
    "ep2.pp2_zero_bubble": Case("moe", f"{EP2} {PP2} --pipeline-schedule zero_bubble", 4),
    "ep2.dp2_zero1": Case("moe", f"{EP2} {ZERO1} {SMALL}", 4),
    "ep2.dp2_zero2": Case("moe_bias", f"{EP2} {ZERO2} {SMALL}", 4, micro=1),
    "ep2.cp2_even": Case("moe", f"{EP2} {CP2}", 2, common=EVEN),
    "tp2_etp1_even": Case("moe", f"{TP2} {SP} {ETP1}", 2, common=EVEN),
    "ep2_even_globally": Case("moe", EP2, 2, micro=1, common=GLOBALLY),
    "ep2.tp2_even_globally": Case("moe", f"{EP2} {TP2} {SP}", 4, micro=1, common=GLOBALLY),
    "dp2_zero3": Case("moe", ZERO3, 2),
    "ep2_zero3": Case("moe", f"{EP2} {ZERO3}", 2),  # a group of one for experts
    "ep2.dp2_zero3": Case("moe_bias", f"{EP2} {ZERO3}", 4, micro=1),
    "ep2.dp2_zero3_gather": Case("moe", f"{EP2} {ZERO3} {GATHER}", 4),
    "ep2.dp2_zero3_recompute": Case("moe", f"{EP2} {ZERO3} --recompute-granularity full", 4, micro=1),
    "ep2.dp2_zero3_recompute_part": Case("moe_bias", f"{EP2} {ZERO3} {PART}", 4, micro=1),
    "ep2.dp2_zero3_meanwhile": Case("moe_bias", f"{EP2} {ZERO3} --moe-shared-expert-overlap", 4),
    "ep2.tp2_zero3": Case("moe", f"{EP2} {TP2} {SP} {ZERO3}", 4),
    "ep2.tp2_zero3_bias": Case("moe_bias", f"{EP2} {TP2} {ZERO3}", 8, micro=1),  # etp 2, edp 2
    "ep2.tp4_zero3_folded": Case("moe", f"{EP2} {TP4} {SP} {ETP1} {ZERO3}", 4),  # experts alone are divided
    "ep2.pp2_zero3": Case("moe", f"{EP2} {PP2} {ZERO3}", 4),
    "ep2.dp2.pp2_zero3": Case("moe_bias", f"{EP2} {PP2} {ZERO3}", 8, micro=1),
    "ep2.pp2_zero3_interleaved": Case("moe", f"{EP2} {PP2} {ZERO3} {CHUNKS}", 4),
    "ep2.cp2_zero3": Case("moe", f"{EP2} {CP2} {ZERO3}", 4),
    "ep2_hybrid_zero3": Case("moe", f"{EP2} {ZERO3} {HYBRID}", 8, micro=1),
    "ep4_hybrid_zero3": Case("moe", f"{EP4} {ZERO3} {HYBRID}", 4),  # experts of a rank are in one replica only
    "ep2_hybrid_zero2": Case("moe", f"{EP2} {ZERO2} {HYBRID} {SMALL}", 8, micro=1),
    "ep2_hybrid_zero1": Case("moe_bias", f"{EP2} {ZERO1} {HYBRID} {SMALL}", 4),
    "ep2.tp2.dp2": Case("moe", f"{EP2} {TP2} {SP} {ZERO1} {SMALL}", 8, micro=1),
    "ep4.tp2_folded": Case("moe_bias", f"{EP4} {TP2} {ETP1}", 8, micro=1),
    "ep2_random": Case("moe", EP2, 2, micro=1, common=RANDOM),
    "ep2.tp2_random": Case("moe_bias", f"{EP2} {TP2} {SP} --recompute-granularity full", 4, common=RANDOM),
    "ep2.cp2_random": Case("moe", f"{EP2} {CP2} {GATHER}", 2, common=RANDOM),
    "ep2.pp2_random": Case("moe_bias", f"{EP2} {PP2}", 4, micro=1, common=RANDOM),
    "ep2_muon": Case("moe", EP2, 2, common=MUON),
    "tp2_muon": Case("moe_bias", f"{TP2} {SP}", 2, common=MUON),
    "ep2.tp2_muon": Case("moe_bias", f"{EP2} {TP2}", 4, common=MUON),
    "ep2.dp2_zero1_muon": Case("moe_bias", f"{EP2} {ZERO1} {SMALL}", 4, micro=1, common=MUON),
    "ep2.tp2_zero3_muon": Case("moe_bias", f"{EP2} {TP2} {ZERO3}", 8, micro=1, common=MUON),
    "ep2.pp2_zero3_muon": Case("moe", f"{EP2} {PP2} {ZERO3}", 4, common=MUON),
    "ep2_hybrid_zero2_muon": Case("moe", f"{EP2} {ZERO2} {HYBRID} {SMALL}", 8, micro=1, common=MUON),
}


EVERY_TIME = (
    *("micro1", "ep2", "ep4", "ep2_gather", "tp2_etp1", "ep2.tp2", "ep2.pp2", "ep2.cp2", "ep2.tp2_padded"),
    *(
        "ep2.dp2_zero1",
        "dp2_zero3",
        "ep2_zero3",
        "ep2.dp2_zero3",
        "ep2.tp2_zero3",
        "ep2.dp2.pp2_zero3",
        "ep2.tp2.dp2",
        "ep2.tp2_zero3_muon",
        "ep2.pp2_documents",
        "tp2_etp1_even",
        "ep2_even_globally",
    ),
    "ep2_masked",
    "ep2_random",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERY_TIME else pytest.mark.slow) for name in CASES]
)
def test_experts_on_other_ranks_equal_one_rank(eight_ranks: RankPool, name: str) -> None:
    compare(eight_ranks, CASES[name])


def run_broken(mesh: Mesh, case: Case, where: str) -> dict[str, Any] | None:
    """The run with one thing left out."""
    owner, name, without = REMOVED[where]
    keep = getattr(owner, name)
    setattr(owner, name, without)
    try:
        return run_case(mesh, case)
    finally:
        setattr(owner, name, keep)


def hold_experts_as_layers(model: Any, mesh: Mesh, parts: Any, parallel: Any) -> None:
    """The fault of summing gradients of experts over the ranks that hold other experts."""
    expert.shard_experts(model, mesh, parts, parallel)
    parts.experts = frozenset()


def divide_by_ranks(unit: FSDPModule, factor: float) -> None:
    """The fault of taking the mean of experts' gradients over the ranks that share the experts of a layer."""
    SET_FACTOR(unit, 2 * factor if isinstance(unit, Experts) else factor)


def forget_replicas(mesh: Mesh) -> DeviceMesh:
    """The fault of summing experts' gradients inside a replica only."""
    alone = mesh.layout.peers(mesh.rank, ("edp_shard",), EXPERT_AXES)
    return fsdp._make_mesh(mesh, alone, None, mesh.edp_shard_group)


def take_as_one(stack: torch.Tensor, num_matrices: int) -> tuple[torch.Tensor, int]:
    """The fault of making a rank's experts orthogonal together."""
    return orthogonalise(stack), max(stack.shape)


SET_FACTOR = FSDPModule.set_gradient_divide_factor
REMOVED: dict[str, tuple[Any, str, Any]] = {
    "the ranks of gradients": (apply, "shard_experts", hold_experts_as_layers),
    "terms of copied routers": (data, "add_terms", lambda views, mesh: None),
    "squares of the norm": (data, "sum_over", lambda x, group, meter: None),
    "numbers of micro-batches of all ranks": (expert, "_share_numbers", lambda layer, mesh: None),
    "numbers of shared samples": (expert, "_share_numbers", lambda layer, mesh: None),
    "counts of other ranks": (load, "sum_over", lambda x, group, meter: None),
    "zero3: the scale of experts": (FSDPModule, "set_gradient_divide_factor", divide_by_ranks),
    "zero3: the ranks of experts": (fsdp, "make_expert_mesh", fsdp.make_layer_mesh),
    "zero3: experts of other replicas": (fsdp, "make_expert_mesh", forget_replicas),
    "zero3: squares of the norm": (fsdp, "sum_over", lambda x, group, meter: None),
    "muon: parts of experts": (matrices, "sum_over", lambda x, group, meter: None),
    "muon: experts apart": (optimizer, "orthogonalise_each", take_as_one),
}
BROKEN = {
    "the ranks of gradients": Case("moe", EP2, 2),
    "terms of copied routers": Case("moe", f"{TP2} {ETP1}", 2),
    "squares of the norm": Case("moe", EP2, 2),
    "numbers of micro-batches of all ranks": Case("moe", EP2, 2, micro=1, common=GLOBALLY),
    "numbers of shared samples": Case("moe", f"{TP2} {SP} {ETP1}", 2, common="--moe-aux-loss-coeff 1"),
    "counts of other ranks": Case("moe_bias", EP2, 2, micro=1),
    "zero3: the scale of experts": Case("moe", f"{EP2} {ZERO3}", 4),
    "zero3: the ranks of experts": Case("moe", f"{EP2} {ZERO3}", 4),
    "zero3: experts of other replicas": Case("moe", f"{EP2} {ZERO3} {HYBRID}", 4),
    "zero3: squares of the norm": Case("moe", f"{EP2} {ZERO3}", 2),
    "muon: parts of experts": CASES["ep2.tp2_muon"],
    "muon: experts apart": CASES["ep2.tp2_muon"],
}


@pytest.mark.parametrize("where", BROKEN)
def test_what_is_left_out_is_noticed(eight_ranks: RankPool, where: str) -> None:
    case = BROKEN[where]
    found = eight_ranks.run(run_broken, case, where)[0]
    difference = find_difference(run_alone(replace(case, flags="", num_ranks=1, micro=2)), found)
    assert any(difference[name] > 10 * largest for name, largest in PRECISION.items()), difference


def list_messages(mesh: Mesh, case: Case) -> list[tuple[str, int]] | None:
    """Kinds of the messages of a step's first forward and ranks that share them, in their order."""
    found: list[tuple[str, int]] = []

    def note(kind: str, keep: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            found.append((kind, dist.get_world_size(options["group"])))
            return keep(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for kind in ("all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor"):
            patch.setattr(dist, kind, note(kind, getattr(dist, kind)))
        run_case(mesh, case)
    return found[: found.index(("reduce_scatter_tensor", 4))] if found else None


def test_experts_are_on_their_way_before_the_host_waits_for_the_numbers_of_rows(eight_ranks: RankPool) -> None:
    """Of four ranks two share the experts (all-to-all), and two have the same (all-gather)."""
    for found in eight_ranks.run(list_messages, Case("moe", f"{EP2} {ZERO3}", 4, steps=1))[:4]:
        layers = "".join(
            {("all_gather_into_tensor", 2): "e", ("all_to_all_single", 2): "t"}.get(one, "") for one in found
        )
        assert layers.startswith("ettt" * 4)


@pytest.mark.parametrize("flags", ["--recompute-granularity full", "--recompute-activations --recompute-modules mlp"])
def test_recompute_sends_tokens_again_and_changes_nothing(eight_ranks: RankPool, flags: str) -> None:
    case = Case("moe_bias", f"{EP2} {flags}", 2, micro=1)
    plain = eight_ranks.run(run_case, replace(case, flags=EP2))[0]
    again = eight_ranks.run(run_case, case)[0]
    assert (again["losses"], again["norms"], again["load"]) == (plain["losses"], plain["norms"], plain["load"])
    assert sum(plain["load"]["counts"][0]) == 2 * 8 * 16  # choices x samples x tokens: nothing twice


def test_bf16_keeps_close_to_one_rank_and_the_router_wide(eight_ranks: RankPool) -> None:
    case = Case("moe", f"{EP2} {TP2} {SP} {ZERO1}", 4, common="--bf16")
    one = run_alone(replace(case, flags="", num_ranks=1))
    for found in eight_ranks.run(run_case, case)[:4]:
        difference = find_difference(one, found)
        assert difference["losses"] <= 5e-3, difference
        assert difference["norms"] <= 5e-2, difference
        assert found["dtypes"]["blocks.0.mlp.router.weight"] == "torch.float32"
        assert found["dtypes"]["blocks.0.mlp.experts.up.weight"] == "torch.bfloat16"
        router = torch.from_numpy(found["weights"]["blocks.0.mlp.router.weight"])
        assert (router != router.bfloat16().float()).any()  # ZeRO sent it as wide as it is


@pytest.mark.parametrize("name", ["ep2.pp2_bias", "ep2.tp2"])
def test_what_is_logged_of_the_load_is_that_of_one_rank(eight_ranks: RankPool, name: str) -> None:
    case = CASES[name]
    one = run_alone(replace(case, flags="", num_ranks=1, micro=2))["load"]
    for found in eight_ranks.run(run_case, case)[: case.num_ranks]:
        assert sum(map(sum, found["load"]["counts"])) == sum(map(sum, one["counts"]))
        for key, value in one["values"].items():
            assert found["load"]["values"][key] == pytest.approx(value, rel=1e-3, abs=1e-6), key


def test_a_shared_expert_computed_meanwhile_is_the_same_to_the_bit(eight_ranks: RankPool) -> None:
    case = Case("moe_bias", EP2, 2)
    plain = eight_ranks.run(run_case, case)[0]
    meanwhile = eight_ranks.run(run_case, replace(case, flags=f"{EP2} --moe-shared-expert-overlap"))[0]
    assert meanwhile["losses"] == plain["losses"]
    assert meanwhile["norms"] == plain["norms"]
