"""Mixtral and DeepSeek-V3 in Hugging Face folders: their fields of `config.json` and the names of their weights.

Experts are one tensor each there, and lie one above the other here; `down` is stored as [h, f] there and is [f, h] of
each expert here. DeepSeek's further prediction is a layer behind the last one, with copies of the embedding and of the
output projection, which are written and not read; it joins the embedding and the hidden state in the other order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from megaflow_trainer.config.sections import ModelConfig

FAMILIES = ("mixtral", "deepseek_v3")
ARCHITECTURES = {"mixtral": "MixtralForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}


@dataclass(frozen=True, slots=True)
class Source:
    """Where a weight of ours is in a Hugging Face file: one tensor, or several one above the other.

    Args:
        names: of the tensors.
        is_transposed: whether they are stored input x output.
        is_even: whether several are of equal size; otherwise they are queries, keys and values.
        is_swapped: whether the two halves of the columns are the other way round.
    """

    names: tuple[str, ...]
    is_transposed: bool = False
    is_even: bool = False
    is_swapped: bool = False


_COMMON = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_NAMES = {
    "mixtral": {
        **_COMMON,
        "attention.proj": "self_attn.o_proj",
        "mlp.router": "block_sparse_moe.gate",
        "mlp.experts.gate": "block_sparse_moe.experts.{}.w1",
        "mlp.experts.up": "block_sparse_moe.experts.{}.w3",
        "mlp.experts.down": "block_sparse_moe.experts.{}.w2",
    },
    "deepseek_v3": {
        **_COMMON,
        "attention.q_down": "self_attn.q_a_proj",
        "attention.q_norm": "self_attn.q_a_layernorm",
        "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_norm": "self_attn.kv_a_layernorm",
        "attention.kv_up": "self_attn.kv_b_proj",
        "attention.proj": "self_attn.o_proj",
        "mlp.router": "mlp.gate",
        "mlp.experts.gate": "mlp.experts.{}.gate_proj",
        "mlp.experts.up": "mlp.experts.{}.up_proj",
        "mlp.experts.down": "mlp.experts.{}.down_proj",
        "mlp.shared.gate": "mlp.shared_experts.gate_proj",
        "mlp.shared.up": "mlp.shared_experts.up_proj",
        "mlp.shared.down": "mlp.shared_experts.down_proj",
        "hidden_norm": "hnorm",
        "embedding_norm": "enorm",
        "join": "eh_proj",
        "norm": "shared_head.norm",
    },
}
_PLACE = re.compile(r"(blocks|further)\.(\d+)\.(?:block\.)?(.+)\.(\w+)$")
_ENDS = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def find_source(config: ModelConfig, family: str, name: str) -> Source:
    """Where a weight, or the bias of a router, is in the files."""
    place = _PLACE.match(name)
    if place is None:
        stem, _, kind = name.rpartition(".")
        return Source((f"{_ENDS[stem]}.{kind}",))
    outer, number, stem, kind = place.groups()
    layer = f"model.layers.{int(number) + (config.num_layers if outer == 'further' else 0)}."
    if kind == "expert_bias":
        return Source((f"{layer}{_NAMES[family][stem]}.e_score_correction_bias",))
    if stem == "attention.qkv":
        return Source(tuple(f"{layer}self_attn.{part}_proj.{kind}" for part in ("q", "k", "v")))
    if stem == "attention.q_up":
        return Source((f"{layer}self_attn.{'q_proj' if config.q_latent_dim is None else 'q_b_proj'}.{kind}",))
    theirs = _NAMES[family][stem]
    if stem.startswith("mlp.experts."):
        names = tuple(f"{layer}{theirs.format(expert)}.{kind}" for expert in range(config.num_experts or 0))
        return Source(names, is_transposed=stem.endswith("down"), is_even=True)
    return Source((f"{layer}{theirs}.{kind}",), is_swapped=stem == "join")


def list_copies(config: ModelConfig, family: str) -> dict[str, str]:
    """Tensors that the files hold once more, and the weights of ours that they are."""
    if family != "deepseek_v3":
        return {}
    layers = [f"model.layers.{config.num_layers + depth}." for depth in range(config.num_mtp_layers)]
    head = "embedding.weight" if config.tied_embeddings else "head.weight"
    copies = {"embed_tokens.weight": "embedding.weight", "shared_head.head.weight": head}
    return {f"{layer}{theirs}": ours for layer in layers for theirs, ours in copies.items()}


def find_family(config: ModelConfig) -> str | None:
    """The family that has this shape of experts, if one has."""
    if config.num_experts is None or config.capacity_factor is not None:
        return None
    is_softmax = config.router_score == "softmax" and not config.router_pre_softmax
    is_every = all(config.has_experts(number) for number in range(config.num_layers))
    plain = not (config.is_latent or config.num_mtp_layers or config.qk_norm or config.has_qkv_bias)
    if plain and is_softmax and is_every and not config.has_expert_bias and config.shared_dim is None:
        is_mixtral = config.router_scale == 1 and config.router_groups is None
        is_mixtral = is_mixtral and config.rotary_scaling == "none" and not config.rotary_interleaved
        return "mixtral" if is_mixtral and config.expert_width == config.ffn_width else None
    first = count_dense(config)
    is_tail = all(config.has_experts(number) == (number >= first) for number in range(config.num_layers))
    is_shared = config.shared_dim is None or config.shared_dim % config.expert_width == 0
    is_deepseek = config.is_latent and config.router_score == "sigmoid" and config.has_expert_bias and is_tail
    has_rope = config.rotary_scaling in ("none", "yarn") and config.router_top_k > 1
    return "deepseek_v3" if is_deepseek and is_shared and has_rope and not config.linear_bias else None


def count_dense(config: ModelConfig) -> int:
    """Layers before the first one with experts."""
    numbers = range(config.num_layers)
    return next((number for number in numbers if config.has_experts(number)), config.num_layers)


def read_shape(given: dict[str, Any], family: str) -> dict[str, Any]:
    """The fields of experts and of latent attention that `config.json` describes."""
    if family == "mixtral":
        return {
            "num_experts": given["num_local_experts"],
            "router_top_k": given["num_experts_per_tok"],
            "window": given.get("sliding_window"),
        }
    layers, first = given["num_hidden_layers"], given["first_k_dense_replace"]
    shared = (given.get("n_shared_experts") or 0) * given["moe_intermediate_size"]
    groups = given.get("n_group") or 1
    rope = {**(given.get("rope_scaling") or {}), **(given.get("rope_parameters") or {})}
    return {
        "num_kv_heads": None,
        "head_dim": None,
        "is_latent": True,
        "q_latent_dim": given.get("q_lora_rank"),
        "kv_latent_dim": given["kv_lora_rank"],
        "qk_dim": given["qk_nope_head_dim"],
        "qk_rotary_dim": given["qk_rope_head_dim"],
        "v_dim": given["v_head_dim"],
        "rotary_interleaved": given.get("rope_interleave", True),
        "rotary_mscale": rope.get("mscale") or 1.0,
        "rotary_mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
        "num_mtp_layers": given.get("num_nextn_predict_layers") or 0,
        "num_experts": given["n_routed_experts"],
        "expert_layers": f"[0]*{first}+[1]*{layers - first}",
        "expert_dim": given["moe_intermediate_size"],
        "shared_dim": shared or None,
        "router_top_k": given["num_experts_per_tok"],
        "router_score": "sigmoid",
        "has_expert_bias": True,
        "router_groups": groups if groups > 1 else None,
        "router_group_top_k": given["topk_group"] if groups > 1 else None,
        "router_scale": given.get("routed_scaling_factor", 1.0),
    }


def describe(config: ModelConfig, family: str) -> dict[str, Any]:
    """The fields of `config.json` that say what `read_shape` reads."""
    if family == "mixtral":
        return {
            "num_local_experts": config.num_experts,
            "num_experts_per_tok": config.router_top_k,
            "sliding_window": config.window,
            "router_aux_loss_coef": config.aux_loss_scale,
        }
    return {
        "q_lora_rank": config.q_latent_dim,
        "kv_lora_rank": config.kv_latent_dim,
        "qk_nope_head_dim": config.qk_dim,
        "qk_rope_head_dim": config.qk_rotary_dim,
        "v_head_dim": config.v_dim,
        "head_dim": config.qk_rotary_dim,
        "rope_interleave": config.rotary_interleaved,
        "num_nextn_predict_layers": config.num_mtp_layers,
        "n_routed_experts": config.num_experts,
        "first_k_dense_replace": count_dense(config),
        "moe_layer_freq": 1,
        "moe_intermediate_size": config.expert_width,
        "n_shared_experts": (config.shared_dim or 0) // config.expert_width,
        "num_experts_per_tok": config.router_top_k,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "n_group": config.router_groups or 1,
        "topk_group": config.router_group_top_k or 1,
        "routed_scaling_factor": config.router_scale,
        "attention_bias": False,
    }
