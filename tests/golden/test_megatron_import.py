"""Checkpoints that Megatron-Core wrote (megatron/make.py) give its own losses; a pickle in one runs nothing."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.pairs import write_pair
from helpers.runs import SHAPE, read_metrics, read_tensors, run_tiny
from megaflow.errors import CheckpointError, ConfigError
from megaflow_trainer.checkpoint.initial import fill_weights, read_weights
from megaflow_trainer.checkpoint.megatron import find_megatron, list_kinds, read_megatron
from megaflow_trainer.config.sections import ModelConfig
from megaflow_trainer.model.gpt import build_gpt
from megaflow_trainer.model.sockets import Sockets

pytestmark = pytest.mark.golden

HERE = Path(__file__).parent / "megatron"
COMMON: dict[str, Any] = {
    "num_layers": 2,
    "hidden_dim": 16,
    "num_heads": 4,
    "max_positions": 8,
    "vocab_size": 24,
    "vocab_multiple": 1,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
LLAMA: dict[str, Any] = {
    **COMMON,
    "num_kv_heads": 2,
    "ffn_dim": 24,
    "activation": "swiglu",
    "norm": "RMSNorm",
    "linear_bias": False,
    "position_kind": "rope",
    "tied_embeddings": False,
}
MODELS = {"gpt": ModelConfig(**COMMON), "llama": ModelConfig(**LLAMA)}


@pytest.mark.parametrize("kind", MODELS)
def test_imported_weights_give_megatrons_losses(kind: str) -> None:
    recorded = json.loads((HERE / kind / "losses.json").read_text())
    weights, path = read_weights(HERE / kind, MODELS[kind])
    assert path == HERE / kind / "iter_0000007"
    model = build_gpt(MODELS[kind], Sockets(), device=torch.device("cpu"), dtype=torch.float32).eval()
    fill_weights(dict(model.named_parameters()), lambda: (weights, path), vocab_size=24, may_grow=False)
    tokens = torch.tensor([recorded["tokens"]])
    with torch.no_grad():
        losses = model(tokens, tokens)[0]
    torch.testing.assert_close(losses, torch.tensor(recorded["losses"]), atol=1e-5, rtol=0)
    assert max(recorded["losses"]) - min(recorded["losses"]) > 0.1


def test_a_model_trains_on_from_megatrons_optimizer_with_its_losses() -> None:
    recorded = json.loads((HERE / "trained" / "losses.json").read_text())
    path = HERE / "trained" / "iter_0000007"
    assert list_kinds(path) == {"exp_avg": 16, "exp_avg_sq": 16}
    model = build_gpt(MODELS["gpt"], Sockets(), device=torch.device("cpu"), dtype=torch.float32).train()
    named = dict(model.named_parameters())
    for name, weight in read_megatron(path, MODELS["gpt"]).items():
        named[name].data.copy_(weight)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    moments = {kind: read_megatron(path, MODELS["gpt"], kind) for kind in ("exp_avg", "exp_avg_sq")}
    for name, weight in named.items():
        optimizer.state[weight] = {"step": torch.tensor(7.0), **{kind: moments[kind][name] for kind in moments}}
    tokens, losses = torch.tensor([recorded["tokens"]]), []
    for _ in recorded["losses"]:
        optimizer.zero_grad()
        loss = model(tokens, tokens).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == pytest.approx(recorded["losses"], rel=1e-5)
    assert recorded["losses"][0] > 1.02 * recorded["losses"][-1]


def test_another_shape_is_told() -> None:
    with pytest.raises(CheckpointError, match=r"linear_qkv.weight has shape \(2, 48, 16\), which does not fit"):
        read_megatron(HERE / "gpt" / "iter_0000007", ModelConfig(**{**COMMON, "num_kv_heads": 3, "num_heads": 12}))
    with pytest.raises(CheckpointError, match=r"tensor output_layer\.weight is not in the checkpoint"):
        read_megatron(HERE / "gpt" / "iter_0000007", ModelConfig(**{**COMMON, "tied_embeddings": False}))


@pytest.mark.parametrize("kind", [{"num_mtp_layers": 1}, {"num_experts": 4}])
def test_a_kind_of_model_that_is_not_read_is_told(kind: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="and experts are not read from Megatron-Core's checkpoints; convert it"):
        read_megatron(HERE / "gpt" / "iter_0000007", ModelConfig(**{**COMMON, **kind}))


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch exploded",)


@pytest.mark.parametrize("place", [".metadata", "common.pt", "__0_0.distcp"])
def test_a_pickle_that_asks_for_more_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    shutil.copytree(HERE / "gpt", tmp_path / "gpt")
    monkeypatch.chdir(tmp_path)
    path = find_megatron(tmp_path / "gpt")
    assert path is not None
    size = (path / place).stat().st_size
    bomb = pickle.dumps(Bomb())
    (path / place).write_bytes(bomb + b"\0" * max(0, size - len(bomb)))
    if place == "common.pt":
        read_megatron(path, MODELS["gpt"])  # it is not opened
    else:
        with pytest.raises((CheckpointError, pickle.UnpicklingError)) as caught:
            read_megatron(path, MODELS["gpt"])
        if place == ".metadata":
            assert f"asks for {os.system.__module__}.system, which is no part of a description" in str(caught.value)
    assert not (tmp_path / "exploded").exists()


FLAGS = ["--train-iters", "2", "--global-batch-size", "2", "--vocab-size", "24", "--make-vocab-size-divisible-by", "8"]
SMALL = ["--hidden-size", "16", "--seq-length", "8", *FLAGS]


def test_finetuning_takes_the_weights_and_begins_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_pair(tmp_path / "toy", vocab_size=24)
    flags = [*SMALL, "--load", str(HERE / "gpt"), "--finetune", "--lr", "0", "--save", str(tmp_path / "run")]
    assert run_tiny(prefix, flags, base=SHAPE) == 0
    assert "weights from Megatron-Core's" in capsys.readouterr().out
    weights = read_megatron(HERE / "gpt" / "iter_0000007", MODELS["gpt"])
    found = read_tensors(tmp_path / "run", 2)
    assert torch.equal(found["model/blocks.1.attention.qkv.weight"], weights["blocks.1.attention.qkv.weight"])
    assert [line["iteration"] for line in read_metrics(tmp_path / "run")] == [1, 2]


def test_going_on_from_one_is_refused_with_the_remedy(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "toy", vocab_size=24)
    with pytest.raises(CheckpointError, match=r"holds no exp_avg and exp_avg_sq .* --finetune"):
        run_tiny(prefix, [*SMALL, "--load", str(HERE / "gpt"), "--run-dir", str(tmp_path / "run")], base=SHAPE)
    with pytest.raises(ConfigError, match=r"takes the weights of checkpoint\.load"):
        run_tiny(prefix, [*SMALL, "--finetune", "--run-dir", str(tmp_path / "run")], base=SHAPE)
