"""Optional packages without a GPU: what keeps one from serving is one sentence, and fakes see how they are called."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.fake_packages import install
from helpers.runs import TINY, one_rank
from megaflow.errors import ConfigError
from megaflow_trainer.config import read_command
from megaflow_trainer.config.model_section import ATTENTION_KERNELS
from megaflow_trainer.model.rope import Rotary, rotate_both
from megaflow_trainer.ops import attention_packages, packages
from megaflow_trainer.ops.attention import ATTENTION, attend_math
from megaflow_trainer.ops.attention_block import attend_block, attend_block_backward
from megaflow_trainer.ops.attention_packages import attend_engine, attend_flash_2
from megaflow_trainer.ops.flash_4 import attend_flash_4, attend_flash_4_joined
from megaflow_trainer.ops.packages import FLASH_4, Package, PackageError
from megaflow_trainer.ops.registry import Need, choose
from megaflow_trainer.training.build import build_model

CPU, H200 = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nothing_loaded() -> Iterator[None]:
    packages._load.cache_clear()
    packages._MET.clear()
    yield
    packages._load.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions about a GPU are answered as on an H200."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")


def need(**options: Any) -> Need:
    return Need(**({"device": H200, "dtype": torch.bfloat16, "head_dim": 64} | options))


def refuse(name: str, given: Need) -> str:
    with pytest.raises(ConfigError) as caught:
        choose("attention", ATTENTION, name, given)
    return str(caught.value)


def test_the_configuration_knows_every_entry() -> None:
    assert {entry.name for entry in ATTENTION} == set(ATTENTION_KERNELS) - {"auto"}


@pytest.mark.usefixtures("gpu")
def test_a_package_that_is_missing_says_how_to_get_it() -> None:
    assert refuse("flash_attn_4", need()).startswith(
        "attention 'flash_attn_4' cannot run here: the package flash-attn-4 is not installed (pip install flash-attn-4)"
    )
    assert "pip install flash-attn --no-build-isolation" in refuse("flash_attn_2", need())
    assert "pip install transformer-engine[pytorch]" in refuse("transformer_engine", need())


@pytest.mark.parametrize(
    "error, words",
    [
        (OSError("libcudnn.so.9: cannot open shared object file"), "OSError: libcudnn.so.9: cannot open shared object"),
        (ImportError("undefined symbol: _ZN3c10"), "ImportError: undefined symbol: _ZN3c10"),
        (RuntimeError("two\nlines"), "RuntimeError: two"),
        *(
            (kind("why"), f"{kind.__name__}: why")
            for kind in (AttributeError, NameError, SyntaxError, IndexError, ZeroDivisionError, Exception, SystemExit)
        ),
        (KeyError(), "KeyError: no reason given"),
        (subprocess.CalledProcessError(1, "nvcc"), "CalledProcessError: Command 'nvcc' returned non-zero exit"),
        (
            ModuleNotFoundError("No module named 'cutlass'", name="cutlass"),
            "ModuleNotFoundError: No module named 'cutl",
        ),
    ],
)
def test_a_package_that_does_not_load_says_why(
    error: BaseException, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(packages.importlib, "import_module", fail)
    found = FLASH_4.find_obstacle("flash_attn.cute.flash_attn_func")
    assert found is not None
    assert found.startswith("the package flash-attn-4 is installed and flash_attn.cute.flash_attn_func does not load: ")
    assert found.endswith(words) or words in found
    assert "\n" not in found


def test_ctrl_c_is_no_fault_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(packages.importlib, "import_module", interrupt)
    with pytest.raises(KeyboardInterrupt):
        FLASH_4.find_obstacle("flash_attn.cute.flash_attn_func")


class DslError(Exception):
    """Of no builtin kind."""


@pytest.mark.parametrize("error", [ValueError("d"), AssertionError(), DslError("two\nlines"), PackageError("gone")])
def test_what_a_kernel_raises_is_one_kind_of_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    attention_packages._make_engine.cache_clear()
    install(
        monkeypatch,
        transformer_engine__pytorch__DotProductAttention=refuse,
        flash_attn__flash_attn_interface__flash_attn_func=refuse,
        flash_attn__cute__flash_attn_func=refuse,
    )
    said = f"{type(error).__name__}: {(str(error).splitlines() or ['no reason given'])[0]}"
    for attend, name in ((attend_flash_4, "flash-attn-4"), (attend_flash_2, "flash-attn"), (attend_engine, "tra")):
        with pytest.raises(RuntimeError, match=rf"^{name}.*: {said}$"):
            attend(*make_heads(), dropout=0.0)
    memory = torch.OutOfMemoryError("out of memory")
    monkeypatch.setattr(sys.modules["flash_attn.flash_attn_interface"], "flash_attn_func", raise_it(memory))
    packages._load.cache_clear()
    with pytest.raises(torch.OutOfMemoryError):
        attend_flash_2(*make_heads(), dropout=0.0)


def raise_it(error: Exception) -> Any:
    def run(*_: Any, **__: Any) -> None:
        raise error

    return run


def test_a_package_without_the_part_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, flash_attn__cute__other=1)
    found = FLASH_4.find_obstacle("flash_attn.cute.flash_attn_func")
    assert found is not None
    assert "AttributeError: module 'flash_attn.cute' has no attribute 'flash_attn_func'" in found


def test_a_folder_of_a_package_alone_is_not_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn 2 and 4 share the folder flash_attn."""
    install(monkeypatch, flash_attn__other=1)
    sys.modules["flash_attn"].__path__ = []  # type: ignore[attr-defined]
    assert FLASH_4.find_obstacle("flash_attn.cute.flash_attn_func") == (
        "the package flash-attn-4 is not installed (pip install flash-attn-4)"
    )


