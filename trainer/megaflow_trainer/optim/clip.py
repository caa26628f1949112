"""Clipping by the global norm."""

from __future__ import annotations

import torch
from torch import Tensor


def clip_factor(norm: Tensor, largest: float) -> Tensor:
    """What gradients are multiplied by so that their norm is at most `largest`; 1 if that is 0. Stays on the device."""
    if largest == 0:
        return torch.ones_like(norm)
    return (largest / (norm + 1e-6)).clamp(max=1.0)
