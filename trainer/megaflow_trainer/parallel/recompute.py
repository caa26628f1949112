"""Activation recompute, and saved activations that are narrower or elsewhere: memory of backward against time.

Full: a run of blocks keeps its input only and is computed again in backward; `uniform` does so for every run of
`num_layers` blocks, `block` for each of the first `num_layers` blocks. Selective: named parts of every block are
computed again. Random streams are replayed, so losses and gradients are those without recompute, to the bit.

Compressed: what autograd saves between forward and backward is rounded to bf16 or fp8 (e4m3, one scale a tensor): the
loss stays, gradients change a little. Offloaded: it waits in the CPU's memory. Weights are never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megaflow_trainer.config.sections import RecomputeConfig

_FP8_LARGEST = 448.0
_SMALLEST = 4096
"""Elements below which a saved tensor is left as it is: scales and masks cost nothing."""


def apply_recompute(model: nn.Module, config: RecomputeConfig) -> None:
    """Wrap the blocks of a model, or parts of them, so that backward computes them again."""
    blocks = model.blocks
    assert isinstance(blocks, nn.ModuleList), "a GPT"
    if config.granularity == "selective":
        for block in blocks:
            for name in config.modules:
                part = block.get_submodule(name)
                part.forward = _recomputed(part.forward)
    if config.granularity == "full" and config.method == "block":
        for block in list(blocks)[: config.num_layers or len(blocks)]:
            block.forward = _recomputed(block.forward)
    if config.granularity == "full" and config.method == "uniform":
        _chain(list(blocks), config.num_layers or 1)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False) if torch.is_grad_enabled() else forward(*args)

    return run


def _chain(blocks: list[nn.Module], length: int) -> None:
    """Let the first block of each run of `length` compute the whole run, and the others pass on what they get."""
    for first in range(0, len(blocks), length):
        parts = [block.forward for block in blocks[first : first + length]]

        def run(x: Tensor, *rest: Any, parts: list[Callable[..., Any]] = parts) -> Tensor:
            for part in parts:
                x = part(x, *rest)
            return x

        blocks[first].forward = _recomputed(run)
        for block in blocks[first + 1 : first + length]:
            block.forward = lambda x, *rest: x


@dataclass(slots=True)
class SavedReport:
    """Bytes that autograd saved of activations, as they were and as they were kept, and the worst rounding."""

    num_bytes: int = 0
    kept_bytes: int = 0
    error: float = 0.0
    """Largest relative error of a saved tensor, as |rounded - x| / |x| of its 2-norms; measured only if asked."""


@dataclass(slots=True)
class SavedActivations:
    """What is done with the tensors that autograd saves in forward.

    Args:
        compression: none, bf16 or fp8.
        is_offloaded: whether they wait in the CPU's memory.
        weights: what is not an activation, by address; its saved tensors are left alone.
        measures_error: whether the report's error is kept up, which costs two norms a tensor.
    """

    compression: str = "none"
    is_offloaded: bool = False
    weights: frozenset[int] = frozenset()
    measures_error: bool = False
    report: SavedReport = field(default_factory=SavedReport)

    def hooks(self) -> AbstractContextManager[Any]:
        """The context around a forward."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, x: Tensor) -> Any:
        if x.data_ptr() in self.weights or not x.is_floating_point() or x.numel() < _SMALLEST:
            return x
        kept, scale = self._narrow(x)
        self.report.num_bytes += x.numel() * x.element_size()
        self.report.kept_bytes += kept.numel() * kept.element_size()
        if self.measures_error:
            error = (_widen(kept, scale, x.dtype) - x).norm() / x.norm().clamp(min=1e-30)
            self.report.error = max(self.report.error, float(error))
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


def make_saved(model: nn.Module, config: RecomputeConfig) -> SavedActivations | None:
    """What the configuration asks to be done with saved activations; None if nothing."""
    if config.compression == "none" and not config.is_offloaded:
        return None
    weights = frozenset(weight.data_ptr() for weight in model.parameters())
    return SavedActivations(config.compression, config.is_offloaded, weights)


@contextmanager
def keep_saved(saved: SavedActivations | None) -> Iterator[None]:
    """The context around a forward; nothing without a wish."""
    with nullcontext() if saved is None else saved.hooks():
        yield