def test_what_a_kernel_lacks_is_said_before_the_package_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    assert "flash-attn-4 needs compute capability 9.0, NVIDIA A100 has less" in refuse("flash_attn_4", need())
    for name in ("flash_attn_4", "flash_attn_2", "transformer_engine"):
        assert "needs a CUDA GPU and this machine's device is cpu" in refuse(name, need(device=CPU))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for name in ("flash_attn_4", "flash_attn_2", "transformer_engine"):
        assert "needs 16-bit weights" in refuse(name, need(dtype=torch.float32))
        assert "is not told of bounds between documents" in refuse(name, need(has_documents=True))
        assert "takes heads up to 256 wide in steps of 8, and these are 264" in refuse(name, need(head_dim=264))
        assert "in steps of 8, and these are 100" in refuse(name, need(head_dim=100))
    assert "flash-attn-4 has no dropout (--attention-dropout 0)" in refuse("flash_attn_4", need(has_dropout=True))
    assert "takes values as wide as keys" in refuse("flash_attn_2", need(value_dim=32))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert "takes heads up to 128 wide" in refuse("flash_attn_4", need(head_dim=192))


def test_all_that_a_kernel_lacks_is_said_at_once_and_the_device_first() -> None:
    given = need(device=CPU, dtype=torch.float32, head_dim=100, has_dropout=True, has_documents=True, value_dim=300)
    rest = (
        "it needs 16-bit weights, and without --bf16 they are fp32; it is not told of bounds between documents "
        "(--reset-attention-mask); it takes heads up to 256 wide in steps of 8, and these are 100; "
        "it takes heads up to 256 wide in steps of 8, and these are 300; use sdpa or math, or auto"
    )
    for name, package, own in (
        ("flash_attn_4", "flash-attn-4", "has no dropout (--attention-dropout 0)"),
        ("flash_attn_2", "flash-attn", "takes values as wide as keys, and these are 300 and 100"),
        ("transformer_engine", "transformer-engine", "is used without dropout here (--attention-dropout 0)"),
    ):
        assert refuse(name, given) == (
            f"attention {name!r} cannot run here: {package} needs a CUDA GPU and this machine's device is cpu; "
            f"it {own}; {rest}"
        )


def test_a_run_that_asks_for_one_is_refused_in_words() -> None:
    for name in ("flash_attn_4", "flash_attn_2", "transformer_engine"):
        words = [*TINY, "--train-iters", "1", "--data-path", "x", "--bf16", "--attention-backend", name]
        with pytest.raises(ConfigError, match="needs a CUDA GPU and this machine's device is cpu; use sdpa or math"):
            build_model(read_command(words, world_size=1)[0], one_rank())


def test_auto_loads_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Package, "load", lambda *_: pytest.fail("nothing is to be loaded"))
    assert choose("attention", ATTENTION, "auto", need(device=CPU)).name == "sdpa"


def make_heads() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 12, heads, 16, generator=generator) for heads in (4, 2, 2))
    return tuple(x.transpose(1, 2).requires_grad_() for x in (q, k, v))  # type: ignore[return-value]


def attend_tokens_first(q: Tensor, k: Tensor, v: Tensor, scale: float | None, left: int | None) -> Tensor:
    """What the packages compute, `[b, s, n, d]`."""
    window = None if left is None or left < 0 else left + 1
    parts = (part.transpose(1, 2) for part in (q, k, v))
    return attend_math(*parts, dropout=0.0, window=window, scale=scale).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # said of torch's own compiler
