"""What a run says of the load of its experts: known numbers, lines, warnings; and that a run goes on exactly."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from helpers.pairs import write_pair
from helpers.runs import TINY, one_rank, read_curve, read_metrics, read_tensors, run_tiny
from megaflow_trainer.config import read_command
from megaflow_trainer.model.moe import list_routers
from megaflow_trainer.parallel.load import LoadReport
from megaflow_trainer.training.build import build_model
from megaflow_trainer.training.metrics import describe_load

LOSSES = "--moe-aux-loss-coeff 0.5 --moe-z-loss-coeff 0.25"


@pytest.mark.parametrize("flags", ["", "--recompute-granularity full"], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_a_router_of_equal_scores_has_the_load_and_losses_of_its_equations(kind: str, flags: str) -> None:
    words = f"--num-experts 4 {LOSSES} --moe-router-load-balancing-type {kind} {flags} --no-compile".split()
    config, _ = read_command([*TINY, "--train-iters", "1", "--data-path", "x", *words], world_size=1)
    model, tokens = build_model(config, one_rank()), torch.arange(34).view(2, 17)
    assert model.load is not None
    for router in list_routers(model.module):
        router.weight.data.zero_()
    model.load.start()
    for _ in range(3):  # micro-batches
        model(tokens[:, :-1], tokens[:, 1:]).sum().backward()
    report = model.load.finish(torch.tensor(96.0), is_wanted=True)
    assert report is not None
    values = {name: value.item() for name, value in report.list_values().items()}
    assert report.counts.tolist() == [[96, 96, 0, 0]] * 2  # of equal scores the first two experts win
    assert values.pop("balance_loss") == pytest.approx(1.0)
    assert values.pop("router_z_loss") == pytest.approx(math.log(4) ** 2)
    assert values == {
        "expert_tokens_min": 0,
        "expert_tokens_mean": 48,
        "expert_tokens_max": 96,
        "expert_max_over_mean": 2,
        "expert_entropy": pytest.approx(0.5),
        "dead_experts": 4,
        "dropped_share": 0,
    }
    assert report.describe_dead() == "experts that no token of this step chose: layer 0: 2, 3; layer 1: 2, 3"


def make_report(counts: list[list[int]], layers: tuple[int, ...]) -> LoadReport:
    table = torch.tensor(counts, dtype=torch.float64)
    return LoadReport(table, layers, {}, torch.tensor(5.0), torch.tensor(0.5))


def test_drops_and_biases_are_part_of_the_line_and_nobody_is_called_dead_who_lives() -> None:
    report = make_report([[1, 9], [5, 5]], (1, 3))
    values = {name: value.item() for name, value in report.list_values().items()}
    assert (values["dropped_share"], values["expert_bias_norm"]) == (0.25, 0.5)
    assert values["expert_max_over_mean"] == pytest.approx((9 / 5 + 1) / 2)
    line = describe_load(values)
    assert "tokens per expert: 1/5/9, entropy " in line
    assert line.endswith(" | bias norm: 5.0000E-01 | dropped: 25.00%")
    assert report.describe_dead() is None
    lone = {name: value.item() for name, value in make_report([[4]], (0,)).list_values().items()}
    assert "tokens per expert: 4/4/4, entropy 0.0000 |" in describe_load(lone)
    said = make_report([[0, 1]] * 10, tuple(range(10))).describe_dead()
    assert said is not None
    assert said.endswith("layer 7: 0 and 2 more layers")


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(tmp_path_factory.mktemp("data") / "toy_text_document")


def test_a_run_warns_of_experts_that_nobody_chose(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--num-experts 64 --moe-router-topk 1 --moe-router-pre-softmax --train-iters 2 --global-batch-size 2"
    assert run_tiny(prefix, [*words.split(), "--moe-ffn-hidden-size", "8", "--run-dir", str(tmp_path)]) == 0
    said, events = capsys.readouterr().out, read_metrics(tmp_path, "event")
    lines = read_metrics(tmp_path)
    warnings = [event for event in events if event["event"] == "dead_experts"]
    assert [event["iteration"] for event in warnings] == [1, 2]
    for line, warning in zip(lines, warnings, strict=True):
        assert (line["expert_tokens_min"], line["expert_tokens_mean"]) == (0, 0.5)  # 32 tokens, 64 experts
        numbers = warning["text"].partition(": ")[2].replace(";", ",").split(",")
        assert len(numbers) == line["dead_experts"] >= 64
        assert f" warning: {warning['text']}" in said
    assert "tokens per expert: 0/0/" in said


@pytest.mark.parametrize("precision", ["", "--bf16", "--fp16"])
def test_biases_stay_in_a_step_that_is_skipped(prefix: str, tmp_path: Path, precision: str) -> None:
    words = (
        "--num-experts 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias --train-iters 2 "
        f"--global-batch-size 2 {precision}"
    ).split()
    moved = []
    for scale in ("0.1", "1e30"):  # of which the second has no finite gradient
        folder = tmp_path / scale
        extra = ["--moe-z-loss-coeff", scale, "--initial-loss-scale", "1024", "--run-dir", str(folder)]
        assert run_tiny(prefix, [*words, *extra]) == 0
        moved.append([(line["skipped_steps"] > 0, line["expert_bias_norm"] > 0) for line in read_metrics(folder)])
    assert moved == [[(False, False), (False, True)], [(True, False), (True, False)]]  # logged before they move


def test_a_run_in_bf16_goes_on_with_the_router_and_biases_that_it_had(prefix: str, tmp_path: Path) -> None:
    words = (
        "--num-experts 4 --bf16 --use-distributed-optimizer --moe-router-score-function sigmoid --global-batch-size 2 "
        "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.0013 --train-iters 4 --save-interval 2 "
        f"--lr-decay-style constant --lr-warmup-iters 0 {LOSSES}"
    ).split()
    straight, again = tmp_path / "straight", tmp_path / "again"
    run_tiny(prefix, [*words, "--save", str(straight), "--run-dir", str(straight)])
    run_tiny(prefix, [*words, "--save", str(again), "--run-dir", str(again), "--exit-interval", "2"])
    run_tiny(prefix, [*words, "--save", str(again), "--load", str(again), "--run-dir", str(again / "on")])
    assert read_curve(again / "on") == read_curve(straight)[2:]
    expected, found = read_tensors(straight, 4), read_tensors(again, 4)
    for name in ("weight", "expert_bias"):
        kept = expected[f"model/blocks.1.mlp.router.{name}"]
        assert kept.dtype == torch.float32
        assert (kept != kept.bfloat16().float()).any()  # what rounding would lose
        assert torch.equal(found[f"model/blocks.1.mlp.router.{name}"], kept)
