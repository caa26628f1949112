"""A run from text goes on with another number of data-parallel ranks, over the same samples."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from helpers.containers import table_of
from helpers.ranks import RankPool
from helpers.runs import SHAPE, read_curve, read_metrics, run_tiny
from megaflow.origin import find_iteration
from megaflow_trainer.parallel.mesh import Mesh

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

FLAGS = ("--vocab-size", "50257", "--global-batch-size", "4", "--micro-batch-size", "1", "--train-iters", "6")
KEPT = ("--save-interval", "3", "--eval-interval", "2", "--eval-iters", "2", "--split", "80,20,0")


def train_text(mesh: Mesh, corpus: str, flags: list[str]) -> int:
    return run_tiny(corpus, flags, mesh, base=SHAPE)


def test_a_run_from_text_goes_on_from_one_rank_to_two(two_ranks: RankPool, tmp_path: Path) -> None:
    texts = [f"{number} of two hundred documents, with some words to be learnt" for number in range(200)]
    pq.write_table(table_of(texts), tmp_path / "corpus.parquet", row_group_size=20)
    corpus, one, two = str(tmp_path / "corpus.parquet"), tmp_path / "one", tmp_path / "two"
    assert run_tiny(corpus, [*FLAGS, *KEPT, "--save", str(one)], base=SHAPE) == 0
    shutil.copytree(one, two)
    shutil.rmtree(two / "iter_0000006")
    (two / "latest_checkpointed_iteration.txt").write_text("3")
    assert two_ranks.run(train_text, corpus, [*FLAGS, *KEPT, "--save", str(two)]) == [0, 0]
    expected, found = read_curve(one), read_curve(two)
    assert [row[0] for row in found] == [1, 2, 3, 4, 5, 6]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5)
    valid = [[line["valid_loss"] for line in read_metrics(run, "valid_loss")] for run in (one, two)]
    assert valid[1] == pytest.approx(valid[0], rel=2e-5)
    origins = [[repr(sample) for sample in find_iteration(run, 5).origins()] for run in (one, two)]
    assert origins[0] == origins[1]
    assert len(origins[0]) == 4
