"""Two GPUs under torchrun, joined by NCCL: a killed rank ends all, they go on, other layouts load what they saved."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from helpers.launching import end, find_children, start_agent, wait_for
from helpers.pairs import write_pair
from helpers.runs import TINY, read_curve, read_metrics

pytestmark = [pytest.mark.dist, pytest.mark.gpu, pytest.mark.timeout(600)]

LENGTH = ("--global-batch-size", "4", "--micro-batch-size", "2", "--no-compile", "--lr-decay-style", "constant")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two GPUs here")
    return write_pair(tmp_path_factory.mktemp("data") / "toy_text_document")


def train(folder: Path, prefix: str, steps: int, *flags: str, nproc: int = 2) -> str:
    """A run of `steps` iterations that saves its last; its log."""
    log = folder.with_suffix(".log")
    length = ("--train-iters", str(steps), "--save-interval", str(steps), "--save", str(folder))
    agents = [start_agent(log, [*TINY, *LENGTH, *length, "--data-path", prefix, *flags], nproc=nproc)]
    assert end(agents) == [0], log.read_text()
    return log.read_text()


@pytest.mark.parametrize("layout", ["", "--tensor-model-parallel-size 2", "--use-distributed-optimizer"])
def test_a_killed_rank_ends_all_and_they_go_on_from_the_last_checkpoint(
    prefix: str, tmp_path: Path, layout: str
) -> None:
    words = ("--save-interval", "10", "--save", str(tmp_path / "run"), "--data-path", prefix)
    flags = [*TINY, *LENGTH, *layout.split(), "--train-iters", "300", *words]
    log = tmp_path / "run.log"
    agents = [start_agent(log, flags, options=("--standalone", "--max-restarts=1"))]
    wait_for(log, "saved iteration 10 ", agents)
    ranks = find_children(agents[0].pid)
    assert len(ranks) == 2
    os.kill(ranks[-1], signal.SIGKILL)
    codes = end(agents)
    text = log.read_text()
    assert codes == [0], text
    assert text.count("going on after iteration") == 1
    train(tmp_path / "one", prefix, 300, nproc=1)
    one, two = read_curve(tmp_path / "one"), read_curve(tmp_path / "run")
    assert [line[0] for line in two] == [line[0] for line in one]
    assert [line[1] for line in two] == pytest.approx([line[1] for line in one], abs=5e-4)


@pytest.mark.parametrize("is_back", [False, True], ids=["tp2_to_dp2", "dp2_to_tp2"])
def test_what_one_layout_saves_another_goes_on_from(prefix: str, tmp_path: Path, is_back: bool) -> None:
    dp2 = ("--use-distributed-optimizer",)
    source, target = (dp2, TP2) if is_back else (TP2, dp2)
    train(tmp_path / "run", prefix, 4, *source)
    train(tmp_path / "straight", prefix, 8, *source)
    train(tmp_path / "on", prefix, 8, *target, "--load", str(tmp_path / "run"))
    straight, on = (read_metrics(tmp_path / name) for name in ("straight", "on"))
    assert [line["iteration"] for line in on] == [5, 6, 7, 8]
    for one, two in zip(straight[4:], on, strict=True):
        assert two["lm_loss"] == pytest.approx(one["lm_loss"], abs=2e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=2e-5)
