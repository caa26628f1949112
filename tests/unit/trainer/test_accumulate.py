"""Products that add to main gradients: the same losses and gradients as autograd's own, in one process and compiled."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from helpers.pairs import write_pair
from helpers.runs import TINY, one_rank, read_metrics, run_tiny
from megaflow_trainer.config import read_command
from megaflow_trainer.ops.accumulate import AccumulatingLoss
from megaflow_trainer.ops.linear import Linear
from megaflow_trainer.ops.scores import score_chunk
from megaflow_trainer.parallel import fusion
from megaflow_trainer.parallel.data import MainGradients
from megaflow_trainer.training import build

LENGTH = ["--train-iters", "6", "--global-batch-size", "8", "--micro-batch-size", "2", "--lr-decay-style", "constant"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_linear_layer_adds_its_gradient(dtype: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(0)
    layer = Linear(12, 20, bias=has_bias).to(dtype)
    x = torch.randn(2, 3, 12, dtype=dtype, requires_grad=True)
    direction = torch.randn(2, 3, 20, dtype=dtype)
    layer(x).backward(direction)
    assert layer.weight.grad is not None
    expected = {"x": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad if has_bias else None}
    x.grad = layer.weight.grad = None
    layer.zero_grad()
    main_grad = torch.ones(20, 12)
    layer.product.main_grad = main_grad
    for _ in range(2):
        layer(x).backward(direction)
    assert layer.weight.grad is None
    torch.testing.assert_close(
        main_grad, 1 + 2 * expected["weight"].float(), rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-4
    )
    torch.testing.assert_close(x.grad, 2 * expected["x"])
    if has_bias:
        torch.testing.assert_close(layer.bias.grad, 2 * expected["bias"])


@pytest.mark.parametrize("chunk_scores", [1, 40, 1 << 20])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_the_loss_makes_the_gradients_of_its_weighted_sum(chunk_scores: int, scale: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8, requires_grad=True)
    weight = torch.randn(20, 8, requires_grad=True)  # 3 rows of padding
    target = torch.randint(0, 17, (2, 5))
    weights = torch.tensor([[1.0, 0.0, 2.0, 1.0, 1.0], [0.5, 1.0, 1.0, 0.0, 3.0]])
    scores = F.linear(x, weight)[..., :17] * scale
    expected = F.cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="none").view(2, 5)
    (expected * weights).sum().backward()
    assert weight.grad is not None
    grads = (x.grad, weight.grad)
    x.grad = None
    main_grad = torch.zeros(20, 8)
    held: list[int] = []

    def score(scores: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        held.append(scores.numel())
        return score_chunk(scores, *rest)

    loss = AccumulatingLoss(main_grad, score=score, chunk_scores=chunk_scores)
    losses = loss(x, weight.detach(), target, weights, vocab_size=17, scale=scale)
    torch.testing.assert_close(losses, expected.detach())
    assert sum(held) == 10 * 20
    assert max(held) == {1: 20, 40: 40, 1 << 20: 200}[chunk_scores], "a token at least"
    (losses * weights).sum().backward()
    torch.testing.assert_close(x.grad, grads[0])
    torch.testing.assert_close(main_grad, grads[1])
    assert main_grad[17:].count_nonzero() == 0


EXPERTS = "--num-experts 4 --moe-router-topk 2"


@pytest.mark.parametrize(
    "flags, can",
    [
        ("--bf16", True),
        ("--fp16", True),
        ("--bf16 --zero-stage 1", True),
        ("--bf16 --zero-stage 2", False),  # buffers come and go
        ("--bf16 --main-grads-dtype bf16", True),
        ("--bf16 --main-grads-dtype bf16 --zero-stage 2", False),
        ("", False),  # nothing is won where a gradient is as wide as its weight
        (f"--bf16 {EXPERTS}", True),  # but for routers, which are in fp32 and have no such product
        (EXPERTS, False),
    ],
)
def test_when_products_may_add_to_main_gradients(flags: str, can: bool) -> None:
    words = [*TINY, "--train-iters", "1", "--data-path", "x", *flags.split()]
    gradients = build.build_model(read_command(words, world_size=1)[0], one_rank()).gradients
    assert isinstance(gradients, MainGradients)
    routers = {slot.weight.dtype for bucket in gradients.buckets for slot in bucket.slots if "router" in slot.name}
    assert routers == ({torch.float32} if "experts" in flags else set())
    assert fusion.can_accumulate(gradients) == can


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(tmp_path_factory.mktemp("data") / "toy")


KINDS = {
    "gpt2": "",
    "llama": "--swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights "
    "--disable-bias-linear --num-query-groups 2",
    "recompute": "--recompute-granularity full",
    "further": "--mtp-num-layers 1 --position-embedding-type rope",
}


@pytest.mark.parametrize("flags", ["", "--eod-mask-loss", "--fp16 --initial-loss-scale 256", "--bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_accumulates_in_products_is_the_run_without(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, flags: str
) -> None:
    words = [*LENGTH, *KINDS[kind].split(), *flags.split()]
    run_tiny(prefix, [*words, "--run-dir", str(tmp_path / "plain")])
    monkeypatch.setattr(build, "_can_accumulate", lambda config, mesh: True)
    monkeypatch.setattr("megaflow_trainer.parallel.apply.can_accumulate", lambda gradients: True)
    keep = fusion.accumulate_in_products
    monkeypatch.setattr(
        "megaflow_trainer.parallel.apply.accumulate_in_products", lambda *a, **_: keep(*a, compiler=fusion.Compiler())
    )
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    run_tiny(prefix, [*words, "--run-dir", str(tmp_path / "fused")])
    plain, fused = (read_metrics(tmp_path / name) for name in ("plain", "fused"))
    loose = "16" in flags
    for one, other in zip(plain, fused, strict=True):
        assert other["lm_loss"] == pytest.approx(one["lm_loss"], rel=2e-3 if loose else 1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=2e-2 if loose else 1e-4)


def multiply_heads(y: Tensor) -> Tensor:
    """Products of heads, whose gradient lies by heads and not by tokens."""
    heads = y.view(2, 4, 4, 8).transpose(1, 2)
    return heads @ heads.transpose(-1, -2)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
@pytest.mark.parametrize("follow", [lambda y: F.gelu(y).transpose(0, 1), multiply_heads], ids=["gelu", "heads"])
def test_a_compiled_layer_writes_its_gradient_once(follow: Callable[[Tensor], Tensor]) -> None:
    """The gradient of the result, which two products take, is one buffer of the compiled backward."""
    torch.compiler.reset()
    layer = Linear(16, 32, bias=False)
    layer.product.main_grad = torch.zeros(32, 16)
    x = torch.randn(2, 4, 16, requires_grad=True)

    def run() -> None:
        torch.compile(lambda x: follow(layer(x)), dynamic=False)(x).sum().backward()

    _, codes = run_and_get_code(run)
    taken = r"(?:reinterpret_tensor\()?(\w+)"
    added = re.findall(rf"add_product_\.default\(\w+, {taken}", codes[-1])
    multiplied = re.findall(rf"extern_kernels\.mm\({taken}", codes[-1])
    assert len(added) == 1
    assert added == multiplied


@pytest.mark.slow  # compiling takes a minute
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_a_compiled_run_is_the_run_without(prefix: str, tmp_path: Path) -> None:
    for name, flags in (("plain", []), ("compiled", ["--compile"])):
        run_tiny(prefix, [*LENGTH, *flags, "--run-dir", str(tmp_path / name)])
    plain, compiled = (read_metrics(tmp_path / name) for name in ("plain", "compiled"))
    for one, other in zip(plain, compiled, strict=True):
        assert other["lm_loss"] == pytest.approx(one["lm_loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
