"""One rank gets a number that is not finite: all decide alike, and the right documents are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.layouts import find_mesh
from helpers.pairs import write_pair
from helpers.ranks import RankPool
from helpers.runs import TINY, read_curve, read_metrics, run_tiny
from megaflow import GPTDataset, IndexedDataset
from megaflow.errors import ConfigError, MegaflowError
from megaflow_trainer.config import read_command
from megaflow_trainer.config.layout import make_layout
from megaflow_trainer.parallel.collectives import do_on_first
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.training import step as step_module

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

LENGTH = ["--train-iters", "6", "--global-batch-size", "8", "--micro-batch-size", "2", "--seed", "3"]
BAD_RANK, BAD_STEP = 1, 3
BAD_SAMPLE = 8 * (BAD_STEP - 1) + 2  # the first of the second micro-batch of the step: rank 1's


def train_with(
    mesh: Mesh, prefix: str, flags: list[str], first: int, last: int, kind: str
) -> tuple[int | str, list[float]]:
    """Train while rank 1 meets a bad sample in the steps from `first` to `last`; the weights' sums at the end."""
    keep, counts = step_module.sum_losses, [0]

    def spoil(model: Any, batch: Any, *rest: Any) -> Any:
        loss, by_sample = keep(model, batch, *rest)
        counts[0] += 1
        step = (counts[0] + 1) // 2
        if mesh.rank != BAD_RANK or not first <= step <= last or counts[0] % 2 == 0:
            return loss, by_sample
        if kind == "gradient":
            return loss + 0 * (loss - loss.detach()).sqrt(), by_sample  # finite, and its derivative is not
        bad = by_sample.clone()
        bad[0, 0] = {"nan": torch.nan, "inf": torch.inf, "spike": 100.0 * bad[1, 0]}[kind]
        return loss + (bad[0, 0] if kind != "spike" else 3000.0), bad

    step_module.sum_losses = spoil
    try:
        code: int | str = run_tiny(prefix, flags, mesh)
    except MegaflowError as error:
        code = f"{type(error).__name__}: {error}"
    finally:
        step_module.sum_losses = keep
    return code, [0.0]


def write_data(folder: Path) -> str:
    """A pair whose sidecar tells where each document came from."""
    prefix = write_pair(folder / "toy")
    source = {
        "path": "corpus.jsonl",
        "format": "jsonl",
        "first_document": 0,
        "num_documents": 40,
        "lines_without_document": [],
    }
    Path(f"{prefix}.json").write_text(json.dumps({"format_version": 1, "sources": [source]}))
    return prefix


def find_documents(prefix: str, sample: int) -> list[int]:
    """What the dataset says of a sample, asked apart from the trainer."""
    dataset = GPTDataset(IndexedDataset(prefix), seq_len=16, num_samples=6 * 8, split="90,10,0", seed=3)
    return sorted({piece[0] for piece in dataset.pieces(sample)})  # one sequence a document in these data


def fail_on_first(mesh: Mesh, kind: str) -> str:
    """What a rank raises where the first one's action does."""
    kinds = {"config": ConfigError("as it is"), "bug": TypeError("a fault\nof ours"), "exit": SystemExit(3)}

    def act() -> None:
        raise kinds[kind]

    try:
        do_on_first(act, mesh.world_group)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_no_rank_waits_for_a_first_one_that_has_failed(two_ranks: RankPool) -> None:
    assert two_ranks.run(fail_on_first, "config") == ["ConfigError: as it is"] * 2
    said = "MegaflowError: the first rank ends with a fault that it shows itself:"
    found = two_ranks.run(fail_on_first, "bug")
    assert found == ["TypeError: a fault\nof ours", f"{said} TypeError: a fault"]
    assert two_ranks.run(fail_on_first, "exit") == ["SystemExit: 3", f"{said} SystemExit: 3"]


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_by_all_and_names_its_documents(
    two_ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    prefix = write_data(tmp_path)
    flags = [*LENGTH, "--run-dir", str(tmp_path / "run")]
    codes = two_ranks.run(train_with, prefix, flags, BAD_STEP, BAD_STEP, kind)
    assert [code for code, _ in codes] == [0, 0]
    lines = read_metrics(tmp_path / "run")
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 0, 0, 0]
    assert [line["lm_loss"] is None for line in lines] == [False, False, True, False, False, False]
    (event,) = read_metrics(tmp_path / "run", "event")
    assert (event["event"], event["kind"], event["iteration"], event["in_a_row"]) == ("nonfinite", "loss", BAD_STEP, 1)
    assert sorted(item["sample"] for item in event["samples"]) == list(range(16, 24))
    (guilty,) = [item for item in event["samples"] if item["loss"] is None]
    assert (guilty["sample"], guilty["rank"]) == (BAD_SAMPLE, BAD_RANK)
    expected = find_documents(prefix, BAD_SAMPLE)
    assert sorted(item["document"] for item in guilty["documents"]) == expected
    assert {item["origin"] for item in guilty["documents"]} == {f"corpus.jsonl, line {n + 1}" for n in expected}


