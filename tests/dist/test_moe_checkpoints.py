"""Experts saved on some ranks load on any others, biases of routers too; and what is saved has one form."""

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

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

ZERO3, HYBRID = "--zero-stage 3", "--num-distributed-optimizer-instances 2"
EP2, TP2 = "--expert-model-parallel-size 2", "--tensor-model-parallel-size 2"
LAYOUTS = {
    "one": ("", Layout()),
    "ep2": (f"{EP2} --zero-stage 1", Layout(ep=2, dp_shard=2)),
    "ep2.tp2": (f"{EP2} {TP2} --sequence-parallel --zero-stage 1", Layout(tp=2, ep=2, etp=2, dp_shard=2)),
    "ep2.dp2.zero3": (f"{EP2} {ZERO3} --micro-batch-size 1", Layout(ep=2, dp_shard=4)),
    "ep2.zero3": (f"{EP2} {ZERO3}", Layout(ep=2, dp_shard=2)),
    "ep2.tp2.zero3": (f"{EP2} {TP2} {ZERO3}", Layout(tp=2, ep=2, etp=2, dp_shard=2)),
    "ep2.hybrid": (f"{EP2} {ZERO3} {HYBRID} --micro-batch-size 1", Layout(ep=2, dp_shard=2, dp_replicate=2)),
}
EVERY_TIME = ("one", "ep2", "ep2.tp2", "ep2.dp2.zero3")
PAIRS = [
    pytest.param(
        one, other, marks=() if one in EVERY_TIME and other in EVERY_TIME else pytest.mark.slow, id=f"{one}-{other}"
    )
    for one in LAYOUTS
    for other in LAYOUTS
]
SHAPE = [
    "--num-experts",
    "4",
    "--moe-ffn-hidden-size",
    "24",
    "--swiglu",
    "--position-embedding-type",
    "rope",
    "--global-batch-size",
    "4",
    "--micro-batch-size",
    "2",
    "--eval-interval",
    "0",
    "--adam-eps",
    "1e-6",
    "--lr-decay-style",
    "constant",
    "--lr-warmup-iters",
    "0",
    "--moe-router-score-function",
    "sigmoid",
    "--moe-router-enable-expert-bias",
    "--moe-router-bias-update-rate",
    "0.01",
    "--moe-shared-expert-intermediate-size",
    "16",
    "--train-iters",
    "4",
    "--save-interval",
    "1",
]
FIRST = 2
BIAS = "model/blocks.1.mlp.router.expert_bias"


def train_on(pool_mesh: Mesh, layout: Layout, prefix: str, flags: list[str]) -> int | None:
    level_groups(pool_mesh)
    mesh = find_mesh(pool_mesh, layout)
    return run_tiny(prefix, flags, mesh) if pool_mesh.rank < layout.size else None


def train(pool: RankPool, name: str, prefix: str, folder: Path, last: int, *flags: str) -> None:
    words, layout = LAYOUTS[name]
    places = ["--save", str(folder), "--run-dir", str(folder / "log"), "--exit-interval", str(last)]
    codes = pool.run(train_on, layout, prefix, [*SHAPE, *words.split(), *places, *flags])
    assert set(codes[: layout.size]) <= {0, 75, 76}, codes


@pytest.fixture(scope="module")
def saved(eight_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("experts")
    return {"prefix": write_pair(root / "toy"), "root": root}


def find_run(pool: RankPool, saved: dict[str, Any], name: str, *flags: str) -> Path:
    """The folder of a run of four steps on a layout, which is trained once."""
    folder: Path = saved["root"] / "".join([name, *flags])
    if not folder.exists():
        train(pool, name, saved["prefix"], folder, 4, *flags)
    return folder


def compare(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    kept = {name for name in one if not name.startswith("rng/")}
    assert kept == {name for name in other if not name.startswith("rng/")}
    for name in kept:
        scale = one[name].abs().max().item() + 1e-12
        assert (one[name] - other[name]).abs().max().item() <= 2e-3 * scale, name


MUON = ("--optimizer", "muon")
MUON_PAIRS = (("one", "ep2.tp2.zero3"), ("ep2.tp2.zero3", "ep2"))


@pytest.mark.parametrize(
    ("source", "target", "flags"),
    [
        *(pytest.param(*pair.values, (), marks=pair.marks, id=pair.id) for pair in PAIRS),
        *(pytest.param(*pair, MUON, marks=pytest.mark.slow, id="-".join((*pair, "muon"))) for pair in MUON_PAIRS),
    ],
)
def test_experts_saved_on_some_ranks_load_on_others(
    eight_ranks: RankPool, saved: dict[str, Any], tmp_path: Path, source: str, target: str, flags: tuple[str, ...]
) -> None:
    one, straight = (find_run(eight_ranks, saved, name, *flags) for name in ("one", source))
    checkpoint = tmp_path / "from"
    compare(read_tensors(one, FIRST), read_tensors(straight, FIRST))
    checkpoint.mkdir()
    (checkpoint / f"iter_{FIRST:07d}").symlink_to(straight / f"iter_{FIRST:07d}")
    (checkpoint / "latest_checkpointed_iteration.txt").write_text(str(FIRST))
    train(eight_ranks, target, saved["prefix"], tmp_path / "to", 4, "--load", str(checkpoint), *flags)
    expected, found = (
        {row["iteration"]: (row["lm_loss"], row["grad_norm"]) for row in read_metrics(folder / "log")}
        for folder in (straight, tmp_path / "to")
    )
    for step in (3, 4):
        assert found[step] == pytest.approx(expected[step], rel=2e-5)
    after, before = read_tensors(tmp_path / "to", 4), read_tensors(straight, FIRST)
    assert torch.equal(after[BIAS], read_tensors(straight, 4)[BIAS])
    assert after[BIAS].dtype == torch.float32
    assert before[BIAS].abs().max().item() == pytest.approx(0.02, abs=0.011)
    compare(read_tensors(straight, 4), after)
