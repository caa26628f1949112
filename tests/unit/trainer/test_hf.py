"""Hugging Face folders: logits of `transformers`, bytes that come back, and growing a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.pairs import write_pair
from helpers.runs import TINY, read_tensors, run_tiny
from megaflow.errors import CheckpointError
from megaflow_trainer.checkpoint.hf import find_family, read_hf, write_hf
from megaflow_trainer.checkpoint.initial import fill_weights
from megaflow_trainer.config.sections import ModelConfig
from megaflow_trainer.model.gpt import GPT, build_gpt
from megaflow_trainer.model.init import init_weights
from megaflow_trainer.model.sockets import Sockets

SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DEEPSEEK = {
    **SMALL,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "llama_mha": ("Llama", {**SMALL, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama_gqa_16_8": ("Llama", {**SMALL, "hidden_size": 64, "num_attention_heads": 16, "num_key_value_heads": 8}),
    "llama_gqa_16_2": ("Llama", {**SMALL, "hidden_size": 64, "num_attention_heads": 16, "num_key_value_heads": 2}),
    "llama_mqa": ("Llama", {**SMALL, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama_3": ("Llama", {**SMALL, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 16}}),
    "llama_yarn": ("Llama", {**SMALL, "rope_scaling": YARN}),
    "mistral": ("Mistral", {**SMALL, "num_key_value_heads": 2, "sliding_window": 5, "head_dim": 16}),
    "qwen2": ("Qwen2", {**SMALL, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {**SMALL, "num_key_value_heads": 2, "head_dim": 8}),
    "mixtral": ("Mixtral", {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
    "deepseek_v3_yarn": ("DeepseekV3", {**DEEPSEEK, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}}),
    "deepseek_v3_direct": ("DeepseekV3", {**DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
}


def load(config: ModelConfig, weights: dict[str, torch.Tensor]) -> GPT:
    model = build_gpt(config, Sockets(), device=torch.device("cpu"), dtype=torch.float32)
    model.load_state_dict(weights)
    return model.eval()


def make_shape(**shape: Any) -> ModelConfig:
    return ModelConfig(
        **{"num_layers": 2, "hidden_dim": 32, "num_heads": 4, "vocab_size": 61, "max_positions": 16} | shape
    )


def make_weights(config: ModelConfig, seed: int = 3) -> dict[str, torch.Tensor]:
    model = build_gpt(config, Sockets(), device=torch.device("cpu"), dtype=torch.float32)
    init_weights(model, config, seed=seed)
    with torch.no_grad():  # biases and norms that differ from row to row, so that an exchange is seen
        for weight in model.parameters():
            weight.add_(0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)))
    return dict(model.state_dict())


def same_bytes(one: Path, other: Path) -> bool:
    return all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in ("config.json", "model.safetensors")
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    kind, settings = FAMILIES[name]
    given = getattr(transformers, f"{kind}Config")(**settings, attn_implementation="eager")
    torch.manual_seed(0)
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    theirs = getattr(transformers, f"{kind}{head}")(given).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.02 * torch.randn(weight.shape))
        for bias_name, bias in theirs.named_buffers():
            if bias_name.endswith("e_score_correction_bias"):
                bias.add_(0.05 * torch.randn(bias.shape))
    theirs.save_pretrained(tmp_path / "theirs")
    config, weights = read_hf(tmp_path / "theirs")
    tokens = torch.randint(61, (2, 40))
    with torch.no_grad():
        expected = theirs(tokens).logits
        found = load(config, weights).compute_logits(tokens)
    assert (found - expected).abs().max().item() <= 1e-5
    write_hf(tmp_path / "ours", config, weights)  # and back: transformers reads what we write
    again = type(theirs).from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, expected)
    stored = load_file(tmp_path / "theirs" / "model.safetensors")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert stored.keys() == written.keys()
    assert all(torch.equal(stored[key], written[key]) for key in stored)


ROPE = {"position_kind": "rope", "norm": "RMSNorm", "activation": "swiglu", "linear_bias": False}
SHAPES = {
    "gpt2": {},
    "llama": {**ROPE, "num_kv_heads": 2, "tied_embeddings": False},
    "mistral": {**ROPE, "num_kv_heads": 1, "window": 8},
    "qwen2": {**ROPE, "qkv_bias": True, "num_kv_heads": 2},
    "qwen3": {**ROPE, "qk_norm": True, "head_dim": 16},
    "mixtral": {**ROPE, "num_experts": 4, "num_kv_heads": 2, "tied_embeddings": False},
    "deepseek_v3": {
        **ROPE,
        "is_latent": True,
        "kv_latent_dim": 16,
        "qk_dim": 8,
        "qk_rotary_dim": 4,
        "v_dim": 6,
        "num_experts": 4,
        "expert_dim": 8,
        "shared_dim": 16,
        "expert_layers": "[0,1]",
        "router_score": "sigmoid",
        "has_expert_bias": True,
        "num_mtp_layers": 1,
        "tied_embeddings": False,
        "hidden_dropout": 0.0,
    },
}


@pytest.mark.parametrize("family", SHAPES)
def test_export_import_export_is_the_same_bytes(family: str, tmp_path: Path) -> None:
    config = make_shape(**SHAPES[family], vocab_multiple=16)  # 64 rows, 3 of them padding
    assert find_family(config) == family
    weights = make_weights(config)
    write_hf(tmp_path / "one", config, weights)
    read, back = read_hf(tmp_path / "one")
    write_hf(tmp_path / "two", read, back)
    assert same_bytes(tmp_path / "one", tmp_path / "two")
    tokens = torch.randint(61, (2, 16))
    assert torch.equal(load(config, weights).compute_logits(tokens)[..., :61], load(read, back).compute_logits(tokens))


@pytest.mark.parametrize(
    "family, names",
    [
        ("mixtral", ("model.layers.1.block_sparse_moe.experts.{}.{}.weight", "w1", "w3", "w2")),
        ("deepseek_v3", ("model.layers.1.mlp.experts.{}.{}.weight", "gate_proj", "up_proj", "down_proj")),
    ],
)
def test_each_expert_is_the_tensor_of_its_number(family: str, names: tuple[str, ...], tmp_path: Path) -> None:
    config = make_shape(**SHAPES[family])
    weights = make_weights(config)
    write_hf(tmp_path, config, weights)
    stored, width = load_file(tmp_path / "model.safetensors"), config.expert_width
    pattern, *theirs = names
    for ours, part in zip(("gate", "up", "down"), theirs, strict=True):
        for expert in range(4):
            rows = weights[f"blocks.1.mlp.experts.{ours}.weight"][expert * width : (expert + 1) * width]
            found = stored[pattern.format(expert, part)]
            assert torch.equal(found.T if ours == "down" else found, rows)


def test_what_has_no_hugging_face_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="this model has no Hugging Face form"):
        write_hf(tmp_path, make_shape(activation="squared_relu"), {})
    (tmp_path / "config.json").write_text('{"model_type": "bert", "vocab_size": 5}')
    with pytest.raises(CheckpointError, match="model_type 'bert' is not read"):
        read_hf(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    config = make_shape()
    write_hf(tmp_path, config, make_weights(config))
    text = (tmp_path / "config.json").read_text().replace('"n_layer": 2', '"n_layer": 3')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tensor transformer\.h\.2\.ln_1\.weight"):
        read_hf(tmp_path)


def test_further_prediction_joins_the_embedding_first_in_the_files(tmp_path: Path) -> None:
    """DeepSeek-V3, equation 21 as its files have it: eh_proj of [enorm(embedding); hnorm(hidden state)]."""
    config = make_shape(**SHAPES["deepseek_v3"])
    weights = make_weights(config)
    write_hf(tmp_path, config, weights)
    stored = load_file(tmp_path / "model.safetensors")["model.layers.2.eh_proj.weight"]
    hidden, embedding = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    ours = torch.cat([hidden, embedding], dim=1) @ weights["further.0.join.weight"].T
    torch.testing.assert_close(torch.cat([embedding, hidden], dim=1) @ stored.T, ours)
    assert torch.equal(read_hf(tmp_path)[1]["further.0.join.weight"], weights["further.0.join.weight"])


EXPERT = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.{}.w1.weight",
    "deepseek_v3": "model.layers.1.mlp.experts.{}.down_proj.weight",
}


def damage(family: str, folder: Path, tensors: dict[str, Any], **given: Any) -> None:
    """A folder of a family with other tensors and other lines of config.json."""
    config = make_shape(**SHAPES[family])
    write_hf(folder, config, make_weights(config))
    stored = load_file(folder / "model.safetensors") | tensors
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text()) | given
    (folder / "config.json").write_text(json.dumps(text))


@pytest.mark.parametrize(
    "family, given, said",
    [
        ("mixtral", {"num_local_experts": [4]}, "config.json: num_experts takes a whole number, got [4]"),
        ("mixtral", {"num_local_experts": 0}, "config.json: model.num_experts must be >= 1, got 0"),
        ("mixtral", {"num_experts_per_tok": None}, "config.json: router_top_k takes a whole number, got None"),
        ("mixtral", {"num_experts_per_tok": 5}, "model.router_top_k 5 is above model.num_experts 4"),
        ("mixtral", {"num_hidden_layers": 1}, "tensor model.layers.1.block_sparse_moe.experts.0.w1.weight and"),
        ("deepseek_v3", {"n_group": 3, "topk_group": 1}, "model.router_groups 3 must divide model.num_experts 4"),
        ("deepseek_v3", {"first_k_dense_replace": 99}, "zeros and ones such as"),
        ("deepseek_v3", {"kv_lora_rank": None}, "config.json: kv_latent_dim takes a whole number, got None"),
        ("deepseek_v3", {"num_experts_per_tok": 1}, "num_experts_per_tok 1 is a router whose weights are all 1"),
        (
            "deepseek_v3",
            {"n_shared_experts": 0},
            "tensor model.layers.1.mlp.shared_experts.down_proj.weight and 5 more are in the files",
        ),
        (
            "deepseek_v3",
            {"num_hidden_layers": 3, "num_nextn_predict_layers": 0},
            "in the files and no part of the deepseek_v3",
        ),
    ],
)
def test_a_description_of_experts_that_does_not_fit_is_said(
    family: str, given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    damage(family, tmp_path, {}, **given)
    with pytest.raises(CheckpointError) as caught:
        read_hf(tmp_path)
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("family", EXPERT)
@pytest.mark.parametrize(
    "kind, said",
    [
        ("narrow", "has shape (15, 31), which does not fit"),
        ("flat", "has shape (3,), which does not fit"),
        ("int8", "is in int8; give files in fp32, bf16, fp16 or fp64"),
        ("float8_e4m3fn", "is in float8_e4m3fn; give files"),
    ],
)
def test_a_damaged_expert_is_named(family: str, kind: str, said: str, tmp_path: Path) -> None:
    name = EXPERT[family].format(2)
    parts = {"narrow": torch.zeros(15, 31), "flat": torch.zeros(3)}
    damage(family, tmp_path, {name: parts[kind] if kind in parts else torch.zeros(8, 32, dtype=getattr(torch, kind))})
    with pytest.raises(CheckpointError) as caught:
        read_hf(tmp_path)
    assert f"{name} {said}" in str(caught.value)


@pytest.mark.parametrize("family", EXPERT)
def test_an_expert_too_many_is_no_weight_that_is_left_out(family: str, tmp_path: Path) -> None:
    damage(family, tmp_path, {EXPERT[family].format(4): torch.zeros(8, 32)})
    with pytest.raises(CheckpointError, match=rf"experts\.4\..* is in the files and no part of the {family}"):
        read_hf(tmp_path)


@pytest.mark.parametrize(
    "family, name",
    [
        ("gpt2", "transformer.h.0.attn.bias"),
        ("gpt2", "transformer.h.0.attn.masked_bias"),
        ("gpt2", "lm_head.weight"),
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
    ],
)
def test_what_older_files_hold_beside_the_weights_is_read_over(family: str, name: str, tmp_path: Path) -> None:
    damage(family, tmp_path, {name: torch.zeros(3)})
    assert name not in read_hf(tmp_path)[1]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(tmp_path_factory.mktemp("data") / "toy_text_document")


LENGTH = ("--train-iters", "2", "--global-batch-size", "2")


def test_a_run_starts_from_a_hugging_face_folder(prefix: str, tmp_path: Path) -> None:
    config = make_shape(vocab_size=64, vocab_multiple=1)
    weights = make_weights(config)
    write_hf(tmp_path / "hf", config, weights)
    run_tiny(prefix, [*LENGTH, "--lr", "0", "--init-from", str(tmp_path / "hf"), "--save", str(tmp_path / "run")])
    found = read_tensors(tmp_path / "run", 2)
    assert torch.equal(found["model/blocks.1.mlp.up.weight"], weights["blocks.1.mlp.up.weight"])
    assert torch.equal(found["model/embedding.weight"][:64], weights["embedding.weight"])


def test_a_model_grows_by_layers_vocabulary_and_positions(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_tiny(prefix, [*LENGTH, "--save", str(tmp_path / "small")])
    small = read_tensors(tmp_path / "small", 2)
    larger = ["--num-layers", "4", "--vocab-size", "100", "--max-position-embeddings", "24", "--lr", "0"]
    flags = [*LENGTH, *larger, "--init-from", str(tmp_path / "small"), "--save", str(tmp_path / "large")]
    with pytest.raises(CheckpointError, match=r"embedding.weight has shape \(96, 32\) .* \(144, 32\) .*; --grow keeps"):
        run_tiny(prefix, flags)
    run_tiny(prefix, [*flags, "--grow"])
    said = capsys.readouterr().out
    assert "layers 2 to 3 keep their initial weights" in said
    assert "embedding.weight: rows 96 to 143 keep their initial values" in said
    large = read_tensors(tmp_path / "large", 2)
    for name in ("model/blocks.1.attention.qkv.weight", "model/norm.weight"):
        assert torch.equal(large[name], small[name])
    assert torch.equal(large["model/embedding.weight"][:96], small["model/embedding.weight"])
    assert torch.equal(large["model/positions.weight"][:16], small["model/positions.weight"])
    assert large["model/blocks.3.mlp.up.weight"].std() > 0


def test_a_narrower_or_wider_model_does_not_grow() -> None:
    saved = make_weights(make_shape())
    with pytest.raises(CheckpointError, match=r"has shape \(96, 32\).*\(144, 48\).*start with the model flags"):
        fill_weights(
            {"blocks.0.attention.qkv.weight": torch.zeros(144, 48)},
            lambda: ({"blocks.0.attention.qkv.weight": saved["blocks.0.attention.qkv.weight"]}, Path("ckpt")),
            vocab_size=61,
            may_grow=True,
        )
    with pytest.raises(CheckpointError, match="of the checkpoint is not in this model"):
        fill_weights({}, lambda: (saved, Path("ckpt")), vocab_size=61, may_grow=True)


def test_the_converter_writes_recipe_and_folder(prefix: str, tmp_path: Path) -> None:
    import convert_hf

    config = make_shape(**SHAPES["llama"], vocab_multiple=1, vocab_size=64)
    write_hf(tmp_path / "hf", config, make_weights(config))
    assert convert_hf.main(["recipe", str(tmp_path / "hf"), str(tmp_path / "m.yaml")]) == 0
    flags = ["--config", str(tmp_path / "m.yaml"), *TINY[6:], "--train-iters", "1", "--lr", "0"]
    flags += ["--make-vocab-size-divisible-by", "1", "--data-path", prefix, "--save", str(tmp_path / "run")]
    run_tiny(prefix, [*flags, "--init-from", str(tmp_path / "hf")], base=[])
    assert convert_hf.main(["export", str(tmp_path / "run"), str(tmp_path / "back")]) == 0
    stored, written = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert all(torch.equal(stored[key], written[key]) for key in stored)
    assert convert_hf.main(["export", str(tmp_path / "none"), str(tmp_path / "x")]) == 1
    with pytest.raises(SystemExit) as caught:
        convert_hf.main([])
    assert caught.value.code == 2