def test_a_skipped_step_leaves_the_weights_as_they_were_and_the_schedule_goes_on(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    prefix = write_data(tmp_path)
    clean, spoilt = tmp_path / "clean", tmp_path / "spoilt"
    two_ranks.run(train_with, prefix, [*LENGTH, "--run-dir", str(clean)], 0, -1, "nan")
    two_ranks.run(train_with, prefix, [*LENGTH, "--run-dir", str(spoilt)], BAD_STEP, BAD_STEP, "gradient")
    before, after = read_curve(clean), read_curve(spoilt)
    assert after[:2] == before[:2]
    assert after[2][1] == before[2][1]  # the loss was fine, the gradient was not
    assert [line[3:] for line in after] == [line[3:] for line in before]  # rate and samples
    norms = [line["param_norm"] for line in read_metrics(spoilt)]
    assert norms[2] == norms[1] != norms[3]
    (event,) = read_metrics(spoilt, "event")
    assert event["kind"] == "gradient"
    assert len(event["samples"]) == 8


def poison_gradient(pool_mesh: Mesh, prefix: str, flags: list[str]) -> int | str:
    """Train on a layout; in the third step one element of the gradient that rank 1 alone holds is no number."""
    config, _ = read_command([*TINY, "--data-path", prefix, *flags], world_size=2)
    mesh = find_mesh(pool_mesh, make_layout(config.parallel, world_size=2, num_kv_heads=config.model.kv_heads))
    keep, counts = step_module._move, [0]

    def spoil(model: Any, optimizer: Any, report: Any, config: Any, *, num_tokens: Any) -> Any:
        counts[0] += 1
        if counts[0] == BAD_STEP:
            if mesh.rank == BAD_RANK:
                own = [main.main_grad for main in model.gradients.parameters if main.name.endswith("mlp.up.weight")]
                own[0].view(-1)[0] = torch.nan
            report.grad_norm = model.gradients.norm() / num_tokens
        return keep(model, optimizer, report, config, num_tokens=num_tokens)

    step_module._move = spoil
    try:
        return run_tiny(prefix, flags, mesh)
    except MegaflowError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        step_module._move = keep


DIVIDED = {
    "tp": ["--tensor-model-parallel-size", "2"],
    "pp": ["--pipeline-model-parallel-size", "2"],
    "zero 1": ["--zero-stage", "1"],
    "zero 2": ["--zero-stage", "2"],
    "zero 3": ["--zero-stage", "3"],
}


@pytest.mark.parametrize("layout", DIVIDED)
def test_a_bad_gradient_that_one_rank_alone_holds_is_skipped_by_all(
    two_ranks: RankPool, tmp_path: Path, layout: str
) -> None:
    prefix = write_data(tmp_path)
    flags = [*LENGTH, *DIVIDED[layout], "--run-dir", str(tmp_path / "run")]
    assert two_ranks.run(poison_gradient, prefix, flags) == [0, 0]
    lines = read_metrics(tmp_path / "run")
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 0, 0, 0]
    norms = [line["param_norm"] for line in lines]
    assert norms[2] == norms[1] != norms[3]  # of the parts of both ranks
    (event,) = read_metrics(tmp_path / "run", "event")
    assert (event["kind"], event["iteration"]) == ("gradient", BAD_STEP)
    assert sorted(item["sample"] for item in event["samples"]) == list(range(16, 24))


def test_too_many_bad_steps_in_a_row_end_all_ranks_alike(two_ranks: RankPool, tmp_path: Path) -> None:
    prefix = write_data(tmp_path)
    flags = [*LENGTH, "--run-dir", str(tmp_path / "run"), "--max-nonfinite-steps", "2"]
    (first, _), (second, _) = two_ranks.run(train_with, prefix, flags, 3, 9, "nan")
    assert first == second
    assert str(first).startswith(
        "DivergedError: loss or gradient were not finite in 2 iterations in a row, up to iteration 4"
    )
    assert [event["in_a_row"] for event in read_metrics(tmp_path / "run", "event")] == [1, 2]


def test_a_spike_is_told_with_the_sample_that_has_it(two_ranks: RankPool, tmp_path: Path) -> None:
    prefix = write_data(tmp_path)
    flags = ["--train-iters", "24", *LENGTH[2:], "--run-dir", str(tmp_path / "run")]
    codes = two_ranks.run(train_with, prefix, flags, 20, 20, "spike")
    assert [code for code, _ in codes] == [0, 0]
    (event,) = read_metrics(tmp_path / "run", "event")
    assert (event["event"], event["iteration"]) == ("spike", 20)
    assert event["deviations"] > 8
    assert (event["samples"][0]["sample"], event["samples"][0]["rank"]) == (8 * 19 + 2, BAD_RANK)
    assert event["samples"][0]["loss"] == 100.0
