"""Counts of models with experts: published ones, and those of the real model on every rank, without its memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers.saved import count_saved_bytes
from megaflow_trainer.config.activations import CPU, count_activation_bytes
from megaflow_trainer.config.arithmetic import (
    count_expert_parameters,
    count_flops_per_token,
    count_layer_of_experts,
    count_mlp_parameters,
    count_parameters,
)
from megaflow_trainer.config.layout import Layout
from megaflow_trainer.config.presets import PRESETS
from megaflow_trainer.config.sections import ModelConfig, ParallelConfig, RecomputeConfig
from megaflow_trainer.config.shares import count_held_experts, count_held_parameters, hold_all
from megaflow_trainer.model.gpt import build_gpt
from megaflow_trainer.model.init import init_weights
from megaflow_trainer.model.sockets import Sockets
from megaflow_trainer.parallel.expert import find_expert_weights, shard_experts
from megaflow_trainer.parallel.mesh import Launch, build_mesh
from megaflow_trainer.parallel.tensor import shard_tensor

MIXTRAL, DEEPSEEK = (ModelConfig(**PRESETS[name]) for name in ("mixtral_8x7b", "deepseek_v3"))


def test_mixtral_has_its_published_parameters() -> None:
    assert count_parameters(MIXTRAL) == 46_702_792_704
    assert count_parameters(MIXTRAL, is_active=True) == 12_879_925_248


def test_deepseek_has_its_published_parameters_without_and_with_further_prediction() -> None:
    plain = dataclasses.replace(DEEPSEEK, num_mtp_layers=0)
    biases = 58 * 256  # which are no parameters here
    assert count_parameters(plain) + biases == 671_026_419_200
    assert count_parameters(plain, is_active=True) == pytest.approx(37.5e9, rel=0.01)  # 37B, the embedding included
    block = count_parameters(DEEPSEEK) - count_parameters(plain)
    assert block == pytest.approx(11.5e9, rel=0.01)  # "14B of the MTP module" less what it shares: embedding and head


def test_experts_of_mixtral_are_90_gb_and_a_quarter_of_it_at_ep_4() -> None:
    total = count_expert_parameters(MIXTRAL)
    assert total == 32 * 8 * 3 * 4096 * 14336
    assert 2 * total / 1e9 == pytest.approx(90.2, abs=0.05)
    assert 2 * count_expert_parameters(MIXTRAL, ep=4) / 1e9 == pytest.approx(22.5, abs=0.05)


def test_flops_count_what_a_token_passes() -> None:
    full = count_flops_per_token(MIXTRAL, seq_len=4096, is_causal=False)
    lookup = 32000 * 4096
    assert full == 6.0 * (12_879_925_248 - lookup) + 12.0 * 32 * 4096 * 4096


@pytest.fixture(params=[(5, 8), (13, 32)])
def fake_rank(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    rank, size = request.param
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    yield rank, size
    dist.destroy_process_group()


LAYOUTS = {
    "ep4": Layout(ep=4, dp_replicate=8),
    "ep4.tp2": Layout(tp=2, ep=4, etp=2, dp_replicate=4),
    "ep4.tp2.etp1": Layout(tp=2, ep=4, etp=1, dp_replicate=4),
    "ep8": Layout(ep=8, dp_replicate=8),
}
SMALL = ModelConfig(
    num_layers=2,
    hidden_dim=16,
    num_heads=2,
    num_experts=16,
    expert_dim=8,
    shared_dim=4,
    vocab_size=32,
    vocab_multiple=16,
    max_positions=16,
)


@pytest.mark.parametrize("model", [MIXTRAL, DEEPSEEK, SMALL], ids=["mixtral", "deepseek", "small_with_biases"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_holds_as_many_weights_of_experts_as_counted(
    fake_rank: tuple[int, int], name: str, model: ModelConfig
) -> None:
    rank, size = fake_rank
    layout = dataclasses.replace(LAYOUTS[name], dp_replicate=size // LAYOUTS[name].tp)
    mesh = build_mesh(Launch(rank=rank, world_size=size), torch.device("cpu"), "gloo", layout)
    real = build_gpt(model, Sockets(), device=torch.device("meta"), dtype=torch.bfloat16)
    assert sum(weight.numel() for weight in real.parameters()) == count_parameters(model)
    parts = shard_tensor(real, mesh, is_sequence=False)
    shard_experts(real, mesh, parts, ParallelConfig(tp=layout.tp, ep=layout.ep, etp=layout.etp))
    experts = find_expert_weights(real)
    held = sum(weight.numel() for name, weight in real.named_parameters() if name in experts)
    assert held == count_expert_parameters(model, ep=layout.ep, etp=layout.etp)
    share = dataclasses.replace(hold_all(model), tp=layout.tp, ep=layout.ep, etp=layout.etp)
    assert held == count_held_experts(model, share)
    assert sum(weight.numel() for weight in real.parameters()) == count_held_parameters(model, share)
    assert all(weight.dtype == torch.bfloat16 for name, weight in real.named_parameters() if name in experts)


def test_a_layer_is_router_experts_and_the_shared_one() -> None:
    whole = count_layer_of_experts(SMALL)
    assert whole == 16 * 16 + 16 * count_mlp_parameters(SMALL, 8) + count_mlp_parameters(SMALL, 4)
    assert whole - count_layer_of_experts(SMALL, is_active=True) == 14 * count_mlp_parameters(SMALL, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "changes", [{"activation": "swiglu", "linear_bias": False}, {"shared_dim": 32}, {"expert_layers": "2"}]
)
def test_activations_by_formula_are_those_that_are_kept(changes: dict[str, object], dtype: torch.dtype) -> None:
    shape = {"num_layers": 4, "hidden_dim": 64, "num_heads": 4, "max_positions": 64, "vocab_size": 61}
    plain = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "num_experts": 8, "expert_dim": 48}
    config = ModelConfig(**{**shape, **plain, **changes})  # type: ignore[arg-type]
    model = build_gpt(config, Sockets(), device=torch.device("cpu"), dtype=dtype)
    init_weights(model, config, seed=1)
    tokens = torch.randint(61, (2, 65), generator=torch.Generator().manual_seed(1))
    found, _ = count_saved_bytes(model, lambda: model(tokens[:, :-1], tokens[:, 1:]))
    counted = count_activation_bytes(
        config,
        RecomputeConfig(),
        [()] * 4,
        seq_len=64,
        micro_batch_size=2,
        item_bytes=dtype.itemsize,
        kernels=CPU,
    )
    assert counted.kept == pytest.approx(found, rel=0.02)
