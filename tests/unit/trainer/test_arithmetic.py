"""Parameters and FLOPs by formula equal the real model's."""

from __future__ import annotations

import pytest
import torch

from megaflow_trainer.config.arithmetic import (
    count_flops_per_token,
    count_parameters,
    find_peak_flops,
    name_precision,
)
from megaflow_trainer.config.sections import ModelConfig, StepConfig
from megaflow_trainer.model.gpt import build_gpt
from megaflow_trainer.model.sockets import Sockets

GPT2 = {  # layers, width, heads, parameters as published
    "small": (12, 768, 12, 124_439_808),
    "medium": (24, 1024, 16, 354_823_168),
    "large": (36, 1280, 20, 774_030_080),
    "xl": (48, 1600, 25, 1_557_611_200),
}


def make_model(size: str, *, vocab_multiple: int = 1, is_tied: bool = True) -> ModelConfig:
    layers, hidden, heads, _ = GPT2[size]
    return ModelConfig(
        num_layers=layers,
        hidden_dim=hidden,
        num_heads=heads,
        ffn_dim=4 * hidden,
        max_positions=1024,
        vocab_size=50257,
        vocab_multiple=vocab_multiple,
        tied_embeddings=is_tied,
    )


def count_real(config: ModelConfig) -> int:
    model = build_gpt(config, Sockets(), device=torch.device("meta"), dtype=torch.bfloat16)
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("size", GPT2)
def test_gpt2_sizes_equal_the_published_ones_and_the_real_model(size: str) -> None:
    config = make_model(size)
    assert count_parameters(config) == GPT2[size][3] == count_real(config)


@pytest.mark.parametrize("is_tied", [True, False])
def test_padding_and_an_untied_head_are_counted(is_tied: bool) -> None:
    config = make_model("small", vocab_multiple=128, is_tied=is_tied)
    assert count_parameters(config) == count_real(config)


def test_vocabulary_is_padded_to_a_multiple() -> None:
    sizes = [ModelConfig(vocab_size=n, vocab_multiple=128).vocab_rows for n in (2, 128, 129, 50257)]
    assert sizes == [128, 128, 256, 50304]


def test_flops_follow_the_two_conventions() -> None:
    config = make_model("small", vocab_multiple=128)
    full = count_flops_per_token(config, seq_len=1024, is_causal=False)
    causal = count_flops_per_token(config, seq_len=1024, is_causal=True)
    assert full == 6 * 124_475_904 + 12 * 12 * 768 * 1024
    assert full - causal == 6 * 12 * 768 * 1024


def test_peak_is_known_for_known_devices_only() -> None:
    assert find_peak_flops("NVIDIA H200", "bf16") == 989e12
    assert find_peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12
    assert find_peak_flops("NVIDIA H200", "fp32") is None
    assert find_peak_flops("NVIDIA A100-SXM4-80GB", "tf32") == 156e12
    assert find_peak_flops("NVIDIA A100-SXM4-80GB", "fp8") is None, "it has none"
    assert find_peak_flops("NVIDIA H100 80GB HBM3", "fp8") == 1979e12
    assert find_peak_flops("Tesla V100-SXM2-32GB", "fp16") == 125e12
    assert find_peak_flops("NVIDIA L40", "bf16") is None, "no L4, and no L40S"
    assert find_peak_flops("NVIDIA L4", "fp16") == 121e12
    assert find_peak_flops("cpu x86_64", "bf16") is None


def test_the_precision_of_products_is_that_of_the_flags() -> None:
    steps = {
        "bf16": StepConfig(dtype="bf16"),
        "fp8": StepConfig(dtype="bf16", fp8="hybrid"),
        "tf32": StepConfig(dtype="fp32", allows_tf32=True),
        "fp32": StepConfig(dtype="fp32", allows_tf32=False),
        "fp16": StepConfig(dtype="fp16"),
    }
    assert {name: name_precision(step) for name, step in steps.items()} == {name: name for name in steps}
