#!/usr/bin/env python3
"""What a run was measured on: GPU, versions, commit and date, and how fast the GPU multiplies.

    python3 benches/gpu/machine.py

Prints one JSON line. The ceilings are products of two matrices of 8192 x 8192: in bf16, and where the GPU has it in fp8
(e4m3, one scale a tensor, result in bf16). `warm`: median of 20 times of 10 launches, after a second of the same work,
so that the GPU is as warm as in a run. `cold`: median of the first 5 launches after a pause of 5 seconds; a GPU that is
limited by its power is faster then, and no run can be held to that.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import time_ms

PACKAGES = (
    *("triton", "flash-attn", "flash-attn-4", "transformer-engine", "megatron-core"),
    *("torchao", "liger-kernel", "apex"),
)
WIDTH = 8192
PAUSE_S, COLD_LAUNCHES = 5.0, 5
FP8_CAPABILITY = (8, 9)


def describe_machine() -> dict[str, Any]:
    """The first GPU and its uuid, versions of what is installed, commit of the checkout and date in UTC."""
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "uuid": str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.is_available() else None,
        "versions": {name: version for name, version in versions.items() if version},
        "commit": find_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def find_commit() -> str | None:
    """The commit of this checkout, with `+` if files differ from it; None outside of one."""
    root = Path(__file__).resolve().parents[2]
    told = []
    for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
        except OSError:  # no git here
            return None
        if done.returncode:
            return None
        told.append(done.stdout.strip())
    return told[0] + ("+" if told[1] else "")


def make_products(device: torch.device) -> dict[str, Callable[[], object]]:
    """The products that are timed, by format."""
    x, y = (torch.randn(WIDTH, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(x)
    products: dict[str, Callable[[], object]] = {"bf16": lambda: torch.mm(x, y, out=out)}
    if torch.cuda.get_device_capability(device) >= FP8_CAPABILITY:
        a, b = (z.to(torch.float8_e4m3fn) for z in (x, y))
        one = torch.ones((), device=device)
        products["fp8"] = lambda: torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    return products


def measure_ceilings() -> dict[str, float]:
    """FLOP/s of the products on the first GPU, `FORMAT_cold_flops_per_s` and `FORMAT_warm_flops_per_s`; empty without a
    GPU.
    """
    if not torch.cuda.is_available():
        return {}
    found, flops = {}, 2.0 * WIDTH**3
    for name, product in make_products(torch.device("cuda", 0)).items():
        time_ms(product, launches=1, repeats=1, warm=0)  # loads its kernel
        time.sleep(PAUSE_S)
        found[f"{name}_cold_flops_per_s"] = flops / time_ms(product, launches=1, repeats=COLD_LAUNCHES, warm=0) * 1e3
        end = time.perf_counter() + 1.0
        while time.perf_counter() < end:
            time_ms(product, launches=10, repeats=1, warm=0)
        found[f"{name}_warm_flops_per_s"] = flops / time_ms(product, launches=10, repeats=20) * 1e3
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.parse_args()
    print(json.dumps({**describe_machine(), "ceilings": measure_ceilings()}))


if __name__ == "__main__":
    main()
