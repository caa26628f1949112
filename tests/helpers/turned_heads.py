"""Gradients of rotated heads turned back by the kernel beside plain torch, on any device. As a script: on a CPU, by
interpretation.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megaflow_trainer.ops.rotation import turn_back_plainly

SHAPES = ((2, 5, 6, 16, 4, 16), (1, 3, 3, 24, 2, 8), (2, 7, 9, 8, 9, 6), (1, 1, 1, 8, 0, 8), (2, 4, 40, 128, 39, 128))
"""b, s, all heads, d, heads that are turned, r: more pairs than a program takes, and fewer."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def list_cases(device: torch.device) -> Iterator[tuple[str, Tensor, int, Tensor, Tensor, bool]]:
    """Name and what `turn_back_` is handed: tables for all samples and for each of them; also what is not a number."""
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        for b, s, m, d, num_turned, r in SHAPES:
            for is_interleaved in (False, True):
                for table in ((s, r // 2), (b, 1, s, r // 2)):
                    heads = torch.randn(b, s, m, d, generator=generator).to(dtype).to(device)
                    if d == 24:
                        heads[0, 0, 0, 0], heads[0, 1, 0, 0] = torch.nan, torch.inf
                    angles = torch.rand(table, generator=generator) * 6
                    cos, sin = (1.2 * angles.cos()).to(device), (1.2 * angles.sin()).to(device)
                    name = f"{dtype} {(b, s, m, d, num_turned, r)} {is_interleaved} {table}"
                    yield name, heads, num_turned, cos, sin, is_interleaved


def find_differences(device: torch.device) -> dict[str, float]:
    """By case: the largest difference over the rounding of its dtype."""
    from megaflow_trainer.ops.rotation_kernel import turn_heads_back

    found = {}
    for name, heads, num_turned, cos, sin, is_interleaved in list_cases(device):
        own, wanted = heads.clone(), heads.clone()
        turn_back_plainly(wanted, num_turned, cos, sin, is_interleaved=is_interleaved)
        turn_heads_back(own, num_turned, cos, sin, is_interleaved=is_interleaved)
        assert torch.equal(own.isnan(), wanted.isnan()), name
        step = torch.finfo(heads.dtype).eps * wanted.float().nan_to_num().abs() + 2e-6
        found[name] = float(((own.float().nan_to_num() - wanted.float().nan_to_num()).abs() / step).max())
        r = 2 * cos.shape[-1]
        assert torch.equal(own[:, :, num_turned:], heads[:, :, num_turned:]), name
        assert torch.equal(own[..., r:], heads[..., r:]), name
        assert num_turned == 0 or not torch.equal(own.nan_to_num(), heads.nan_to_num()), name
    return found


def main() -> None:
    """Differences by case."""
    Path(sys.argv[1]).write_text(json.dumps(find_differences(torch.device("cpu"))), encoding="utf-8")


if __name__ == "__main__":
    main()
