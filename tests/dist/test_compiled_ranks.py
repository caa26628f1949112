"""Blocks that ranks share, compiled as on GPUs: one graph for all of them, whose products add to main gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from helpers.layouts import Case, find_difference, run_case
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