@pytest.mark.parametrize("kind", ["apart", "joined", "turned", "turned apart"])
def test_flash_attn_4_is_called_as_it_asks(
    window: int | None, scale: float | None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake with the arguments of 4.0.0b36; the op's gradients are those that the fake backward writes."""
    met: list[torch.Size] = []

    def forward(
        q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, window_size: Any, return_lse: bool
    ) -> tuple[Tensor, Tensor]:
        if not met:  # a kernel is compiled once
            warnings.warn("said by 4.0.0b36 when it compiles a kernel", UserWarning, stacklevel=2)
        met.append(q.shape)
        assert causal
        assert return_lse
        assert window_size == ((None, None) if window is None else (4, 0))
        parts = (part.transpose(1, 2) for part in (q, k, v))
        out, lse = attend_block(*parts, offset=0, window=window, scale=softmax_scale)
        return out.transpose(1, 2), lse

    def backward(*tensors: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, **options: Any) -> tuple[Tensor, ...]:
        factor = options.pop("softmax_scale")
        sides = {"window_size_left": None, "window_size_right": None}
        if window is not None:
            sides = {"window_size_left": 4, "window_size_right": 0}
        assert options == {"causal": True, **sides}
        assert tensors[4].is_contiguous()
        q, k, v, out, grad = (tensor.transpose(1, 2) for tensor in tensors[:5])
        found = attend_block_backward(grad, (q, k, v), (out, tensors[5]), offset=0, window=window, scale=factor)
        for made, part in zip((dq, dk, dv), found, strict=True):
            width = made.shape[3]  # what lies otherwise would be copied behind the kernel
            assert made.stride()[1:] == ((made.shape[2] if kind == "apart" else 8) * width, width, 1)
            made.copy_(part.transpose(1, 2))
        return dq, dk, dv

    install(monkeypatch, flash_attn__cute__flash_attn_func=forward, flash_attn__cute__interface__x=None)
    sys.modules["flash_attn.cute.interface"]._flash_attn_bwd = backward  # type: ignore[attr-defined]
    tables, attend, reference = None, attend_flash_4, attend_math
    if kind != "apart":
        if kind != "joined":
            shape = (2, 1, 12, 6) if kind == "turned apart" else (12, 6)  # of the samples, or of all
            angles = torch.rand(shape, generator=torch.Generator().manual_seed(4)) * 6
            tables = 1.1 * angles.cos(), 1.1 * angles.sin(), window is None
        attend, reference = partial(attend_joined, tables=tables), partial(attend_turned, tables=tables)
    compare(attend, window, scale, reference)
    torch.compiler.reset()
    compare(torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=False), window, scale, reference)


def attend_joined(q: Tensor, k: Tensor, v: Tensor, *, tables: Any, **options: Any) -> Tensor:
    return attend_flash_4_joined(torch.cat([part.transpose(1, 2) for part in (q, k, v)], dim=2), 2, tables, **options)


def attend_turned(q: Tensor, k: Tensor, v: Tensor, *, tables: Any, **options: Any) -> Tensor:
    if tables is not None:
        q, k = rotate_both(q, k, Rotary(*tables))
    return attend_math(q, k, v, **options)


def compare(attend: Any, window: int | None, scale: float | None, reference: Any = attend_math) -> None:
    """Result and gradients of an entry against attention written out."""
    outcomes = []
    for function in (reference, attend):
        q, k, v = make_heads()
        y = function(q, k, v, dropout=0.0, window=window, scale=scale)
        outcomes.append([y, *torch.autograd.grad(y, (q, k, v), torch.linspace(-1, 1, y.numel()).view_as(y))])
    for one, two in zip(*outcomes, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 5])
def test_flash_attn_2_is_called_as_it_asks(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        assert (causal, dropout_p) == (True, 0.0)
        assert window_size == ((-1, -1) if window is None else (4, 0))
        return attend_tokens_first(q, k, v, softmax_scale, window_size[0])

    install(monkeypatch, flash_attn__flash_attn_interface__flash_attn_func=forward)
    compare(attend_flash_2, window, 0.3)


@pytest.mark.parametrize("window, given", [(None, None), (5, None), (None, "1")])
def test_the_attention_of_transformer_engine_is_called_as_it_asks(
    window: int | None, given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_FLASH_ATTN_V4", given or "")
    if given is None:
        monkeypatch.delenv("NVTE_FLASH_ATTN_V4")

    class DotProductAttention:
        def __init__(
            self,
            num_attention_heads: int,
            kv_channels: int | tuple[int, int],
            num_gqa_groups: int | None = None,
            attention_dropout: float = 0.0,
            qkv_format: str = "sbhd",
            softmax_scale: float | None = None,
        ) -> None:
            assert (num_attention_heads, kv_channels, num_gqa_groups, qkv_format) == (4, 16, 2, "bshd")
            assert os.environ["NVTE_FLASH_ATTN_V4"] == (given or "0"), "its windows are not flash-attn 4's"
            self.scale = softmax_scale

        def __call__(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            qkv_format: str,
            attn_mask_type: str,
            window_size: tuple[int, int] | None = None,
        ) -> Tensor:
            assert attn_mask_type == "causal"
            assert window_size == (None if window is None else (4, 0))
            left = None if window_size is None else window_size[0]
            return attend_tokens_first(q, k, v, self.scale, left).flatten(2)

    attention_packages._make_engine.cache_clear()
    install(monkeypatch, transformer_engine__pytorch__DotProductAttention=DotProductAttention)
    compare(attend_engine, window, 0.3)
    attention_packages._make_engine.cache_clear()
