"""AdamW over all weights of a rank in one pass (`ops/adam_kernel.py`): clip, decay, move, round into the weights.

What differs from weight to weight (place, rate, decay, number of steps) is in tables on the device, so that a step is a
launch for each combination of dtypes and a few small ones for the rates, whatever the number of weights, and the host
waits for nothing. The rule's own `update` is the reference and serves where this cannot.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megaflow_trainer.ops.trial import try_kernel
from megaflow_trainer.optim.rules import Adam, Slot

_WIDTHS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Moved:
    """A master with its rule, and the weight that it is rounded into (itself where they are one)."""

    slot: Slot
    rule: object
    weight: Tensor
    decay_factor: float
    lr_factor: float

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Master, gradient, both moments, weight: in the order of the kernel's table."""
        state = self.slot.state
        return self.slot.master, self.slot.grad, state["exp_avg"], state["exp_avg_sq"], self.weight

    @property
    def dtypes(self) -> tuple[torch.dtype | None, ...]:
        """Of the tensors; None for a weight that is the master."""
        master, *_, weight = self.tensors
        found = [tensor.dtype for tensor in self.tensors[:-1]]
        return (*found, None if weight.data_ptr() == master.data_ptr() else weight.dtype)


def find_obstacle(moved: Sequence[Moved]) -> str | None:
    """Why one pass cannot move these weights, or None."""
    if any(not isinstance(own.rule, Adam) for own in moved):
        return "it is for AdamW alone"
    devices = {tensor.device.type for own in moved for tensor in own.tensors}
    if devices - {"cuda"}:
        return f"it is for GPUs, and masters, states or gradients are on {' and '.join(sorted(devices))}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return find_unfit(moved)


def find_unfit(moved: Sequence[Moved]) -> str | None:
    """Why the kernel cannot move these tensors, wherever they are, or None."""
    tensors = [tensor for own in moved for tensor in own.tensors]
    others = {str(tensor.dtype) for tensor in tensors if tensor.dtype not in _WIDTHS}
    if others:
        return f"it knows fp32, bf16 and fp16, and there are {' and '.join(sorted(others))}"
    if any(not tensor.is_contiguous() for tensor in tensors):
        return "a weight, a state or a gradient has gaps in memory"
    return None


def make_fused(moved: Sequence[Moved]) -> tuple[FusedAdam | None, str | None]:
    """The one pass, compiled and tried, or why there is none."""
    obstacle = find_obstacle(moved)
    if obstacle is not None or not moved:
        return None, obstacle

    def make() -> FusedAdam:
        fused = FusedAdam(moved)
        fused.launch(skip=torch.ones((), device=moved[0].slot.master.device))
        return fused

    fused, why = try_kernel(make)
    return fused, None if why is None else f"its kernel could not be made: {why}"


@dataclass(frozen=True, slots=True)
class _Launch:
    """Chunks of tensors of the same dtypes, int32 `[programs, 2]`, and what the kernel is told of them."""

    chunks: Tensor
    options: dict[str, Any]


class FusedAdam:
    """Moves `moved` in one pass. Takes the place of their counts of steps: views of one tensor from now on."""

    def __init__(self, moved: Sequence[Moved]) -> None:
        from megaflow_trainer.ops import adam_kernel  # needs triton, which machines without a GPU may not have

        self.kernel = adam_kernel.move_adam
        rule = moved[0].rule
        assert isinstance(rule, Adam), "checked"
        self.betas, self.eps, self.moved = rule.betas, rule.eps, list(moved)
        device = moved[0].slot.master.device
        self.steps = torch.stack([own.slot.state["step"] for own in moved])
        for own, step in zip(moved, self.steps.unbind(), strict=True):
            own.slot.state["step"] = step
        wide = {"dtype": torch.float64, "device": device}
        self.lr_factors = torch.tensor([own.lr_factor for own in moved], **wide)  # type: ignore[arg-type]
        self.decay_factors = torch.tensor([own.decay_factor for own in moved], **wide)  # type: ignore[arg-type]
        self.places = torch.tensor([[tensor.data_ptr() for tensor in own.tensors] for own in moved], device=device)
        self.lengths = torch.tensor([own.slot.master.numel() for own in moved], device=device)
        self.rates = torch.ones(len(moved), 3, device=device)
        self.factor = torch.ones((), device=device)
        self.launches = [self._prepare(dtypes) for dtypes in dict.fromkeys(own.dtypes for own in moved)]

    def _prepare(self, dtypes: tuple[torch.dtype | None, ...]) -> _Launch:
        from megaflow_trainer.ops import adam_kernel

        names = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
        kinds = [None if dtype is None else getattr(adam_kernel.tl, names[dtype]) for dtype in dtypes]
        own = [number for number, one in enumerate(self.moved) if one.dtypes == dtypes]
        rows = []
        for number in own:
            num_chunks = -(-self.moved[number].slot.master.numel() // adam_kernel.CHUNK)
            chunk = torch.arange(num_chunks, dtype=torch.int32)
            rows.append(torch.stack([torch.full_like(chunk, number), chunk], dim=1))
        options = dict(zip(("MASTER", "GRAD", "FIRST", "SECOND", "WEIGHT"), kinds, strict=True))
        aligned = all(tensor.data_ptr() % 16 == 0 for number in own for tensor in self.moved[number].tensors)
        options |= {"IS_ALIGNED": aligned, "CHUNK": adam_kernel.CHUNK, "BLOCK": adam_kernel.BLOCK}
        return _Launch(torch.cat(rows).to(self.places.device), options)

    @torch.no_grad()
    def step(self, lr: float, decay: float, *, factor: Tensor | None = None, skip: Tensor | None = None) -> None:
        """One step.

        Args:
            lr: rate, before the factors of weights.
            decay: weight decay, likewise.
            factor: scalar on the device that gradients are multiplied by; they are left as they are.
            skip: float32 scalar on the device; where it is 1 nothing changes.
        """
        skip = torch.zeros_like(self.factor) if skip is None else skip
        self.steps.add_(1 - skip)
        t = self.steps.to(torch.float64)
        lrs = self.lr_factors * lr
        keep = 1 - lrs * (self.decay_factors * decay)
        size = lrs / (1 - self.betas[0] ** t)
        lift = (1 - self.betas[1] ** t).rsqrt()
        self.rates.copy_(torch.stack([keep, size, lift], dim=1))
        if factor is None:
            self.factor.fill_(1)
        else:
            self.factor.copy_(factor)
        self.launch(skip=skip)

    def launch(self, *, skip: Tensor) -> None:
        """Run the kernel with the rates as they are."""
        for launch in self.launches:
            if len(launch.chunks):
                self.kernel[(len(launch.chunks),)](
                    launch.chunks,
                    self.places,
                    self.lengths,
                    self.rates,
                    self.factor,
                    skip,
                    1 - self.betas[0],
                    1 - self.betas[1],
                    self.eps,
                    **launch.options,
                )
