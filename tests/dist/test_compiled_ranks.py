"""Blocks that ranks share, compiled as on GPUs: one graph for all of them, whose products add to main gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from helpers.layouts import Case, check_equal, find_difference, run_case
from helpers.ranks import RankPool
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.training import build

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

TP2 = "--tensor-model-parallel-size 2"
COMMON = "--bf16 --num-layers 3"


def run_compiled(mesh: Mesh, case: Case) -> tuple[dict[str, Any] | None, dict[str, int], dict[str, int]]:
    """A run whose products add to main gradients, its graphs and their breaks."""
    torch._dynamo.reset()
    counters.clear()
    patch = pytest.MonkeyPatch()
    patch.setattr(build, "_can_accumulate", lambda config, mesh: True)
    try:
        found = run_case(mesh, case)
    finally:
        patch.undo()
    return found, dict(counters["stats"]), dict(counters["graph_break"])


@pytest.mark.parametrize("kind, sequence", [("llama", "--sequence-parallel"), ("gpt2_plain", "")])
def test_shared_blocks_are_one_graph_and_equal_one_rank(two_ranks: RankPool, kind: str, sequence: str) -> None:
    """One graph of the block, one of each of the two parts of the loss."""
    case = Case(kind, f"{TP2} {sequence} --compile", 2, common=COMMON, steps=4)
    one = two_ranks.run(run_case, replace(case, flags="", num_ranks=1))[0]
    for found, stats, breaks in two_ranks.run(run_compiled, case):
        assert not breaks
        assert stats["unique_graphs"] <= 3
        difference = find_difference(one, found)
        assert difference["losses"] <= 2e-3, difference
        assert difference["norms"] <= 5e-3, difference


SMALL = "--ddp-bucket-size 4000"
PP2, CP2 = "--pipeline-model-parallel-size 2", "--context-parallel-size 2"
LAYOUTS = {
    "tp2_sp": (f"{TP2} --sequence-parallel", 2),
    "zero1": ("--zero-stage 1", 2),
    "pp2": (PP2, 2),
    "cp2": (CP2, 2),
    "cp2_a2a": (f"{CP2} --cp-comm-type a2a", 2),
    "tp2pp2": (f"{TP2} {PP2}", 4),
}


@pytest.mark.slow  # compiling takes its time
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_blocks_equal_one_rank_without(eight_ranks: RankPool, layout: str, kind: str) -> None:
    flags, num_ranks = LAYOUTS[layout]
    one = eight_ranks.run(run_case, Case(kind))[0]
    found = eight_ranks.run(run_case, Case(kind, f"{flags} {SMALL} --compile", num_ranks))[:num_ranks]
    check_equal(found, one, {"losses": 2e-5, "norms": 1e-5, "weights": 1e-4})
