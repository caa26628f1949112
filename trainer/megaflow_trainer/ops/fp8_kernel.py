"""Rounding to fp8 in one pass over memory, as a tensor lies and turned: a Triton kernel. Imported where used only.

A program takes a tile of `[t, n]`. It reads it row by row, writes it row by row, and writes it column by column, where
four tokens of a column are one word of 32 bits: a thread holds them already, so that only words change places. All
accesses are 16 bytes wide where n is a multiple of 16 (`tests/unit/trainer/test_fp8_cast.py` looks).

Bytes an element of 16 bits: 2 read, 1 written each way: 4. Instructions an element: 12 to 18 on Hopper, of some 29 that
there is time for at 4 TB/s; a division alone would take 10 more, and branch.

x / unit is the rounded quotient, as torch divides. For 16-bit x it is x * (1 / unit) with one correction,
q + (x - q unit) (1 / unit), which costs a third of a division. That this is the same number was tried for all 2^23
fractions of a unit with all of bf16 and of fp16 (9.7e9 quotients; without the correction 27 % of those of bf16 differ,
and 1e-6 would be rounded to another number of 8 bits). It needs units of at least 2^-80, and at most the largest
float32 over the format's largest number; an infinite one gives 0, and not a number where x is infinite too, as a
division does.

Legend: t tokens, n columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = (128, 64, 4)
"""Tokens and columns of a program, and its warps: 64 elements a thread, in 128 registers or less, so that four programs
share a multiprocessor and some read while others write. `benches/gpu/fp8_cast.py` times others.
"""
NUMBERS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
"""Triton's names of the formats."""

_TO_WORD = (
    "{{ .reg .b16 low, high; cvt.rn.satfinite.{0}.f32 low, $2, $1; cvt.rn.satfinite.{0}.f32 high, $4, $3; "
    "mov.b32 $0, {{low, high}}; }}"
)
_TO_E4M3, _TO_E5M2 = tl.constexpr(_TO_WORD.format("e4m3x2")), tl.constexpr(_TO_WORD.format("e5m2x2"))


