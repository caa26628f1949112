"""Data parallelism: every rank holds the whole model and other samples; gradients are summed in fp32.

All main gradients lie in one flat fp32 buffer. Backward leaves a gradient in the weight's dtype; a hook adds it to the
buffer and frees it, so that accumulation over micro-batches is in fp32 whatever the weights are. After the last
micro-batch the buffer is summed over the group by one all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaflow_trainer.parallel.collectives import sum_over

_ALIGNMENT = 32  # elements: each view starts on a 128-byte line


@dataclass(frozen=True, slots=True)
class MainParameter:
    """A weight as the optimizer sees it on this rank."""

    name: str
    weight: nn.Parameter
    main_grad: Tensor


class MainGradients:
    """The gradients of a model in one dtype (fp32; fp64 for fp64 weights), as sums over the tokens of the batch."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None, dtype: torch.dtype = torch.float32) -> None:
        named = list(model.named_parameters())
        sizes = [-(-weight.numel() // _ALIGNMENT) * _ALIGNMENT for _, weight in named]
        if named[0][1].dtype == torch.float64:
            dtype = torch.float64
        self.buffer = torch.zeros(sum(sizes), dtype=dtype, device=named[0][1].device)
        self.group = group
        self.parameters: list[MainParameter] = []
        for (name, weight), piece in zip(named, self.buffer.split(sizes), strict=True):
            main = MainParameter(name, weight, piece[: weight.numel()].view_as(weight))
            weight.register_post_accumulate_grad_hook(_make_hook(main.main_grad))
            self.parameters.append(main)

    def zero(self) -> None:
        """Forget the last step."""
        self.buffer.zero_()

    def reduce(self) -> None:
        """Sum over the data-parallel group: one all-reduce of all parameters, fp32."""
        sum_over(self.buffer, self.group)

    def norm(self) -> Tensor:
        """Global 2-norm, fp32 scalar on the device (fp64 in fp64). Every weight is counted once."""
        return torch.linalg.vector_norm(self.buffer, dtype=torch.promote_types(self.buffer.dtype, torch.float32))

    def scale(self, factor: Tensor) -> None:
        """Multiply every gradient by a scalar."""
        self.buffer.mul_(factor)


def _make_hook(main_grad: Tensor):  # type: ignore[no-untyped-def]
    def add_to_main(weight: Tensor) -> None:
        assert weight.grad is not None
        main_grad.add_(weight.grad)
        weight.grad = None

    return add_to_main
