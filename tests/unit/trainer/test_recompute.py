"""Recompute gives the same bits with less memory; narrower or offloaded activations give what they promise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.pairs import write_pair
from helpers.runs import one_rank, read_curve, run_tiny
from megaflow_trainer.config.sections import ModelConfig, RecomputeConfig
from megaflow_trainer.model.gpt import build_gpt
from megaflow_trainer.model.init import init_weights
from megaflow_trainer.model.sockets import Sockets
from megaflow_trainer.parallel.apply import ParallelModel, parallelize
from megaflow_trainer.parallel.recompute import SavedActivations

MODES = {
    "uniform": {"granularity": "full", "method": "uniform"},
    "uniform_3": {"granularity": "full", "method": "uniform", "num_layers": 3},
    "block_2": {"granularity": "full", "method": "block", "num_layers": 2},
    "attention": {"granularity": "selective"},
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
    return parallelize(model, one_rank(), recompute=recompute)


def run(model: ParallelModel) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Losses, gradients and the bytes that autograd keeps between forward and backward."""
    torch.manual_seed(5)
    tokens = torch.randint(61, (2, 65))
    weights = frozenset(weight.data_ptr() for weight in model.module.parameters())
    kept = SavedActivations(weights=weights)
    if model.saved is None:
        with kept.hooks():
            loss = model(tokens[:, :-1], tokens[:, 1:])
    else:
        loss, kept = model(tokens[:, :-1], tokens[:, 1:]), model.saved
    num_bytes = kept.report.kept_bytes
    loss.sum().backward()
    return loss.detach(), model.gradients.buffer.clone(), num_bytes


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
    model.saved.measures_error = True
    again, rounded, fewer = run(model)
    assert torch.equal(loss, again)
    assert fewer == pytest.approx(part * num_bytes, rel=0.01)
    assert 0 < model.saved.report.error < error
    assert 0 < (rounded - grads).norm() / grads.norm() < error


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
