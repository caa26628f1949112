"""What autograd keeps between forward and backward, counted on the real model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def count_saved_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Bytes of the distinct tensors that `forward` leaves for backward, weights left out, and its result."""
    weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
    sizes: dict[int, int] = {}
    held: list[torch.UntypedStorage] = []  # so that no address is used twice

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in weights:
            sizes[storage._cdata] = storage.nbytes()
            held.append(storage)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = forward()
    return sum(sizes.values()), result
