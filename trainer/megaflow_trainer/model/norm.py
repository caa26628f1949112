"""Normalisation over the last dimension, in fp32 inside whatever the weights are."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from megaflow_trainer.config.sections import ModelConfig

NORMS = (nn.LayerNorm, nn.RMSNorm)


class LayerNorm(nn.LayerNorm):
    """torch's, or a kernel that is handed input, weight, bias and epsilon."""

    kernel: Callable[..., Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """`[..., h]` to `[..., h]`."""
        return super().forward(x) if self.kernel is None else self.kernel(x, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """torch's, or a kernel that is handed input, weight, None and epsilon."""

    kernel: Callable[..., Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """`[..., h]` to `[..., h]`."""
        return super().forward(x) if self.kernel is None else self.kernel(x, self.weight, None, self.eps)


def make_norm(config: ModelConfig, width: int) -> nn.Module:
    """The norm that the configuration names, over `width` channels."""
    kind = LayerNorm if config.norm == "LayerNorm" else RMSNorm
    return kind(width, eps=config.norm_eps)
