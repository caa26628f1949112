"""Rounding to fp8 as it lies and turned: the ops on a CPU, their kernel in Triton's interpreter and as Hopper runs it.

On a GPU it is in test_fp8_gpu.py.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.fp8_rounding import DTYPES, is_same
from helpers.interpreting import interpret
from megaflow_trainer.ops import fp8_cast
from megaflow_trainer.ops.fp8_cast import (
    E4M3,
    E5M2,
    find_largest,
    narrow,
    narrow_,
    narrow_both,
    narrow_both_,
    narrow_turned,
    turn,
)

FORMATS = (E4M3, E5M2)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_ways_are_the_same_numbers_filled_up_with_zeros(dtype: torch.dtype, form: torch.dtype) -> None:
    x, unit, largest = torch.randn(37, 50).to(dtype), torch.tensor(2.0 / torch.finfo(form).max), torch.tensor(0.5)
    wanted = narrow(x, unit, form)
    for has_sums, (plain, turned, sums) in (
        (False, narrow_both(x, unit, form)),
        (True, narrow_both_(x, unit, largest, form, has_sums=True)),
    ):
        assert torch.equal(sums, x.sum(0) if has_sums else x.new_empty(0))
        assert is_same(plain, wanted)
        assert turned.shape == (50, 48)
        assert turned.is_contiguous()
        assert is_same(turned[:, :37].contiguous(), wanted.t().contiguous())
        assert not turned[:, 37:].view(torch.uint8).any()
        assert is_same(turned, narrow_turned(x, unit, form))
    assert largest == x.abs().max()
    assert is_same(narrow_(x / 2, unit, largest, form), narrow(x / 2, unit, form))
    assert largest == x.abs().max(), "what was larger stays"


def test_what_is_not_a_number_is_kept_as_the_largest() -> None:
    x, unit = torch.randn(4, 32), torch.tensor(0.1)
    for value in (torch.nan, torch.inf):
        x[1, 2] = value
        for keep in (narrow_both_, narrow_):
            largest = torch.tensor(3.0)
            keep(x, unit, largest, E4M3)
            assert not largest.isfinite()
            keep(torch.ones(4, 32), unit, largest, E4M3)
            assert not largest.isfinite(), "nor does a later tensor undo it"


def test_tensors_with_gaps_and_without_elements() -> None:
    unit = torch.tensor(0.01)
    x = torch.randn(32, 20)
    for own in (x.t(), x[:, ::2], x[:1].expand(32, 20)):
        plain, turned, _ = narrow_both(own, unit, E5M2)
        assert is_same(plain, narrow(own.clone(memory_format=torch.contiguous_format), unit, E5M2))
        assert is_same(turned[:, : len(own)].contiguous(), plain.t().contiguous())
    for rows, columns in ((0, 16), (16, 0)):
        empty, largest = torch.empty(rows, columns), torch.tensor(1.0)
        plain, turned, sums = narrow_both_(empty, unit, largest, E4M3, has_sums=True)
        assert plain.shape == (rows, columns)
        assert turned.shape == (columns, rows)
        assert torch.equal(sums, torch.zeros(columns))
        assert largest == 1
        assert find_largest(empty) == 0


def test_what_the_compiler_is_told_of_the_ops_holds() -> None:
    """Shapes, strides, what is changed and that nothing is shared: torch looks."""
    x, unit, largest = torch.randn(37, 1), torch.tensor(0.1), torch.tensor(0.0)
    for op, given in (
        (narrow_both, (x, unit, E4M3)),
        (narrow_both, (x, unit, E4M3, True)),
        (narrow_both, (torch.randn(5, 16).t(), unit, E5M2)),
        (narrow_both_, (x, unit, largest, E5M2, True)),
        (narrow_, (x, unit, largest, E4M3)),
        (narrow_turned, (torch.randn(1, 16), unit, E4M3)),
    ):
        torch.library.opcheck(op, given, test_utils=("test_schema", "test_faketensor"))


WANTED = torch.device("cpu"), torch.bfloat16, E5M2, (("plain", "turned", "largest", "sums"), (144, 77))


@needs_triton
@pytest.mark.parametrize(
    "kind, said",
    [
        (None, "ModuleNotFoundError"),
        ("PTXASError", "PTXASError: "),
        ("TritonError", "TritonError: no reason given"),
        ("RuntimeError", "RuntimeError: no reason given"),
    ],
)
def test_a_kernel_that_cannot_be_made_leaves_torch_and_is_said(
    kind: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.errors import TritonError
    from triton.runtime.errors import PTXASError

    def fail(*args: Any, **given: Any) -> None:
        raise {"PTXASError": PTXASError("for sm_999"), "TritonError": TritonError(), "RuntimeError": RuntimeError()}[
            str(kind)
        ]

    module = None if kind is None else SimpleNamespace(round_to_fp8=fail)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "megaflow_trainer.ops.fp8_kernel", module)
    make = fp8_cast._make_kernel.__wrapped__
    with pytest.warns(UserWarning, match=f"several passes, since a kernel could not be made: {said}"):
        assert make(*WANTED) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert make(*WANTED) is None


@needs_triton
@pytest.mark.parametrize("lost", [None, "plain", "turned", "largest", "sums"])
def test_a_kernel_whose_results_are_wrong_is_left_alone_in_words(
    lost: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(x: Tensor, unit: Tensor, form: torch.dtype, *, has_sums: bool = False, **given: Tensor) -> Tensor | None:
        plain = narrow(x, unit, form)
        own = {"plain": plain, "turned": turn(plain), "largest": find_largest(x)}
        for name, result in given.items():
            result.copy_(own[name])
            if name == lost:
                result.view(-1)[-1] = 0
        return x.float().sum(0) * (lost != "sums") if has_sums else None

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "megaflow_trainer.ops.fp8_kernel", SimpleNamespace(round_to_fp8=run))
    if lost is None:
        assert fp8_cast._make_kernel.__wrapped__(*WANTED) is run
        return
    with pytest.warns(UserWarning, match=f"gives wrong results \\({lost}, in torch.float8_e5m2\\)"):
        assert fp8_cast._make_kernel.__wrapped__(*WANTED) is None


@pytest.mark.parametrize("bits", [7, 10])
def test_a_corrected_product_is_the_rounded_quotient(bits: int) -> None:
    """What the kernel computes for bf16 and fp16, in float64, where its first step is exact. 2^24 of 2^(23 + bits)."""
    generator = torch.Generator().manual_seed(bits)
    unit = 1 + torch.randint(2**23, (2 ** (24 - bits), 1), generator=generator) / 2.0**23
    x = 1 + torch.arange(2**bits) / 2.0**bits
    wanted, part = x / unit, 1 / unit
    first = x * part
    behind = (first.double() * unit.double() - x).float()
    found = (first.double() - behind.double() * part.double()).float()
    assert torch.equal(found, wanted)
    assert not torch.equal(first, wanted), "without the correction it is another"


@needs_triton
def test_the_kernel_is_plain_torch_in_the_interpreter(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    found = interpret("fp8_rounding.py", path, str(path))
    assert found["num_cases"] == 108
    assert found["differ"] == {"plain": [], "turned": [], "largest": [], "sums": [], "alone": []}


def compile_for_hopper(form: torch.dtype, names: set[str], *, is_ragged: bool) -> Any:
    """The kernel as a Hopper GPU runs it, with the results that are named, for bf16."""
    compiler = pytest.importorskip("triton.backends.compiler")
    import triton
    from triton.compiler import ASTSource

    from megaflow_trainer.ops import fp8_kernel

    name = str(fp8_kernel.NUMBERS[form])
    given = {"x": "*bf16", "unit": "*fp32", "plain": f"*{name}", "turned": "*i32", "largest": "*fp32", "sums": "*fp32"}
    given |= dict.fromkeys(("num_rows", "num_columns", "num_padded"), "i32")
    tokens, columns, num_warps = fp8_kernel.TILE
    constants: dict[str, Any] = {"NUMBER": fp8_kernel.NUMBERS[form], "LARGEST": torch.finfo(form).max}
    constants |= {"IS_NARROW": True, "IS_RAGGED": is_ragged, "BY_ASSEMBLER": True}
    constants |= {"TOKENS": tokens, "COLUMNS": columns}
    constants |= {name: None for name in ("plain", "turned", "largest", "sums") if name not in names}
    signature = {**given, **dict.fromkeys(constants, "constexpr")}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(given)
        if name not in constants and not (is_ragged and name == "num_rows")
    }
    source = ASTSource(fp8_kernel.round_tile, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=compiler.GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})


@needs_triton
@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("form, number", [(E4M3, "e4m3x2"), (E5M2, "e5m2x2")])
def test_accesses_are_wide_and_numbers_are_rounded_two_at_once(form: torch.dtype, number: str, is_ragged: bool) -> None:
    """A thread loads 8 elements at once, stores 16 at once either way, and rounds two at once from float32."""
    from megaflow_trainer.ops.fp8_kernel import TILE

    own = TILE[0] * TILE[1] // (32 * TILE[2])
    code = compile_for_hopper(form, {"plain", "turned", "largest", "sums"}, is_ragged=is_ragged).asm["ptx"]
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", code)) == own // 8
    assert len(re.findall(r"st\.global\S*\.v4\.b32", code)) == 2 * own // 16
    assert len(re.findall(r"st\.global", code)) == 2 * own // 16 + 1, "and the sums"
    assert len(re.findall(rf"cvt\.rn\.satfinite\.{number}\.f32", code)) == own, "two at once, either way"
    assert ".ftz" not in code, "small numbers are not taken for 0"
    assert len(re.findall(r"div\.rn\.f32", code)) == 1, "of the unit alone"
    alone = compile_for_hopper(form, {"turned"}, is_ragged=is_ragged).asm["ptx"]
    assert len(re.findall(r"st\.global\S*\.v4\.b32", alone)) == own // 16
    assert len(re.findall(r"st\.global", alone)) == own // 16


RESULTS = [
    {"plain", "turned"},
    {"plain", "turned", "sums"},
    {"plain", "turned", "largest"},
    {"plain", "turned", "largest", "sums"},
    {"turned"},
    {"plain", "largest"},
]


@needs_triton
@pytest.mark.parametrize("form, is_ragged", [(E4M3, False), (E5M2, True)])
@pytest.mark.parametrize("names", RESULTS, ids="+".join)
def test_the_assembler_makes_no_numbers_of_the_address_of_the_stack(
    names: set[str], form: torch.dtype, is_ragged: bool
) -> None:
    """That is what CUDA 12.8's put in the place of bytes that it had lost: instructions that read R1, which the kernel,
    having nothing on its stack, has no use for.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    if not tool.exists():
        pytest.skip("this triton has no disassembler")
    cubin = compile_for_hopper(form, names, is_ragged=is_ragged).asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    lines = [re.sub(r"/\*.*?\*/", "", line).strip() for line in text.splitlines()]
    assert any(line.startswith("F2FP.SATFINITE") for line in lines), "the kernel was read"
    assert [line for line in lines if re.search(r"\bR1\b", line)] == ["LDC R1, c[0x0][0x28] ;"]
