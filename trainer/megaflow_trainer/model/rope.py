"""Rotary positions: pairs of channels are turned by an angle that grows with the position.

Channel pair j of d turns by position * base^(-2j/d). Which two channels form a pair is a convention of the checkpoint:
*halves* (j, j + d/2), as in Hugging Face's Llama files, or *interleaved* (2j, 2j + 1), as in Meta's. Both give the same
model if the rows of the query and key matrices are permuted alike.

Scaling stretches positions beyond those of pretraining: `linear` divides every angle by the factor, `ntk` raises the
base so that only slow pairs are stretched, `llama3` and `yarn` blend by wavelength.

Legend: b micro-batch, n heads, s sequence, d head dim, r rotated channels (the first r of d).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megaflow_trainer.config.sections import ModelConfig
from megaflow_trainer.ops.rotation import rotate_pairs

_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0  # turns within the original length below which all, above which nothing, stretches
_YARN_FAST, _YARN_SLOW = 32.0, 1.0  # the same two bounds in YaRN's paper


@dataclass(frozen=True, slots=True)
class Rotary:
    """Cosines and sines of every token's position, `[s, r/2]` or `[b, 1, s, r/2]` fp32, and the pairing of channels."""

    cos: Tensor
    sin: Tensor
    is_interleaved: bool

    def take(self, positions: Tensor) -> Rotary:
        """The table for tokens at positions of their own in each sample, int64 `[b, s]`, from that of all positions."""
        return Rotary(self.cos[positions][:, None], self.sin[positions][:, None], self.is_interleaved)


def make_rotary(config: ModelConfig, positions: Tensor, device: torch.device) -> Rotary | None:
    """The table for tokens at `positions`, `[s]` on the CPU; None if the model has no rotary positions."""
    if config.rotary_dim == 0:
        return None
    frequencies, gain = compute_frequencies(config)  # [r/2]
    angles = torch.outer(positions.to(torch.float32), frequencies)  # [s, r/2]
    return Rotary((angles.cos() * gain).to(device), (angles.sin() * gain).to(device), config.rotary_interleaved)


def compute_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Angle per position of each pair, `[r/2]` fp32 on the CPU, and what cosines and sines are multiplied by."""
    r, factor = config.rotary_dim, config.rotary_factor
    base = config.rotary_base * (factor ** (r / (r - 2)) if config.rotary_scaling == "ntk" and r > 2 else 1.0)
    plain = 1.0 / base ** (torch.arange(0, r, 2, dtype=torch.float32) / r)
    original = config.rotary_original_positions or int((config.max_positions or 2048) / factor)
    if config.rotary_scaling == "linear":
        return plain / factor, 1.0
    if config.rotary_scaling == "llama3":
        turns = original * plain / (2 * math.pi)
        kept = ((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)).clamp(0, 1)
        return plain * kept + plain / factor * (1 - kept), 1.0
    if config.rotary_scaling == "yarn":
        kept = _yarn_kept(r, base, original)
        gain = _yarn_growth(factor, config.rotary_mscale) / _yarn_growth(factor, config.rotary_mscale_all_dim)
        return plain * kept + plain / factor * (1 - kept), gain
    return plain, 1.0


def score_growth(config: ModelConfig) -> float:
    """What attention scores are multiplied by beside 1 / sqrt(d): 1 but under yarn with `rotary_mscale_all_dim`, where
    queries and keys of DeepSeek's latent attention grow as wholes and not only in their rotated part.
    """
    if config.rotary_scaling != "yarn":
        return 1.0
    return _yarn_growth(config.rotary_factor, config.rotary_mscale_all_dim) ** 2


def _yarn_growth(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


def _yarn_kept(r: int, base: float, original: int) -> Tensor:
    """How much of each pair's frequency is kept: 1 for fast pairs, 0 for slow ones, a ramp between."""

    def pair_of(turns: float) -> float:
        return r * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(pair_of(_YARN_FAST)), 0), min(math.ceil(pair_of(_YARN_SLOW)), r - 1)
    ramp = (torch.arange(r // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    return 1 - ramp.clamp(0, 1)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn the first r channels of queries or keys `[b, n, s, d]` by their positions; computed in fp32."""
    return rotate_pairs(x, rotary.cos, rotary.sin, is_interleaved=rotary.is_interleaved)


def rotate_both(q: Tensor, k: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Queries and keys, turned."""
    return rotate(q, rotary), rotate(k, rotary)
