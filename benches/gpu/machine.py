#!/usr/bin/env python3
"""What a run was measured on: GPU, versions, commit and date, and how fast the GPU multiplies.

    python3 benches/gpu/machine.py

Prints one JSON line. The ceiling is the product of two matrices of 8192 x 8192 in bf16: median of 20 times of 10
launches, after a second of the same work, so that the GPU is as warm as in a run.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from timing import time_ms

PACKAGES = ("triton", "flash-attn-4", "transformer-engine", "megatron-core", "torchao")
WIDTH = 8192


def describe_machine() -> dict[str, Any]:
    """GPU, versions of what is installed, commit of the checkout and date in UTC."""
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
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


def measure_ceiling() -> float | None:
    """FLOP/s of a large product in bf16 on the first GPU, when it is warm; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", 0)
    x, y = (torch.randn(WIDTH, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(x)
    end = time.perf_counter() + 1.0
    while time.perf_counter() < end:
        time_ms(lambda: torch.mm(x, y, out=out), launches=10, repeats=1, warm=0)
    return 2.0 * WIDTH**3 / (time_ms(lambda: torch.mm(x, y, out=out), launches=10, repeats=20) / 1e3)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.parse_args()
    print(json.dumps({**describe_machine(), "ceiling_flops_per_s": measure_ceiling()}))


if __name__ == "__main__":
    main()
