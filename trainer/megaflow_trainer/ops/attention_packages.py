"""Attention by optional packages: flash-attn 4, flash-attn 2 and Transformer Engine.

They lie behind the same function as torch's kernels. flash-attn 4 is wrapped as an op with its backward, so that
compiled blocks stay whole; the others run outside of a compiled graph. Of heads that lie side by side, as one product
makes queries, keys and values, an op of its own writes the gradient as one tensor: joining three reads and writes each
once more.

Legend: b micro-batch, n query heads, g key/value heads, s sequence, d and e head dims.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megaflow.errors import first_line
from megaflow_trainer.ops.packages import ENGINE, FLASH_2, FLASH_4, Package
from megaflow_trainer.ops.registry import Entry, Need

_FLASH_4 = "flash_attn.cute.flash_attn_func"
_FLASH_4_BACKWARD = "flash_attn.cute.interface._flash_attn_bwd"
_FLASH_2 = "flash_attn.flash_attn_interface.flash_attn_func"
_ENGINE = "transformer_engine.pytorch.DotProductAttention"


def attend_flash_4(
    q: Tensor, k: Tensor, v: Tensor, *, dropout: float, window: int | None = None, scale: float | None = None
) -> Tensor:
    """Causal attention by flash-attn 4; arguments and result as in `ops.attention`, without dropout."""
    assert dropout == 0, "refused with the configuration"
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    left = -1 if window is None else window - 1
    out, _ = flash_4(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), factor, left)
    return out.transpose(1, 2)


def attend_flash_4_joined(
    heads: Tensor, groups: int, *, dropout: float, window: int | None = None, scale: float | None = None
) -> Tensor:
    """The same of heads `[b, s, n + 2 g, d]`, all queries, all keys and all values, to `[b, n, s, d]`."""
    assert dropout == 0, "refused with the configuration"
    factor = heads.shape[-1] ** -0.5 if scale is None else scale
    out, _ = flash_4_joined(heads, groups, factor, -1 if window is None else window - 1)
    return out.transpose(1, 2)


def _bounds(left: int) -> tuple[int | None, int | None]:
    """How many tokens before and behind it a token sees, None for all; `left` is -1 for all earlier ones."""
    return (None, None) if left < 0 else (left, 0)


@torch.library.custom_op("megaflow::flash_4", mutates_args=())
def flash_4(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int) -> tuple[Tensor, Tensor]:
    """`[b, s, n, d]`, `[b, s, g, d]`, `[b, s, g, e]` to `[b, s, n, e]` and the logarithms of the sums of exponentials,
    fp32 `[b, n, s]`. A token sees `left` earlier ones, or all if that is -1.
    """
    return _run_flash_4(q, k, v, scale, left)


def _run_flash_4(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int) -> tuple[Tensor, Tensor]:
    options = {"softmax_scale": scale, "causal": True, "window_size": _bounds(left), "return_lse": True}
    with _refusing(FLASH_4, q, k, v):
        out, lse = FLASH_4.load(_FLASH_4)(q, k, v, **options)[:2]
    return out.contiguous(), lse.contiguous()


_MET: set[object] = set()
"""Calls of packages that have been made: a first one compiles, and may warn."""


@contextmanager
def _refusing(package: Package, *tensors: Tensor) -> Iterator[None]:
    """Packages refuse shapes by assertions, ValueErrors or kinds of their own, torch's kernels by a RuntimeError: so do
    they here. One that is a RuntimeError already (out of memory) stays what it is. What they warn of, such as names
    that their own parts are to give up, when they compile for a shape, is not for who trains with them.
    """
    call = (package, *((x.shape, x.stride(), x.dtype) for x in tensors))
    try:
        with nullcontext() if call in _MET else warnings.catch_warnings():  # which makes others be said again
            if call not in _MET:
                warnings.simplefilter("ignore")
            yield
        _MET.add(call)
    except RuntimeError:
        raise
    except Exception as error:
        raise RuntimeError(f"{package.name}: {type(error).__name__}: {first_line(error)}") from error


@flash_4.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int) -> tuple[Tensor, Tensor]:
    b, s, n, _ = q.shape
    return q.new_empty(b, s, n, v.shape[-1]), q.new_empty(b, n, s, dtype=torch.float32)


@torch.library.custom_op("megaflow::flash_4_backward", mutates_args=())
def flash_4_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, left: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, without gaps and in the order of their dims."""
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))  # else they may lie as q does
    _run_flash_4_backward(grad, (q, k, v), (dq, dk, dv), out, lse, scale, left)
    return dq, dk, dv


