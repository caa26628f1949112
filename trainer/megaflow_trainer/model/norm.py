"""Normalisation over the last dimension, in fp32 inside whatever the weights are."""

from __future__ import annotations

from torch import nn

from megaflow_trainer.config.sections import ModelConfig

NORMS = (nn.LayerNorm, nn.RMSNorm)


def make_norm(config: ModelConfig, width: int) -> nn.Module:
    """The norm that the configuration names, over `width` channels."""
    kind = nn.LayerNorm if config.norm == "LayerNorm" else nn.RMSNorm
    return kind(width, eps=config.norm_eps)
