"""Going on from a checkpoint is the same run; and what may be taken from one, and what not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.pairs import write_pair
from helpers.runs import read_curve, read_metrics, read_tensors, run_tiny
from megaflow import GPTDataset, IndexedDataset, Loader
from megaflow.errors import CheckpointError, ConfigError
from megaflow_trainer.checkpoint import parts, store
from megaflow_trainer.config import read_command
from megaflow_trainer.config.exit_codes import FINISHED, OUT_OF_TIME

STEPS = 20
LENGTH = ("--train-iters", str(STEPS), "--global-batch-size", "4", "--micro-batch-size", "1")
RAMP = ("--rampup-batch-size", "2", "1", "30", "--lr-warmup-samples", "10", "--lr-decay-style", "cosine")
DROPOUT = ("--hidden-dropout", "0.2", "--attention-dropout", "0.2", "--eod-mask-loss")
FLAGS = (*LENGTH, *RAMP, *DROPOUT)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(tmp_path_factory.mktemp("data") / "toy_text_document")


@pytest.fixture(scope="module")
def straight(prefix: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps, with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("straight")
    assert run_tiny(prefix, [*FLAGS, "--save-interval", "1", "--save", str(folder)]) == FINISHED
    return folder


def read_all(folder: Path) -> list[tuple[Any, ...]]:
    """Everything that two equal runs have in common, by iteration."""
    keys = ("iteration", "lm_loss", "grad_norm", "param_norm", "lr", "weight_decay", "consumed_samples")
    return [tuple(line[key] for key in (*keys, "global_batch_size")) for line in read_metrics(folder)]


def test_the_straight_run_accumulates_and_ramps_up(straight: Path) -> None:
    sizes = [line["global_batch_size"] for line in read_metrics(straight)]
    assert (sizes[0], sizes[-1]) == (2, 4)
    assert 3 in sizes
    assert len({line[4] for line in read_all(straight)}) == STEPS  # the rate


@pytest.mark.parametrize("step", range(1, STEPS))
def test_a_run_resumed_at_any_step_equals_the_straight_one_to_the_bit(
    prefix: str, straight: Path, tmp_path: Path, step: int
) -> None:
    name = f"iter_{step:07d}"
    shutil.copytree(straight / name, tmp_path / name)
    assert run_tiny(prefix, [*FLAGS, "--save", str(tmp_path)]) == FINISHED
    assert read_all(tmp_path) == read_all(straight)[step:]
    sums = [json.loads((folder / f"iter_{STEPS:07d}" / "state.json").read_text()) for folder in (tmp_path, straight)]
    assert sums[0]["files"] == sums[1]["files"]  # sums of all bytes: weights, moments, random streams
    assert sums[0]["loader"] == sums[1]["loader"]
    assert sums[0]["spikes"] == sums[1]["spikes"]


def test_a_run_stopped_after_every_step_equals_the_straight_one(prefix: str, straight: Path, tmp_path: Path) -> None:
    codes = [run_tiny(prefix, [*FLAGS, "--exit-interval", "1", "--save", str(tmp_path)]) for _ in range(STEPS)]
    assert codes == [OUT_OF_TIME] * (STEPS - 1) + [FINISHED]
    assert read_all(tmp_path) == read_all(straight)
    starts = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert [start["from_iteration"] for start in starts] == list(range(STEPS))
    assert [start["end"]["exit_code"] for start in starts] == codes
    assert starts[3]["from_checkpoint"] == str(tmp_path / "iter_0000003")


def test_a_finished_run_says_what_can_be_done_with_it(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a run"
    flags = ["--train-iters", "2", *LENGTH[2:], "--run-dir", str(folder)]
    run_tiny(prefix, [*flags, "--exit-interval", "1"])
    assert "tools/report.py" not in capsys.readouterr().out
    run_tiny(prefix, flags)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f" finished: python tools/report.py '{folder}' draws it as a page, python tools/diagnose.py")


def test_a_time_limit_saves_and_ends(prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tiny(prefix, [*FLAGS, "--exit-duration-in-mins", "0", "--save", str(tmp_path)]) == OUT_OF_TIME
    assert "stopped by its time limit after iteration 1; the same command goes on" in capsys.readouterr().out
    assert store.find_checkpoint(tmp_path).path == tmp_path / "iter_0000001"


def test_saving_while_training_and_at_once_give_the_same_files(prefix: str, straight: Path, tmp_path: Path) -> None:
    flags = [*FLAGS, "--no-async-save", "--save-interval", "1", "--keep-last", "2", "--keep-every", "7"]
    run_tiny(prefix, [*flags, "--save", str(tmp_path)])
    kept = sorted(store.count_iterations(path) for path in tmp_path.glob("iter_*"))
    assert kept == [7, 14, 19, 20]
    for step in kept:
        name = Path(f"iter_{step:07d}") / "part_00000.safetensors"
        assert parts.sum_file(tmp_path / name) == parts.sum_file(straight / name)


def test_a_checkpoint_tells_everything_that_it_must(straight: Path) -> None:
    state = json.loads((straight / "iter_0000005" / "state.json").read_text())
    assert state["consumed_samples"] == state["loader"]["consumed_samples"] == read_all(straight)[4][6]
    assert state["config"]["optim"]["lr"] == 1e-3
    assert state["schedule"]["numbers"]["rate.warmup"] == 10
    assert len(state["data_fingerprint"]) == 64
    assert (state["world_size"], state["iteration"], state["format"]) == (1, 5, 2)
    assert {name.partition("/")[0] for name in read_tensors(straight, 5)} == {"model", "optimizer", "rng"}


def copy_last(straight: Path, folder: Path) -> None:
    shutil.copytree(straight / "iter_0000010", folder / "iter_0000010")


OTHER = ("--lr", "5e-4", "--weight-decay", "0.2")


def test_another_schedule_is_an_error_that_names_both_values(prefix: str, straight: Path, tmp_path: Path) -> None:
    copy_last(straight, tmp_path)
    with pytest.raises(ConfigError) as caught:
        run_tiny(prefix, [*FLAGS, *OTHER, "--save", str(tmp_path)])
    message = str(caught.value)
    assert "--lr was 0.001 and is 0.0005; --weight-decay was 0.01 and is 0.2; give --override-opt" in message
    assert "--use-checkpoint-opt_param-scheduler to go on by the checkpoint" in message


@pytest.mark.parametrize("flag", ["--override-opt_param-scheduler", "--override-opt-param-scheduler"])
def test_with_override_every_value_is_the_command_lines_from_the_first_step(
    prefix: str, straight: Path, tmp_path: Path, flag: str
) -> None:
    copy_last(straight, tmp_path / "a")
    run_tiny(prefix, [*FLAGS, *OTHER, flag, "--save", str(tmp_path / "a")])
    run_tiny(prefix, [*FLAGS, *OTHER, "--run-dir", str(tmp_path / "b")])
    assert [line[4:] for line in read_all(tmp_path / "a")] == [line[4:] for line in read_all(tmp_path / "b")[10:]]


def test_with_the_checkpoints_schedule_the_command_lines_is_ignored(
    prefix: str, straight: Path, tmp_path: Path
) -> None:
    copy_last(straight, tmp_path)
    longer = ["--train-iters", "28", *FLAGS[2:], *OTHER, "--use-checkpoint-opt_param-scheduler"]
    run_tiny(prefix, [*longer, "--save", str(tmp_path)])
    assert read_all(tmp_path)[:10] == read_all(straight)[10:]
    beyond = [line[4] for line in read_all(tmp_path) if line[6] >= STEPS * 4]  # samples of the checkpoint's decay
    assert beyond
    assert set(beyond) == {0.0}


def test_without_the_optimizer_the_weights_and_the_place_are_taken(prefix: str, straight: Path, tmp_path: Path) -> None:
    copy_last(straight, tmp_path / "a")
    copy_last(straight, tmp_path / "b")
    for name, flag in (("a", "--no-load-optim"), ("b", "--no-load-rng")):
        run_tiny(prefix, [*FLAGS, flag, "--save-interval", "1", "--save", str(tmp_path / name)])
        assert [line[4:] for line in read_all(tmp_path / name)] == [line[4:] for line in read_all(straight)[10:]]
    first, expected = read_all(tmp_path / "a")[0], read_all(straight)[10]
    assert first[:3] == expected[:3]  # loss and gradient of the same weights, samples and dropout
    assert first[3] != expected[3]  # and another step of the fresh moments
    moments = read_tensors(tmp_path / "a", 11)
    assert moments["optimizer/step.embedding.weight"].item() == 1
    assert read_all(tmp_path / "b")[0][1] != expected[1]  # other activations were dropped
    assert read_tensors(tmp_path / "b", 11)["optimizer/step.embedding.weight"].item() == 11


def test_finetuning_begins_anew_and_its_own_folder_goes_on(prefix: str, straight: Path, tmp_path: Path) -> None:
    flags = [*FLAGS, "--load", str(straight), "--finetune", "--seed", "5", "--save", str(tmp_path)]
    run_tiny(prefix, [*flags, "--exit-interval", "4"])
    first = read_all(tmp_path)
    assert [line[0] for line in first] == [1, 2, 3, 4]
    assert first[0][6] == 2  # samples from the start
    fresh = read_curve(straight)[0][1]
    assert first[0][1] < fresh - 0.05  # with trained weights
    run_tiny(prefix, [*flags, "--exit-interval", "8"])
    assert [line[0] for line in read_all(tmp_path)] == list(range(1, 9))


def test_another_optimizer_names_the_tensor_and_the_remedy(prefix: str, straight: Path, tmp_path: Path) -> None:
    copy_last(straight, tmp_path)
    with pytest.raises(CheckpointError, match="in the checkpoint; --no-load-optim begins with fresh"):
        run_tiny(prefix, [*FLAGS, "--optimizer", "sgd", "--save", str(tmp_path)])
    assert run_tiny(prefix, [*FLAGS, "--optimizer", "sgd", "--no-load-optim", "--save", str(tmp_path)]) == FINISHED


def test_the_manifest_is_enough_to_repeat_the_run_and_to_rebuild_its_loader(
    prefix: str, straight: Path, tmp_path: Path
) -> None:
    recipe = straight / "config.yaml"
    config, _ = read_command(["--config", str(recipe)], world_size=1)
    assert config.last_step == STEPS
    again = [*("--config", str(recipe)), "--run-dir", str(tmp_path / "again"), "--save", str(tmp_path / "again")]
    assert run_tiny(prefix, again, base=()) == FINISHED
    assert read_all(tmp_path / "again") == read_all(straight)
    start = json.loads((straight / "run.json").read_text())["starts"][0]
    data = start["data"]["train"]
    about, seed = data["description"], start["config"]["seed"]
    dataset = GPTDataset(
        IndexedDataset(data["pairs"][0]["prefix"]),
        seq_len=about["seq_len"],
        num_samples=about["num_samples"],
        split=about["split"],
        seed=seed,
    )
    assert dataset.fingerprint == data["fingerprint"]
    with Loader(dataset, start["config"]["step"]["micro_batch_size"], consumed_samples=4) as loader:
        assert next(loader).sample_ids.tolist() == [4]
    assert start["versions"]["torch"] == torch.__version__
    assert {"command", "folder", "time", "ranks", "environment", "code", "device"} <= start.keys()
    assert start["packages"]["numpy"]
