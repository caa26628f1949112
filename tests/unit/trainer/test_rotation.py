"""Gradients of rotated heads that lie among others, by the kernel in Triton's interpreter; on a GPU it is in
test_fused_gpu.py. Rotation itself is in test_shapes.py.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.interpreting import interpret
from helpers.turned_heads import DTYPES, SHAPES, list_cases
from megaflow_trainer.ops import rotation
from megaflow_trainer.ops.rotation import put_beside_heads, rotate_pairs, turn_back_, turn_back_plainly

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
CPU = torch.device("cpu")


def test_turning_back_is_the_gradient_of_the_rotation() -> None:
    for name, heads, num_turned, cos, sin, is_interleaved in list_cases(CPU):
        x = torch.zeros_like(heads[:, :, :num_turned]).requires_grad_()
        tables = put_beside_heads(cos), put_beside_heads(sin)
        rotate_pairs(x, *tables, is_interleaved=is_interleaved).backward(heads[:, :, :num_turned])
        rest = heads[:, :, num_turned:].clone()
        turn_back_(heads, num_turned, cos, sin, is_interleaved=is_interleaved)
        assert x.grad is not None
        torch.testing.assert_close(heads[:, :, :num_turned], x.grad, rtol=0, atol=0, equal_nan=True, msg=name)
        assert torch.equal(heads[:, :, num_turned:], rest), name


@needs_triton
def test_the_kernel_is_plain_torch_in_the_interpreter(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    found = interpret("turned_heads.py", path, str(path))
    assert len(found) == len(DTYPES) * len(SHAPES) * 4
    for name, difference in found.items():
        assert difference <= 1.01, name


@needs_triton
@pytest.mark.parametrize("fault", ["none", "angles", "pairs", "heads"])
def test_a_kernel_whose_results_are_wrong_is_left_alone_in_words(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(heads: Tensor, num_turned: int, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> None:
        sin = -sin if fault == "angles" else sin
        count = num_turned - 1 if fault == "heads" else num_turned
        turn_back_plainly(heads, count, cos, sin, is_interleaved=is_interleaved and fault != "pairs")

    monkeypatch.setitem(sys.modules, "megaflow_trainer.ops.rotation_kernel", SimpleNamespace(turn_heads_back=run))
    find = rotation._find_kernel.__wrapped__
    for dtype in DTYPES:
        for is_interleaved in (False, True):
            if fault == "none" or (fault == "pairs" and not is_interleaved):
                assert find(CPU, dtype, (5, 6, 24, 4, 8), is_interleaved) is run
                continue
            with pytest.warns(UserWarning, match=f"more passes than one, since .* gives wrong gradients in {dtype}"):
                assert find(CPU, dtype, (5, 6, 24, 4, 8), is_interleaved) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("units, is_right", [(0, True), (1, True), (8, False)])
def test_a_kernel_may_round_otherwise_and_not_compute_otherwise(dtype: torch.dtype, units: int, is_right: bool) -> None:
    """One head of one token that is off by so many units of the last place."""

    def run(heads: Tensor, num_turned: int, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> None:
        turn_back_plainly(heads, num_turned, cos, sin, is_interleaved=is_interleaved)
        heads[1, 2, 0] *= 1 + units * torch.finfo(dtype).eps

    assert rotation.is_right(run, CPU, dtype, (5, 6, 24, 4, 8), is_interleaved=False) == is_right


def test_where_no_kernel_can_be_made_plain_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megaflow_trainer.ops.rotation_kernel", None)
    with pytest.warns(UserWarning, match="since a kernel could not be made: ModuleNotFoundError"):
        assert rotation._find_kernel.__wrapped__(CPU, torch.float32, (5, 6, 24, 4, 8), False) is None


@pytest.mark.parametrize("rows, kind", [(1, 1), (48, 16), (40, 5)])
def test_each_form_of_the_kernel_is_compared_and_then_used(
    rows: int, kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton makes a kernel for each width and number of heads, and for rows of the tables that are 1 or of 16s."""
    asked: list[Any] = []
    used: list[Any] = []

    def find(*given: Any) -> Any:
        asked.append(given)
        return lambda *heads, **options: used.append(heads)

    class OnGpu(Tensor):
        is_cuda = True

    monkeypatch.setattr(rotation, "_find_kernel", find)
    heads = torch.zeros(2, rows, 6, 24, dtype=torch.bfloat16).as_subclass(OnGpu)
    cos, sin = torch.ones(8, rows).t(), torch.ones(rows, 8)
    turn_back_(heads, 4, cos, sin, is_interleaved=True)
    assert asked == [(heads.device, torch.bfloat16, (kind, 6, 24, 4, 8), True)]
    assert len(used) == 1
    assert all(table.is_contiguous() for table in used[0][2:])


@needs_triton
def test_accesses_are_wide() -> None:
    """As a Hopper GPU runs it, for the heads of Llama 1.3B in bf16: 16 bytes at once, read and written."""
    compiler = pytest.importorskip("triton.backends.compiler")
    import triton
    from triton.compiler import ASTSource

    from megaflow_trainer.ops.rotation_kernel import TILE, turn_token

    given = {"heads": "*bf16", "cos": "*fp32", "sin": "*fp32", "num_rows": "i32"}
    constants = {"PAIRS": 32 * 64, "STEP": 48 * 128, "WIDTH": 128, "HALF": 64, "IS_INTERLEAVED": False}
    constants |= {"BLOCK": TILE[0]}
    attributes = {(place,): [["tt.divisibility", 16]] for place in range(4)}
    source = ASTSource(
        turn_token, given | dict.fromkeys(constants, "constexpr"), constexprs=constants, attrs=attributes
    )
    made = triton.compile(source, target=compiler.GPUTarget("cuda", 90, 32), options={"num_warps": TILE[1]})
    assert TILE[0] == 32 * TILE[1] * 8
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", made.asm["ptx"])) == 2 + 4  # and cosines and sines in fp32
    assert len(re.findall(r"st\.global\S*\.v4\.b32", made.asm["ptx"])) == 2
