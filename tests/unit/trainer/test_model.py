"""The model's maths, its initial weights, and the registry of ops."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from helpers.runs import one_rank
from megaflow.errors import ConfigError
from megaflow_trainer.config.sections import ModelConfig
from megaflow_trainer.model import init
from megaflow_trainer.model.attention import Attention
from megaflow_trainer.model.context import Context
from megaflow_trainer.model.gpt import GPT, build_gpt
from megaflow_trainer.model.init import init_weights
from megaflow_trainer.model.rope import Rotary, make_rotary, rotate_both
from megaflow_trainer.model.sockets import Sockets
from megaflow_trainer.ops.attention import ATTENTION, attend_math, attend_sdpa
from megaflow_trainer.ops.attention_mask import DocumentMask
from megaflow_trainer.ops.registry import Need, choose
from megaflow_trainer.parallel.data import MainGradients
from megaflow_trainer.training import build

CPU = torch.device("cpu")


def make_model(*, seed: int = 1, dtype: torch.dtype = torch.float32, multiple: int = 48, **shape: object) -> GPT:
    config = make_config(multiple, **shape)
    model = build_gpt(config, Sockets(), device=CPU, dtype=dtype)
    init_weights(model, config, seed=seed)
    return model


def make_config(multiple: int = 48, **shape: object) -> ModelConfig:
    base: dict[str, object] = {"num_layers": 2, "hidden_dim": 32, "num_heads": 4, "max_positions": 16, "vocab_size": 61}
    base |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "vocab_multiple": multiple}
    return ModelConfig(**(base | shape))  # type: ignore[arg-type]


def make_tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(seed))


def test_padding_of_the_vocabulary_never_enters_loss_or_gradient() -> None:
    tokens = make_tokens()
    plain, padded = make_model(multiple=1), make_model(multiple=48)
    with torch.no_grad():
        padded.load_state_dict({**plain.state_dict(), "embedding.weight": padded.embedding.weight})
        padded.embedding.weight[:61] = plain.embedding.weight
        padded.embedding.weight[61:] = 1e3  # would win every softmax
    losses = [model(tokens[:, :-1], tokens[:, 1:]) for model in (plain, padded)]
    assert torch.equal(losses[0], losses[1])
    losses[1].sum().backward()
    assert padded.embedding.weight.grad is not None
    assert padded.embedding.weight.grad[61:].count_nonzero() == 0


def test_a_prediction_does_not_see_the_future() -> None:
    model, tokens = make_model(), make_tokens()[:, :16]
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 61
    before, after = model.compute_logits(tokens), model.compute_logits(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_the_first_loss_is_that_of_a_uniform_guess() -> None:
    tokens = make_tokens()
    assert make_model()(tokens[:, :-1], tokens[:, 1:]).mean().item() == pytest.approx(math.log(61), abs=0.05)


def test_the_block_is_the_textbook_one() -> None:
    model, tokens = make_model(num_layers=1), make_tokens()[:, :-1]
    weights = dict(model.named_parameters())

    def apply(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ weights[f"blocks.0.{name}.weight"].T + weights[f"blocks.0.{name}.bias"]

    def norm(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (32,))

    x = weights["embedding.weight"][tokens] + weights["positions.weight"]
    heads = [part.view(2, 16, 4, 8).transpose(1, 2) for part in apply("attention.qkv", norm(x)).split(32, dim=-1)]
    x = x + apply("attention.proj", attend_math(*heads, dropout=0.0).transpose(1, 2).reshape(2, 16, 32))
    x = x + apply("mlp.down", F.gelu(apply("mlp.up", norm(x)), approximate="tanh"))
    torch.testing.assert_close(model.compute_logits(tokens), norm(x) @ weights["embedding.weight"].T)


def test_a_tied_embedding_is_counted_once_in_the_norm() -> None:
    model, tokens = make_model(), make_tokens()
    gradients = MainGradients(model, one_rank())
    model(tokens[:, :-1], tokens[:, 1:]).sum().backward()
    assert [main.name for main in gradients.parameters].count("embedding.weight") == 1
    again = make_model()
    loss = again(tokens[:, :-1], tokens[:, 1:]).sum()
    grads = torch.autograd.grad(loss, list(again.parameters()))  # one entry a tensor, both uses of it summed
    expected = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    torch.testing.assert_close(gradients.norm(), expected)


def test_an_untied_head_is_another_matrix() -> None:
    assert make_model().head is None
    assert make_model(tied_embeddings=False).head is not None


def test_initial_weights_have_the_stated_spread() -> None:
    model = make_model(hidden_dim=128, num_layers=8)
    weights = dict(model.named_parameters())
    assert weights["blocks.3.mlp.up.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["blocks.3.mlp.down.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert weights["blocks.3.attention.proj.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert weights["blocks.3.attention.qkv.bias"].count_nonzero() == 0
    assert torch.equal(weights["norm.weight"], torch.ones(128))


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    torch.manual_seed(1)
    first = make_model(num_layers=2).state_dict()
    torch.manual_seed(2)
    deeper = make_model(num_layers=4, init_std=0.02).state_dict()
    assert torch.equal(first["blocks.1.mlp.up.weight"], deeper["blocks.1.mlp.up.weight"])
    assert not torch.equal(first["blocks.0.mlp.up.weight"], first["blocks.1.mlp.up.weight"])
    assert not torch.equal(first["embedding.weight"], make_model(seed=2).state_dict()["embedding.weight"])


def test_initial_weights_do_not_depend_on_how_many_are_drawn_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(num_layers=3, num_experts=2, router_top_k=1)
    alone, together = (build_gpt(config, Sockets(), device=CPU, dtype=torch.bfloat16) for _ in range(2))
    random = torch.get_rng_state()
    init_weights(alone, config, seed=1)
    seen: set[int] = set()
    draw = init._draw

    def see(*given: Any) -> torch.Tensor:
        seen.add(threading.get_ident())
        time.sleep(0.01)
        return draw(*given)

    monkeypatch.setattr(init, "_draw", see)
    init_weights(together, config, seed=1, threads=4)
    assert len(seen) == 4
    monkeypatch.setattr(init, "_HELD_BYTES", 2 * 4 * 128 * 32 + 1)  # two matrices of experts
    seen.clear()
    init_weights(together, config, seed=1, threads=4)
    assert len(seen) == 2
    for (name, one), other in zip(alone.named_parameters(), together.parameters(), strict=True):
        assert torch.equal(one, other), name
        assert other.requires_grad
        assert not other.isnan().any()
    assert torch.equal(random, torch.get_rng_state())


@pytest.mark.parametrize(
    "own, all_of_host, gpus, threads", [(2, 2, None, 2), (16, 16, 1, 8), (16, 16, 8, 2), (4, 64, 8, 4), (8, 8, 16, 1)]
)
def test_weights_are_drawn_by_this_ranks_share_of_the_processors(
    own: int, all_of_host: int, gpus: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is bound to some of them has its share already."""
    monkeypatch.setattr(build, "count_processors", lambda: own)
    monkeypatch.setattr(build.os, "cpu_count", lambda: all_of_host)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    device = torch.device("cpu" if gpus is None else "cuda")
    assert build.count_threads(dataclasses.replace(one_rank(), device=device)) == threads