@triton.jit
def _divide(x: tl.tensor, unit: tl.tensor, LARGEST: tl.constexpr, IS_NARROW: tl.constexpr) -> tl.tensor:
    """`x / unit`, rounded to the nearest float32; of what is beyond the format's largest number, some larger one."""
    if IS_NARROW:
        part = tl.minimum(tl.div_rn(1.0, unit), 3.0e38, propagate_nan=tl.PropagateNan.ALL)  # 0 times it is to be 0
        whole = tl.where(unit == float("inf"), 0.0, unit)
        q = tl.clamp(x * part, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        # That is finite, which the correction needs. Its signs let -0 stay -0: -(x - q unit), and minus that.
        q = tl.fma(tl.fma(q, whole, x * -1.0), part * -1.0, q)
    else:
        q = tl.div_rn(x, unit)
    return q


@triton.jit
def _load(x: tl.tensor, at: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """One of four rows that follow each other, of every word of a tile, in float32."""
    return tl.load(x + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _round(  # noqa: PLR0913  # what a kernel needs
    value: tl.tensor,
    unit: tl.tensor,
    plain: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    NUMBER: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_NARROW: tl.constexpr,
    IS_RAGGED: tl.constexpr,
) -> tl.tensor:
    """`value / unit` in the format's range, float32; stored rounded where that is wanted."""
    q = tl.clamp(_divide(value, unit, LARGEST, IS_NARROW), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if IS_RAGGED:
        q = tl.where(mask, q, 0.0)  # 0 / unit is not a number where the unit is none
    if plain is not None:
        tl.store(plain + at, q.to(NUMBER), mask=mask)
    return q


@triton.jit
def _make_words(
    q_0: tl.tensor, q_1: tl.tensor, q_2: tl.tensor, q_3: tl.tensor, NUMBER: tl.constexpr, BY_ASSEMBLER: tl.constexpr
) -> tl.tensor:
    """Four numbers, rounded, in one word, the first in its lowest byte.

    Converted once more, straight to words. Words made of the bytes that `plain` got are what the assembler of CUDA 12.8
    and 12.9 makes wrong: it joins two conversions to one word, loses one half of it, which the other words still need,
    and says nothing (triton-lang/triton issue 11111; every other pair of bytes was the stack's address).
    """
    if BY_ASSEMBLER:
        words = tl.inline_asm_elementwise(
            _TO_E5M2 if tl.float8e5 == NUMBER else _TO_E4M3,
            "=r,f,f,f,f",
            [q_0, q_1, q_2, q_3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        words = q_0.to(NUMBER).to(tl.uint8, bitcast=True).to(tl.int32)
        words |= q_1.to(NUMBER).to(tl.uint8, bitcast=True).to(tl.int32) << 8
        words |= q_2.to(NUMBER).to(tl.uint8, bitcast=True).to(tl.int32) << 16
        words |= q_3.to(NUMBER).to(tl.uint8, bitcast=True).to(tl.int32) << 24
    return words


@triton.jit
def _find_bits(value: tl.tensor) -> tl.tensor:
    """Of |value|, as whole numbers in the same order."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def round_tile(  # noqa: PLR0913  # what a kernel needs
    x: tl.tensor,
    unit: tl.tensor,
    plain: tl.tensor,
    turned: tl.tensor,
    largest: tl.tensor,
    sums: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    num_padded: tl.tensor,
    NUMBER: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_NARROW: tl.constexpr,
    IS_RAGGED: tl.constexpr,
    BY_ASSEMBLER: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Round a tile of `x / unit`.

    Args:
        x: `[t, n]`, float32, bfloat16 or float16.
        unit: float32 scalar.
        plain: fp8 `[t, n]`, or None where it is not wanted.
        turned: words of four fp8 numbers, int32 `[n, padded t / 4]`, or None.
        largest: float32 scalar, at least 0, that becomes the largest |x| if that is larger, and not a number if any x
            is not; or None. Floats of one sign are ordered as their bits are, not-a-number last.
        sums: float32 `[tiles over t, n]`, sums of x over the tokens of a tile, or None.
        num_rows: t.
        num_columns: n.
        num_padded: tokens of `turned`, a multiple of 16; those beyond t are 0.
        NUMBER: the format.
        LARGEST: its largest number.
        IS_NARROW: whether x is of 16 bits.
        IS_RAGGED: whether tokens are filled up.
        BY_ASSEMBLER: whether words are made by an instruction of the GPU, which Triton's interpreter does not know.
        TOKENS: of a tile.
        COLUMNS: of a tile.
    """
    across = tl.cdiv(num_columns, COLUMNS)
    word = tl.program_id(0) // across * (TOKENS // 4) + tl.arange(0, TOKENS // 4)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    row, is_in = word[:, None] * 4, (column < num_columns)[None, :]
    at_0 = row.to(tl.int64) * num_columns + column[None, :]
    at_1, at_2, at_3 = at_0 + num_columns, at_0 + 2 * num_columns, at_0 + 3 * num_columns
    mask_0, mask_1 = (row < num_rows) & is_in, (row + 1 < num_rows) & is_in
    mask_2, mask_3 = (row + 2 < num_rows) & is_in, (row + 3 < num_rows) & is_in
    x_0, x_1 = _load(x, at_0, mask_0), _load(x, at_1, mask_1)
    x_2, x_3 = _load(x, at_2, mask_2), _load(x, at_3, mask_3)
    if largest is not None:
        bits = tl.maximum(tl.maximum(_find_bits(x_0), _find_bits(x_1)), tl.maximum(_find_bits(x_2), _find_bits(x_3)))
        tl.atomic_max(largest.to(tl.pointer_type(tl.int32), bitcast=True), tl.max(bits), sem="relaxed")
    if sums is not None:
        of_tile = tl.sum((x_0 + x_1) + (x_2 + x_3), axis=0)
        tl.store(sums + (tl.program_id(0) // across).to(tl.int64) * num_columns + column, of_tile, column < num_columns)
    size = tl.load(unit)
    q_0 = _round(x_0, size, plain, at_0, mask_0, NUMBER, LARGEST, IS_NARROW, IS_RAGGED)
    q_1 = _round(x_1, size, plain, at_1, mask_1, NUMBER, LARGEST, IS_NARROW, IS_RAGGED)
    q_2 = _round(x_2, size, plain, at_2, mask_2, NUMBER, LARGEST, IS_NARROW, IS_RAGGED)
    q_3 = _round(x_3, size, plain, at_3, mask_3, NUMBER, LARGEST, IS_NARROW, IS_RAGGED)
    if turned is not None:
        words = tl.trans(_make_words(q_0, q_1, q_2, q_3, NUMBER, BY_ASSEMBLER))
        num_words = num_padded // 4
        own = (column < num_columns)[:, None] & (word < num_words)[None, :]
        tl.store(turned + column[:, None].to(tl.int64) * num_words + word[None, :], words, mask=own)


def round_to_fp8(
    x: Tensor,
    unit: Tensor,
    dtype: torch.dtype,
    *,
    plain: Tensor | None = None,
    turned: Tensor | None = None,
    largest: Tensor | None = None,
    has_sums: bool = False,
    tile: tuple[int, int, int] = TILE,
) -> Tensor | None:
    """Launch the kernel on the process's current GPU.

    Args:
        x: `[t, n]` without gaps: float32, bfloat16 or float16.
        unit: what 1 stands for in fp8, float32 scalar.
        dtype: e4m3 or e5m2.
        plain: `[t, n]` to be filled, if wanted.
        turned: `[n, t]` to be filled, if wanted, its t filled up with zeros to a multiple of 16.
        largest: float32 scalar, the largest |x| so far, if that is to be kept.
        has_sums: whether sums of x over the tokens are wanted.
        tile: tokens, columns and warps of a program.

    Returns:
        The sums, float32 `[n]`, added in the same order every time, if wanted.
    """
    t, n = x.shape
    tokens, columns, num_warps = tile
    num_padded = -(-t // 16) * 16
    num_tiles = triton.cdiv(num_padded, tokens)
    sums = torch.empty(num_tiles, n, dtype=torch.float32, device=x.device) if has_sums else None
    if not x.numel():
        return None if sums is None else sums.sum(0)
    round_tile[(num_tiles * triton.cdiv(n, columns),)](
        x,
        unit,
        plain,
        None if turned is None else turned.view(torch.int32),
        largest,
        sums,
        t,
        n,
        num_padded,
        NUMBER=NUMBERS[dtype],
        LARGEST=torch.finfo(dtype).max,
        IS_NARROW=x.element_size() == 2,
        IS_RAGGED=num_padded != t,
        BY_ASSEMBLER=not triton.knobs.runtime.interpret,
        TOKENS=tokens,
        COLUMNS=columns,
        num_warps=num_warps,
    )
    return None if sums is None else sums.sum(0)