def _run_flash_4_backward(
    grad: Tensor,
    parts: Sequence[Tensor],
    grads: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    scale: float,
    left: int,
) -> None:
    """Write the gradients of queries, keys and values, wherever they lie."""
    before, behind = _bounds(left)
    options = {"softmax_scale": scale, "causal": True, "window_size_left": before, "window_size_right": behind}
    made = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    with _refusing(FLASH_4, grad, *parts, *grads):
        FLASH_4.load(_FLASH_4_BACKWARD)(*parts, out, grad.contiguous(), lse, **options, **made)


@flash_4_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, left: int
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale, ctx.left = inputs
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    return (*flash_4_backward(grad, q, k, v, out, lse, ctx.scale, ctx.left), None, None)


flash_4.register_autograd(_backward, setup_context=_keep)


def _split(heads: Tensor, groups: int) -> tuple[Tensor, ...]:
    """Queries, keys and values of heads side by side."""
    return heads.split([heads.shape[2] - 2 * groups, groups, groups], dim=2)


@torch.library.custom_op("megaflow::flash_4_joined", mutates_args=())
def flash_4_joined(heads: Tensor, groups: int, scale: float, left: int) -> tuple[Tensor, Tensor]:
    """As `flash_4`, of heads `[b, s, n + 2 g, d]`."""
    q, k, v = _split(heads, groups)
    return _run_flash_4(q, k, v, scale, left)


@flash_4_joined.register_fake
def _(heads: Tensor, groups: int, scale: float, left: int) -> tuple[Tensor, Tensor]:
    b, s, n, d = heads.shape
    n -= 2 * groups
    return heads.new_empty(b, s, n, d), heads.new_empty(b, n, s, dtype=torch.float32)


@torch.library.custom_op("megaflow::flash_4_joined_backward", mutates_args=())
def flash_4_joined_backward(
    grad: Tensor, heads: Tensor, out: Tensor, lse: Tensor, groups: int, scale: float, left: int
) -> Tensor:
    """The gradient of the heads, `[b, s, n + 2 g, d]` without gaps."""
    made = heads.new_empty(heads.shape)
    _run_flash_4_backward(grad, _split(heads, groups), _split(made, groups), out, lse, scale, left)
    return made


@flash_4_joined_backward.register_fake
def _(grad: Tensor, heads: Tensor, out: Tensor, lse: Tensor, groups: int, scale: float, left: int) -> Tensor:
    return heads.new_empty(heads.shape)


