"""Parameters, FLOPs and peaks as pure functions: used by the log, by recipes and by planning, tested on real models.

Legend: L layers, h hidden, f ffn, v vocabulary (padded), p positions, s sequence, e experts, k chosen ones.
"""

from __future__ import annotations

from collections import Counter

from megaflow_trainer.config.sections import ModelConfig, OptimConfig, StepConfig

_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("B200", {"bf16": 2250e12, "fp16": 2250e12, "fp8": 4500e12, "tf32": 1125e12}),
    ("H200", {"bf16": 989e12, "fp16": 989e12, "fp8": 1979e12, "tf32": 494.5e12}),
    ("H100 PCIe", {"bf16": 756e12, "fp16": 756e12, "fp8": 1513e12, "tf32": 378e12}),
    ("H100 NVL", {"bf16": 835e12, "fp16": 835e12, "fp8": 1671e12, "tf32": 417.5e12}),
    ("H100", {"bf16": 989e12, "fp16": 989e12, "fp8": 1979e12, "tf32": 494.5e12}),
    ("A100", {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12}),
    ("L40S", {"bf16": 362e12, "fp16": 362e12, "fp8": 733e12, "tf32": 183e12}),
    ("L4", {"bf16": 121e12, "fp16": 121e12, "fp8": 242.5e12, "tf32": 60e12}),
    ("RTX 4090", {"bf16": 165e12, "fp16": 165e12, "fp8": 330e12, "tf32": 82.6e12}),
    ("V100", {"fp16": 125e12}),
    ("T4", {"fp16": 65e12}),
)
"""Dense peaks with fp32 accumulation in FLOP/s, from the makers' data sheets (half of what these give with sparsity).
The first name that is a word, or words, of the device's counts.
"""


def count_parameters(model: ModelConfig, *, is_active: bool = False) -> int:
    """Weights of the model, a tied embedding counted once; or of them those that one token passes: of the experts those
    that it chooses.
    """
    h = model.hidden_dim
    embeddings = model.vocab_rows * h * (1 if model.tied_embeddings else 2)
    if model.position_kind == "learned_absolute":
        embeddings += (model.max_positions or 0) * h
    kinds = Counter(model.has_experts(number) for number in range(model.num_layers + model.num_mtp_layers))
    blocks = sum(
        count * count_block_parameters(model, has_experts=has_experts, is_active=is_active)
        for has_experts, count in kinds.items()
    )
    return embeddings + blocks + _count_norm(model, h) + model.num_mtp_layers * (2 * h * h + 3 * _count_norm(model, h))


def count_block_parameters(model: ModelConfig, *, has_experts: bool = False, is_active: bool = False) -> int:
    """Attention, MLP or experts, and the two norms before them."""
    mlp = count_layer_of_experts(model, is_active=is_active) if has_experts else count_mlp_parameters(model)
    return count_attention_parameters(model) + mlp + 2 * _count_norm(model, model.hidden_dim)


def count_layer_of_experts(model: ModelConfig, *, is_active: bool = False) -> int:
    """Router, experts and the expert that all tokens pass; or of the experts only those that a token chooses."""
    num = (model.router_top_k if is_active else model.num_experts) or 0
    shared = 0 if model.shared_dim is None else count_mlp_parameters(model, model.shared_dim)
    return (model.num_experts or 0) * model.hidden_dim + num * count_mlp_parameters(model, model.expert_width) + shared


