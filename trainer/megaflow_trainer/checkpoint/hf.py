"""Hugging Face folders (`config.json` and safetensors) of GPT-2, Llama, Mistral, Qwen2, Qwen3, Mixtral and DeepSeek-V3.

A weight of ours is one tensor of theirs, several one above the other (queries, keys, values), or a transposed one
(GPT-2 stores input x output). Rotary pairs are halves of a head on both sides, so no rows are permuted.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megaflow.errors import CheckpointError, ConfigError
from megaflow_trainer.checkpoint import hf_experts
from megaflow_trainer.checkpoint.hf_experts import Source
from megaflow_trainer.config.checks import check_heads, check_shape
from megaflow_trainer.config.expert_section import check_experts
from megaflow_trainer.config.fields import convert, list_fields
from megaflow_trainer.config.sections import ModelConfig
from megaflow_trainer.model.gpt import build_gpt
from megaflow_trainer.model.sockets import Sockets
from megaflow_trainer.parallel.load import list_biases

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def is_hf_folder(folder: Path) -> bool:
    """Whether a folder holds a Hugging Face model."""
    return (folder / _CONFIG).is_file()


def read_hf(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The shape and the weights, by our names, of a Hugging Face folder. The vocabulary is not padded.

    Raises:
        CheckpointError: naming the file and what in it cannot be read or is of a kind that this trainer does not have.
    """
    config, family = read_hf_config(folder)
    stored = _read_tensors(folder)
    if family == "gpt2":  # the first published file has no prefix
        kept = ("transformer.", "lm_head.")
        stored = {name if name.startswith(kept) else f"transformer.{name}": t for name, t in stored.items()}
    last = f"model.layers.{config.num_layers}."
    if config.num_mtp_layers and not any(name.startswith(last) for name in stored):
        config = dataclasses.replace(config, num_mtp_layers=0)  # transformers leaves further prediction out
    shapes, weights, sources = _list_shapes(config), {}, list_sources(config, family)
    _expect_nothing_else(folder, set(stored), config, family, sources)
    for name, source in sources.items():
        missing = [part for part in source.names if part not in stored]
        if missing:
            raise CheckpointError(f"{folder}: tensor {missing[0]}, which makes {name}, is not in the files")
        weights[name] = _join(folder, source, {part: stored[part] for part in source.names})
        if tuple(weights[name].shape) != shapes[name]:
            raise CheckpointError(
                f"{folder}: {' + '.join(source.names)} has shape {tuple(weights[name].shape)}, {_CONFIG} asks for "
                f"{shapes[name]}"
            )
    return config, weights


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NO_WEIGHTS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")


def _expect_nothing_else(
    folder: Path, stored: set[str], config: ModelConfig, family: str, sources: Mapping[str, Source]
) -> None:
    """Masks and angles that older files hold are computed, a tied output projection is the embedding; all else that is
    not read is weights that the model would go without.
    """
    read = {part for source in sources.values() for part in source.names} | {*hf_experts.list_copies(config, family)}
    if config.tied_embeddings:
        read.add("lm_head.weight")
    others = sorted(name for name in stored - read if not _NO_WEIGHTS.search(name))
    if others:
        more = f" and {len(others) - 1} more are" if len(others) > 1 else " is"
        raise CheckpointError(
            f"{folder}: tensor {others[0]}{more} in the files and no part of the {family} that {_CONFIG} describes; "
            "check its numbers of layers and experts"
        )


def _join(folder: Path, source: Source, parts: Mapping[str, Tensor]) -> Tensor:
    """A weight of ours from its tensors."""
    first = next(iter(parts))
    for name, part in parts.items():
        if part.dtype not in _DTYPES:
            kind = str(part.dtype).removeprefix("torch.")
            raise CheckpointError(f"{folder}: {name} is in {kind}; give files in fp32, bf16, fp16 or fp64")
        alike = slice(None, -1) if source.is_transposed else slice(1, None)
        if part.dim() != parts[first].dim() or part.shape[alike] != parts[first].shape[alike]:
            raise CheckpointError(
                f"{folder}: {name} has shape {tuple(part.shape)}, which does not fit {first} with "
                f"{tuple(parts[first].shape)}"
            )
    turned = [part.T if source.is_transposed and part.dim() == 2 else part for part in parts.values()]
    whole = torch.cat(turned) if len(turned) > 1 else turned[0].contiguous()
    return _swap(whole) if source.is_swapped else whole


