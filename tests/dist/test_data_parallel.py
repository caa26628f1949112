"""Two data-parallel ranks are one rank, however the batch is cut; and the test notices when they are not."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.layouts import EOD, GLOBAL_BATCH, ListLoader
from helpers.pairs import write_pair
from helpers.ranks import RankPool
from helpers.runs import TINY, one_rank, read_curve, read_metrics, read_tensors, run_tiny
from megaflow.errors import CheckpointError, ConfigError, FileAccessError
from megaflow_trainer.config import TrainConfig, read_command
from megaflow_trainer.optim.optimizer import Optimizer
from megaflow_trainer.optim.schedule import StepPlan
from megaflow_trainer.parallel.collectives import do_on_first, gather_objects
from megaflow_trainer.parallel.data import MainGradients
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.seed import seed_dropout
from megaflow_trainer.training.build import build_model
from megaflow_trainer.training.clock import Clock
from megaflow_trainer.training.feed import Feed
from megaflow_trainer.training.step import train_step
from megaflow_trainer.training.stop import Stop, StopVote

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

STEPS = 5


def make_config(mesh_size: int, micro: int, *flags: str) -> TrainConfig:
    sizes = ["--micro-batch-size", str(micro), "--global-batch-size", str(GLOBAL_BATCH), "--train-iters", str(STEPS)]
    config, _ = read_command([*TINY, "--data-path", "none", *sizes, *flags], world_size=mesh_size)
    return config


def run_steps(mesh: Mesh, micro: int, eod_id: int | None, *flags: str) -> dict[str, Any]:
    """Losses, norms and weights of a few steps, and the gradients of the first."""
    config = make_config(mesh.world_size, micro, *flags)
    model = build_model(config, mesh)
    optimizer = Optimizer(model.gradients.parameters, config.optim)
    clock = Clock(mesh.device)
    feed = Feed(ListLoader(micro, mesh, 64), mesh.device, clock, vocab_size=64, eod_id=eod_id)  # type: ignore[arg-type]
    count = config.step.sizes.num_micro_batches
    plan = StepPlan(lr=1e-3, weight_decay=0.01, num_micro_batches=count, num_samples=GLOBAL_BATCH)
    losses, norms, grads = [], [], {}
    for step in range(STEPS):
        report = train_step(model, optimizer, feed, mesh, clock, config, plan=plan)
        losses.append(report.loss.item())
        norms.append(report.grad_norm.item())
        if step == 0:
            grads = {main.name: main.main_grad.numpy().copy() for main in model.gradients.parameters}
    weights = {name: value.detach().float().numpy().copy() for name, value in model.module.named_parameters()}
    for name in [name for name in weights if name.endswith("qkv.bias")]:
        for kind in (grads, weights):  # the key's bias has no gradient (softmax ignores it): what is there is rounding
            kind[name] = np.delete(kind[name], slice(config.model.hidden_dim, 2 * config.model.hidden_dim))
    return {"losses": losses, "norms": norms, "grads": grads, "weights": weights}


def run_without_reduce(mesh: Mesh, micro: int) -> dict[str, Any]:
    """The same with the all-reduce of gradients removed."""
    keep, MainGradients._send = MainGradients._send, lambda self, bucket: None  # type: ignore[method-assign]
    try:
        return run_steps(mesh, micro, EOD)
    finally:
        MainGradients._send = keep  # type: ignore[method-assign]


def find_difference(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """The largest differences: losses absolute, norms relative, gradients and weights relative to their scale."""
    found = {
        "losses": max(abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=True)),
        "norms": max(abs(a - b) / a for a, b in zip(one["norms"], other["norms"], strict=True)),
    }
    for kind in ("grads", "weights"):
        assert one[kind].keys() == other[kind].keys()
        found[kind] = max(
            float(np.abs(one[kind][name] - other[kind][name]).max() / (np.abs(one[kind][name]).max() + 1e-12))
            for name in one[kind]
        )
    return found


@pytest.mark.parametrize("micro", [1, 2, 4], ids=["accumulate4", "accumulate2", "accumulate1"])
@pytest.mark.parametrize("eod_id", [None, EOD], ids=["unmasked", "unequal_masks"])
def test_dp2_equals_one_rank(two_ranks: RankPool, micro: int, eod_id: int | None) -> None:
    one = run_steps(one_rank(), GLOBAL_BATCH, eod_id)
    for rank in two_ranks.run(run_steps, micro, eod_id):
        difference = find_difference(one, rank)
        assert difference["losses"] <= 2e-5
        assert difference["norms"] <= 1e-5
        assert difference["grads"] <= 1e-5
        assert difference["weights"] <= 1e-4


def test_dp2_ranks_hold_equal_weights_to_the_bit(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(run_steps, 2, EOD)
    assert all(np.array_equal(first["weights"][name], second["weights"][name]) for name in first["weights"])
    assert first["losses"] == second["losses"]
    assert first["norms"] == second["norms"]


def test_dp2_without_the_gradient_all_reduce_is_noticed(two_ranks: RankPool) -> None:
    one = run_steps(one_rank(), GLOBAL_BATCH, EOD)
    difference = find_difference(one, two_ranks.run(run_without_reduce, 2)[0])
    assert difference["grads"] > 1e-2
    assert difference["weights"] > 1e-2
    assert difference["norms"] > 1e-3


def test_zero3_of_a_rank_with_nobody_to_divide_among_computes_in_bf16() -> None:
    """Weights are wide only where they are gathered into the compute dtype."""
    plain = run_steps(one_rank(), GLOBAL_BATCH, EOD, "--bf16")
    alone = run_steps(one_rank(), GLOBAL_BATCH, EOD, "--bf16", "--zero-stage", "3")
    assert alone["losses"] == plain["losses"]
    assert alone["norms"] == plain["norms"]


def test_dp2_in_bf16_stays_close_to_one_rank(two_ranks: RankPool) -> None:
    one = run_steps(one_rank(), GLOBAL_BATCH, EOD, "--bf16")
    other = two_ranks.run(run_steps, 2, EOD, "--bf16")[0]
    assert max(abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=True)) <= 5e-3


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_cut_into_micro_batches_does_not_change_the_step(micro: int) -> None:
    difference = find_difference(run_steps(one_rank(), GLOBAL_BATCH, EOD), run_steps(one_rank(), micro, EOD))
    assert difference["losses"] <= 2e-5
    assert difference["norms"] <= 1e-5
    assert difference["weights"] <= 1e-4


def draw_dropout(mesh: Mesh) -> list[float]:
    seed_dropout(1234, mesh)
    return torch.rand(4).tolist()


def test_ranks_drop_different_activations(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(draw_dropout)
    assert first != second


def fail_on_first(mesh: Mesh) -> str:
    def action() -> None:
        raise FileAccessError("disk full")

    try:
        do_on_first(action, mesh.world_group)
    except FileAccessError as error:
        return str(error)
    return "no error"


def test_an_error_of_the_first_rank_is_raised_on_all(two_ranks: RankPool) -> None:
    assert two_ranks.run(fail_on_first) == ["disk full", "disk full"]


def vote(mesh: Mesh, asked_rank: int, reason: str) -> list[Stop]:
    now = [0.0]
    deadline_s = 10.0 if reason == "time" and mesh.rank == asked_rank else None
    with StopVote(mesh, deadline_s=deadline_s, now=lambda: now[0]) as stop:
        answers = []
        for step in range(4):
            if step == 1:
                now[0] = 11.0
                if mesh.rank == asked_rank and reason == "signal":
                    os.kill(os.getpid(), signal.SIGUSR1)
            answers.append(stop.is_agreed(has_fault=step >= 1 and mesh.rank == asked_rank and reason == "fault"))
        return answers


@pytest.mark.parametrize("asked_rank", [0, 1])
@pytest.mark.parametrize("reason, stop", [("signal", Stop.SIGNAL), ("time", Stop.OUT_OF_TIME), ("fault", Stop.FAULT)])
def test_a_reason_on_one_rank_stops_all_after_the_same_step(
    two_ranks: RankPool, asked_rank: int, reason: str, stop: Stop
) -> None:
    first, second = two_ranks.run(vote, asked_rank, reason)
    assert first == second == [Stop.NO, Stop.NO, stop, stop]


def gather_ranks(mesh: Mesh) -> list[int]:
    return gather_objects(mesh.rank, mesh.world_group)


def test_objects_are_gathered_in_rank_order(two_ranks: RankPool) -> None:
    assert two_ranks.run(gather_ranks) == [[0, 1], [0, 1]]


def fail_on_last(mesh: Mesh) -> None:
    if mesh.rank == mesh.world_size - 1:
        raise ConfigError("only here")


def test_the_pool_reports_a_failing_rank_and_starts_anew(two_ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"rank 1:[\s\S]*only here"):
        two_ranks.run(fail_on_last)
    assert two_ranks.run(gather_ranks) == [[0, 1], [0, 1]]


def train_on_ranks(mesh: Mesh, prefix: str, flags: list[str]) -> int:
    return run_tiny(prefix, flags, mesh)


LENGTH = ["--train-iters", "6", "--global-batch-size", "8", "--micro-batch-size", "2", "--eod-mask-loss"]


def test_a_whole_run_on_dp2_equals_one_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "toy")
    flags = [*LENGTH, "--split", "80,20,0", "--eval-interval", "3", "--eval-iters", "2"]
    run_tiny(prefix, [*flags, "--run-dir", str(tmp_path / "one")])
    assert two_ranks.run(train_on_ranks, prefix, [*flags, "--run-dir", str(tmp_path / "two")]) == [0, 0]
    for key in ("lm_loss", "valid_loss"):
        one, two = (read_metrics(tmp_path / name, key) for name in ("one", "two"))
        assert [line[key] for line in two] == pytest.approx([line[key] for line in one], abs=2e-5)
        assert [line["iteration"] for line in two] == [line["iteration"] for line in one]


def test_dp2_resumes_to_the_bit_with_each_ranks_own_dropout(two_ranks: RankPool, tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "toy")
    flags = [*LENGTH, "--hidden-dropout", "0.2", "--save-interval", "3"]
    two_ranks.run(train_on_ranks, prefix, [*flags, "--save", str(tmp_path / "straight")])
    shutil.copytree(tmp_path / "straight" / "iter_0000003", tmp_path / "resumed" / "iter_0000003")
    two_ranks.run(train_on_ranks, prefix, [*flags, "--save", str(tmp_path / "resumed")])
    assert read_curve(tmp_path / "resumed") == read_curve(tmp_path / "straight")[3:]
    expected, found = (read_tensors(tmp_path / name, 6) for name in ("straight", "resumed"))
    assert found.keys() == expected.keys()
    assert {"rng/cpu.0", "rng/cpu.1"} <= found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("before, after", [("one", "two"), ("two", "one")])
def test_another_number_of_ranks_goes_on_with_the_same_samples(
    two_ranks: RankPool, tmp_path: Path, before: str, after: str
) -> None:
    prefix = write_pair(tmp_path / "toy")
    flags = [*LENGTH, "--save-interval", "3", "--save"]
    starters = {
        "one": lambda folder: run_tiny(prefix, [*flags, folder]),
        "two": lambda folder: two_ranks.run(train_on_ranks, prefix, [*flags, folder]),
    }
    starters[before](str(tmp_path / "straight"))
    shutil.copytree(tmp_path / "straight" / "iter_0000003", tmp_path / "resumed" / "iter_0000003")
    starters[after](str(tmp_path / "resumed"))
    for one, other in zip(read_curve(tmp_path / "straight")[3:], read_curve(tmp_path / "resumed"), strict=True):
        assert other[1] == pytest.approx(one[1], abs=2e-5)
        assert (other[0], *other[3:]) == (one[0], *one[3:])


def train_into_an_error(mesh: Mesh, prefix: str, folder: str) -> str:
    try:
        run_tiny(prefix, [*LENGTH, "--save", folder], mesh)
    except FileAccessError as error:
        return str(error)
    return "no error"


def test_a_disk_that_refuses_is_the_same_error_on_every_rank(two_ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = two_ranks.run(train_into_an_error, write_pair(tmp_path / "toy"), str(tmp_path / "file" / "d"))
    assert first == second
    assert "cannot be written" in first


def try_to_train(mesh: Mesh, prefix: str, flags: list[str]) -> str:
    try:
        run_tiny(prefix, flags, mesh)
    except CheckpointError as error:
        return str(error)
    return "trained"


def test_ranks_pass_over_the_same_damaged_step_and_refuse_alike(two_ranks: RankPool, tmp_path: Path) -> None:
    prefix, root = write_pair(tmp_path / "toy"), tmp_path / "saved"
    flags = [*LENGTH, "--save-interval", "3", "--save", str(root)]
    two_ranks.run(train_on_ranks, prefix, flags)
    curve = read_curve(root)
    flip_byte(root / "iter_0000006" / "part_00001.safetensors")
    assert two_ranks.run(try_to_train, prefix, flags) == ["trained", "trained"]
    assert read_curve(root) == curve
    for step in (3, 6):
        flip_byte(root / f"iter_{step:07d}" / "part_00000.safetensors")
    first, second = two_ranks.run(try_to_train, prefix, flags)
    assert first == second
    assert "none of its checkpoints can be loaded" in first


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