def _keep_joined(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    heads, *ctx.options = inputs
    ctx.save_for_backward(heads, *output)


def _backward_joined(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return flash_4_joined_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None


flash_4_joined.register_autograd(_backward_joined, setup_context=_keep_joined)


@torch.compiler.disable
def attend_flash_2(
    q: Tensor, k: Tensor, v: Tensor, *, dropout: float, window: int | None = None, scale: float | None = None
) -> Tensor:
    """Causal attention by flash-attn 2; arguments and result as in `ops.attention`."""
    left = -1 if window is None else window - 1
    parts = (part.transpose(1, 2) for part in (q, k, v))
    options = {"causal": True, "window_size": (left, -1 if left < 0 else 0)}
    with _refusing(FLASH_2, q, k, v):
        out: Tensor = FLASH_2.load(_FLASH_2)(*parts, dropout_p=dropout, softmax_scale=scale, **options)
    return out.transpose(1, 2)


@torch.compiler.disable
def attend_engine(
    q: Tensor, k: Tensor, v: Tensor, *, dropout: float, window: int | None = None, scale: float | None = None
) -> Tensor:
    """Causal attention as Transformer Engine picks a kernel for it; arguments and result as in `ops.attention`, without
    dropout.
    """
    assert dropout == 0, "refused with the configuration"
    parts = (part.transpose(1, 2).contiguous() for part in (q, k, v))
    reach = {} if window is None else {"window_size": (window - 1, 0)}
    with _refusing(ENGINE, q, k, v):
        core = _make_engine(q.shape[1], k.shape[1], q.shape[-1], v.shape[-1], scale)
        out: Tensor = core(*parts, qkv_format="bshd", attn_mask_type="causal", **reach)  # [b, s, n e]
    return out.view(q.shape[0], q.shape[2], q.shape[1], -1).transpose(1, 2)


@functools.cache
def _make_engine(heads: int, groups: int, width: int, value_width: int, scale: float | None) -> Any:
    """The module of one shape of heads; it has no weights.

    It may not take flash-attn 4: Transformer Engine 2.20 tells that (-1, 0) for "no window", and flash-attn 4.0.0b36
    takes it for a window without tokens, so that the result has nothing to do with attention. `NVTE_FLASH_ATTN_V4=1`
    in the environment lets it, for releases that understand each other.
    """
    os.environ.setdefault("NVTE_FLASH_ATTN_V4", "0")
    widths = width if width == value_width else (width, value_width)
    make = ENGINE.load(_ENGINE)
    return make(heads, widths, num_gqa_groups=groups, attention_dropout=0.0, qkv_format="bshd", softmax_scale=scale)


def _find_obstacle(need: Need, package: Package, *paths: str, least: tuple[int, int], widest: int) -> str | None:
    """What a kernel of a package lacks for a need: the device first, then the package, then the shape."""
    if need.device.type != "cuda":
        return f"{package.name} needs a CUDA GPU and this machine's device is {need.device.type}"
    if torch.cuda.get_device_capability(need.device) < least:
        name = torch.cuda.get_device_name(need.device)
        return f"{package.name} needs compute capability {least[0]}.{least[1]}, {name} has less"
    if need.dtype not in (torch.bfloat16, torch.float16):
        return f"{package.name} needs 16-bit weights, and without --bf16 they are fp32"
    if need.has_documents:
        return f"{package.name} is not told of bounds between documents (--reset-attention-mask)"
    for width in (need.head_dim, need.value_dim or need.head_dim):
        if width > widest or width % 8:
            return f"{package.name} takes heads up to {widest} wide in steps of 8, and these are {width}"
    return package.find_obstacle(*paths)


def _flash_4_obstacle(need: Need) -> str | None:
    if need.has_dropout:
        return "flash-attn-4 has no dropout (--attention-dropout 0)"
    is_blackwell = need.device.type == "cuda" and torch.cuda.get_device_capability(need.device) >= (10, 0)
    widest = 128 if is_blackwell else 256
    return _find_obstacle(need, FLASH_4, _FLASH_4, _FLASH_4_BACKWARD, least=(9, 0), widest=widest)


def _flash_2_obstacle(need: Need) -> str | None:
    if need.value_dim not in (None, need.head_dim):
        return f"flash-attn 2 takes values as wide as keys, and these are {need.value_dim} and {need.head_dim}"
    return _find_obstacle(need, FLASH_2, _FLASH_2, least=(8, 0), widest=256)


def _engine_obstacle(need: Need) -> str | None:
    if need.has_dropout:
        return "Transformer Engine's attention is used without dropout here (--attention-dropout 0)"
    return _find_obstacle(need, ENGINE, _ENGINE, least=(8, 0), widest=256)


PACKAGES: tuple[Entry, ...] = (
    Entry(
        name="flash_attn_4",
        function=attend_flash_4,
        joined=attend_flash_4_joined,
        obstacle=_flash_4_obstacle,
        package=FLASH_4.name,
    ),
    Entry(
        name="flash_attn_2",
        function=attend_flash_2,
        obstacle=_flash_2_obstacle,
        package=FLASH_2.name,
        is_timed=False,
        is_traceable=False,
    ),
    Entry(
        name="transformer_engine",
        function=attend_engine,
        obstacle=_engine_obstacle,
        package=ENGINE.name,
        is_timed=False,
        is_traceable=False,
    ),
)
