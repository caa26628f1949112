"""Tensors to 8 bits: rounded in units, as they lie and turned, by plain torch or in one pass of a kernel.

On a GPU the ops here are a kernel (`ops/fp8_kernel.py`) which reads a tensor once and writes it both ways; elsewhere,
and where it cannot be made, they are plain torch, bit for bit the same but for sums, which are added in another order.
To the compiler they are opaque: what they read is written once, in its own dtype, instead of being computed again for
each of their results.

Legend: t tokens, n columns.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megaflow_trainer.ops.trial import try_kernel

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""What the kernels of products ask dims of weights, and the dim that is summed over, to be a multiple of."""


def find_largest(x: Tensor, dim: int | None = None) -> Tensor:
    """Largest |x|, fp32: a scalar, or along `dim`, which stays.

    The scalar is found row by row, as norms and what follows products are made, so that the compiler can find the
    largest values of rows in the pass that makes them.
    """
    magnitude = x.abs()
    if dim is not None:
        return magnitude.amax(dim, keepdim=True).float()
    return magnitude.amax(-1).amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)


def narrow(x: Tensor, unit: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in units, rounded, row by row in memory; what is larger than the format's largest number becomes that."""
    largest = torch.finfo(dtype).max
    return (x.float() / unit).clamp(-largest, largest).to(dtype).contiguous()


def turn(x: Tensor) -> Tensor:
    """fp8 `[t, n]` to `[n, t]`, with zeros behind the last token up to a multiple of what kernels ask for."""
    missing = -x.shape[0] % MULTIPLE
    if missing:
        x = F.pad(x.view(torch.uint8), (0, 0, 0, missing)).view(x.dtype)
    return x.t().clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("megaflow::keep_largest_", mutates_args={"largest"})
def keep_largest_(largest: Tensor, found: Tensor) -> None:
    """`largest = max(largest, found)`, scalars; not a number if either is."""
    torch.maximum(largest, found, out=largest)


@keep_largest_.register_fake
def _(largest: Tensor, found: Tensor) -> None:
    return None


@torch.library.custom_op("megaflow::narrow_both", mutates_args=())
def narrow_both(x: Tensor, unit: Tensor, dtype: torch.dtype, has_sums: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """`[t, n]` rounded as `narrow` does, the same turned as `turn` does, and sums over the tokens.

    Sums are of `x` itself, added in fp32, in its dtype, `[n]`; empty where they are not wanted.
    """
    return _round_both(x, unit, None, dtype, has_sums)


@torch.library.custom_op("megaflow::narrow_both_", mutates_args={"largest"})
def narrow_both_(
    x: Tensor, unit: Tensor, largest: Tensor, dtype: torch.dtype, has_sums: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """As `narrow_both`; `largest` becomes the largest |x| if that is larger, or if any x is not a number."""
    return _round_both(x, unit, largest, dtype, has_sums)


@torch.library.custom_op("megaflow::narrow_", mutates_args={"largest"})
def narrow_(x: Tensor, unit: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """As `narrow_both_`, without the turned one."""
    run = _find_kernel(x, dtype, ("plain", "largest"))
    if run is None:
        keep_largest_(largest, find_largest(x))
        return narrow(x, unit, dtype)
    plain = _make_plain(x, dtype)
    run(x.contiguous(), unit, dtype, plain=plain, largest=largest)
    return plain


@torch.library.custom_op("megaflow::narrow_turned", mutates_args=())
def narrow_turned(x: Tensor, unit: Tensor, dtype: torch.dtype) -> Tensor:
    """As `narrow_both`, only the turned one."""
    run = _find_kernel(x, dtype, ("turned",))
    if run is None:
        return turn(narrow(x, unit, dtype))
    turned = _make_turned(x, dtype)
    run(x.contiguous(), unit, dtype, turned=turned)
    return turned


@narrow_both.register_fake
def _(x: Tensor, unit: Tensor, dtype: torch.dtype, has_sums: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    return _make_plain(x, dtype), _make_turned(x, dtype), x.new_empty(x.shape[1] if has_sums else 0)


@narrow_both_.register_fake
def _(
    x: Tensor, unit: Tensor, largest: Tensor, dtype: torch.dtype, has_sums: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    return _make_plain(x, dtype), _make_turned(x, dtype), x.new_empty(x.shape[1] if has_sums else 0)


@narrow_.register_fake
def _(x: Tensor, unit: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    return _make_plain(x, dtype)


@narrow_turned.register_fake
def _(x: Tensor, unit: Tensor, dtype: torch.dtype) -> Tensor:
    return _make_turned(x, dtype)


def _round_both(
    x: Tensor, unit: Tensor, largest: Tensor | None, dtype: torch.dtype, has_sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    names = ("plain", "turned", *(("largest",) if largest is not None else ()), *(("sums",) if has_sums else ()))
    run = _find_kernel(x, dtype, names)
    if run is None:
        if largest is not None:
            keep_largest_(largest, find_largest(x))
        plain = narrow(x, unit, dtype)
        return plain, turn(plain), x.sum(0) if has_sums else x.new_empty(0)
    plain, turned = _make_plain(x, dtype), _make_turned(x, dtype)
    sums = run(x.contiguous(), unit, dtype, plain=plain, turned=turned, largest=largest, has_sums=has_sums)
    return plain, turned, x.new_empty(0) if sums is None else sums.to(x.dtype)


def _make_plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _make_turned(x: Tensor, dtype: torch.dtype) -> Tensor:
    t, n = x.shape
    return x.new_empty((n, t + -t % MULTIPLE), dtype=dtype)


def _find_kernel(x: Tensor, form: torch.dtype, names: tuple[str, ...]) -> Callable[..., Tensor | None] | None:
    """What rounds in one pass and gives the results that are named, or None where that cannot be."""
    is_known = x.is_cuda and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    shape = tuple(_SAMPLE[0] if size % MULTIPLE == 0 else _SAMPLE[1] for size in x.shape)
    return _make_kernel(x.device, x.dtype, form, (names, shape)) if is_known else None


_SAMPLE = (144, 77)
"""Of what is compared, for sizes that are a multiple of 16 and for others, since Triton makes a kernel for each."""


@functools.cache
def _make_kernel(
    device: torch.device, dtype: torch.dtype, form: torch.dtype, wanted: tuple[tuple[str, ...], tuple[int, ...]]
) -> Callable[..., Tensor | None] | None:
    """The kernel, tried once for each dtype, format, set of results and kind of shape: it serves where its bits are
    those of plain torch.
    """
    if torch.cuda.get_device_capability(device) < (8, 9):
        return None

    def make() -> tuple[Callable[..., Tensor | None], list[str]]:
        from megaflow_trainer.ops.fp8_kernel import round_to_fp8

        return round_to_fp8, _compare(round_to_fp8, device, dtype, form, *wanted)

    found, why = try_kernel(make)
    if found is None:
        _tell(f"a kernel could not be made: {why}")
        return None
    run, wrong = found
    if not wrong:
        return run
    _tell(f"the kernel that this version of Triton makes gives wrong results ({', '.join(wrong)}, in {form})")
    return None


def _tell(why: str) -> None:
    warnings.warn(f"tensors are rounded to fp8 in several passes, since {why}", stacklevel=3)


def _compare(
    run: Callable[..., Tensor | None],
    device: torch.device,
    dtype: torch.dtype,
    form: torch.dtype,
    names: tuple[str, ...],
    shape: tuple[int, ...],
) -> list[str]:
    """Which of the results are not those of plain torch: compilers have been seen to lose bytes."""
    x = torch.linspace(-300, 300, math.prod(shape), device=device).sin().view(shape).to(dtype)
    unit = torch.full((), 0.9 / torch.finfo(form).max, device=device)
    plain = narrow(x, unit, form)
    own = {"plain": _make_plain(x, form), "turned": _make_turned(x, form), "largest": unit.new_zeros(())}
    given = {name: own[name] for name in names if name != "sums"}
    sums = run(x, unit, form, has_sums="sums" in names, **given)
    same = {"largest": bool(own["largest"] == find_largest(x))}
    same["plain"] = torch.equal(own["plain"].view(torch.uint8), plain.view(torch.uint8))
    same["turned"] = torch.equal(own["turned"].view(torch.uint8), turn(plain).view(torch.uint8))
    same["sums"] = sums is not None and torch.allclose(sums, x.float().sum(0), atol=1e-3)
    return [name for name in names if not same[name]]
