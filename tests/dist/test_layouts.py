"""Every layout gives the losses, gradient norms and weights of one process; and the test notices when it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.layouts import EOD, KINDS, Case, check_equal, find_difference, find_mesh, run_case
from helpers.pairs import write_pair
from helpers.ranks import RankPool
from helpers.runs import one_rank, read_metrics, run_tiny
from megaflow_trainer.config.layout import Layout
from megaflow_trainer.parallel import apply, context, data, overlap, tensor, vocabulary
from megaflow_trainer.parallel.data import MainGradients
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.overlap import Travel
from megaflow_trainer.training import build, step

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

TP2, TP4 = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4"
SP = "--sequence-parallel"
ZERO1, ZERO2, ZERO3 = "--use-distributed-optimizer", "--zero-stage 2", "--zero-stage 3"
SMALL = "--ddp-bucket-size 4000"
HYBRID = "--num-distributed-optimizer-instances 2"
PRECISION = {"losses": 2e-5, "norms": 1e-5, "weights": 1e-4}


@cache
def run_alone(case: Case) -> dict[str, Any]:
    """The same training by one process."""
    outcome = run_case(one_rank(), replace(case, flags="", num_ranks=1))
    assert outcome is not None
    return outcome


def compare(pool: RankPool, case: Case, run: Callable[..., Any] = run_case) -> None:
    outcomes = pool.run(run, case)[: case.num_ranks]
    one = run_alone(replace(case, flags="", num_ranks=1, micro=2))
    check_equal(outcomes, one, PRECISION)


def quick(*names: str) -> list[Any]:
    """All kinds of models; those that are not named only where slow tests run."""
    return [pytest.param(kind, marks=[] if kind in names else pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize("sequence", ["", SP], ids=["tp", "sp"])
@pytest.mark.parametrize("kind", quick("gpt2", "llama", "multi_query", "qwen", "latent_queries", "further"))
def test_tp2_equals_one_rank(eight_ranks: RankPool, kind: str, sequence: str) -> None:
    compare(eight_ranks, Case(kind, f"{TP2} {sequence}", 2))


@pytest.mark.parametrize("sequence", ["", SP], ids=["tp", "sp"])
def test_tp2_without_overlap_equals_one_rank(eight_ranks: RankPool, sequence: str) -> None:
    compare(eight_ranks, Case("llama", f"{TP2} {sequence} --no-overlap", 2))


@pytest.mark.parametrize("kind", ["llama", "multi_query", "gpt2", "latent"])
def test_tp4_with_as_many_or_fewer_kv_heads_equals_one_rank(eight_ranks: RankPool, kind: str) -> None:
    compare(eight_ranks, Case(kind, f"{TP4} {SP}", 4))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("vocab", [257, 50257])
def test_a_vocabulary_that_tp_does_not_divide(eight_ranks: RankPool, kind: str, vocab: int) -> None:
    compare(eight_ranks, Case(kind, TP2, 2, vocab=vocab))


def test_a_rank_whose_rows_of_the_vocabulary_are_all_padding(eight_ranks: RankPool) -> None:
    compare(eight_ranks, Case("gpt2", TP4, 4, vocab=257))


@pytest.mark.parametrize("flags", ["", ZERO1, ZERO2, ZERO3], ids=["zero0", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("kind", quick("gpt2", "further"))
@pytest.mark.parametrize("micro", [1, 4])
def test_dp2_equals_one_rank(eight_ranks: RankPool, kind: str, flags: str, micro: int) -> None:
    compare(eight_ranks, Case(kind, f"{flags} {SMALL}", 2, micro=micro))


@pytest.mark.parametrize("flags", ["", ZERO1, ZERO2], ids=["zero0", "zero1", "zero2"])
def test_dp2_without_overlap_and_without_masks_equals_one_rank(eight_ranks: RankPool, flags: str) -> None:
    compare(eight_ranks, Case("gpt2", f"{flags} {SMALL} --no-overlap", 2, eod_id=None))


@pytest.mark.parametrize("flags", [ZERO1, ZERO2, ZERO3], ids=["zero1", "zero2", "zero3"])
def test_two_replicas_of_divided_states_equal_one_rank(eight_ranks: RankPool, flags: str) -> None:
    compare(eight_ranks, Case("gpt2", f"{flags} {HYBRID} {SMALL}", 4, micro=1))


@pytest.mark.parametrize("sequence", ["", SP], ids=["tp", "sp"])
@pytest.mark.parametrize("flags", ["", ZERO1, ZERO2, ZERO3], ids=["zero0", "zero1", "zero2", "zero3"])
def test_tp2_dp2_equals_one_rank(eight_ranks: RankPool, flags: str, sequence: str) -> None:
    kind = "multi_query" if sequence else "gpt2"
    compare(eight_ranks, Case(kind, f"{TP2} {sequence} {flags} {SMALL}", 4))


@pytest.mark.parametrize("flags", ["--recompute-granularity full", "--recompute-activations"], ids=["full", "part"])
@pytest.mark.parametrize("layout", [f"{TP2} {SP} {ZERO1}", f"{TP2} {ZERO3}"], ids=["zero1", "zero3"])
def test_recompute_on_tp2_dp2_equals_one_rank(eight_ranks: RankPool, layout: str, flags: str) -> None:
    compare(eight_ranks, Case("gpt2", f"{layout} {flags} {SMALL}", 4))


SLOW = pytest.mark.slow
PP2, PP4 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
VIRTUAL = "--num-virtual-stages-per-pipeline-rank 2"
SCHEDULES = {
    "gpipe": "--pipeline-schedule gpipe",
    "1f1b": "--pipeline-schedule 1f1b",
    "interleaved": f"--pipeline-schedule interleaved {VIRTUAL}",
    "zero_bubble": f"--pipeline-schedule zero_bubble {VIRTUAL}",
    "zero_bubble_1": "--pipeline-schedule zero_bubble",
    "zbv": "--pipeline-schedule zbv",
}


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=SLOW)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pp2_equals_one_rank_by_every_schedule(eight_ranks: RankPool, schedule: str, kind: str) -> None:
    compare(eight_ranks, Case(kind, f"{PP2} {SCHEDULES[schedule]}", 2))


@pytest.mark.parametrize("schedule", ["zero_bubble", f"zbv {SP} --no-overlap", f"zbv {SP}"], ids=["tp", "apart", "sp"])
def test_a_backward_taken_apart_passes_what_tp_ranks_exchange(eight_ranks: RankPool, schedule: str) -> None:
    compare(eight_ranks, Case("llama", f"{PP2} {TP2} --pipeline-schedule {schedule}", 4))


@pytest.mark.parametrize(
    "kind, flags, num_ranks",
    [
        ("multi_query", f"{TP2} {SP}", 2),
        ("gpt2", f"{ZERO1} {SMALL}", 2),
        ("llama", f"{TP2} {ZERO2} {HYBRID} {SMALL}", 8),
        ("gpt2", f"{TP2} {ZERO3}", 4),
        ("gpt2", f"{PP2} {ZERO1} {SMALL}", 4),
    ],
)
def test_muon_sees_whole_matrices_on_every_layout(eight_ranks: RankPool, kind: str, flags: str, num_ranks: int) -> None:
    compare(eight_ranks, Case(kind, flags, num_ranks, micro=8 // num_ranks, common="--optimizer muon"))


def test_runs_of_recomputed_blocks_stay_inside_a_chunk(eight_ranks: RankPool) -> None:
    flags = f"{SCHEDULES['interleaved']} --recompute-granularity full --recompute-num-layers 2"
    compare(eight_ranks, Case("gpt2_plain", f"{PP2} {flags}", 2))


@pytest.mark.parametrize("micro", [1, pytest.param(4, marks=SLOW), 8], ids=["8 micro-batches", "2", "1"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pp2_takes_any_number_of_micro_batches(eight_ranks: RankPool, schedule: str, micro: int) -> None:
    compare(eight_ranks, Case("gpt2", f"{PP2} {SCHEDULES[schedule]} {SMALL}", 2, micro=micro))


@pytest.mark.parametrize("kind", quick("multi_query", "further", "llama"))
def test_pp2_of_every_kind_of_ends_equals_one_rank(eight_ranks: RankPool, kind: str) -> None:
    compare(eight_ranks, Case(kind, PP2, 2))


@pytest.mark.parametrize("layout", ["", "--pipeline-model-parallel-layout Et|tt|t|L"], ids=["even", "by_hand"])
def test_pp4_equals_one_rank(eight_ranks: RankPool, layout: str) -> None:
    compare(eight_ranks, Case("gpt2", f"{PP4} {layout}", 4))


@pytest.mark.parametrize("flags", ["", ZERO1, ZERO2], ids=["zero0", "zero1", "zero2"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_pp2_dp2_with_tied_ends_equals_one_rank(eight_ranks: RankPool, flags: str, schedule: str) -> None:
    compare(eight_ranks, Case("gpt2", f"{PP2} {SCHEDULES[schedule]} {flags} {SMALL}", 4))


@pytest.mark.parametrize(
    "kind, flags, num_ranks",
    [
        ("gpt2", "", 4),
        ("gpt2", SCHEDULES["gpipe"], 4),
        ("further", SCHEDULES["interleaved"], 4),
        ("gpt2", f"{HYBRID} --recompute-granularity full", 8),
        ("documents_llama", "--bf16", 4),
    ],
    ids=["1f1b", "gpipe", "interleaved", "replicas", "bf16"],
)
def test_pp2_with_divided_weights_equals_one_rank(eight_ranks: RankPool, kind: str, flags: str, num_ranks: int) -> None:
    if "bf16" not in flags:
        compare(eight_ranks, Case(kind, f"{PP2} {ZERO3} {flags}", num_ranks, micro=8 // num_ranks))
        return
    case = Case(kind, f"{PP2} {ZERO3}", num_ranks, common=flags)
    one = run_alone(replace(case, flags="", num_ranks=1))
    for found in eight_ranks.run(run_case, case)[:num_ranks]:
        difference = find_difference(one, found)
        assert difference["losses"] <= 5e-3, difference
        assert difference["norms"] <= 5e-2, difference


@pytest.mark.parametrize("flags", ["", SP, f"{SP} --recompute-granularity full"], ids=["tp", "sp", "recompute"])
def test_tp2_pp2_equals_one_rank(eight_ranks: RankPool, flags: str) -> None:
    compare(eight_ranks, Case("gpt2", f"{TP2} {PP2} {flags}", 4))


@pytest.mark.parametrize("zero", [ZERO1, ZERO3], ids=["zero1", "zero3"])
def test_tp2_pp2_dp2_equals_one_rank(eight_ranks: RankPool, zero: str) -> None:
    compare(eight_ranks, Case("gpt2", f"{TP2} {SP} {PP2} {zero} {SMALL}", 8))


def train_whole(pool_mesh: Mesh, layout: Layout, prefix: str, flags: list[str]) -> int | None:
    mesh = find_mesh(pool_mesh, layout)
    return run_tiny(prefix, flags, mesh) if pool_mesh.rank < layout.size else None


CP2, CP4 = "--context-parallel-size 2", "--context-parallel-size 4"
CP_KINDS = {name: f"--cp-comm-type {name}" for name in ("p2p", "all_gather", "a2a")}


@pytest.mark.parametrize("kind", quick("gpt2", "multi_query", "further"))
@pytest.mark.parametrize("comm", CP_KINDS)
def test_cp2_equals_one_rank(eight_ranks: RankPool, comm: str, kind: str) -> None:
    compare(eight_ranks, Case(kind, f"{CP2} {CP_KINDS[comm]}", 2))


@pytest.mark.parametrize("comm", CP_KINDS)
def test_cp4_equals_one_rank(eight_ranks: RankPool, comm: str) -> None:
    compare(eight_ranks, Case("window" if comm == "p2p" else "llama", f"{CP4} {CP_KINDS[comm]}", 4))


@pytest.mark.parametrize("flags", ["", ZERO1, ZERO2, ZERO3], ids=["zero0", "zero1", "zero2", "zero3"])
def test_cp2_dp2_equals_one_rank(eight_ranks: RankPool, flags: str) -> None:
    compare(eight_ranks, Case("gpt2", f"{CP2} {flags} {SMALL}", 4))


@pytest.mark.parametrize("comm", CP_KINDS)
def test_cp2_tp2_equals_one_rank(eight_ranks: RankPool, comm: str) -> None:
    compare(eight_ranks, Case("gpt2", f"{CP2} {CP_KINDS[comm]} {TP2} {SP}", 4))


def test_cp2_pp2_equals_one_rank(eight_ranks: RankPool) -> None:
    compare(eight_ranks, Case("gpt2", f"{CP2} {PP2}", 4))


APART = {
    "tp2": (TP2, 2),
    "sp2": (f"{TP2} {SP}", 2),
    "pp2": (PP2, 2),
    "zero3": (f"{ZERO3} {SMALL} --recompute-granularity full", 2),
    **{comm: (f"{CP4} {flags}", 4) for comm, flags in CP_KINDS.items()},
    "tp2.pp2.cp2": (f"{TP2} {SP} {PP2} {CP2}", 8),
}


@pytest.mark.parametrize("kind", ["documents", pytest.param("documents_llama", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", APART)
def test_documents_stay_apart_on_every_layout(eight_ranks: RankPool, layout: str, kind: str) -> None:
    flags, ranks = APART[layout]
    compare(eight_ranks, Case(kind, flags, ranks, micro=1))
    plain = run_alone(Case("gpt2"))
    assert find_difference(plain, run_alone(Case("documents")))["losses"] > 1e-3, "the samples hold one document each"


@pytest.mark.parametrize("zero", [ZERO1, pytest.param(ZERO3, marks=SLOW)], ids=["zero1", "zero3"])
@pytest.mark.parametrize("layout", [f"{TP2} {SP} {CP2}", f"{PP2} {CP2}"], ids=["tp2.cp2.dp2", "pp2.cp2.dp2"])
def test_triples_equal_one_rank(eight_ranks: RankPool, layout: str, zero: str) -> None:
    compare(eight_ranks, Case("gpt2", f"{layout} {zero} {SMALL}", 8))


@pytest.mark.parametrize("layout", [f"{PP2} {ZERO1}", f"{TP2} {SP} {ZERO2}"], ids=["pp2_zero1", "tp2_zero2"])
def test_activations_are_compressed_on_every_layout(eight_ranks: RankPool, layout: str) -> None:
    case = Case("gpt2", f"{layout} {SMALL}", 4, micro=4, common="--compress-activations fp8 --hidden-size 64")
    exact = run_alone(replace(case, flags="", num_ranks=1, common="--hidden-size 64"))
    found = eight_ranks.run(run_case, case)[0]
    first = [abs(a - b) / a for a, b in zip(exact["norms"], found["norms"], strict=True)][:4]
    assert 1e-5 < max(first) < 5e-3, "rounding of one step; later ones add up"
    assert find_difference(exact, found)["losses"] < 2e-2


@pytest.mark.parametrize("layout", [f"{TP2} {SP} {ZERO1}", f"{TP2} {PP2}", f"{CP2} {ZERO2}", f"{TP2} {ZERO3}"])
@pytest.mark.parametrize("precision", ["--bf16", "--fp16 --initial-loss-scale 256"], ids=["bf16", "fp16"])
def test_16_bits_stay_close_to_one_rank(eight_ranks: RankPool, precision: str, layout: str) -> None:
    case = Case("multi_query", f"{layout} {SMALL}", 4, common=precision)
    one = run_alone(replace(case, flags="", num_ranks=1))
    for found in eight_ranks.run(run_case, case)[:4]:
        difference = find_difference(one, found)
        assert difference["losses"] <= 5e-3, difference
        assert difference["norms"] <= 5e-2, difference


WHOLE = {
    f"{TP2} {SP} {ZERO1}": Layout(tp=2, dp_shard=2),
    PP2: Layout(pp=2, dp_replicate=2),
    f"{PP2} {SCHEDULES['zbv']} {ZERO1}": Layout(pp=2, dp_shard=2),
    f"{PP2} {SCHEDULES['interleaved']}": Layout(pp=2),
    CP2: Layout(cp=2),
    ZERO3: Layout(dp_shard=2),
    f"{PP2} {ZERO3}": Layout(pp=2, dp_shard=2),
}


@pytest.mark.parametrize("layout", WHOLE, ids=["tp2_zero1", "pp2", "zbv", "interleaved", "cp2", "zero3", "pp2_zero3"])
def test_a_whole_run_with_validation_equals_one_rank(eight_ranks: RankPool, tmp_path: Path, layout: str) -> None:
    ranks = WHOLE[layout]
    prefix = write_pair(tmp_path / "toy")
    flags = (
        "--num-layers 4 --train-iters 4 --global-batch-size 8 --micro-batch-size 2 --split 80,20,0 --eval-interval 2 "
        "--eval-iters 2"
    )
    run_tiny(prefix, [*flags.split(), "--run-dir", str(tmp_path / "one")])
    words = [*flags.split(), *layout.split(), "--run-dir", str(tmp_path / "two")]
    assert eight_ranks.run(train_whole, ranks, prefix, words)[: ranks.size] == [0] * ranks.size
    for key in ("lm_loss", "valid_loss"):
        one, two = (read_metrics(tmp_path / name, key) for name in ("one", "two"))
        assert [line[key] for line in two] == pytest.approx([line[key] for line in one], abs=2e-5)
        assert len(one) > 0
    axes = {axis for line in read_metrics(tmp_path / "two", "lm_loss") for axis in line["communication"]}
    named = {"tp": ranks.tp, "pp": ranks.pp, "cp": ranks.cp, "dp": ranks.dp * ranks.cp, "world": 2}
    assert axes == {axis for axis, size in named.items() if size > 1}
    bubbles = [line["pipeline_bubble"] for line in read_metrics(tmp_path / "two") if "pipeline_bubble" in line]
    assert len(bubbles) == (4 if PP2 in layout else 0)
    assert all(0 < bubble < 1 for bubble in bubbles)


@pytest.mark.parametrize(
    "flags, ranks",
    [(f"{TP2} {SP}", Layout(tp=2)), (PP2, Layout(pp=2)), (f"{CP2} {PP2}", Layout(cp=2, pp=2))],
    ids=["tp2", "pp2", "cp2.pp2"],
)
def test_losses_of_further_predictions_are_logged_alike(
    eight_ranks: RankPool, tmp_path: Path, flags: str, ranks: Layout
) -> None:
    prefix = write_pair(tmp_path / "toy")
    same = (
        "--num-layers 4 --train-iters 3 --global-batch-size 8 --micro-batch-size 2 --mtp-num-layers 2 --eval-interval 0"
    )
    run_tiny(prefix, [*same.split(), "--run-dir", str(tmp_path / "one")])
    words = [*same.split(), *flags.split(), "--run-dir", str(tmp_path / "two")]
    assert eight_ranks.run(train_whole, ranks, prefix, words)[: ranks.size] == [0] * ranks.size
    for key in ("mtp_1_loss", "mtp_2_loss", "lm_loss"):
        one, two = ([line[key] for line in read_metrics(tmp_path / name)] for name in ("one", "two"))
        assert two == pytest.approx(one, abs=2e-5)
        assert len(one) == 3


def run_accumulating(mesh: Mesh, case: Case) -> dict[str, Any] | None:
    """The run with products that add to main gradients, here of the weights' dtype and on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_can_accumulate", lambda config, mesh: True)
        patch.setattr(apply, "can_accumulate", lambda gradients: True)
        return run_case(mesh, case)