def write_hf(folder: Path, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    """Write a folder that `transformers` loads; rows that only pad the vocabulary are left out.

    Raises:
        CheckpointError: if the shape is none of the families'.
    """
    family = find_family(config)
    tensors: dict[str, Tensor] = {}
    for name, source in list_sources(config, family).items():
        weight = weights[name].detach().cpu()
        if name in ("embedding.weight", "head.weight"):
            weight = weight[: config.vocab_size]
        weight = _swap(weight) if source.is_swapped else weight
        for part, piece in zip(source.names, weight.split(_list_rows(config, source, weight)), strict=True):
            tensors[part] = (piece.T if source.is_transposed else piece).contiguous()
    for copy, name in hf_experts.list_copies(config, family).items():
        tensors[copy] = weights[name].detach().cpu()[: config.vocab_size].clone()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    widths = [tensor.dtype for name, tensor in tensors.items() if "embed" in name or "wte" in name]
    dtype = str(widths[0]).removeprefix("torch.")  # routers may be wider than the model
    text = json.dumps({**_describe(config, family), "torch_dtype": dtype}, indent=2, sort_keys=True)
    (folder / _CONFIG).write_text(text + "\n", encoding="utf-8")


def find_family(config: ModelConfig) -> str:
    """The Hugging Face model type that has this shape.

    Raises:
        CheckpointError: if none has.
    """
    is_gpt2 = (
        config.position_kind == "learned_absolute"
        and (config.norm, config.activation) == ("LayerNorm", "gelu")
        and (config.linear_bias, config.has_qkv_bias) == (True, True)
        and (config.num_kv_heads in (None, config.num_heads))
    )
    is_llama = (
        config.position_kind == "rope"
        and (config.norm, config.activation) == ("RMSNorm", "swiglu")
        and not config.rotary_interleaved
        and config.rotary_fraction == 1
        and config.rotary_scaling != "ntk"
    )
    experts = hf_experts.find_family(config) if config.mup_base_dim is None else None
    if (
        experts is not None
        and config.position_kind == "rope"
        and (config.norm, config.activation) == ("RMSNorm", "swiglu")
    ):
        return experts
    plain = not (config.is_latent or config.num_mtp_layers or config.mup_base_dim or config.num_experts)
    if plain and is_gpt2 and not config.qk_norm and config.window is None and config.head_dim is None:
        return "gpt2"
    if plain and is_llama:
        kind = (config.qk_norm, config.has_qkv_bias, config.linear_bias, config.window is not None)
        families = {
            (False, False, False, False): "llama",
            (False, True, True, False): "llama",
            (False, False, False, True): "mistral",
            (False, True, False, False): "qwen2",
            (True, False, False, False): "qwen3",
        }
        if kind in families:
            return families[kind]
    raise CheckpointError(
        "this model has no Hugging Face form: it is neither GPT-2, Llama, Mistral, Qwen, Mixtral nor DeepSeek-V3"
    )


def list_sources(config: ModelConfig, family: str) -> dict[str, Source]:
    """Where each weight of ours is in the files of a family."""
    found = {}
    for name in _list_shapes(config):
        if family in hf_experts.FAMILIES:
            found[name] = hf_experts.find_source(config, family, name)
            continue
        outer, _, rest = name.removeprefix("blocks.").partition(".") if name.startswith("blocks.") else ("", "", name)
        found[name] = _find_gpt2(outer, rest) if family == "gpt2" else _find_llama(outer, rest)
    return found


_GPT2_NAMES = {
    "embedding": "wte",
    "positions": "wpe",
    "norm": "ln_f",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "attention.qkv": "attn.c_attn",
    "attention.proj": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_LLAMA_NAMES = {
    "embedding": ("embed_tokens",),
    "norm": ("norm",),
    "attention_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
    "attention.proj": ("self_attn.o_proj",),
    "mlp.gate": ("mlp.gate_proj",),
    "mlp.up": ("mlp.up_proj",),
    "mlp.down": ("mlp.down_proj",),
}


def _find_gpt2(block: str, rest: str) -> Source:
    if rest == "head.weight":
        return Source(("lm_head.weight",))
    stem, _, kind = rest.rpartition(".")
    place = f"transformer.h.{block}." if block else "transformer."
    return Source((f"{place}{_GPT2_NAMES[stem]}.{kind}",), stem.startswith(("attention.", "mlp.")) and kind == "weight")


def _find_llama(block: str, rest: str) -> Source:
    if rest == "head.weight":
        return Source(("lm_head.weight",))
    stem, _, kind = rest.rpartition(".")
    place = f"model.layers.{block}." if block else "model."
    return Source(tuple(f"{place}{name}.{kind}" for name in _LLAMA_NAMES[stem]))


def _list_rows(config: ModelConfig, source: Source, weight: Tensor) -> list[int]:
    """Rows of each part of a weight."""
    if len(source.names) == 1:
        return [len(weight)]
    if source.is_even:
        return [len(weight) // len(source.names)] * len(source.names)
    d = config.head_width
    return [config.num_heads * d, config.kv_heads * d, config.kv_heads * d]


def _list_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    model = build_gpt(config, Sockets(), device=torch.device("meta"), dtype=torch.float32)
    tensors = [*model.named_parameters(), *list_biases(model).items()]
    return {name: tuple(tensor.shape) for name, tensor in tensors}


def _swap(weight: Tensor) -> Tensor:
    """The two halves of the columns exchanged."""
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    try:
        if (folder / _INDEX).is_file():
            index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
            files = sorted(set(index["weight_map"].values()))
        else:
            files = [_WEIGHTS]
        return {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
    except Exception as error:  # safetensors raises kinds of its own
        raise CheckpointError(f"{folder}: the weights cannot be read: {error}") from None


def read_hf_config(folder: Path) -> tuple[ModelConfig, str]:
    """The shape that `config.json` describes, and its family.

    Raises:
        CheckpointError: if the file cannot be read or asks for what this trainer does not have.
    """
    path = folder / _CONFIG
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        family = given["model_type"]
        if family not in ("gpt2", "llama", "mistral", "qwen2", "qwen3", *hf_experts.FAMILIES):
            raise CheckpointError(
                f"{path}: model_type {family!r} is not read; gpt2, llama, mistral, qwen2, qwen3, mixtral and "
                "deepseek_v3 are"
            )
        _expect(given, path, "quantization_config", (None,), None)
        shape = _read_gpt2(given, path) if family == "gpt2" else _read_llama(given, family, path)
        shape |= {"vocab_size": given["vocab_size"], "vocab_multiple": 1}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error!r}") from None
    return _make_config(shape, path), family


def _make_config(shape: dict[str, Any], path: Path) -> ModelConfig:
    """The shape, once its values are of their fields' kinds and fit each other."""
    known = list_fields()
    try:
        config = ModelConfig(**{name: convert(known[f"model.{name}"], value, name) for name, value in shape.items()})
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None
    faults = check_heads(config) + check_shape(config) + check_experts(config, num_layers=config.num_layers)
    if faults:
        raise CheckpointError(f"{path}: {'; '.join(faults)}")
    return config


def _read_gpt2(given: dict[str, Any], path: Path) -> dict[str, Any]:
    _expect(given, path, "activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    _expect(given, path, "scale_attn_by_inverse_layer_idx", (False,), False)
    return {
        "num_layers": given["n_layer"],
        "hidden_dim": given["n_embd"],
        "num_heads": given["n_head"],
        "ffn_dim": given.get("n_inner") or 4 * given["n_embd"],
        "max_positions": given["n_positions"],
        "norm_eps": given.get("layer_norm_epsilon", 1e-5),
        "tied_embeddings": given.get("tie_word_embeddings", True),
        "hidden_dropout": given.get("resid_pdrop", 0.1),
        "attention_dropout": given.get("attn_pdrop", 0.1),
    }


def _read_llama(given: dict[str, Any], family: str, path: Path) -> dict[str, Any]:
    _expect(given, path, "hidden_act", ("silu",), "silu")
    _expect(given, path, "use_sliding_window", (False,), False)
    if family == "deepseek_v3":
        _expect(given, path, "scoring_func", ("sigmoid",), "sigmoid")
        _expect(given, path, "topk_method", ("noaux_tc",), "noaux_tc")
        _expect(given, path, "norm_topk_prob", (True,), True)
        _expect(given, path, "moe_layer_freq", (1,), 1)
        _expect(given, path, "attention_bias", (False,), False)
        if given["num_experts_per_tok"] == 1:  # its files divide the one score by itself
            raise CheckpointError(
                f"{path}: num_experts_per_tok 1 is a router whose weights are all 1; 2 and more are read"
            )
    has_bias = bool(given.get("attention_bias", False))
    if family == "llama":
        _expect(given, path, "mlp_bias", (has_bias,), False)
    return {
        "num_layers": given["num_hidden_layers"],
        "hidden_dim": given["hidden_size"],
        "num_heads": given["num_attention_heads"],
        "num_kv_heads": given.get("num_key_value_heads") or given["num_attention_heads"],
        "head_dim": given.get("head_dim") or given["hidden_size"] // given["num_attention_heads"],
        "ffn_dim": given["intermediate_size"],
        "max_positions": given["max_position_embeddings"],
        "norm_eps": given["rms_norm_eps"],
        "norm": "RMSNorm",
        "activation": "swiglu",
        "position_kind": "rope",
        "linear_bias": has_bias and family == "llama",
        "qkv_bias": has_bias or family == "qwen2",
        "qk_norm": family == "qwen3",
        "window": given.get("sliding_window") if family == "mistral" else None,
        "tied_embeddings": given.get("tie_word_embeddings", False),
        "hidden_dropout": 0.0,
        "attention_dropout": given.get("attention_dropout", 0.0),
        **_read_rope(given, path, has_mscale=family == "deepseek_v3"),
        **(hf_experts.read_shape(given, family) if family in hf_experts.FAMILIES else {}),
    }


def _read_rope(given: dict[str, Any], path: Path, *, has_mscale: bool) -> dict[str, Any]:
    """Base and scaling, from `rope_parameters` or from the older `rope_theta` and `rope_scaling`."""
    rope = {**(given.get("rope_scaling") or {}), **(given.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    shape: dict[str, Any] = {"rotary_base": rope.get("rope_theta", given.get("rope_theta", 10000.0))}
    if kind == "default":
        return shape
    standard = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "beta_fast": 32, "beta_slow": 1}
    others = [name for name, value in standard.items() if rope.get(name, value) not in (value, None)]
    unknown = ("attention_factor",) if has_mscale else ("attention_factor", "mscale", "mscale_all_dim")
    others += [name for name in unknown if rope.get(name) is not None]
    if kind not in ("linear", "llama3", "yarn") or others:
        raise CheckpointError(f"{path}: rope scaling {kind} {' '.join(others)} is not one that this trainer has")
    original = rope.get("original_max_position_embeddings")
    return {**shape, "rotary_scaling": kind, "rotary_factor": rope["factor"], "rotary_original_positions": original}


def _expect(given: dict[str, Any], path: Path, name: str, known: tuple[Any, ...], default: Any) -> None:
    if given.get(name, default) not in known:
        raise CheckpointError(f"{path}: {name} {given[name]!r} is not one that this trainer has, only {known}")


def _describe(config: ModelConfig, family: str) -> dict[str, Any]:
    """The content of `config.json`."""
    names = {"gpt2": "GPT2LMHead", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
    names |= {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", **hf_experts.ARCHITECTURES}
    common = {
        "model_type": family,
        "architectures": [names[family] + ("Model" if family == "gpt2" else "")],
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied_embeddings,
        "initializer_range": config.init_std,
    }
    if family == "gpt2":
        return {
            **common,
            "n_layer": config.num_layers,
            "n_embd": config.hidden_dim,
            "n_head": config.num_heads,
            "n_inner": config.ffn_width,
            "n_positions": config.max_positions,
            "layer_norm_epsilon": config.norm_eps,
            "activation_function": "gelu_new",
            "resid_pdrop": config.hidden_dropout,
            "embd_pdrop": config.hidden_dropout,
            "attn_pdrop": config.attention_dropout,
        }
    own: dict[str, Any] = {
        **common,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.ffn_width,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_dropout": config.attention_dropout,
        "rope_theta": config.rotary_base,
        "rope_scaling": _describe_scaling(config),
    }
    if family in ("llama", "qwen3"):
        own["attention_bias"] = config.has_qkv_bias
    if family == "llama":
        own["mlp_bias"] = config.linear_bias
    if family == "mistral":
        own["sliding_window"] = config.window
    return own | (hf_experts.describe(config, family) if family in hf_experts.FAMILIES else {})


def _describe_scaling(config: ModelConfig) -> dict[str, Any] | None:
    if config.rotary_scaling == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": config.rotary_scaling, "factor": config.rotary_factor}
    if config.rotary_scaling == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if config.rotary_scaling != "linear":
        positions = config.rotary_original_positions or int((config.max_positions or 0) / config.rotary_factor)
        scaling["original_max_position_embeddings"] = positions
    if config.rotary_mscale_all_dim:
        scaling |= {"mscale": config.rotary_mscale, "mscale_all_dim": config.rotary_mscale_all_dim}
    return scaling
