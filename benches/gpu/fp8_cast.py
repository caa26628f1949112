#!/usr/bin/env python3
"""Rounding of bf16 to fp8, as it lies and turned, on a GPU: the kernel with several tiles against torch compiled.

    python3 benches/gpu/fp8_cast.py

Prints milliseconds and GB/s by bytes that must move: 2 read and 2 written an element. A copy (2 read, 2 written) shows
what the memory gives; largest values (2 read) are what scales from the tensors themselves add. Medians; half a minute.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from pathlib import Path
from typing import Any

import torch
from timing import need_gpu, show, time_ms
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "trainer"), str(ROOT / "python")]

from megaflow_trainer.ops.fp8_cast import E5M2, find_largest, narrow, turn  # noqa: E402
from megaflow_trainer.ops.fp8_kernel import TILE, round_to_fp8  # noqa: E402

SHAPES = ((32768, 2048), (32768, 8192), (8192, 11008))
TILES = ((128, 64, 4), (128, 128, 4), (128, 128, 8), (256, 64, 4), (256, 64, 8), (256, 128, 8), (64, 128, 4))
"""Tokens, columns, warps."""


def round_both(x: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    plain = narrow(x, unit, E5M2)
    return plain, turn(plain)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.parse_args()
    device = need_gpu()
    start = time.perf_counter()
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}; tile in use {TILE}")
    compiled, compiled_largest = (torch.compile(function, dynamic=False) for function in (round_both, find_largest))
    for shape in SHAPES:
        x = torch.randn(shape, device=device, dtype=torch.bfloat16)
        unit, largest = torch.tensor(1e-4, device=device), torch.zeros((), device=device)
        plain = torch.empty(shape, device=device, dtype=E5M2)
        turned = torch.empty(shape[::-1], device=device, dtype=E5M2)
        both: dict[str, Any] = {"plain": plain, "turned": turned}
        wanted = dict(zip(("plain", "turned"), round_both(x, unit), strict=True))
        print(f"{shape}", flush=True)
        copy = torch.empty_like(x)
        show("copy", time_ms(lambda x=x, copy=copy: copy.copy_(x)), 4 * x.numel())
        show("torch, compiled", time_ms(lambda x=x, unit=unit: compiled(x, unit)), 4 * x.numel())
        show("largest, compiled", time_ms(lambda x=x: compiled_largest(x)), 2 * x.numel())
        for tile in TILES:
            for name, given, item in (
                ("both", both, 4),
                ("both, sums", {**both, "has_sums": True}, 4),
                ("both, largest", {**both, "largest": largest}, 4),
                ("turned alone", {"turned": turned}, 3),
            ):
                if name in ("both", "both, sums") or tile == TILE:
                    work = functools.partial(round_to_fp8, x, unit, E5M2, tile=tile, **given)
                    show(f"kernel {tile}, {name}", time_ms(work), item * x.numel())
                    pairs = [(wanted[key], given[key]) for key in wanted if key in given]
                    if not all(torch.equal(own.view(torch.uint8), found.view(torch.uint8)) for own, found in pairs):
                        raise SystemExit("the kernel rounds otherwise than torch")
                    for _, found in pairs:
                        found.view(torch.uint8).zero_()
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
