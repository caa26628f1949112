"""What one layout saves any other goes on from: loss, norms, weights and moments are those of one that never stopped.

All layouts share a global batch and its samples, so the step after a load is the same step everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.layouts import find_mesh, level_groups
from helpers.pairs import write_pair
from helpers.ranks import RankPool
from helpers.runs import read_metrics, read_tensors, run_tiny
from megaflow_trainer.config.layout import Layout
from megaflow_trainer.parallel.mesh import Mesh

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

TP2, PP2, CP2 = (f"--{axis}-parallel-size 2" for axis in ("tensor-model", "pipeline-model", "context"))
ZERO1, ZERO2, ZERO3 = (f"--zero-stage {stage}" for stage in (1, 2, 3))
LAYOUTS = {
    "one": ("", Layout()),
    "dp2": ("", Layout(dp_shard=2)),
    "tp2": (f"{TP2} --sequence-parallel", Layout(tp=2)),
    "pp2": (PP2, Layout(pp=2)),
    "cp2": (CP2, Layout(cp=2)),
    "zero1": (ZERO1, Layout(dp_shard=2)),
    "zero3": (ZERO3, Layout(dp_shard=2)),
    "tp2pp2": (f"{TP2} {PP2}", Layout(tp=2, pp=2)),
    "tp2zero2": (f"{TP2} {ZERO2}", Layout(tp=2, dp_shard=2)),
    "tp2zero3": (f"{TP2} {ZERO3}", Layout(tp=2, dp_shard=2)),
    "pp2zero3": (f"{PP2} {ZERO3}", Layout(pp=2, dp_shard=2)),
    "zbv_tied": (f"{PP2} --pipeline-schedule zbv {ZERO1}", Layout(pp=2, dp_shard=2)),
}
EVERY_TIME = ("one", "dp2", "tp2", "pp2", "cp2", "zero1", "zero3", "tp2pp2")
PAIRS = [
    pytest.param(
        one, other, marks=() if one in EVERY_TIME and other in EVERY_TIME else pytest.mark.slow, id=f"{one}-{other}"
    )
    for one in LAYOUTS
    for other in LAYOUTS
]
SHAPE = [
    "--num-layers",
    "4",
    "--num-attention-heads",
    "4",
    "--num-query-groups",
    "2",
    "--position-embedding-type",
    "rope",
    "--global-batch-size",
    "8",
    "--micro-batch-size",
    "2",
    "--eval-interval",
    "0",
    "--hidden-dropout",
    "0.1",
    "--attention-dropout",
    "0",
    "--adam-eps",
    "1e-6",
    "--lr",
    "1e-3",
    "--lr-decay-style",
    "constant",
    "--lr-warmup-iters",
    "0",
]
FIRST, LAST = 3, 5


def train_on(pool_mesh: Mesh, layout: Layout, prefix: str, flags: list[str]) -> int | None:
    level_groups(pool_mesh)
    mesh = find_mesh(pool_mesh, layout)
    return run_tiny(prefix, flags, mesh) if pool_mesh.rank < layout.size else None


def train(pool: RankPool, name: str, prefix: str, folder: Path, last: int, *flags: str) -> None:
    """Train on a layout up to a step, saving into `folder` and logging beside it."""
    words, layout = LAYOUTS[name]
    length = ["--train-iters", str(LAST), "--exit-interval", str(last), "--save-interval", "1"]
    log = ["--save", str(folder), "--run-dir", str(folder / "log")]
    codes = pool.run(train_on, layout, prefix, [*SHAPE, *words.split(), *length, *log, *flags])
    assert set(codes[: layout.size]) <= {0, 75, 76}, codes


@pytest.fixture(scope="module")
def saved(eight_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of each layout, whose checkpoint behind step 3 others go on from."""
    root = tmp_path_factory.mktemp("layouts")
    prefix = write_pair(root / "toy")
    for name in LAYOUTS:  # a moment each
        train(eight_ranks, name, prefix, root / name, LAST)
    return {"prefix": prefix, "root": root}


def read_curve(folder: Path, first: int) -> list[tuple[float, float]]:
    rows = read_metrics(folder / "log")
    return [(row["lm_loss"], row["grad_norm"]) for row in rows if row["iteration"] > first]


def compare_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], *, tolerance: float) -> None:
    kept = {name for name in one if not name.startswith("rng/")}
    assert kept == {name for name in other if not name.startswith("rng/")}
    for name in kept:
        scale = one[name].abs().max().item() + 1e-12
        difference = (one[name] - other[name]).abs().max().item() / scale
        assert difference <= tolerance, (name, difference)


def test_every_layout_saves_the_same_tensors(saved: dict[str, Any]) -> None:
    one = read_tensors(saved["root"] / "one", FIRST)
    for name in LAYOUTS:
        compare_tensors(one, read_tensors(saved["root"] / name, FIRST), tolerance=2e-3)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_checkpoint_of_any_layout_loads_under_any_other(
    eight_ranks: RankPool, saved: dict[str, Any], tmp_path: Path, source: str, target: str
) -> None:
    straight = saved["root"] / source
    checkpoint = tmp_path / "from"
    checkpoint.mkdir()
    (checkpoint / f"iter_{FIRST:07d}").symlink_to(straight / f"iter_{FIRST:07d}")
    (checkpoint / "latest_checkpointed_iteration.txt").write_text(str(FIRST))
    train(eight_ranks, target, saved["prefix"], tmp_path / "to", FIRST + 1, "--load", str(checkpoint))
    expected, found = read_curve(straight, FIRST)[:1], read_curve(tmp_path / "to", FIRST)
    if source == target:
        assert found == expected
    assert found[0][0] == pytest.approx(expected[0][0], rel=1e-6)
    assert found[0][1] == pytest.approx(expected[0][1], rel=2e-5)
    after = read_tensors(tmp_path / "to", FIRST + 1)
    compare_tensors(read_tensors(straight, FIRST + 1), after, tolerance=0 if source == target else 2e-4)


@pytest.mark.parametrize("target", ["tp2pp2", "zero3"])
@pytest.mark.parametrize("flags", ["--init-from", "--finetune --load"])
def test_weights_alone_are_taken_by_any_layout(
    eight_ranks: RankPool, saved: dict[str, Any], tmp_path: Path, target: str, flags: str
) -> None:
    words = [*flags.split(), str(saved["root"] / "tp2")]
    for name in ("one", target):
        train(eight_ranks, name, saved["prefix"], tmp_path / name, 1, *words)
    one, other = (read_curve(tmp_path / name, 0) for name in ("one", target))
    assert other[0][0] == pytest.approx(one[0][0], rel=1e-6)
    assert one[0][0] < read_curve(saved["root"] / "one", 0)[0][0] - 0.01, "trained weights, not initial ones"
    compare_tensors(read_tensors(tmp_path / "one", 1), read_tensors(tmp_path / target, 1), tolerance=1e-3)


def test_a_model_that_does_not_fit_is_refused_alike_on_all_ranks(
    eight_ranks: RankPool, saved: dict[str, Any], tmp_path: Path
) -> None:
    words, layout = LAYOUTS["tp2pp2"]
    flags = [*SHAPE, *words.split(), "--num-layers", "6", "--load", str(saved["root"] / "one"), "--train-iters", "5"]
    with pytest.raises(AssertionError, match=r"blocks\.4\..* of this model is not in the checkpoint") as caught:
        eight_ranks.run(train_on, layout, saved["prefix"], flags)
    assert str(caught.value).count("is not in the checkpoint") >= layout.size
