"""AdamW in one pass beside the reference, on any device. As a script: every case on the CPU in Triton's interpreter.

The interpreter rounds to bf16 towards zero, a GPU to the nearest.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from helpers.runs import read_curve, read_tensors, run_tiny
from megaflow_trainer.config.sections import OptimConfig
from megaflow_trainer.optim import fused
from megaflow_trainer.optim.fused import FusedAdam, Moved
from megaflow_trainer.optim.optimizer import Optimizer
from megaflow_trainer.optim.rules import Adam, Slot
from megaflow_trainer.parallel.data import DataOptions, MainGradients
from megaflow_trainer.parallel.mesh import Launch, build_mesh

CONFIG = OptimConfig(weight_decay=0.1, adam_beta2=0.95)
CASES: dict[str, tuple[torch.dtype, dict[str, str]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "fp16": (torch.float16, {}),
    "states in bf16": (torch.bfloat16, {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}),
    "states in fp16": (torch.bfloat16, {"exp_avg_dtype": "fp16", "exp_avg_sq_dtype": "fp32"}),
    "all bf16": (
        torch.bfloat16,
        {"main_dtype": "bf16", "main_grad_dtype": "bf16", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    ),
}
"""dtype of the weights, and of what the optimizer keeps."""


def make(case: str, device: torch.device, *, is_fused: bool) -> tuple[nn.Module, MainGradients, Optimizer]:
    """Matrices and vectors of odd sizes, one of more than a chunk, in four groups of rates and decay."""
    dtype, options = CASES[case]
    torch.manual_seed(0)
    parts = {"blocks": nn.Linear(130, 131), "norm": nn.LayerNorm(7), "head": nn.Linear(5, 3)}
    model = nn.ModuleDict(parts).to(device, dtype)
    mesh = build_mesh(Launch(), device, "nccl" if device.type == "cuda" else "gloo")
    grad_dtype = torch.bfloat16 if options.get("main_grad_dtype") == "bf16" else torch.float32
    gradients = MainGradients(model, mesh, options=DataOptions(dtype=grad_dtype))
    config = dataclasses.replace(CONFIG, is_fused=is_fused, no_decay=("head.*",), **options)
    return model, gradients, Optimizer(gradients.parameters, config, mup_ratio=0.25)


def compare(case: str, device: torch.device) -> dict[str, float]:
    """Largest difference of each kind of tensor after steps of both, one of them skipped, over its largest element."""
    found = {}
    for is_fused in (False, True):
        model, gradients, optimizer = make(case, device, is_fused=is_fused)
        assert (optimizer.fused is not None) == is_fused, optimizer.obstacle
        for step in range(5):
            torch.manual_seed(step)
            gradients.kept[0].copy_(torch.randn(gradients.kept[0].shape) * 10 ** (step - 3))
            skip = torch.tensor(float(step == 2), device=device)
            if step == 2 and is_fused:
                gradients.kept[0].fill_(torch.nan)
            if step != 2 or is_fused:
                factor = torch.tensor(0.5, device=device, dtype=torch.float64)
                optimizer.step(1e-2 / (step + 1), factor=factor, found_inf=skip if is_fused else None)
        tensors = {f"weight.{name}": weight.detach() for name, weight in model.named_parameters()}
        found[is_fused] = {name: x.double().cpu() for name, x in (tensors | optimizer.list_tensors()).items()}
    assert found[True].keys() == found[False].keys()
    worst: dict[str, float] = {}
    for name, one in found[False].items():
        kind = name.split(".")[0]
        assert one.abs().max() > 0
        difference = ((found[True][name] - one).abs().max() / one.abs().max()).item()
        worst[kind] = max(worst.get(kind, 0.0), difference)
    return worst


def compare_unaligned(device: torch.device) -> float:
    """The largest difference where no tensor begins at a multiple of 16 bytes."""
    flats = [torch.randn(20001, generator=torch.Generator().manual_seed(n)).abs() for n in range(4)]
    rule = Adam(betas=(0.9, 0.95), eps=1e-8, dtypes=(torch.float32, torch.float32))
    masters = []
    for is_fused in (False, True):
        master, grad, m, v = (flat.clone().to(device)[1:] for flat in flats)
        slot = Slot(master, grad, {"step": torch.zeros((), device=device), "exp_avg": m, "exp_avg_sq": v})
        moved = FusedAdam([Moved(slot, rule, master, 1.0, 1.0)]) if is_fused else None
        if moved is None:
            rule.update([slot], lr=1e-2, decay=0.1)
        else:
            moved.step(1e-2, 0.1)
        masters.append(master)
    return (masters[0] - masters[1]).abs().max().item()


def run_whole(folder: Path, prefix: str) -> dict[str, Any]:
    """Runs with and without, the one with stopped and resumed in the middle."""
    words = ["--train-iters", "6", "--global-batch-size", "4", "--micro-batch-size", "2", "--save-interval", "3"]
    run_tiny(prefix, [*words, "--no-fused-optimizer", "--save", str(folder / "plain")])
    run_tiny(prefix, [*words, "--exit-interval", "3", "--save", str(folder / "fused")])
    run_tiny(prefix, [*words, "--save", str(folder / "fused")])
    steps = {x.item() for name, x in read_tensors(folder / "fused", 6).items() if name.startswith("optimizer/step.")}
    return {"plain": read_curve(folder / "plain"), "fused": read_curve(folder / "fused"), "steps": sorted(steps)}


def main() -> None:
    """All cases; the figures as JSON."""
    fused.find_obstacle = fused.find_unfit  # the interpreter works on the CPU
    cpu = torch.device("cpu")
    found: dict[str, Any] = {case: compare(case, cpu) for case in CASES}
    found["unaligned"] = compare_unaligned(cpu)
    found["run"] = run_whole(Path(sys.argv[1]), sys.argv[2])
    Path(sys.argv[1], "found.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
