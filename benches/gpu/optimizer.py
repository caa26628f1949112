#!/usr/bin/env python3
"""A step of AdamW on a GPU: all in one pass against torch's own fused step with its scaling and its copy.

    python3 benches/gpu/optimizer.py                 # 1.3e9 weights, as in a GPT of 1.3B
    python3 benches/gpu/optimizer.py --million 124 --states bf16

Prints milliseconds and GB/s, the bytes that must move over the time, of each part of both. Alternating, medians.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

import torch
from timing import need_gpu, time_ms

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "trainer"), str(ROOT / "python")]

from megaflow_trainer.config.sections import OptimConfig  # noqa: E402
from megaflow_trainer.optim.optimizer import DTYPES, Optimizer  # noqa: E402
from megaflow_trainer.parallel.data import DataOptions, MainGradients  # noqa: E402
from megaflow_trainer.parallel.mesh import Launch, build_mesh  # noqa: E402

WIDTH = 2048


def make_model(num_weights: int, device: torch.device) -> torch.nn.Module:
    """About so many weights in the sizes of GPT blocks, bf16."""
    sizes = ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (WIDTH,), (4 * WIDTH,))
    weights, left = [], num_weights
    while left > 0:
        for shape in sizes:
            weights.append(torch.nn.Parameter(torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02))
            left -= weights[-1].numel()
    return torch.nn.ParameterList(weights)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--million", type=float, default=1300, help="weights, in millions (default: 1300)")
    parser.add_argument("--states", choices=("fp32", "bf16"), default="fp32", help="moments (default: fp32)")
    parser.add_argument("--repeats", type=int, default=20, help="steps of each (default: 20)")
    options = parser.parse_args()
    if options.repeats < 1 or options.million <= 0:
        parser.error("--repeats must be >= 1 and --million above 0")
    device = need_gpu("steps of AdamW")
    measure = functools.partial(time_ms, launches=1, repeats=options.repeats, warm=2)
    model = make_model(int(options.million * 1e6), device)
    gradients = MainGradients(model, build_mesh(Launch(), device, "nccl"), options=DataOptions())
    gradients.kept[0].normal_()
    factor, no = torch.full((), 1e-3, device=device), torch.zeros((), device=device)
    num_weights = sum(weight.numel() for weight in model.parameters())
    state = DTYPES[options.states].itemsize
    moved = 4 + 2 * 4 + 2 * 2 * state + 2  # gradient, master, moments, weight
    passes = {"one pass": moved, "torch": moved + 8 + 4, "norm of gradients": 4, "zeroing of gradients": 4}
    print(f"{num_weights / 1e9:.2f}e9 weights, {torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    print(f"{'':22} {'ms':>8} {'GB/s':>8}  bytes a weight")
    for is_fused in (False, True, False, True):
        config = OptimConfig(is_fused=is_fused, exp_avg_dtype=options.states, exp_avg_sq_dtype=options.states)
        optimizer = Optimizer(gradients.parameters, config)
        if is_fused and optimizer.fused is None:
            raise SystemExit(f"no pass of its own: {optimizer.obstacle}")
        skip = no if optimizer.skips_on_device else None

        def step(optimizer: Optimizer = optimizer, skip: torch.Tensor | None = skip) -> None:
            optimizer.step(1e-4, factor=factor, found_inf=skip)

        show(
            "one pass" if is_fused else "torch",
            measure(step),
            num_weights,
            passes,
        )
        del optimizer, step
        torch.cuda.empty_cache()
    show("norm of gradients", measure(gradients.norm), num_weights, passes)
    show(
        "zeroing of gradients",
        measure(gradients.start),
        num_weights,
        passes,
    )


def show(name: str, ms: float, num_weights: int, passes: dict[str, int]) -> None:
    """One line of the table."""
    print(f"{name:22} {ms:8.3f} {passes[name] * num_weights / ms / 1e6:8.0f}  {passes[name]}", flush=True)


if __name__ == "__main__":
    main()