@pytest.mark.parametrize(
    "kind, flags, num_ranks",
    [
        ("gpt2", f"{TP2} {SP}", 2),
        ("qwen", f"{TP2} {ZERO1} --recompute-granularity full", 4),
        ("latent_queries", f"{TP2} {PP2}", 4),
        ("gpt2", f"{PP2} {SCHEDULES['interleaved']} {SMALL}", 2),
        ("llama", f"{CP2} --no-overlap", 4),
    ],
)
def test_products_that_accumulate_give_one_rank_s_gradients(
    eight_ranks: RankPool, kind: str, flags: str, num_ranks: int
) -> None:
    compare(eight_ranks, Case(kind, flags, num_ranks), run_accumulating)


def run_broken(mesh: Mesh, case: Case, where: str) -> dict[str, Any] | None:
    """The run with one collective removed."""
    owner, name, without, _ = BROKEN[where]
    original = getattr(owner, name)
    setattr(owner, name, without)
    try:
        return run_case(mesh, case)
    finally:
        setattr(owner, name, original)


def keep_sum(x: torch.Tensor, group: Any, *_: Any, **__: Any) -> None:
    """In place of an all-reduce."""


def keep_own(output: torch.Tensor, input: torch.Tensor, *_: Any, group: Any, **__: Any) -> None:  # noqa: A002  # by the name that torch has for it
    """In place of a reduce-scatter."""
    output.copy_(input.view(dist.get_world_size(group), -1)[dist.get_rank(group)].view_as(output))


