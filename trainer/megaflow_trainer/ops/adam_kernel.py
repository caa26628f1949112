"""AdamW in one pass over memory, for any number of tensors at once: a Triton kernel. Imported where it is used only.

A program takes one chunk of one tensor. Which one, a table in the device's memory says: tensors keep their own places,
so whole weights, ZeRO's runs of flat buffers and FSDP's rows are all served by one launch a combination of dtypes.

Bytes an element (fp32 gradient, master and moments, bf16 weight): 4 of the gradient, 8 each of master and moments, 2 of
the weight: 30. Scaling, torch's fused step and a copy, one after another, move 8 + 28 + 6 = 42.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 16384
"""Elements of a program, in blocks of `BLOCK`."""
BLOCK = 1024


@triton.jit
def _move_block(  # noqa: PLR0913  # what a kernel needs
    places: tl.tuple,
    at: tl.tensor,
    mask: tl.tensor,
    factor: tl.tensor,
    rates: tl.tuple,
    gain_1: tl.tensor,
    gain_2: tl.tensor,
    eps: tl.tensor,
    WEIGHT: tl.constexpr,
) -> None:
    """Read, move and write one block; masters and moments are rounded to what they are stored as."""
    w_place, g_place, m_place, v_place, weight_place = places
    keep, size, lift = rates
    w = tl.load(w_place + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_place + at, mask=mask, other=0.0).to(tl.float32) * factor
    m = tl.load(m_place + at, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(v_place + at, mask=mask, other=0.0).to(tl.float32)
    m += (g - m) * gain_1
    v += (g * g - v) * gain_2
    w = w * keep - size * tl.div_rn(m, tl.sqrt_rn(v) * lift + eps)
    tl.store(m_place + at, m.to(m_place.dtype.element_ty), mask=mask)
    tl.store(v_place + at, v.to(v_place.dtype.element_ty), mask=mask)
    tl.store(w_place + at, w.to(w_place.dtype.element_ty), mask=mask)
    if WEIGHT is not None:
        tl.store(weight_place + at, w.to(WEIGHT), mask=mask)


@triton.jit
def move_adam(  # noqa: PLR0913  # what a kernel needs
    chunks: tl.tensor,
    places: tl.tensor,
    lengths: tl.tensor,
    rates: tl.tensor,
    factor: tl.tensor,
    skip: tl.tensor,
    gain_1: tl.tensor,
    gain_2: tl.tensor,
    eps: tl.tensor,
    MASTER: tl.constexpr,
    GRAD: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    WEIGHT: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Move a chunk: m += (g - m) gain_1, v += (g^2 - v) gain_2, w = w keep - size m / (sqrt(v) lift + eps).

    Args:
        chunks: int32 `[programs, 2]`: number of the tensor, number of the chunk in it.
        places: int64 `[tensors, 5]`: addresses of master, gradient, first and second moment, weight.
        lengths: int64 `[tensors]`, elements.
        rates: float32 `[tensors, 3]`: keep, size, lift.
        factor: float32 scalar, what gradients are multiplied by.
        skip: float32 scalar; where it is not 0 nothing is changed.
        gain_1: 1 - beta 1.
        gain_2: 1 - beta 2.
        eps: added to the root.
        MASTER: dtype of masters.
        GRAD: dtype of gradients.
        FIRST: dtype of first moments.
        SECOND: dtype of second moments.
        WEIGHT: dtype of weights; None where the weight is the master.
        IS_ALIGNED: whether all addresses are multiples of 16.
        CHUNK: elements of a program.
        BLOCK: elements that are moved at once.
    """
    if tl.load(skip) == 0.0:
        number = tl.load(chunks + 2 * tl.program_id(0)).to(tl.int64)
        start = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
        length = tl.load(lengths + number)
        w_place = tl.load(places + 5 * number).to(tl.pointer_type(MASTER))
        g_place = tl.load(places + 5 * number + 1).to(tl.pointer_type(GRAD))
        m_place = tl.load(places + 5 * number + 2).to(tl.pointer_type(FIRST))
        v_place = tl.load(places + 5 * number + 3).to(tl.pointer_type(SECOND))
        weight_place = tl.load(places + 5 * number + 4).to(tl.pointer_type(MASTER if WEIGHT is None else WEIGHT))
        if IS_ALIGNED:
            w_place, g_place = tl.multiple_of(w_place, 16), tl.multiple_of(g_place, 16)
            m_place, v_place = tl.multiple_of(m_place, 16), tl.multiple_of(v_place, 16)
            weight_place = tl.multiple_of(weight_place, 16)
        own = (w_place, g_place, m_place, v_place, weight_place)
        rate = (tl.load(rates + 3 * number), tl.load(rates + 3 * number + 1), tl.load(rates + 3 * number + 2))
        scale = tl.load(factor)
        if start + CHUNK <= length:  # whole: a mask that the compiler cannot see through would make accesses narrow
            every = tl.full([BLOCK], 1, tl.int1)
            for first in range(0, CHUNK, BLOCK):
                at = start + first + tl.arange(0, BLOCK)
                _move_block(own, at, every, scale, rate, gain_1, gain_2, eps, WEIGHT)
        else:
            for first in range(0, CHUNK, BLOCK):
                at = start + first + tl.arange(0, BLOCK)
                _move_block(own, at, at < length, scale, rate, gain_1, gain_2, eps, WEIGHT)
