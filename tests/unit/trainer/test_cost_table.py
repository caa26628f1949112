"""Selective recompute by budget: the table's bytes and FLOPs are the real model's, and no bit changes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from helpers.runs import one_rank
from helpers.saved import count_saved_bytes
from megaflow_trainer.config import read_command
from megaflow_trainer.config.activations import CPU, GPU, describe_attention, describe_mlp
from megaflow_trainer.config.cost_table import (
    choose_parts,
    count_block_flops,
    describe_plan,
    list_costs,
    plan_recompute,
)
from megaflow_trainer.config.presets import PRESETS
from megaflow_trainer.config.sections import ModelConfig, RecomputeConfig
from megaflow_trainer.model.gpt import build_gpt
from megaflow_trainer.model.init import init_weights
from megaflow_trainer.model.sockets import Sockets
from megaflow_trainer.ops.attention import attend_math
from megaflow_trainer.parallel.apply import Plan, parallelize

LENGTH = 64
LLAMA: dict[str, Any] = {
    "norm": "RMSNorm",
    "position_kind": "rope",
    "activation": "swiglu",
    "linear_bias": False,
    "num_kv_heads": 2,
    "num_layers": 3,
    "hidden_dim": 64,
    "num_heads": 4,
    "max_positions": LENGTH,
    "vocab_size": 60,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt2": {"num_layers": 3, "hidden_dim": 64, "num_heads": 4, "max_positions": LENGTH, "vocab_size": 60},
    "nemotron": {**LLAMA, "activation": "squared_relu", "norm": "LayerNorm"},
}


def run(
    config: ModelConfig, parts: list[tuple[str, ...]], core: Any = None
) -> tuple[int, float, torch.Tensor, torch.Tensor]:
    """Bytes kept, FLOPs of matrix products in backward, losses and gradients."""
    model = build_gpt(
        config, Sockets() if core is None else Sockets(attention=core), device=torch.device("cpu"), dtype=torch.float32
    )
    init_weights(model, config, seed=1)
    wrapped = parallelize(
        model, one_rank(), Plan(recompute=RecomputeConfig(granularity="selective"), recomputed_parts=parts)
    )
    torch.manual_seed(3)
    tokens = torch.randint(60, (2, LENGTH + 1))
    kept, loss = count_saved_bytes(model, lambda: wrapped(tokens[:, :-1], tokens[:, 1:]))
    with FlopCounterMode(display=False) as counter:
        loss.sum().backward()
    return kept, counter.get_total_flops(), loss.detach(), wrapped.gradients.kept[0].clone()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rows_of_the_table_save_what_they_say(shape: dict[str, Any]) -> None:
    config = ModelConfig(**shape, hidden_dropout=0.0, attention_dropout=0.0)
    plain = run(config, [()] * 3)[0]
    for row in list_costs(config, seq_len=LENGTH, item_bytes=4, kernels=CPU):
        saved = plain - run(config, [row.after] * 3)[0]
        before = plain - run(config, [row.before] * 3)[0]
        assert saved - before == pytest.approx(3 * 2 * LENGTH * row.saved_bytes, rel=0.01)


@pytest.mark.parametrize("parts", [("attention",), ("mlp",), ("attention_core",), ("mlp_activation",)])
def test_flops_of_the_table_are_those_of_the_products_run_again(parts: tuple[str, ...]) -> None:
    config = ModelConfig(**LLAMA, hidden_dropout=0.0, attention_dropout=0.0, attention="math")
    extra = run(config, [parts] * 3, attend_math)[1] - run(config, [()] * 3, attend_math)[1]
    attention = describe_attention(config, seq_len=LENGTH, item_bytes=4, kernels=CPU)
    mlp = describe_mlp(config, item_bytes=4, kernels=CPU)
    products = {  # written out, attention has no use of the mask: it multiplies all of s x s
        "attention": attention.before_flops + 4.0 * LENGTH * 64,
        "attention_core": 4.0 * LENGTH * 64,
        "mlp": mlp.before_flops,
        "mlp_activation": 0.0,  # no product is run again: the last one's result is not needed
    }
    assert extra == 3 * 2 * LENGTH * products[parts[0]]


def test_a_budget_changes_no_bit_and_keeps_less_the_larger_it_is() -> None:
    config = ModelConfig(**LLAMA, hidden_dropout=0.1, attention_dropout=0.1)
    plain = run(config, [()] * 3)
    sizes = []
    for budget in (0.0, 0.02, 0.2, 0.4, 0.6, 1.0):
        parts = plan_recompute(config, seq_len=LENGTH, item_bytes=4, budget=budget)
        kept, _, loss, grads = run(config, parts)
        assert torch.equal(loss, plain[2])
        assert torch.equal(grads, plain[3])
        sizes.append(kept)
    assert sizes[0] == plain[0]
    assert all(larger >= smaller for larger, smaller in pairwise(sizes))
    assert len(set(sizes)) >= 5


@pytest.mark.parametrize("name", ["gpt2_small", "llama3_8b", "nemotron4_340b"])
@pytest.mark.parametrize("budget", [0.0, 0.01, 0.1, 0.3, 1.0])
def test_a_plan_stays_within_its_budget_and_takes_the_best_rows_first(name: str, budget: float) -> None:
    config = ModelConfig(**PRESETS[name])
    parts = plan_recompute(config, seq_len=4096, item_bytes=2, budget=budget)
    halves = (
        describe_attention(config, seq_len=4096, item_bytes=2, kernels=GPU),
        describe_mlp(config, item_bytes=2, kernels=GPU),
    )
    spent = sum(half.count_flops(block) for block in parts for half in halves)
    assert spent <= budget * config.num_layers * count_block_flops(config, seq_len=4096)
    rows = list_costs(config, seq_len=4096, item_bytes=2)
    assert [row.value for row in rows] == sorted((row.value for row in rows), reverse=True)
    assert rows[0].after == ("mlp_activation",)  # a function of one argument: nearly free
    just = 1.001 * rows[0].flops / count_block_flops(config, seq_len=4096)
    assert plan_recompute(config, seq_len=4096, item_bytes=2, budget=just) == [rows[0].after] * config.num_layers
    half = plan_recompute(config, seq_len=4096, item_bytes=2, budget=just / 2)
    assert half == [rows[0].after] * (config.num_layers // 2) + [()] * (config.num_layers - config.num_layers // 2)
    if budget == 1.0:
        assert set(parts) == {("attention", "attention_norm", "mlp", "mlp_norm")}


def test_the_plan_of_a_run_is_said() -> None:
    base = ["--train-iters", "1", "--data-path", "x", "--recompute-granularity", "selective", "--bf16"]
    config, _ = read_command([*base, "--recompute-budget", "0.01"], world_size=1)
    assert choose_parts(config) == [("mlp_activation",)] * 12
    assert describe_plan(config).startswith("computed again: mlp_activation in 12 of 12 blocks; 0.")
    nothing, _ = read_command([*base, "--recompute-budget", "0"], world_size=1)
    assert describe_plan(nothing) == "computed again: nothing; 0.0% of the forward's FLOPs, 0% of the bytes saved"
    by_name, _ = read_command(base, world_size=1)
    assert choose_parts(by_name) == [("attention",)] * 12
