"""What the demo advises is true of the flags that it sets."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import demo
from helpers.pairs import write_pair
from helpers.runs import read_curve, run_tiny
from megaflow_trainer.config import TrainConfig, read_command
from megaflow_trainer.optim.schedule import build_schedule

DEVICES = [(demo.CPU_MODEL, demo.CPU_BATCH), (demo.GPU_MODEL, demo.GPU_BATCH)]


def read(flags: str, *later: str, world_size: int = 1) -> TrainConfig:
    return read_command([*shlex.split(flags), "--data-path", "x", *later], world_size=world_size)[0]


def find_advice(topic: str) -> str:
    """The words of one entry, its lines joined."""
    found = re.search(rf"^  {topic}: +(.*(?:\n {{12,}}.*)*)", demo.NEXT, re.MULTILINE)
    assert found is not None
    return " ".join(found[1].split())


@pytest.mark.parametrize("model, batch", DEVICES, ids=["cpu", "gpu"])
def test_two_processes_train_like_one(model: str, batch: str) -> None:
    flags = f"{model} {batch} {demo.list_flags(60)}"
    advised = [word.rstrip(":") for word in find_advice("two processes").split(":")[0].split() if word != "with"]
    later = advised[advised.index("--micro-batch-size") :]
    one, two = read(flags), read(flags, *later, world_size=2)
    assert (one.model.hidden_dropout, one.model.attention_dropout) == (0, 0)
    assert one.step.global_batch_size == two.step.global_batch_size
    assert one.schedule == two.schedule
    assert {two.checkpoint.save, two.log.run_dir}.isdisjoint({"demo/run/checkpoints", "demo/run"})


@pytest.mark.parametrize("num_steps", [1, 10, 60])
def test_a_longer_run_goes_on_at_the_last_learning_rate(num_steps: int) -> None:
    flags = f"{demo.CPU_MODEL} {demo.CPU_BATCH} {demo.list_flags(num_steps)}"
    (longer,) = re.findall(r"--train-iters \d+", find_advice("longer"))
    before, after = (build_schedule(read(flags, *later)) for later in ((), longer.split()))
    end = num_steps * 8
    assert after.lr_at(end) == before.lr_at(end)
    assert after.lr_at(end + 8) == pytest.approx(before.lr_at(end), rel=0.2, abs=3e-4)
    if num_steps == 60:
        assert after.lr_at(end) == after.lr_at(end + 8) == 2e-4


def test_a_longer_run_can_go_on(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "toy", num_documents=400)
    own = ["--global-batch-size", "4", "--micro-batch-size", "4", "--split", "949,50,1", "--save", str(tmp_path / "d")]
    for length in ("4", "8"):
        run_tiny(prefix, [*own, "--lr-decay-iters", "4", "--min-lr", "1e-4", "--train-iters", length])
    curve = read_curve(tmp_path / "d")
    assert [line[0] for line in curve] == list(range(1, 9))
    assert {line[3] for line in curve[3:]} == {1e-4}


def test_the_last_validation_loss_is_found_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1, "lm_loss": 9.0}\n')
    assert demo.read_validation(path) is None
    path.write_text('{"iteration": 1, "valid_loss": 8.0}\n{"iteration": 2, "valid_loss": 7.5}\n')
    assert demo.read_validation(path) == 7.5
    row = {"lm_loss": 9.0, "step_time_s": 1.0, "tokens_per_s_per_gpu": 1.0}
    demo.report([row], seconds=1.0, valid_loss=7.5)
    assert "7.5000 on the validation part" in capsys.readouterr().out