def count_expert_parameters(model: ModelConfig, *, ep: int = 1, etp: int = 1) -> int:
    """Weights of all experts that a rank holds where `ep` ranks divide them and `etp` ranks each of them; routers and
    experts that all tokens pass are not among them.
    """
    layers = sum(model.has_experts(number) for number in range(model.num_layers + model.num_mtp_layers))
    bias = model.hidden_dim if model.linear_bias else 0  # the last bias is on all etp ranks
    inner = count_mlp_parameters(model, model.expert_width) - bias
    return layers * ((model.num_experts or 0) // ep) * (inner // etp + bias)


def count_attention_parameters(model: ModelConfig) -> int:
    """The projections of one attention layer and the norms inside it."""
    if model.is_latent:
        return _count_latent_attention(model)
    h, d, n, g = model.hidden_dim, model.head_width, model.num_heads, model.kv_heads
    qkv = _count_linear(h, (n + 2 * g) * d, has_bias=model.has_qkv_bias)
    proj = _count_linear(n * d, h, has_bias=model.linear_bias)
    return qkv + proj + (2 * _count_norm(model, d) if model.qk_norm else 0)


def _count_latent_attention(model: ModelConfig) -> int:
    h, n, bias = model.hidden_dim, model.num_heads, model.linear_bias
    q_width = n * (model.qk_dim + model.qk_rotary_dim)
    if model.q_latent_dim is None:
        q = _count_linear(h, q_width, has_bias=bias)
    else:
        r = model.q_latent_dim
        q = _count_linear(h, r, has_bias=bias) + _count_norm(model, r) + _count_linear(r, q_width, has_bias=bias)
    r = model.kv_latent_dim
    kv = _count_linear(h, r + model.qk_rotary_dim, has_bias=bias) + _count_norm(model, r)
    kv += _count_linear(r, n * (model.qk_dim + model.v_dim), has_bias=bias)
    return q + kv + _count_linear(n * model.v_dim, h, has_bias=bias)


def count_mlp_parameters(model: ModelConfig, width: int | None = None) -> int:
    """The two matrices of an MLP, or the three of SwiGLU; of the configured inner width or another."""
    h, f, bias = model.hidden_dim, width or model.ffn_width, model.linear_bias
    num_up = 2 if model.activation == "swiglu" else 1
    return num_up * _count_linear(h, f, has_bias=bias) + _count_linear(f, h, has_bias=bias)


def _count_linear(inputs: int, outputs: int, *, has_bias: bool) -> int:
    return inputs * outputs + (outputs if has_bias else 0)


def _count_norm(model: ModelConfig, width: int) -> int:
    return 2 * width if model.norm == "LayerNorm" else width


def count_norm_parameters(model: ModelConfig) -> int:
    """A norm of the residual stream."""
    return _count_norm(model, model.hidden_dim)


def count_state_bytes(
    model: ModelConfig, step: StepConfig, optim: OptimConfig, *, num_parameters: int | None = None
) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer (masters and states) of all weights, or of `num_parameters`.

    Muon's states are counted as AdamW's, which is what it has for embeddings, and more than it has for the rest.
    """
    n = count_parameters(model) if num_parameters is None else num_parameters
    wide = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
    is_wide, weight = step.dtype == "fp64", wide[step.dtype]
    main, grad, first, second = (
        8 if is_wide else wide[dtype]
        for dtype in (optim.main_dtype, optim.main_grad_dtype, optim.exp_avg_dtype, optim.exp_avg_sq_dtype)
    )
    has_copy = optim.is_offloaded or main != weight
    states = first + (second if optim.kind in ("adamw", "adam", "muon") else 0)
    if optim.kind == "sgd" and optim.sgd_momentum == 0:
        states = 0
    return {"weights": weight * n, "gradients": grad * n, "optimizer": ((main if has_copy else 0) + states) * n}


def count_flops_per_token(model: ModelConfig, *, seq_len: int, is_causal: bool) -> float:
    """Forward and backward FLOPs of one token: 6 N + 12 L n d s, or half of the attention if what is masked is not
    counted. An untied input embedding is a look-up and not in N, nor are experts that a token does not choose; a window
    shortens s.
    """
    width = model.num_heads * model.head_width
    if model.is_latent:
        width = model.num_heads * (model.qk_dim + model.qk_rotary_dim + model.v_dim) // 2
    seen = min(seq_len, model.window or seq_len)
    layers = model.num_layers + model.num_mtp_layers
    attention = 12.0 * layers * width * (count_seen(seq_len, seen) if is_causal else seen)
    lookup = 0 if model.tied_embeddings else model.vocab_rows * model.hidden_dim
    heads = model.num_mtp_layers * model.vocab_rows * model.hidden_dim
    return 6.0 * (count_parameters(model, is_active=True) - lookup + heads) + attention


def count_seen(seq_len: int, window: int) -> float:
    """Tokens that a token attends to in the mean, half a window's edge counted: s / 2 without a window."""
    return window - window * window / (2 * seq_len)


def find_peak_flops(device_name: str, precision: str) -> float | None:
    """Dense peak of a device in FLOP/s for products in bf16, fp16, fp8 or tf32; None where it is not known."""
    words = device_name.replace("-", " ").split()
    for name, peaks in _PEAKS:
        first, *rest = name.split()
        if first in words and all(word in words for word in rest):
            return peaks.get(precision)
    return None


def name_precision(step: StepConfig) -> str:
    """The precision of a run's products."""
    if step.fp8 != "none":
        return "fp8"
    return "tf32" if step.dtype == "fp32" and step.allows_tf32 else step.dtype
