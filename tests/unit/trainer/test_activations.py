"""Activations by formula are those that autograd keeps of the real model, in every way to recompute."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from helpers.runs import TINY, one_rank
from helpers.saved import count_saved_bytes
from megaflow_trainer.config import activations, read_command
from megaflow_trainer.config.activations import CPU, GPU, count_activation_bytes
from megaflow_trainer.config.arithmetic import count_state_bytes
from megaflow_trainer.config.compiling import find_kernels
from megaflow_trainer.config.memory import describe_memory, estimate_memory
from megaflow_trainer.config.presets import PRESETS
from megaflow_trainer.config.sections import ModelConfig, PrecisionConfig, RecomputeConfig
from megaflow_trainer.model.gpt import build_gpt
from megaflow_trainer.model.init import init_weights
from megaflow_trainer.model.sockets import Sockets
from megaflow_trainer.ops.attention import attend_math, attend_sdpa
from megaflow_trainer.parallel import precision
from megaflow_trainer.parallel.apply import ParallelModel, Plan, parallelize

TOLERANCE = 0.02
"""Rotary tables, random states and scalars are not counted."""
LENGTH, BATCH = 128, 2
SMALL: dict[str, Any] = {
    "num_layers": 3,
    "hidden_dim": 64,
    "num_heads": 4,
    "max_positions": LENGTH,
    "vocab_size": 60,
    "vocab_multiple": 64,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
LLAMA: dict[str, Any] = {
    "norm": "RMSNorm",
    "position_kind": "rope",
    "activation": "swiglu",
    "linear_bias": False,
    "num_kv_heads": 2,
    "tied_embeddings": False,
}
LATENT = {
    **LLAMA,
    "num_kv_heads": None,
    "is_latent": True,
    "kv_latent_dim": 32,
    "qk_dim": 16,
    "qk_rotary_dim": 8,
    "v_dim": 24,
}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "dropout": {"hidden_dropout": 0.1},
    "window": {"window": 16},
    "math": {"attention": "math"},
    "math_llama": {**LLAMA, "attention": "math"},
    "math_qwen": {**LLAMA, "attention": "math", "qk_norm": True},
    "math_latent": {**LATENT, "attention": "math", "v_dim": 12},
    "llama": LLAMA,
    "qwen": {**LLAMA, "qk_norm": True},
    "nemotron": {**LLAMA, "norm": "LayerNorm", "activation": "squared_relu"},
    "latent": LATENT,
    "latent_queries": {**LATENT, "q_latent_dim": 40},
    "further": {**LLAMA, "num_mtp_layers": 2},
    "experts": {**LLAMA, "num_experts": 8, "expert_dim": 96, "expert_layers": "2", "num_mtp_layers": 1},
    "experts_shared": {"num_experts": 8, "expert_dim": 96, "shared_dim": 32},
}
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "uniform": {"granularity": "full", "method": "uniform"},
    "uniform_2": {"granularity": "full", "method": "uniform", "num_layers": 2},
    "block": {"granularity": "full", "method": "block"},
    "block_1": {"granularity": "full", "method": "block", "num_layers": 1},
    **{
        "+".join(names): {"granularity": "selective", "modules": names}
        for names in (
            *(("attention",), ("attention_core",), ("attention_norm",), ("mlp",), ("mlp_activation",), ("mlp_norm",)),
            *(("attention", "attention_norm", "mlp", "mlp_norm"), ("attention_core", "mlp_activation", "mlp_norm")),
        )
    },
}


def make(config: ModelConfig, recompute: RecomputeConfig, dtype: torch.dtype, device: str = "cpu") -> ParallelModel:
    core = attend_math if config.attention == "math" else attend_sdpa
    model = build_gpt(config, Sockets(attention=core), device=torch.device(device), dtype=dtype)
    if device == "cpu":
        init_weights(model, config, seed=1)
    return parallelize(model, one_rank(), Plan(recompute=recompute))


def measure(model: ParallelModel, length: int, batch: int, device: str = "cpu") -> int:
    tokens = torch.randint(60, (batch, length + 1), device=device)
    return count_saved_bytes(model.module, lambda: model(tokens[:, :-1], tokens[:, 1:]))[0]


@pytest.mark.parametrize(
    "name, dtype",
    [*((name, dtype) for name in SHAPES for dtype in (torch.float32, torch.bfloat16)), ("math", torch.float64)],
    ids=str,
)
def test_kept_bytes_by_formula_are_those_of_the_real_model(name: str, dtype: torch.dtype) -> None:
    config = ModelConfig(**(SMALL | SHAPES[name]))
    for title, mode in MODES.items():
        recompute = RecomputeConfig(**mode)
        found = measure(make(config, recompute, dtype), LENGTH, BATCH)
        counted = count_activation_bytes(
            config,
            recompute,
            [recompute.modules] * config.num_layers,
            seq_len=LENGTH,
            micro_batch_size=BATCH,
            item_bytes=dtype.itemsize,
            kernels=CPU,
        )
        assert counted.kept == pytest.approx(found, rel=TOLERANCE), title


FP8_SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": LLAMA,
    "nemotron": SHAPES["nemotron"],
    "narrow_queries": {"num_heads": 2, "head_dim": 8},  # of the attention none is large enough: 16 and 48 wide
    "experts": SHAPES["experts_shared"],
}


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("name", FP8_SHAPES)
def test_kept_bytes_in_fp8_are_those_of_the_real_model(name: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are 64 wide both ways have products in fp8; those that are not keep their inputs in bf16."""
    monkeypatch.setattr(precision, "FP8_WIDTH", 64)
    monkeypatch.setattr(activations, "FP8_WIDTH", 64)
    config = ModelConfig(**(SMALL | FP8_SHAPES[name]))
    model = build_gpt(config, Sockets(attention=attend_sdpa), device=torch.device("cpu"), dtype=torch.bfloat16)
    init_weights(model, config, seed=1)
    plan = Plan(fp8="hybrid", precision=PrecisionConfig(recipe=recipe))
    found = measure(parallelize(model, one_rank(), plan), LENGTH, BATCH)
    sizes: dict[str, Any] = {"seq_len": LENGTH, "micro_batch_size": BATCH, "item_bytes": 2}
    kernels = dataclasses.replace(CPU, has_fp8=True, input_copies=2)
    counted = count_activation_bytes(config, RecomputeConfig(), [], kernels=kernels, **sizes)
    assert counted.kept == pytest.approx(found, rel=TOLERANCE)
    assert counted.kept <= count_activation_bytes(config, RecomputeConfig(), [], kernels=CPU, **sizes).kept