def test_dropout_acts_in_training_only() -> None:
    model, tokens = make_model(hidden_dropout=0.5, attention_dropout=0.5), make_tokens()[:, :-1]
    assert not torch.equal(model.compute_logits(tokens), model.compute_logits(tokens))
    model.eval()
    assert torch.equal(model.compute_logits(tokens), model.compute_logits(tokens))


def test_a_linear_layer_and_an_attention_core_can_be_plugged_in() -> None:
    calls = []

    class Doubled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append("linear")
            return 2 * super().forward(x)

    def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, dropout: float) -> torch.Tensor:
        calls.append("core")
        return v

    config = make_config(num_layers=1)
    model = build_gpt(config, Sockets(linear=Doubled, attention=core), device=CPU, dtype=torch.float32)
    init_weights(model, config, seed=1)
    model.compute_logits(make_tokens()[:, :-1])
    assert calls == ["linear", "core", "linear", "linear", "linear"]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_sdpa_equals_attention_written_out(dtype: torch.dtype, tolerance: float) -> None:
    q, k, v = torch.randn(3, 2, 4, 16, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = attend_math(q, k, v, dropout=0.0)
    torch.testing.assert_close(attend_sdpa(q, k, v, dropout=0.0), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "shape, is_used",
    [
        ({}, True),
        ({"num_kv_heads": 2, "window": 5}, True),
        ({"position_kind": "rope"}, True),
        ({"qk_norm": True}, False),
    ],
)
def test_heads_side_by_side_go_to_a_core_that_takes_them(shape: dict[str, object], is_used: bool) -> None:
    """Nothing but rotation may be done to them before."""
    seen: list[tuple[int, ...]] = []

    def joined(heads: torch.Tensor, groups: int, tables: Any, **options: Any) -> torch.Tensor:
        seen.append((*heads.shape, groups))
        q, k, v = heads.transpose(1, 2).split([heads.shape[2] - 2 * groups, groups, groups], dim=1)
        assert (tables is None) == (config.rotary_dim == 0)
        if tables is not None:
            q, k = rotate_both(q, k, Rotary(*tables))
        return attend_sdpa(q, k, v, **options)

    config = make_config(**shape)
    grads = []
    for sockets in (Sockets(), Sockets(joined=joined)):
        model = build_gpt(config, sockets, device=CPU, dtype=torch.float32)
        init_weights(model, config, seed=1)
        model.compute_logits(make_tokens()[:, :-1]).square().mean().backward()  # type: ignore[no-untyped-call]
        grads.append([weight.grad for weight in model.parameters()])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)
    groups = config.kv_heads
    assert seen == ([(2, 16, 4 + 2 * groups, 8, groups)] * 2 if is_used else [])


