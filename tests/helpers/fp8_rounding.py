"""Rounding to fp8 by the kernel beside plain torch, on any device. As a script: on the CPU in Triton's interpreter.

The interpreter (3.6) does not carry into the exponent when it rounds to 8 bits, and makes numbers of what is none. So
there the kernel leaves float32, which torch rounds, and what it turns is compared with what it leaves.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megaflow_trainer.ops.fp8_cast import E4M3, E5M2, find_largest, narrow, turn

SHAPES = ((64, 64), (37, 50), (1, 16), (130, 33), (144, 80))
UNITS = (2.3, 1e-20, 1e30, float("inf"), float("nan"))
"""Times the format's largest number: the units."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def list_cases(device: torch.device) -> Iterator[tuple[str, Tensor, Tensor, torch.dtype]]:
    """Name, tensor, unit, format: all sizes and dtypes, with what is not a number, infinite or -0, and odd units."""
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        for form in (E4M3, E5M2):
            for shape in SHAPES:
                x = (torch.randn(shape, generator=generator) * 3).to(dtype)
                x[0, :3] = torch.tensor([-0.0, 0.0, 1e-30])
                special = x.clone()
                special[-1, -2], special[0, -1], special[-1, 0] = torch.nan, torch.inf, -torch.inf
                for unit in UNITS if shape == SHAPES[1] else UNITS[:1]:
                    for name, own in (("plain", x), ("special", special)):
                        label = f"{dtype} {form} {shape} {unit} {name}"
                        size = torch.tensor(unit, dtype=torch.float64) / torch.finfo(form).max
                        yield label, own.to(device), size.float().to(device), form


def is_same(found: Tensor, wanted: Tensor) -> bool:
    """Bit for bit; what is not a number may be any such."""
    gone = wanted.float().isnan()
    bits = torch.uint8 if found.element_size() == 1 else torch.int32
    return bool((found.float().isnan() == gone).all()) and bool((found.view(bits) == wanted.view(bits))[~gone].all())


def round_plainly(x: Tensor, unit: Tensor, form: torch.dtype, before: float) -> tuple[Tensor, Tensor, Tensor]:
    """What plain torch makes: as it lies, turned, the largest of all and of what was before."""
    plain = narrow(x, unit, form)
    return plain, turn(plain), torch.maximum(torch.tensor(before, device=x.device), find_largest(x))


def main() -> None:
    """Names of the cases in which something differs, by what does."""
    import triton.language as tl

    from megaflow_trainer.ops import fp8_kernel

    found: dict[str, list[str]] = {"plain": [], "turned": [], "largest": [], "sums": [], "alone": []}
    forms = dict(fp8_kernel.NUMBERS)
    num_cases = 0
    for name, x, unit, form in list_cases(torch.device("cpu")):
        num_cases += 1
        wanted, _, top = round_plainly(x, unit, form, 4.0)
        wide, largest = torch.empty(x.shape), torch.tensor(4.0)
        fp8_kernel.NUMBERS[form] = tl.float32
        fp8_kernel.round_to_fp8(x, unit, form, plain=wide, largest=largest, tile=(32, 32, 4))
        fp8_kernel.NUMBERS[form] = forms[form]
        plain = torch.empty(x.shape, dtype=form)
        turned, alone = (torch.empty(x.shape[1], x.shape[0] + -x.shape[0] % 16, dtype=form) for _ in range(2))
        sums = fp8_kernel.round_to_fp8(x, unit, form, plain=plain, turned=turned, has_sums=True, tile=(64, 32, 4))
        assert sums is not None
        fp8_kernel.round_to_fp8(x, unit, form, turned=alone, tile=(16, 64, 4))
        same = {"plain": is_same(wide.to(form), wanted), "largest": is_same(largest[None], top[None])}
        same |= {"turned": torch.equal(turned.view(torch.uint8), turn(plain).view(torch.uint8))}
        same |= {"sums": torch.allclose(sums, x.float().sum(0), atol=1e-5, equal_nan=True)}
        same |= {"alone": torch.equal(alone.view(torch.uint8), turned.view(torch.uint8))}
        for kind, is_equal in same.items():
            if not is_equal:
                found[kind].append(name)
    Path(sys.argv[1]).write_text(json.dumps({"num_cases": num_cases, "differ": found}), encoding="utf-8")


if __name__ == "__main__":
    main()
