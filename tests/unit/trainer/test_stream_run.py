"""The trainer straight from text, and from an iteration of it back to the lines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from helpers.containers import table_of
from helpers.pairs import write_pair
from helpers.runs import SHAPE, one_rank, read_curve, read_metrics, run_tiny
from megaflow.errors import ConfigError
from megaflow.origin import find_iteration
from megaflow_trainer.config import read_command
from megaflow_trainer.config.batch import batch_at, batch_phases
from megaflow_trainer.config.sections import StepConfig
from megaflow_trainer.training import step as step_module
from megaflow_trainer.training.run import train
from megaflow_trainer.training.stream_data import is_text

LENGTH = ("--global-batch-size", "4", "--micro-batch-size", "2")


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    texts = [f"{number} of a hundred documents, with some words to be learnt" for number in range(100)]
    pq.write_table(table_of(texts), tmp_path / "corpus.parquet", row_group_size=20)
    return str(tmp_path / "corpus.parquet")


def test_parquet_trains_as_it_is_and_goes_on_exactly(corpus: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = [*LENGTH, "--vocab-size", "50257", "--train-iters", "6", "--save", str(run), "--save-interval", "2"]
    assert run_tiny(corpus, flags, base=SHAPE) == 0
    curve = read_curve(run)
    assert [row[0] for row in curve] == [1, 2, 3, 4, 5, 6]
    for step in (4, 6):
        shutil.rmtree(run / f"iter_{step:07d}")
    (run / "latest_checkpointed_iteration.txt").write_text("2")
    assert run_tiny(corpus, flags, base=SHAPE) == 0
    assert read_curve(run) == curve
    found = find_iteration(run, 5)
    assert (found.first_sample, found.num_samples) == (16, 4)
    pieces = [piece for sample in found.origins() for piece in sample.pieces]
    assert {piece.dataset for piece in pieces} == {corpus}
    assert sum(piece.tokens for piece in pieces) == 4 * 17


VALID = ("--vocab-size", "50257", "--train-iters", "4", "--eval-interval", "2", "--eval-iters", "2")


def test_a_share_of_the_text_is_held_out_and_scored_alike_every_time(corpus: str, tmp_path: Path) -> None:
    def run(name: str, *flags: str) -> Path:
        given = [*LENGTH, *VALID, "--split", "70,30,0", "--run-dir", str(tmp_path / name), *flags]
        assert run_tiny(corpus, given, base=SHAPE) == 0
        return tmp_path / name

    plain, often, still = run("plain"), run("often", "--eval-interval", "1"), run("still", "--lr", "0")
    losses = {line["iteration"]: line["valid_loss"] for line in read_metrics(plain, "valid_loss")}
    more = {line["iteration"]: line["valid_loss"] for line in read_metrics(often, "valid_loss")}
    assert list(losses) == [2, 4]
    assert list(more) == [1, 2, 3, 4]
    assert {step: more[step] for step in losses} == losses
    assert read_curve(often) == read_curve(plain) != read_curve(run("off", "--split", "100,0,0"))
    assert len({line["valid_loss"] for line in read_metrics(still, "valid_loss")}) == 1
    data = json.loads((plain / "run.json").read_text())["starts"][0]["data"]
    parts = [data[name]["description"]["split_name"] for name in ("train", "valid")]
    assert parts == ["train", "valid"]


def test_text_for_validation_can_be_named_by_itself(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("".join(f'{{"text": "quite other words, number {n}, of another kind"}}\n' for n in range(30)))

    def run(name: str, *flags: str) -> list[float]:
        words = [*SHAPE, *LENGTH, *VALID, "--run-dir", str(tmp_path / name), *flags]
        config, notes = read_command(words, world_size=1)
        assert train(config, one_rank(), notes) == 0
        return [line["valid_loss"] for line in read_metrics(tmp_path / name, "valid_loss")]

    losses = run("named", "--train-data-path", corpus, "--valid-data-path", str(other))
    assert losses == pytest.approx(run("again", "--train-data-path", corpus, "--valid-data-path", str(other)), abs=0)
    assert losses != run("same", "--train-data-path", corpus, "--valid-data-path", corpus)
    capsys.readouterr()
    assert run("none", "--train-data-path", corpus) == []
    assert "no validation: no data are named for it" in capsys.readouterr().out
    assert run("empty", "--data-path", corpus, "--split", "10000000,1,0") == []
    said = capsys.readouterr().out
    assert "no validation: no document of the text falls into the valid part of --split 10000000,1,0" in said
    with pytest.raises(ConfigError, match=r"--valid-data-path: .*toy is neither text nor a URL"):
        run("mixed", "--train-data-path", corpus, "--valid-data-path", write_pair(tmp_path / "toy"))


def test_a_bad_step_of_a_stream_names_its_lines(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, calls = step_module.sum_losses, []

    def spoil(*args: Any) -> Any:
        loss, by_sample = keep(*args)
        calls.append(1)
        if len(calls) != 7:  # the first micro-batch of the fourth step
            return loss, by_sample
        bad = by_sample.clone()
        bad[0, 1] = torch.nan
        return loss * torch.nan, bad

    monkeypatch.setattr(step_module, "sum_losses", spoil)
    flags = [*LENGTH, "--vocab-size", "50257", "--train-iters", "5", "--run-dir", str(tmp_path / "run")]
    assert run_tiny(corpus, flags, base=SHAPE) == 0
    (event,) = read_metrics(tmp_path / "run", "event")
    assert event["iteration"] == 4
    guilty = event["samples"][0]
    assert (guilty["sample"], guilty["loss"]) == (13, None)
    expected = find_iteration(tmp_path / "run", 4).origins()
    for sample in event["samples"]:
        pieces = next(origin.pieces for origin in expected if origin.sample == sample["sample"])
        assert [item["origin"] for item in sample["documents"]] == [str(piece.origin) for piece in pieces]
        assert all(item["pair"] == corpus and item["document"] > 0 for item in sample["documents"])
    assert len(event["samples"]) == 4


def test_run_json_leads_from_an_iteration_of_a_pair_to_its_samples(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "toy_text_document")
    ramp = ["--rampup-batch-size", "2", "2", "8"]
    flags = ["--global-batch-size", "6", "--micro-batch-size", "1", *ramp, "--train-iters", "5", "--run-dir"]
    assert run_tiny(prefix, [*flags, str(tmp_path / "run"), "--vocab-size", "64"], base=SHAPE) == 0
    consumed = [0, *(row[4] for row in read_curve(tmp_path / "run"))]
    for iteration in range(1, 6):
        found = find_iteration(tmp_path / "run", iteration)
        assert (found.first_sample, found.first_sample + found.num_samples) == tuple(
            consumed[iteration - 1 : iteration + 1]
        )
    data = json.loads((tmp_path / "run" / "run.json").read_text())["starts"][0]["data"]
    assert data["dataset"]["prefix"] == prefix


@pytest.mark.parametrize(
    "ramp", [(), ("2", "2", "8"), ("2", "2", "7"), ("1", "3", "100"), ("6", "2", "9"), ("4", "9", "5")]
)
def test_phases_are_the_batches_of_every_position(ramp: tuple[str, ...]) -> None:
    step = StepConfig(global_batch_size=10, micro_batch_size=1, num_micro_batches=10, ramp_up=ramp)
    phases = batch_phases(step)
    for consumed in range(130):
        assert [size for first, size in phases if first <= consumed][-1] == batch_at(step, consumed), consumed


def test_what_is_text_and_what_is_not(corpus: str, tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "toy_text_document")
    assert [is_text(name) for name in (corpus, "s3://bucket/x.parquet", str(tmp_path), f"{tmp_path}/*.parquet")] == [
        True
    ] * 4
    assert [is_text(name) for name in (prefix, str(tmp_path / "toy"), str(tmp_path / "nothing"))] == [False] * 3
    flags = ["--train-iters", "1", "--run-dir", str(tmp_path / "run"), *LENGTH]
    with pytest.raises(ConfigError, match="--vocab-size 64 is less than the 50257 tokens"):
        run_tiny(corpus, [*flags, "--vocab-size", "64"], base=SHAPE)
