"""Optional packages on a GPU, those that are installed: against the native way, in result and gradients."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.pairs import write_pair
from helpers.runs import read_curve, run_tiny
from megaflow.errors import ConfigError
from megaflow_trainer.model.rope import Rotary, rotate_both
from megaflow_trainer.ops.attention import ATTENTION, attend_math
from megaflow_trainer.ops.attention_packages import PACKAGES
from megaflow_trainer.ops.registry import Entry, Need
from megaflow_trainer.parallel.mesh import Launch, build_mesh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]
CUDA = torch.device("cuda", 0)


def find_attention(name: str, width: int, value_width: int, window: int | None) -> Entry:
    """The entry, or a skip that says what it lacks."""
    need = Need(device=CUDA, dtype=torch.bfloat16, head_dim=width, value_dim=value_width, has_window=window is not None)
    (entry,) = [entry for entry in ATTENTION if entry.name == name]
    reason = entry.obstacle(need)
    if reason is not None:
        pytest.skip(reason)
    return entry


def make_heads(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    heads, groups, length, width, value_width = shape
    generator = torch.Generator(CUDA).manual_seed(3)
    sizes = ((heads, width), (groups, width), (groups, value_width))
    made = (torch.randn(2, length, *size, device=CUDA, generator=generator).bfloat16() for size in sizes)
    return tuple(x.transpose(1, 2).requires_grad_() for x in made)  # type: ignore[return-value]


@pytest.mark.filterwarnings("ignore")  # packages warn of themselves
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("shape", [(4, 4, 512, 64, 64), (8, 2, 384, 128, 128), (4, 4, 256, 192, 128)], ids=str)
@pytest.mark.parametrize("name", [entry.name for entry in PACKAGES])
def test_attention_of_a_package_equals_attention_written_out(
    name: str, shape: tuple[int, ...], is_compiled: bool, window: int | None
) -> None:
    """The largest difference over the largest value, against fp32: bf16 factors and results round by 2^-9 each."""
    entry = find_attention(name, shape[3], shape[4], window)
    attend = entry.function
    if is_compiled:

        def call(*heads: Tensor, **options: Any) -> Tensor:  # of a function that is kept from the compiler it would not
            return entry.function(*heads, **options)

        attend = torch.compile(call, fullgraph=entry.is_traceable, dynamic=False)
    q, k, v = make_heads(shape)
    grad = torch.randn_like(v[:, :1].expand(-1, shape[0], -1, -1))
    y = attend(q, k, v, dropout=0.0, window=window)
    found = [y, *torch.autograd.grad(y, (q, k, v), grad)]
    wide = [part.detach().float().requires_grad_() for part in (q, k, v)]
    expected = attend_math(*wide, dropout=0.0, window=window)
    wanted = [expected, *torch.autograd.grad(expected, wide, grad.float())]
    for one, other in zip(found, wanted, strict=True):
        assert (one.float() - other).abs().max() <= 2e-2 * other.abs().max()


@pytest.mark.filterwarnings("ignore")  # packages warn of themselves
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("shape", [(4, 4, 512, 64, 64), (8, 2, 384, 128, 128)], ids=str)
@pytest.mark.parametrize("turns", [None, "halves", "neighbours"])
@pytest.mark.parametrize("name", [entry.name for entry in PACKAGES if entry.joined is not None])
def test_attention_of_heads_side_by_side_equals_that_of_three_tensors(
    name: str, turns: str | None, shape: tuple[int, ...], is_compiled: bool, window: int | None
) -> None:
    """Forward bit for bit, where nothing is turned; gradients of queries are sums in the order in which blocks come."""
    torch.compiler.reset()  # every case is another form of the one function
    entry = find_attention(name, shape[3], shape[4], window)
    assert entry.joined is not None
    angles = torch.rand(shape[2], shape[3] // 2, device=CUDA, generator=torch.Generator(CUDA).manual_seed(4)) * 6
    tables = None if turns is None else (1.1 * angles.cos(), 1.1 * angles.sin(), turns == "neighbours")
    q, k, v = make_heads(shape)
    heads = torch.cat([part.detach().transpose(1, 2) for part in (q, k, v)], dim=2).requires_grad_()
    joined = torch.compile(entry.joined, fullgraph=True, dynamic=False) if is_compiled else entry.joined
    y = joined(heads, shape[1], tables, dropout=0.0, window=window)
    turned = (q, k) if tables is None else rotate_both(q, k, Rotary(*tables))
    expected = entry.function(*turned, v, dropout=0.0, window=window)
    assert (y - expected).abs().max() <= (0 if turns is None else 1e-2 * expected.abs().max())
    grad = torch.randn_like(expected)
    (found,) = torch.autograd.grad(y, heads, grad)
    assert found.is_contiguous()
    sizes = [shape[0], shape[1], shape[1]]
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    for one, other in zip(found.transpose(1, 2).split(sizes, dim=1), wanted, strict=True):
        assert (one.float() - other.float()).abs().max() <= 8e-3 * other.abs().max()  # a bit of bf16


def load_bench() -> Any:
    """benches/gpu/extras.py, which holds the cases; its modules find one another in their folder."""
    folder, path = Path(__file__).resolve().parents[3] / "benches" / "gpu", list(sys.path)
    sys.path.insert(0, str(folder))
    module = importlib.import_module("extras")
    sys.path[:] = path
    return module


BENCH = load_bench()


@pytest.mark.filterwarnings("ignore")  # packages, and torch's compiler, warn of themselves
@pytest.mark.parametrize("case", list(BENCH.list_cases()), ids=lambda case: case.name)
def test_an_entry_is_as_near_to_fp32_as_its_page_says(case: Any) -> None:
    row = BENCH.run_case(case, BENCH.SMALL, 0)
    if "reason" in row:
        pytest.skip(row["reason"])
    assert row["error"] <= case.tolerance
    assert row["native_error"] <= 2e-2


RUNS = {
    "engine": ["--transformer-impl", "transformer_engine"],
    "engine fp8": ["--transformer-impl", "transformer_engine", "--fp8-hybrid"],
    "engine fp8 delayed": ["--transformer-impl", "transformer_engine", "--fp8-hybrid", "--fp8-recipe", "delayed"],
    "engine norms": ["--norm-kernel", "transformer_engine"],
    "engine attention": ["--attention-backend", "transformer_engine"],
    "flash_attn_4": ["--attention-backend", "flash_attn_4"],
    "liger": ["--norm-kernel", "liger", "--gate-kernel", "liger", "--rotary-kernel", "liger", "--loss-kernel", "liger"],
    "apex norms": ["--norm-kernel", "apex"],
    "apex adam": ["--adam-kernel", "apex"],
    "apex sums": ["--wgrad-kernel", "apex"],
    "torchao": ["--fp8-hybrid", "--fp8-kernel", "torchao"],
}
MODEL = (
    *("--num-layers", "2", "--hidden-size", "1024", "--num-attention-heads", "8", "--seq-length", "128", "--swiglu"),
    *("--normalization", "RMSNorm", "--position-embedding-type", "rope", "--ffn-hidden-size", "2048"),
    *("--micro-batch-size", "4", "--global-batch-size", "8", "--train-iters", "8", "--lr", "3e-4", "--bf16"),
    *("--lr-decay-style", "constant"),
)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(tmp_path_factory.mktemp("data") / "toy", num_documents=200, document_tokens=300)


@pytest.mark.filterwarnings("ignore")  # packages, and torch's compiler, warn of themselves
@pytest.mark.parametrize("compiles", ["--compile", "--no-compile"])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_by_a_package_is_near_the_native_run(name: str, compiles: str, prefix: str, tmp_path: Path) -> None:
    """8 steps, each loss within 2 %, in fp8 4 %; the first, before any step, within 1e-2."""
    mesh = build_mesh(Launch(), CUDA, "nccl")
    try:
        run_tiny(prefix, [*MODEL, *RUNS[name], compiles, "--run-dir", str(tmp_path / "package")], mesh)
    except ConfigError as error:
        if "is not installed" in str(error):
            pytest.skip(str(error))
        raise
    run_tiny(prefix, [*MODEL, "--run-dir", str(tmp_path / "native")], mesh)
    one, other = ([line[1] for line in read_curve(tmp_path / kind)] for kind in ("native", "package"))
    assert other[0] == pytest.approx(one[0], abs=1e-2)
    assert other == pytest.approx(one, rel=4e-2 if "--fp8-hybrid" in RUNS[name] else 2e-2)