def repeat_own(x: torch.Tensor, group: Any, dim: int = 1, *_: Any, **__: Any) -> torch.Tensor:
    """In place of an all-gather."""
    return torch.cat([x] * dist.get_world_size(group), dim)


def cut_own(x: torch.Tensor, group: Any, dim: int = 1, *_: Any, **__: Any) -> torch.Tensor:
    """In place of a reduce-scatter of tokens."""
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].clone()


def take_first(ranks: Any, x: torch.Tensor) -> torch.Tensor:
    """In place of this rank's part of what is given for all tokens."""
    return x if x.dim() == 1 else x.narrow(ranks.sharers.dim, 0, x.shape[ranks.sharers.dim] // ranks.size)


class Done:
    """What to wait for where nothing was sent."""

    def wait(self) -> None:
        """Nothing to wait for."""


def send_nothing(x: torch.Tensor, group: Any, _: Any) -> Travel:
    """In place of an all-reduce that is started early."""
    return Travel("nothing", Done(), x, x, None)


def gather_nothing(x: torch.Tensor, group: Any, _: Any) -> Travel:
    """In place of an all-gather that is started early."""
    return send_nothing(torch.stack([x] * dist.get_world_size(group)), group, _)


def scatter_nothing(x: torch.Tensor, group: Any, dim: int, _: Any) -> Travel:
    """In place of a reduce-scatter that is started early."""
    return send_nothing(cut_own(x, group, dim), group, _)


def enter_nothing(x: torch.Tensor, ranks: Any) -> torch.Tensor:
    """In place of an entry without division of tokens."""
    return x


def exchange_nothing(x: torch.Tensor, group: Any, *, cut: int, join: int, **_: Any) -> torch.Tensor:
    """In place of an all-to-all."""
    return repeat_own(cut_own(x, group, cut), group, join)


def keep(x: torch.Tensor, group: Any, **_: Any) -> torch.Tensor:
    """In place of a collective that changes no shape."""
    return x


SHORT = {"steps": 4}
BROKEN: dict[str, tuple[Any, str, Any, Case]] = {
    "tp: entry of a pair": (overlap, "start_sum", send_nothing, Case("gpt2", TP2, 2, **SHORT)),
    "tp: entry that waits": (overlap, "sum_over", keep_sum, Case("gpt2", f"{TP2} --no-overlap", 2, **SHORT)),
    "tp: exit of a pair": (overlap, "sum_over", keep_sum, Case("gpt2", TP2, 2, **SHORT)),
    "tp: entry of the loss": (vocabulary, "enter", enter_nothing, Case("gpt2", TP2, 2, **SHORT)),
    "tp: sums of the loss": (vocabulary, "sum_over", keep_sum, Case("gpt2", TP2, 2, **SHORT)),
    "sp: entry of a pair": (overlap, "gather_along", repeat_own, Case("gpt2", f"{TP2} {SP}", 2, **SHORT)),
    "sp: entry that waits": (overlap, "gather_along", repeat_own, Case("gpt2", f"{TP2} {SP} --no-overlap", 2, **SHORT)),
    "sp: tokens gathered again": (overlap, "start_gather", gather_nothing, Case("gpt2", f"{TP2} {SP}", 2, **SHORT)),
    "sp: gradients of an entry": (overlap, "start_scatter", scatter_nothing, Case("gpt2", f"{TP2} {SP}", 2, **SHORT)),
    "sp: exit of a pair": (overlap, "scatter_along", cut_own, Case("gpt2", f"{TP2} {SP}", 2, **SHORT)),
    "sp: tokens of each sample": (
        overlap,
        "start_scatter",
        scatter_nothing,
        Case("gpt2", f"{TP2} {SP}", 2, micro=1, **SHORT),
    ),
    "sp: parts of a dropout": (tensor.TensorRanks, "take_own", take_first, Case("gpt2", f"{TP2} {SP}", 2, **SHORT)),
    "sp: terms of copied weights": (data, "add_terms", keep_sum, Case("gpt2", f"{TP2} {SP}", 2)),
    "tp: squares of the norm": (data, "sum_over", keep_sum, Case("gpt2", TP2, 2, **SHORT)),
    "dp: gradients": (data.dist, "all_reduce", keep_sum, Case("gpt2", SMALL, 2, **SHORT)),
    "dp: losses": (step, "sum_over", keep_sum, Case("gpt2", "", 2, **SHORT)),
    "zero1: gradients": (data.dist, "reduce_scatter_tensor", keep_own, Case("gpt2", f"{ZERO1} {SMALL}", 2, **SHORT)),
    "zero1: weights": (MainGradients, "share_weights", lambda _: None, Case("gpt2", ZERO1, 2, **SHORT)),
    "zero1: replicas": (data, "sum_over", keep_sum, Case("gpt2", f"{ZERO1} {HYBRID}", 4, micro=1, **SHORT)),
    "zero2: gradients": (data.dist, "reduce_scatter_tensor", keep_own, Case("gpt2", ZERO2, 2, **SHORT)),
    "zero3: gradients": (data.dist, "reduce_scatter_tensor", keep_own, Case("gpt2", ZERO3, 2, **SHORT)),
    "pp: copies of the embedding": (data, "add_terms", keep_sum, Case("gpt2", PP2, 2)),
    "pp: squares of the norm": (data, "sum_over", keep_sum, Case("gpt2", PP2, 2, **SHORT)),
    "cp: keys of the ring": (context, "_start_ring", lambda parts, _: lambda: parts, Case("gpt2", CP2, 2, **SHORT)),
    "cp: keys gathered": (
        context,
        "gather_tokens",
        repeat_own,
        Case("gpt2", f"{CP2} {CP_KINDS['all_gather']}", 2, **SHORT),
    ),
    "cp: heads exchanged": (
        context,
        "exchange",
        exchange_nothing,
        Case("gpt2", f"{CP2} {CP_KINDS['a2a']}", 2, **SHORT),
    ),
}
"""Where a collective is removed: by which name who calls it, what is there instead, and a run that has it."""


@pytest.mark.parametrize("where", BROKEN)
def test_a_removed_collective_is_noticed(eight_ranks: RankPool, where: str) -> None:
    case = BROKEN[where][-1]
    found = eight_ranks.run(run_broken, case, where)[0]
    difference = find_difference(run_alone(replace(case, flags="", num_ranks=1)), found)
    assert any(difference[name] > 10 * largest for name, largest in PRECISION.items()), difference
    assert case.eod_id == EOD


@pytest.mark.parametrize("kind", ["multi_query", "qwen", "latent"])
def test_removed_terms_of_heads_are_noticed(eight_ranks: RankPool, kind: str) -> None:
    case = Case(kind, TP2, 2)
    found = eight_ranks.run(run_broken, case, "sp: terms of copied weights")[0]
    assert find_difference(run_alone(replace(case, flags="", num_ranks=1)), found)["weights"] > 1e-3
