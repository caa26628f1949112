"""Attention by optional packages: flash-attn 4, flash-attn 2 and Transformer Engine.

They lie behind the same function as torch's kernels. flash-attn 4 (`flash_4.py`) can be part of a compiled graph, the
others run outside of it.

Legend: b micro-batch, n query heads, g key/value heads, s sequence, d and e head dims.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megaflow_trainer.ops.flash_4 import BACKWARD, FORWARD, attend_flash_4, attend_flash_4_joined
from megaflow_trainer.ops.packages import ENGINE, FLASH_2, FLASH_4, Package, refusing
from megaflow_trainer.ops.registry import Entry, Need

_FLASH_2 = "flash_attn.flash_attn_interface.flash_attn_func"
_ENGINE = "transformer_engine.pytorch.DotProductAttention"


@torch.compiler.disable
def attend_flash_2(
    q: Tensor, k: Tensor, v: Tensor, *, dropout: float, window: int | None = None, scale: float | None = None
) -> Tensor:
    """Causal attention by flash-attn 2; arguments and result as in `ops.attention`."""
    left = -1 if window is None else window - 1
    parts = (part.transpose(1, 2) for part in (q, k, v))
    options = {"causal": True, "window_size": (left, -1 if left < 0 else 0)}
    with refusing(FLASH_2, q, k, v):
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
    with refusing(ENGINE, q, k, v):
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


def _find_obstacle(
    need: Need, package: Package, *paths: str, least: tuple[int, int], widest: int, own: Sequence[str | None] = ()
) -> str | None:
    """All that a kernel of a package lacks for a need: the device first, then what is its own, dtype and shape; if
    there is nothing of that, what keeps the package from loading.
    """
    lacks = [_find_lack_of_device(need.device, least), *own]
    if need.dtype not in (torch.bfloat16, torch.float16):
        lacks.append("needs 16-bit weights, and without --bf16 they are fp32")
    if need.has_documents:
        lacks.append("is not told of bounds between documents (--reset-attention-mask)")
    for width in dict.fromkeys((need.head_dim, need.value_dim or need.head_dim)):
        if width > widest or width % 8:
            lacks.append(f"takes heads up to {widest} wide in steps of 8, and these are {width}")
    found = [lack for lack in lacks if lack is not None]
    return f"{package.name} {'; it '.join(found)}" if found else package.find_obstacle(*paths)


def _find_lack_of_device(device: torch.device, least: tuple[int, int]) -> str | None:
    if device.type != "cuda":
        return f"needs a CUDA GPU and this machine's device is {device.type}"
    if torch.cuda.get_device_capability(device) < least:
        return f"needs compute capability {least[0]}.{least[1]}, {torch.cuda.get_device_name(device)} has less"
    return None


def _flash_4_obstacle(need: Need) -> str | None:
    own = ["has no dropout (--attention-dropout 0)" if need.has_dropout else None]
    is_blackwell = need.device.type == "cuda" and torch.cuda.get_device_capability(need.device) >= (10, 0)
    widest = 128 if is_blackwell else 256
    return _find_obstacle(need, FLASH_4, FORWARD, BACKWARD, least=(9, 0), widest=widest, own=own)


def _flash_2_obstacle(need: Need) -> str | None:
    is_even = need.value_dim in (None, need.head_dim)
    own = None if is_even else f"takes values as wide as keys, and these are {need.value_dim} and {need.head_dim}"
    return _find_obstacle(need, FLASH_2, _FLASH_2, least=(8, 0), widest=256, own=[own])


def _engine_obstacle(need: Need) -> str | None:
    own = ["is used without dropout here (--attention-dropout 0)" if need.has_dropout else None]
    return _find_obstacle(need, ENGINE, _ENGINE, least=(8, 0), widest=256, own=own)


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
