"""Recompute gives the same bits with less memory; narrower or offloaded activations give what they promise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.pairs import write_pair
from helpers.runs import one_rank, read_curve, read_metrics, run_tiny
from helpers.saved import count_saved_bytes
from megaflow_trainer.config.sections import ModelConfig, RecomputeConfig
from megaflow_trainer.model.gpt import build_gpt
from megaflow_trainer.model.init import init_weights
from megaflow_trainer.model.sockets import Sockets
from megaflow_trainer.parallel.apply import ParallelModel, Plan, parallelize
from megaflow_trainer.parallel.saved import SavedActivations

MODES = {
    "uniform": {"granularity": "full", "method": "uniform"},
    "uniform_3": {"granularity": "full", "method": "uniform", "num_layers": 3},
    "block_2": {"granularity": "full", "method": "block", "num_layers": 2},
    "attention": {"granularity": "selective", "modules": ("attention",)},
    "attention_and_norm": {"granularity": "selective", "modules": ("attention", "attention_norm")},
    "cores": {"granularity": "selective", "modules": ("attention_core", "mlp_activation")},
    "mlp_and_norms": {"granularity": "selective", "modules": ("mlp", "mlp_norm", "attention_norm")},
}


def make(recompute: RecomputeConfig, dropout: float = 0.2) -> ParallelModel:
    config = ModelConfig(
        num_layers=4,
        hidden_dim=64,
        num_heads=4,
        max_positions=64,
        vocab_size=61,
        position_kind="rope",
        activation="swiglu",
        hidden_dropout=dropout,
        attention_dropout=dropout,
    )
    model = build_gpt(config, Sockets(), device=torch.device("cpu"), dtype=torch.float32)
    init_weights(model, config, seed=1)
    return parallelize(model, one_rank(), Plan(recompute=recompute))


def run(model: ParallelModel) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Losses, gradients and the bytes that autograd keeps between forward and backward."""
    torch.manual_seed(5)
    tokens = torch.randint(61, (2, 65))
    if model.saved is None:
        num_bytes, loss = count_saved_bytes(model.module, lambda: model(tokens[:, :-1], tokens[:, 1:]))
    else:
        loss = model(tokens[:, :-1], tokens[:, 1:])
        num_bytes = model.saved.report.kept_bytes
    loss.sum().backward()
    return loss.detach(), model.gradients.kept[0].clone(), num_bytes


@pytest.mark.parametrize("mode", MODES)
def test_recompute_changes_no_bit_and_saves_memory(mode: str) -> None:
    loss, grads, num_bytes = run(make(RecomputeConfig()))
    again, same, fewer = run(make(RecomputeConfig(**MODES[mode])))  # type: ignore[arg-type]
    assert torch.equal(loss, again)
    assert torch.equal(grads, same)
    assert fewer < num_bytes


def test_more_recompute_keeps_less() -> None:
    sizes = [run(make(RecomputeConfig(**MODES[mode])))[2] for mode in ("block_2", "uniform_3", "uniform")]  # type: ignore[arg-type]
    assert sizes[0] > sizes[2] > sizes[1]  # inputs of 4 runs against those of 2


@pytest.mark.parametrize("compression, part, error", [("bf16", 0.5, 3e-3), ("fp8", 0.25, 4e-2)])
def test_compressed_activations_take_the_stated_part_and_the_error_is_measured(
    compression: str, part: float, error: float
) -> None:
    loss, grads, num_bytes = run(make(RecomputeConfig()))
    model = make(RecomputeConfig(compression=compression))
    assert model.saved is not None
    again, rounded, fewer = run(model)
    assert torch.equal(loss, again)
    report = model.saved.report
    left = 2 * 64 * (61 + 64) * 4  # the loss is left as it is, scores and what they are made of,
    left += 9 * 2 * 64 * 64  # and so are masks of dropout, a byte an element
    assert report.num_bytes == pytest.approx(num_bytes - left, rel=0.02)  # one saved twice is counted once
    assert fewer == report.kept_bytes == part * report.num_bytes
    assert report.error is not None
    assert 0 < report.error.item() < error
    assert 0 < (rounded - grads).norm() / grads.norm() < error


def test_the_error_is_the_relative_rounding_of_what_is_kept_and_measured_now_and_then() -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0), requires_grad=True)
    saved = SavedActivations(compression="bf16", measure_every=2)
    errors = []
    for scale in (1.0, 2.0, 3.0):
        with saved.hooks():
            ((x * scale) ** 2).sum()
        errors.append(saved.report.error)
        assert (saved.report.num_bytes, saved.report.kept_bytes) == (64 * 128 * 4, 64 * 128 * 2)
    rounded = x.detach().bfloat16().float()
    assert errors[0] is not None
    assert errors[0].item() == pytest.approx(((rounded - x) ** 2).sum().sqrt().item() / x.norm().item(), rel=1e-5)
    assert errors[1] is errors[0]
    assert errors[2] is not errors[0]


def test_memory_that_is_used_again_in_the_same_forward_is_not_taken_for_the_same_tensor() -> None:
    saved = SavedActivations(compression="bf16")
    x = torch.randn(64, 128, requires_grad=True)
    with saved.hooks():
        y = x
        for _ in range(6):  # the narrowed copies let go of the originals, whose memory the next ones get
            y = (y * 1.1).exp().log()
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full_like(x, 1.1**6), rtol=5e-2, atol=0)


def test_the_log_says_what_was_kept_and_how_far_it_was_rounded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write_pair(tmp_path / "toy_text_document")
    flags = ["--train-iters", "3", "--hidden-size", "64", "--seq-length", "64", "--micro-batch-size", "2"]
    run_tiny(prefix, [*flags, "--compress-activations", "fp8", "--run-dir", str(tmp_path / "fp8")])
    lines = read_metrics(tmp_path / "fp8")
    assert [line["kept_bytes"] / line["saved_bytes"] for line in lines] == [0.25] * 3
    assert all(1e-3 < line["saved_error"] < 4e-2 for line in lines)
    assert "| activations kept (MiB): " in capsys.readouterr().out
    run_tiny(prefix, [*flags, "--run-dir", str(tmp_path / "plain")])
    assert not {"kept_bytes", "saved_error"} & read_metrics(tmp_path / "plain")[0].keys()


def test_offloaded_activations_change_no_bit() -> None:
    loss, grads, _ = run(make(RecomputeConfig()))
    again, same, _ = run(make(RecomputeConfig(is_offloaded=True)))
    assert torch.equal(loss, again)
    assert torch.equal(grads, same)


@pytest.mark.parametrize(
    "flags",
    [
        ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1"),
        ("--checkpoint-activations",),
        ("--recompute-activations", "--recompute-modules", "attention", "mlp"),
        ("--offload-activations",),
    ],
)
def test_a_run_with_recompute_is_the_run_without(tmp_path: Path, flags: tuple[str, ...]) -> None:
    prefix = write_pair(tmp_path / "toy_text_document")
    common = ["--train-iters", "4", "--global-batch-size", "2", "--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
    run_tiny(prefix, [*common, "--run-dir", str(tmp_path / "plain")])
    run_tiny(prefix, [*common, *flags, "--run-dir", str(tmp_path / "again")])
    assert read_curve(tmp_path / "again") == read_curve(tmp_path / "plain")
