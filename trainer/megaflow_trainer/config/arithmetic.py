"""Parameters, FLOPs and peaks as pure functions: used by the log, by recipes and by planning, tested on real models.

Legend: L layers, h hidden, f ffn, v vocabulary (padded), p positions, s sequence.
"""

from __future__ import annotations

from megaflow_trainer.config.sections import ModelConfig

_PEAK_BF16: tuple[tuple[str, float], ...] = (
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("RTX 4090", 165e12),
)


def count_parameters(model: ModelConfig) -> int:
    """Weights of the model, a tied embedding counted once.

    A block holds qkv (3h^2 + 3h), the attention projection (h^2 + h), the MLP (2hf + f + h) and two norms (4h).
    """
    h, f = model.hidden_dim, model.ffn_dim or 4 * model.hidden_dim
    block = 4 * h * h + 4 * h + 2 * h * f + f + h + 4 * h
    embeddings = model.vocab_rows * h * (1 if model.tied_embeddings else 2) + (model.max_positions or 0) * h
    return model.num_layers * block + embeddings + 2 * h


def count_flops_per_token(model: ModelConfig, *, seq_len: int, is_causal: bool) -> float:
    """Forward and backward FLOPs of one token: 6 N + 12 L h s, or 6 N + 6 L h s if masked attention is not counted."""
    attention = (6 if is_causal else 12) * model.num_layers * model.hidden_dim * seq_len
    return 6.0 * count_parameters(model) + attention


def find_peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense bf16 peak of a device in FLOP/s; None for an unknown device or another dtype."""
    if dtype != "bf16":
        return None
    return next((peak for name, peak in _PEAK_BF16 if name in device_name), None)