def test_what_a_run_on_a_gpu_keeps_follows_from_its_flags() -> None:
    def find(flags: str) -> tuple[bool, bool, bool, int]:
        words = [*TINY, "--train-iters", "1", "--data-path", "x", "--bf16", *flags.split()]
        found = find_kernels(read_command(words, world_size=2)[0])
        return found.is_compiled, found.has_chunked_loss, found.has_fp8, found.input_copies

    assert find("") == (True, True, False, 1)
    assert find("--no-compile") == (False, False, False, 2)
    assert find("--zero-stage 1")[:2] == (True, True)
    assert find("--zero-stage 2")[:2] == (True, False)
    assert find("--zero-stage 3")[:2] == (False, False)
    assert find("--no-gradient-accumulation-fusion")[:2] == (True, False)
    assert find("--loss-kernel liger")[:2] == (True, False)
    assert find("--pipeline-model-parallel-size 2")[:2] == (True, False)
    uniform = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
    assert [find(f"{uniform} {length}")[1] for length in (1, 2)] == [True, False]
    assert find("--fp8-hybrid") == (True, True, True, 1)
    assert find("--fp8-hybrid --fp8-recipe delayed") == (True, True, True, 2)
    assert not find("--fp8-format e4m3 --fp8-recipe rowwise")[2]
    assert not find("--fp8-hybrid --fp8-kernel torchao")[2]
    assert not find("--fp8-hybrid --transformer-impl transformer_engine")[2]
    ends = "--first-last-layers-bf16 --num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 0"
    assert not find(f"--fp8-hybrid {ends}")[2], "counted as bf16: more than it needs"


