"""Cross entropy with its gradient by the kernel, in Triton's interpreter; on a GPU it is in test_fused_gpu.py."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.interpreting import interpret
from helpers.score_rows import DTYPES, KINDS, SHAPES
from megaflow_trainer.ops import scores as scores_module
from megaflow_trainer.ops.scores import prefer_kernel, score_chunk

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
CPU = torch.device("cpu")


def test_plain_torch_is_the_gradient_of_the_weighted_sum() -> None:
    """In fp64 against autograd, with padding that is not seen."""
    scores = torch.randn(4, 12, dtype=torch.float64, requires_grad=True)
    target, weights = torch.tensor([0, 8, 3, 3]), torch.tensor([1.0, 0.0, 0.5, 2.0])
    expected = F.cross_entropy(scores[:, :9] * 0.7, target, reduction="none")
    (expected * weights).sum().backward()
    losses, grad = score_chunk(scores.detach(), target, weights, 0.7, 9)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    assert scores.grad is not None
    torch.testing.assert_close(grad, scores.grad, rtol=1e-6, atol=1e-6)


@needs_triton
def test_the_kernel_is_plain_torch_in_the_interpreter(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    found = interpret("score_rows.py", path, str(path))
    assert len(found) == len(DTYPES) * len(SHAPES) * len(KINDS) * 2 * 2
    for name, difference in found.items():
        assert difference <= (1e-6 if name.endswith("losses") else 1.1), name


@needs_triton
@pytest.mark.parametrize("lost", [None, "losses", "gradients"])
def test_a_kernel_whose_results_are_wrong_is_left_alone_in_words(
    lost: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(scores: Tensor, target: Tensor, weights: Tensor, losses: Tensor, scale: float, vocab_size: int) -> None:
        own, grad = score_chunk(scores, target, weights, scale, vocab_size)
        losses.copy_(own)
        scores.copy_(grad)
        if lost == "losses":
            losses[-1] += 1e-3
        if lost == "gradients":
            scores[0, 8192] *= 1.1

    monkeypatch.setitem(sys.modules, "megaflow_trainer.ops.scores_kernel", SimpleNamespace(score_in_place=run))
    if lost is None:
        assert scores_module._find_kernel.__wrapped__(CPU, torch.bfloat16, 50304) is run
        return
    with pytest.warns(UserWarning, match=f"read more often .* gives wrong {lost} in torch.bfloat16"):
        assert scores_module._find_kernel.__wrapped__(CPU, torch.bfloat16, 50304) is None


def run_roundly(scores: Tensor, target: Tensor, weights: Tensor, losses: Tensor, scale: float, vocab_size: int) -> None:
    """As a kernel whose exponentials differ in the last bit: some gradients are rounded the other way."""
    own, grad = score_chunk(scores, target, weights, scale, vocab_size)
    losses.copy_(own)
    above = torch.nextafter(grad, torch.full_like(grad, torch.inf))
    scores.copy_(torch.where(torch.arange(grad.shape[1]) % 3 == 0, above, grad))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_that_rounds_otherwise_is_not_wrong(dtype: torch.dtype) -> None:
    """In fp16 one step is more than the tolerance of most gradients, which are subnormal."""
    assert scores_module._compare(run_roundly, CPU, dtype, 50304) == []


def test_where_no_kernel_can_be_made_the_other_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def other(scores: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        calls.append(len(scores))
        return score_chunk(scores, *given)

    given = torch.randn(3, 8), torch.tensor([0, 1, 2]), torch.ones(3), 1.0, 8
    found, wanted = prefer_kernel(other)(*given), score_chunk(*given)
    assert calls == [3]
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    monkeypatch.setitem(sys.modules, "megaflow_trainer.ops.scores_kernel", None)
    with pytest.warns(UserWarning, match="since a kernel could not be made: ModuleNotFoundError"):
        assert scores_module._find_kernel.__wrapped__(CPU, torch.float32, 8) is None


def test_the_kernel_is_told_of_the_vocabulary_and_not_of_its_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu(Tensor):
        is_cuda = True

    asked: list[Any] = []

    def run(scores: Tensor, target: Tensor, weights: Tensor, losses: Tensor, scale: float, vocab_size: int) -> None:
        asked.append((scale, vocab_size))
        own, grad = score_chunk(scores.as_subclass(Tensor), target, weights, scale, vocab_size)
        losses.copy_(own)
        scores.copy_(grad)

    monkeypatch.setattr(scores_module, "_find_kernel", lambda *given: asked.append(given) or run)
    scores, rest = torch.randn(3, 8), (torch.tensor([0, 1, 4]), torch.tensor([1.0, 0.5, 2.0]), 0.7, 5)
    wanted = score_chunk(scores, *rest)
    found = prefer_kernel(lambda *_: pytest.fail("the kernel is to be asked"))(scores.clone().as_subclass(OnGpu), *rest)
    assert asked == [(CPU, torch.float32, 8), (0.7, 5)]
    for own, other in zip(found, wanted, strict=True):
        assert torch.equal(own.as_subclass(Tensor), other)


@needs_triton
def test_accesses_are_wide() -> None:
    """As a Hopper GPU runs it, for 50304 columns in bf16: 16 bytes at once, read in either pass and written."""
    compiler = pytest.importorskip("triton.backends.compiler")
    import triton
    from triton.compiler import ASTSource

    from megaflow_trainer.ops.scores_kernel import TILE, score_rows

    given = {"scores": "*bf16", "target": "*i64", "weights": "*fp32", "losses": "*fp32", "scale": "fp32"}
    given |= {"vocab_size": "i32", "COLUMNS": "constexpr", "BLOCK": "constexpr"}
    attributes = {(place,): [["tt.divisibility", 16]] for place in range(4)}
    source = ASTSource(score_rows, given, constexprs={"COLUMNS": 50304, "BLOCK": TILE[0]}, attrs=attributes)
    made = triton.compile(source, target=compiler.GPUTarget("cuda", 90, 32), options={"num_warps": TILE[1]})
    wide = TILE[0] // (32 * TILE[1] * 8)
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", made.asm["ptx"])) == 2 * wide
    assert len(re.findall(r"st\.global\S*\.v4\.b32", made.asm["ptx"])) == wide
