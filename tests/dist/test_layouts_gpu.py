"""Layouts on several GPUs, joined by NCCL, against one GPU: the same comparison as on the CPU, in fp32 and bf16.

In bf16 layouts sum in other orders, so each is as far from one GPU as that is from itself in fp32 (losses 3e-4 to 9e-4,
norms 1e-3 to 3e-3 on a CPU); single weights with gradients about 0 go where rounding sends them and are not compared.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
INTERLEAVED = "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2"
PRECISION = {"losses": 2e-5, "norms": 1e-5, "weights": 1e-4}
BF16 = {"losses": 1.5e-3, "norms": 6e-3}
TWO = [
    *(f"--zero-stage {stage} {SMALL}" for stage in range(4)),
    *(TP2, f"{TP2} {SP}"),
    *(f"{PP2} --pipeline-schedule {schedule}" for schedule in ("gpipe", "1f1b", "zero_bubble", "zbv")),
    f"{PP2} {INTERLEAVED}",
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
    compare(gpu_ranks, Case("moe", flags, num_ranks), PRECISION)


@pytest.mark.parametrize("kind", ["gpt2", "multi_query"])
@pytest.mark.parametrize("num_ranks, flags", [*((2, flags) for flags in TWO), *((4, flags) for flags in FOUR)])
def test_a_layout_on_gpus_equals_one_gpu(gpu_ranks: RankPool, num_ranks: int, flags: str, kind: str) -> None:
    compare(gpu_ranks, Case(kind, flags, num_ranks), PRECISION)


@pytest.mark.parametrize(
    "kind, num_ranks, flags",
    [
        *(("gpt2", 2, flags) for flags in TWO),
        *(("gpt2", 4, flags) for flags in FOUR),
        *(("moe", num_ranks, flags) for num_ranks, flags in EXPERTS),
    ],
)
def test_a_layout_in_bf16_equals_one_gpu(gpu_ranks: RankPool, kind: str, num_ranks: int, flags: str) -> None:
    compare(gpu_ranks, Case(kind, flags, num_ranks, common="--bf16"), BF16)


def test_the_comparison_in_bf16_sees_another_momentum(gpu_ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match="losses"):
        compare(gpu_ranks, Case("gpt2", f"{TP2} --adam-beta1 0.5", 2, common="--bf16"), BF16)


def compare(pool: RankPool, case: Case, largest: dict[str, float]) -> None:
    if case.num_ranks > pool.size:
        pytest.skip(f"{case.num_ranks} GPUs are needed, and {pool.size} are here")
    one = run_one(pool, replace(case, flags="", num_ranks=1))
    for found in pool.run(run_case, case)[: case.num_ranks]:
        difference = find_difference(one, found)
        assert all(difference[name] <= limit for name, limit in largest.items()), difference


_ONE: dict[tuple[str, str], dict[str, Any]] = {}


def run_one(pool: RankPool, case: Case) -> dict[str, Any]:
    """The run of one GPU, once for all layouts that are compared with it."""
    key = case.kind, case.common
    if key not in _ONE:
        _ONE[key] = pool.run(run_case, case)[0]
    return _ONE[key]
