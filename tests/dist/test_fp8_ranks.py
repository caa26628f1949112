"""Products in fp8 on ranks that share a model: near one rank's, and delayed scales that are the same everywhere."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from helpers import layouts
from helpers.layouts import Case, run_case
from helpers.ranks import RankPool
from helpers.runs import one_rank
from megaflow_trainer.parallel import precision
from megaflow_trainer.parallel.mesh import Mesh

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
DELAYED = "--bf16 --fp8-hybrid --fp8-recipe delayed --fp8-amax-history-len 2"
LAYOUTS = {
    "tp2": ("--tensor-model-parallel-size 2", 2),
    "tp2 sp dp2 zero1": ("--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1", 4),
    "dp2 zero3": ("--zero-stage 3", 2),
    "pp2": ("--pipeline-model-parallel-size 2", 2),
    "pp2 zero bubble": ("--pipeline-model-parallel-size 2 --pipeline-schedule zero_bubble", 2),
    "cp2": ("--context-parallel-size 2", 2),
}


def run_fp8(pool: Mesh, case: Case) -> dict[str, Any] | None:
    """Losses and norms of some steps, and what each layer's inputs, weight and gradient reached in the last two."""
    kept = []

    def build(*args: Any) -> Any:
        kept.append(layouts_build(*args))
        return kept[-1]

    layouts_build = layouts.build_model
    with mock.patch.object(precision, "FP8_WIDTH", 32), mock.patch.object(layouts, "build_model", build):
        found = run_case(pool, case)
    if found is None:
        return None
    fp8 = kept[0].fp8
    states = {} if fp8.scales is None else {name: value.tolist() for name, value in fp8.scales.list_states().items()}
    return {"losses": found["losses"], "norms": found["norms"], "layers": list(fp8.layers), "states": states}


def make_case(flags: str, num_ranks: int, recipe: str) -> Case:
    return Case("gpt2_plain", flags, num_ranks, micro=2, common=f"{recipe} --hidden-size 64", steps=4)


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    found = run_fp8(one_rank(), make_case("", 1, DELAYED))
    assert found is not None
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_delayed_scales_are_those_of_one_rank(eight_ranks: RankPool, one: dict[str, Any], layout: str) -> None:
    """What a tensor reaches is one value of it, after products of 8-bit factors with sums rounded elsewhere: within
    10 % of one rank's. On ranks that share a layer it is the same to the bit, though each sees a part.
    """
    flags, num_ranks = LAYOUTS[layout]
    ranks = [found for found in eight_ranks.run(run_fp8, make_case(flags, num_ranks, DELAYED)) if found is not None]
    assert len(ranks) == num_ranks
    assert {name for found in ranks for name in found["layers"]} == set(one["layers"])
    seen: dict[str, Any] = {}
    for found in ranks:
        assert found["losses"] == pytest.approx(one["losses"], rel=2e-3)
        assert found["norms"] == pytest.approx(one["norms"], rel=2e-2)
        for name, history in found["states"].items():
            assert seen.setdefault(name, history) == history, "the same on every rank"
            for mine, other in zip(history, one["states"][name], strict=True):
                assert mine == pytest.approx(other, rel=0.1), name
    assert set(seen) == set(one["states"])


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_ranks_that_share_layers_round_their_own_part(eight_ranks: RankPool, one: dict[str, Any], recipe: str) -> None:
    case = make_case(
        "--tensor-model-parallel-size 2 --sequence-parallel", 2, f"--bf16 --fp8-hybrid --fp8-recipe {recipe}"
    )
    for found in eight_ranks.run(run_fp8, case)[:2]:
        assert found["losses"] == pytest.approx(one["losses"], rel=2e-3)
        assert len(found["layers"]) == 16
        assert found["states"] == {}