@pytest.mark.parametrize("name", [name for name, shape in PRESETS.items() if "num_experts" not in shape])
def test_every_preset_at_its_published_size_keeps_the_counted_bytes(name: str) -> None:
    config = ModelConfig(**{**PRESETS[name], "attention": "math"})  # no fused kernel on the meta device
    model = make(config, RecomputeConfig(), torch.bfloat16, "meta")
    counted = count_activation_bytes(
        config, RecomputeConfig(), [], seq_len=256, micro_batch_size=2, item_bytes=2, kernels=CPU
    )
    assert counted.kept == pytest.approx(measure(model, 256, 2, "meta"), rel=TOLERANCE)


def count(mode: dict[str, Any], **shape: Any) -> Any:
    config, recompute = ModelConfig(**(SMALL | shape)), RecomputeConfig(**mode)
    parts = [recompute.modules] * config.num_layers
    return count_activation_bytes(
        config, recompute, parts, seq_len=LENGTH, micro_batch_size=BATCH, item_bytes=2, kernels=GPU
    )


def test_what_is_computed_again_is_alive_once_more_in_backward() -> None:
    plain = count({})
    per_block = (plain.kept - count({}, num_layers=1).kept) // 2
    assert plain.again == 0
    assert count(MODES["uniform"]).again == pytest.approx(per_block, rel=1e-3)
    assert count(MODES["uniform_2"]).again == pytest.approx(2 * per_block, rel=1e-3)
    assert plain.kept - count(MODES["attention"]).kept == pytest.approx(3 * count(MODES["attention"]).again, abs=3)


def test_compression_narrows_and_offload_moves_all_but_the_loss() -> None:
    plain, narrow, away = (count(mode) for mode in ({}, {"compression": "fp8"}, {"is_offloaded": True}))
    loss = BATCH * LENGTH * (60 * 4 + 16)
    assert narrow.kept - loss == pytest.approx((plain.kept - loss) / 2, rel=1e-3)
    assert (away.kept, away.offloaded) == (loss, plain.kept - loss)


def test_a_llama_layer_is_the_sum_written_out() -> None:
    h, f, n, g, d = 64, 128, 4, 2, 16
    attention = 2 * h + 4 + 2 * h + 2 * (n + 2 * g) * d + 2 * (n + g) * d + 2 * 2 * n * d + 4 * n
    mlp = 2 * h + 4 + 2 * h + 4 * 2 * f
    difference = count({}, **LLAMA, ffn_dim=f).kept - count({}, **LLAMA, ffn_dim=f, num_layers=2).kept
    assert difference == BATCH * LENGTH * (attention + mlp)


def test_the_memory_of_a_run_is_states_and_activations() -> None:
    flags = "--preset llama2_7b --bf16 --train-iters 1 --data-path x --seq-length 4096 --checkpoint-activations"
    config, _ = read_command(flags.split(), world_size=1)
    device, host = estimate_memory(config)
    assert device.keys() == {"weights", "gradients", "optimizer", "activations"}
    assert {name: device[name] for name in device if name != "activations"} == count_state_bytes(
        config.model, config.step, config.optim
    )
    assert device["weights"] == 2 * 6_738_415_616
    assert device["activations"] > 32 * 4096 * 4096 * 2  # the inputs of 32 blocks
    assert host == {}
    away, _ = read_command([*flags.split(), "--optimizer-cpu-offload", "--offload-activations"], world_size=1)
    device, host = estimate_memory(away)
    assert host.keys() == {"optimizer", "activations"}
    assert "memory of a rank by formula (MiB): weights 12853 + gradients 25705 + activations" in describe_memory(away)
    assert "; in the CPU's memory: activations " in describe_memory(away)
