"""Published shapes by name: the fields of `ModelConfig` that differ from its defaults.

Vocabularies are unpadded (`vocab_multiple` 1), so that parameter counts are the published ones. GPT-3's table gives
1.3B as 24 heads of 128 at width 2048 and 13B as width 5140; as in every later reproduction 16 heads and width 5120 are
taken, which are consistent. Nemotron-4's LayerNorm1p is LayerNorm with the weight stored as 1 + w: the same function.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Shape = Mapping[str, Any]


def _gpt(layers: int, hidden: int, heads: int, positions: int) -> Shape:
    return {
        "num_layers": layers,
        "hidden_dim": hidden,
        "num_heads": heads,
        "max_positions": positions,
        "vocab_size": 50257,
        "vocab_multiple": 1,
    }


_LLAMA: Shape = {
    "activation": "swiglu",
    "norm": "RMSNorm",
    "linear_bias": False,
    "position_kind": "rope",
    "tied_embeddings": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "vocab_multiple": 1,
}


def _llama2(layers: int, hidden: int, heads: int, ffn: int, groups: int | None = None) -> Shape:
    shape = {"num_layers": layers, "hidden_dim": hidden, "num_heads": heads, "ffn_dim": ffn, "num_kv_heads": groups}
    return {**_LLAMA, **shape, "vocab_size": 32000, "max_positions": 4096}


def _llama3(layers: int, hidden: int, heads: int, ffn: int, positions: int) -> Shape:
    shape = {"num_layers": layers, "hidden_dim": hidden, "num_heads": heads, "ffn_dim": ffn, "num_kv_heads": 8}
    return {**_LLAMA, **shape, "vocab_size": 128256, "max_positions": positions, "rotary_base": 500000.0}


_NEMOTRON4_340B: Shape = {
    **_LLAMA,
    "num_layers": 96,
    "hidden_dim": 18432,
    "num_heads": 96,
    "num_kv_heads": 8,
    "ffn_dim": 73728,
    "activation": "squared_relu",
    "norm": "LayerNorm",
    "rotary_fraction": 0.5,
    "vocab_size": 256000,
    "max_positions": 4096,
}

_MIXTRAL_8X7B: Shape = {
    **_llama2(32, 4096, 32, 14336, 8),
    "max_positions": 32768,
    "rotary_base": 1000000.0,
    "num_experts": 8,
    "router_top_k": 2,
}

_DEEPSEEK_V3: Shape = {
    **_LLAMA,
    "num_layers": 61,
    "hidden_dim": 7168,
    "num_heads": 128,
    "ffn_dim": 18432,
    "vocab_size": 129280,
    "max_positions": 163840,
    "norm_eps": 1e-6,
    "is_latent": True,
    "q_latent_dim": 1536,
    "kv_latent_dim": 512,
    "qk_dim": 128,
    "qk_rotary_dim": 64,
    "v_dim": 128,
    "rotary_interleaved": True,
    "rotary_scaling": "yarn",
    "rotary_factor": 40.0,
    "rotary_original_positions": 4096,
    "rotary_mscale": 1.0,
    "rotary_mscale_all_dim": 1.0,
    "num_mtp_layers": 1,
    "num_experts": 256,
    "expert_layers": "([0]*3+[1]*58)",
    "expert_dim": 2048,
    "shared_dim": 2048,
    "router_top_k": 8,
    "router_score": "sigmoid",
    "has_expert_bias": True,
    "router_groups": 8,
    "router_group_top_k": 4,
    "router_scale": 2.5,
}

PRESETS: Mapping[str, Shape] = MappingProxyType(
    {
        "gpt2_small": _gpt(12, 768, 12, 1024),
        "gpt2_medium": _gpt(24, 1024, 16, 1024),
        "gpt2_large": _gpt(36, 1280, 20, 1024),
        "gpt2_xl": _gpt(48, 1600, 25, 1024),
        "gpt3_1.3b": _gpt(24, 2048, 16, 2048),
        "gpt3_2.7b": _gpt(32, 2560, 32, 2048),
        "gpt3_6.7b": _gpt(32, 4096, 32, 2048),
        "gpt3_13b": _gpt(40, 5120, 40, 2048),
        "gpt3_175b": _gpt(96, 12288, 96, 2048),
        "llama2_7b": _llama2(32, 4096, 32, 11008),
        "llama2_13b": _llama2(40, 5120, 40, 13824),
        "llama2_70b": _llama2(80, 8192, 64, 28672, 8),
        "llama3_8b": _llama3(32, 4096, 32, 14336, 8192),
        "llama3_70b": _llama3(80, 8192, 64, 28672, 8192),
        "llama3_405b": {
            **_llama3(126, 16384, 128, 53248, 131072),
            "rotary_scaling": "llama3",
            "rotary_factor": 8.0,
            "rotary_original_positions": 8192,
        },
        "nemotron4_340b": _NEMOTRON4_340B,
        "mixtral_8x7b": _MIXTRAL_8X7B,
        "deepseek_v3": _DEEPSEEK_V3,
    }
)