def test_heads_side_by_side_are_not_handed_over_where_documents_are_apart_or_others_turn_them() -> None:
    joined = lambda *_, **__: pytest.fail("it knows neither")  # noqa: E731
    rotary = make_rotary(make_config(position_kind="rope"), torch.arange(16), CPU)
    x, apart = torch.randn(2, 16, 32), DocumentMask(torch.arange(16).div(5, rounding_mode="floor").expand(2, 16))
    for name in ("documents", "turn"):
        layers = [Attention(make_config(), sockets) for sockets in (Sockets(), Sockets(joined=joined))]
        layers[1].load_state_dict(layers[0].state_dict())
        documents, found = apart if name == "documents" else None, []
        for layer in layers:
            if name == "turn":
                layer.turn = lambda q, k, rotary: (-q, -k)
            found.append(layer(x, Context(torch.arange(16), rotary, None, documents)))
        assert torch.equal(*found)


def test_auto_takes_the_first_entry_that_can_run() -> None:
    need = Need(device=CPU, dtype=torch.float32, head_dim=8)
    assert choose("attention", ATTENTION, "auto", need).name == "sdpa"
    assert choose("attention", ATTENTION, "math", need).name == "math"


def test_flash_attention_without_a_gpu_is_refused_with_the_reason() -> None:
    need = Need(device=CPU, dtype=torch.bfloat16, head_dim=8)
    with pytest.raises(ConfigError, match=r"'flash' cannot run here: flash attention needs a CUDA GPU.*; use sdpa or"):
        choose("attention", ATTENTION, "flash", need)


def test_an_unknown_kernel_names_the_known_ones() -> None:
    need = Need(device=CPU, dtype=torch.float32, head_dim=8)
    with pytest.raises(ConfigError, match="'quick' is not known; the known ones are auto, sdpa, flash, cudnn, math"):
        choose("attention", ATTENTION, "quick", need)
