"""AdamW in one pass, in Triton's interpreter on the CPU; on a GPU it is in test_fused_gpu.py."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
import torch

from helpers.fused_adam import CASES, make
from helpers.interpreting import interpret
from helpers.pairs import write_pair
from megaflow_trainer.optim import fused as fused_module

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
BF16 = 2.0**-7
"""What one rounding to bf16, towards zero, may be off by."""
ROUNDING = {
    "fp32": {},
    "bf16": {"weight": BF16},
    "fp16": {"weight": 2.0**-10},
    "states in bf16": {"weight": BF16, "master": 2e-3, "exp_avg": 4 * BF16, "exp_avg_sq": 4 * BF16},
    "states in fp16": {"weight": BF16, "master": 1e-3, "exp_avg": 2.0**-9},
    "all bf16": {"weight": 4 * BF16, "exp_avg": 4 * BF16, "exp_avg_sq": 4 * BF16},
}
"""Largest difference by kind, over the largest element; where nothing is said, 1e-6: a few roundings of fp32."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the kernel gives, by case."""
    folder = tmp_path_factory.mktemp("fused")
    return interpret("fused_adam.py", folder / "found.json", str(folder), write_pair(folder / "toy"))


@pytest.mark.parametrize("case", CASES)
def test_one_pass_is_the_reference_but_for_roundings(found: dict[str, Any], case: str) -> None:
    differences = found[case]
    assert differences.pop("step") == 0
    assert {"weight", "exp_avg", "exp_avg_sq"} <= differences.keys()
    for kind, difference in differences.items():
        assert difference <= ROUNDING[case].get(kind, 1e-6), (kind, difference)


def test_tensors_may_begin_anywhere(found: dict[str, Any]) -> None:
    assert found["unaligned"] < 1e-6


def test_a_run_with_it_is_the_run_without_and_resumes(found: dict[str, Any]) -> None:
    run = found["run"]
    assert run["steps"] == [6.0]
    assert len(run["plain"]) == 6
    for plain, fused in zip(run["plain"], run["fused"], strict=True):
        assert fused[1] == pytest.approx(plain[1], rel=1e-6)
        assert fused[2] == pytest.approx(plain[2], rel=1e-5)


def test_the_flag_and_what_it_cannot_serve_leave_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """--no-fused-optimizer"""
    cpu = torch.device("cpu")
    _, _, plain = make("fp32", cpu, is_fused=True)
    assert plain.fused is None
    assert plain.obstacle == "it is for GPUs, and masters, states or gradients are on cpu"
    made: list[int] = []
    monkeypatch.setattr(fused_module, "find_obstacle", lambda moved: made.append(len(moved)) or "no")
    assert make("fp32", cpu, is_fused=False)[2].obstacle == "--no-fused-optimizer is given"
    assert not made
    assert make("fp32", cpu, is_fused=True)[2].obstacle == "no"
    assert made == [6]


def test_a_kernel_that_cannot_be_made_leaves_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_module, "find_obstacle", lambda moved: None)

    def fail(moved: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nmore")

    monkeypatch.setattr(fused_module, "FusedAdam", fail)
    optimizer = make("fp32", torch.device("cpu"), is_fused=True)[2]
    assert optimizer.fused is None
    assert optimizer.obstacle == "its kernel could not be made: RuntimeError: Failed to find C compiler."
    optimizer.step(1e-2)


def test_whole_chunks_are_moved_in_wide_accesses() -> None:
    """Compiled for a Hopper GPU, which needs none: 16 bytes an access, but for chunks that end in the middle."""
    compiler = pytest.importorskip("triton.backends.compiler")
    import triton
    import triton.language as tl
    from triton.compiler import ASTSource

    from megaflow_trainer.ops.adam_kernel import move_adam

    kinds = {"MASTER": tl.float32, "GRAD": tl.float32, "FIRST": tl.float32, "SECOND": tl.float32, "WEIGHT": tl.bfloat16}
    constants = {**kinds, "IS_ALIGNED": True, "CHUNK": 16384, "BLOCK": 1024}
    given = {
        "chunks": "*i32",
        "places": "*i64",
        "lengths": "*i64",
        "rates": "*fp32",
        "factor": "*fp32",
        "skip": "*fp32",
    }
    given |= dict.fromkeys(("gain_1", "gain_2", "eps"), "fp32")
    signature = {**given, **dict.fromkeys(constants, "constexpr")}
    made = triton.compile(
        ASTSource(move_adam, signature, constexprs=constants), target=compiler.GPUTarget("cuda", 90, 32)
    )
    assert len(re.findall(r"ld\.global\.v4\.b32", made.asm["ptx"])) == 8  # 8 elements of each of 4 tensors a thread
    assert len(re.findall(r"st\.global\.v4\.b32", made.asm["ptx"])) == 7
