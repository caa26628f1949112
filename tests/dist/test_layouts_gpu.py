"""Layouts on several GPUs, joined by NCCL, against one GPU: the same comparison as on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.layouts import Case, find_difference, run_case
from helpers.ranks import RankPool

pytestmark = [pytest.mark.dist, pytest.mark.gpu, pytest.mark.timeout(600)]

TP2, SP, PP2, CP2 = (
    "--tensor-model-parallel-size 2",
    "--sequence-parallel",
    "--pipeline-model-parallel-size 2",
    "--context-parallel-size 2",
)
SMALL = "--ddp-bucket-size 4000"
PRECISION = {"losses": 2e-5, "norms": 1e-5, "weights": 1e-4}
TWO = [
    *(f"--zero-stage {stage} {SMALL}" for stage in range(4)),
    *(TP2, f"{TP2} {SP}"),
    *(f"{PP2} --pipeline-schedule {schedule}" for schedule in ("gpipe", "1f1b", "zero_bubble", "zbv")),
    *(f"{CP2} --cp-comm-type {kind}" for kind in ("p2p", "all_gather", "a2a")),
]
FOUR = [
    f"{TP2} {SP} --zero-stage 1 {SMALL}",
    f"{TP2} --zero-stage 3",
    f"--zero-stage 2 --num-distributed-optimizer-instances 2 {SMALL}",
    f"{TP2} {SP} {PP2}",
    f"{CP2} {PP2}",
    f"{CP2} {TP2} {SP}",
]


EP2 = "--expert-model-parallel-size 2"
EXPERTS = [
    *((2, f"{EP2} --zero-stage {stage}") for stage in (1, 2, 3)),
    *((4, f"{EP2} --zero-stage 3 {more}") for more in ("", TP2, PP2, "--recompute-granularity full")),
]


@pytest.mark.parametrize("num_ranks, flags", EXPERTS)
def test_experts_on_gpus_equal_one_gpu(gpu_ranks: RankPool, num_ranks: int, flags: str) -> None:
    compare(gpu_ranks, Case("moe", flags, num_ranks))


@pytest.mark.parametrize("kind", ["gpt2", "multi_query"])
@pytest.mark.parametrize("num_ranks, flags", [*((2, flags) for flags in TWO), *((4, flags) for flags in FOUR)])
def test_a_layout_on_gpus_equals_one_gpu(gpu_ranks: RankPool, num_ranks: int, flags: str, kind: str) -> None:
    compare(gpu_ranks, Case(kind, flags, num_ranks))


def compare(pool: RankPool, case: Case) -> None:
    if case.num_ranks > pool.size:
        pytest.skip(f"{case.num_ranks} GPUs are needed, and {pool.size} are here")
    one = pool.run(run_case, replace(case, flags="", num_ranks=1))[0]
    for found in pool.run(run_case, case)[: case.num_ranks]:
        difference = find_difference(one, found)
        assert all(difference[name] <= largest for name, largest in PRECISION.items()), difference
