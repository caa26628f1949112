"""Saved activations that are narrower or elsewhere.

Compressed: what autograd saves of the blocks between forward and backward is rounded to bf16 or fp8 (e4m3, one scale a
tensor): the loss stays, gradients change a little. Offloaded: it waits in the CPU's memory. Weights are never touched,
nor is the loss, whose gradient starts backward at once. A tensor that is saved twice is kept once.

Both are measured: bytes in every forward, the error of rounding in one forward of `measure_every`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from megaflow_trainer.config.sections import RecomputeConfig

_FP8_LARGEST = 448.0
_SMALLEST = 4096
"""Elements below which a saved tensor is left as it is: scales and masks cost nothing."""


@dataclass(slots=True)
class SavedReport:
    """What one forward saved for backward, and the rounding."""

    num_bytes: int = 0
    """Of the tensors as they were."""
    kept_bytes: int = 0
    """Of the tensors as they are kept."""
    error: Tensor | None = None
    """Relative error of all tensors together, |rounded - x| / |x| of 2-norms, of the last forward measured; a scalar
    on the device, fp32."""


@dataclass(slots=True)
class SavedActivations:
    """What is done with the tensors that autograd saves in forward.

    Args:
        compression: none, bf16 or fp8.
        is_offloaded: whether they wait in the CPU's memory.
        weights: what is not an activation, by address; its saved tensors are left alone.
        measure_every: forwards from one measurement of the error to the next, which costs two norms a tensor.
    """

    compression: str = "none"
    is_offloaded: bool = False
    weights: frozenset[int] = frozenset()
    measure_every: int = 1
    report: SavedReport = field(default_factory=SavedReport)
    num_forwards: int = 0
    packed: dict[Any, Any] = field(default_factory=dict)
    squares: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """The context around a forward; afterwards `report` is of this forward."""
        self.report = SavedReport(error=self.report.error)
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        if self.squares:
            lost, total = (torch.stack(part).sum() for part in zip(*self.squares, strict=True))
            self.report = dataclasses.replace(self.report, error=(lost / total.clamp(min=1e-30)).sqrt())
        self.packed, self.squares, self.num_forwards = {}, [], self.num_forwards + 1

    def _pack(self, x: Tensor) -> Any:
        storage = x.untyped_storage()
        if storage.data_ptr() in self.weights or not x.is_floating_point() or x.numel() < _SMALLEST:
            return x
        # The weak reference keeps the storage's identity, not its memory: no other storage gets the same key.
        alive = StorageWeakRef(storage)
        key = (alive, x.dtype, x.storage_offset(), tuple(x.shape), x.stride(), x._version)
        if key not in self.packed:
            self.packed[key] = self._keep(x)
        return self.packed[key]

    def _keep(self, x: Tensor) -> Any:
        kept, scale = self._narrow(x)
        self.report.num_bytes += x.numel() * x.element_size()
        self.report.kept_bytes += kept.numel() * kept.element_size()
        if kept.dtype != x.dtype and self.num_forwards % self.measure_every == 0:
            lost = (_widen(kept, scale, torch.float32) - x).norm().float().square()
            self.squares.append((lost, x.detach().norm().float().square()))
        return (kept.to("cpu") if self.is_offloaded else kept, scale, x.dtype, x.device)

    def _narrow(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.compression == "bf16" and x.element_size() > 2:
            return x.to(torch.bfloat16), None
        if self.compression == "fp8" and x.element_size() > 1:
            scale = x.detach().abs().amax().float().clamp(min=1e-12) / _FP8_LARGEST
            return (x / scale).to(torch.float8_e4m3fn), scale
        return x.detach(), None

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        kept, scale, dtype, device = packed
        return _widen(kept.to(device), scale, dtype)


def _widen(kept: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    return kept.to(dtype) if scale is None else (kept.to(torch.float32) * scale).to(dtype)


def make_saved(model: nn.Module, config: RecomputeConfig, *, measure_every: int = 1) -> SavedActivations | None:
    """What the configuration asks to be done with saved activations; None if nothing. Takes the loss out of it."""
    if config.compression == "none" and not config.is_offloaded:
        return None
    model.loss = _keep_as_they_are(model.loss)  # type: ignore[arg-type, assignment]
    weights = frozenset(weight.untyped_storage().data_ptr() for weight in model.parameters())
    return SavedActivations(config.compression, config.is_offloaded, weights, measure_every)


def _keep_as_they_are(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same loss, what it saves left alone: the innermost hooks count."""

    def run(*args: Any, **options: Any) -> Tensor:
        with saved_tensors_hooks(lambda x: x, lambda x: x):
            return loss(*args, **options)

    return run


def keep_saved(saved: SavedActivations | None) -> AbstractContextManager[Any]:
    """The context around a forward; nothing without a wish."""
    return nullcontext() if saved is None else saved.hooks()
