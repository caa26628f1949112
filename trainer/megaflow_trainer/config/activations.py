"""What a forward keeps for backward, in bytes by formula, and what each part of a block costs to compute again.

A block has two halves alike: a norm, a first part of matrix products, a core, and a last product whose input is all
that backward needs of it. Computing a part again saves what it keeps; the last product is not run again, because
nothing of its result is needed.

Under tensor parallelism a rank's layer is a narrower layer (`shares.narrow`). Under sequence parallelism a rank keeps
1/tp of the tokens between the pairs of matrices (`between`), and of what enters one (`entered`): it gathers it again.

Legend: h hidden, f ffn, n query heads, g key/value heads, d head dim, s sequence, e experts, k choices of a token;
bytes and FLOPs are per token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from megaflow_trainer.config.arithmetic import count_seen
from megaflow_trainer.config.precision_section import FP8_MULTIPLE, FP8_WIDTH
from megaflow_trainer.config.sections import ModelConfig, RecomputeConfig
from megaflow_trainer.config.shares import Share, count_vocabulary_rows, hold_all, list_kinds, narrow

_ELEMENTWISE = 8
"""FLOPs an element of a norm or an activation function, roughly."""
_KEPT_BYTES = {"none": 8, "bf16": 2, "fp8": 1}
CHUNK_SCORES = 1 << 26
"""Scores that exist at once where ranks divide the vocabulary: 256 MiB in fp32."""
WHOLE_CHUNK_SCORES = 1 << 28
"""Scores that exist at once where a rank has the whole vocabulary and makes gradients in forward: 512 MiB in bf16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """What the kernels of a device keep beyond their inputs."""

    is_norm_fused: bool
    """Whether RMSNorm is one kernel; otherwise its input and its result before the weight are kept in fp32."""
    is_compiled: bool = False
    """Whether blocks are compiled: what is cheap is computed again, and attention's result has one layout."""
    has_chunked_loss: bool = False
    """Whether scores of the vocabulary exist for a chunk of tokens at a time (`ops/accumulate.py`)."""
    has_fp8: bool = False
    """Whether products of the linear layers that are large enough keep their inputs in 8 bits."""
    input_copies: int = 1
    """How many copies layers keep that take the same input in fp8: compilers join those that change nothing else."""


GPU = Kernels(is_norm_fused=True)
CPU = Kernels(is_norm_fused=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Half:
    """One half of a block: bytes that its parts keep, and FLOPs that computing them again takes."""

    parts: tuple[str, str, str]
    """Names of the core, of all but the norm, and of the norm, as `recompute.modules` spells them."""
    input: float
    norm: float
    entering: float
    """The norm's result as it comes in, and as the first matrices read it."""
    normed: float
    before: float
    core_input: float
    core: float
    mask: float
    norm_flops: float
    before_flops: float
    core_flops: float

    def count_kept(self, again: Collection[str]) -> float:
        """Bytes kept when the named parts are computed again."""
        core, whole, norm = (name in again for name in self.parts)
        entered = (0 if norm else self.entering) if whole else self.normed
        kept = (self.input if norm else self.norm) + entered + self.mask
        return kept + (0 if whole else self.core_input if core else self.before + self.core)

    def count_flops(self, again: Collection[str]) -> float:
        """FLOPs that computing the named parts again takes."""
        core, whole, norm = (name in again for name in self.parts)
        flops = (self.norm_flops if norm else 0) + (self.before_flops if whole else 0)
        return flops + (self.core_flops if whole or core else 0)


def describe_attention(
    model: ModelConfig,
    *,
    seq_len: int,
    item_bytes: int,
    kernels: Kernels,
    share: Share | None = None,
    micro_batch_size: int = 1,
) -> Half:
    """The half of a block that attends; `model` is narrowed already where tensor-parallel ranks share it."""
    a, h, n = item_bytes, model.hidden_dim, model.num_heads
    seen = count_seen(seq_len, min(seq_len, model.window or seq_len))
    is_sliced = not (model.is_latent or model.rotary_dim or model.qk_norm)  # queries are slices of the first product
    if model.is_latent:
        inner, before_flops, qk, v = _describe_latent(model, a, kernels)
        before = inner + a * n * (model.qk_dim + model.v_dim + 2 * qk)
    else:
        d, g = model.head_width, model.kv_heads
        turned = 0 if is_sliced else (n + g) * d
        inner = _keep_norm(model, (n + g) * d, n + g, a, kernels, has_input=False) if model.qk_norm else 0.0
        before, before_flops = inner + a * ((n + 2 * g) * d + turned), 2.0 * h * (n + 2 * g) * d
        inner += a * (n + 2 * g) * d if model.qk_norm else 0
        qk = v = d
    core_input = before
    # The result has the layout of the queries. That of slices is what the projection reads; another is copied for it.
    has_copy = not is_sliced or model.window is not None
    copies = 2 if has_copy and not kernels.is_compiled else 1
    core = float(a * n * v * copies + 4 * n)
    if _takes_fp8(kernels, n * v, h):  # its kernel and the product's input, which is narrower, keep one each
        core = float((a + 1) * n * v + 4 * n)
    between, entered = (1.0, 1.0) if share is None else (share.between, share.entered)
    normed = a * h * (between if model.is_latent else entered)
    if not model.is_latent and _takes_fp8(kernels, h, (n + 2 * model.kv_heads) * model.head_width):
        normed = float(h)  # of all tokens: gathered ones are not gathered again
    if share is not None and share.cp > 1:
        before, core = inner, _keep_shared(model, share, a, qk, v) + 2 * a * n * v + 4 * n
        if share.cp_kind == "all_gather":  # masks of its two pieces, one for all samples
            core += a * seq_len * (2 * share.cp + 1) / (4 * share.cp * micro_batch_size)
    elif model.attention == "math":  # it copies keys and values, and keeps the copies instead
        before -= _drop_before_math(model, a, kernels)
        core = _keep_math(model, seq_len, a, qk, v)
    return Half(
        parts=("attention_core", "attention", "attention_norm"),
        before=before,
        core_input=core_input,
        core=core,
        before_flops=before_flops,
        core_flops=2.0 * seen * n * (qk + v),
        **_describe_frame(model, a, kernels, between, normed=normed),
    )


def _keep_shared(model: ModelConfig, share: Share, a: int, qk: int, v: int) -> float:
    """Queries, keys and values that attention over several ranks' tokens keeps, as copies of its own."""
    n, g = model.num_heads, model.num_heads if model.is_latent else model.kv_heads
    if share.cp_kind == "all_gather":
        is_sliced = not (model.is_latent or model.rotary_dim or model.qk_norm)
        return a * (n * qk + (g * (qk + v) if is_sliced else 0) + share.cp * g * (qk + v))
    copies = max(1, share.cp // g) if share.cp_kind == "a2a" else 1
    return a * (n * qk + copies * g * (qk + v))


def _drop_before_math(model: ModelConfig, a: int, kernels: Kernels) -> float:
    """What only fused kernels keep of what comes before them: keys, and the product that values are slices of."""
    n, g, d = model.num_heads, model.kv_heads, model.head_width
    if model.is_latent:
        return a * n * (model.qk_dim + model.qk_rotary_dim + model.qk_dim + model.v_dim)
    if not (model.rotary_dim or model.qk_norm):
        return a * 2 * g * d
    is_kept_by_norms = model.qk_norm and not _is_widened(model, a, kernels)
    return a * (g * d + (0 if is_kept_by_norms else (n + 2 * g) * d))


def _keep_math(model: ModelConfig, seq_len: int, a: int, qk: int, v: int) -> float:
    """Attention written out: copies of keys and values, weights of all pairs before and after rounding, the result."""
    weights = max(a, 4) + (a if a < 4 else 0) + (a if model.attention_dropout else 0)
    return model.num_heads * (a * (qk + v) + weights * seq_len + a * v)


def _describe_latent(model: ModelConfig, a: int, kernels: Kernels) -> tuple[float, float, int, int]:
    """Bytes between the first and the last products before the core of latent attention, FLOPs of all of them, and the
    core's head widths of queries and values.
    """
    h, n, c, r = model.hidden_dim, model.num_heads, model.kv_latent_dim, model.qk_rotary_dim
    qk, up = model.qk_dim + r, n * (model.qk_dim + model.v_dim)
    latent = (
        (0 if _is_widened(model, a, kernels) else a * (c + r))
        + _keep_norm(model, c, 1, a, kernels, has_input=False)
        + a * c
    )
    flops = 2.0 * (h * (c + r) + c * up)
    queries = model.q_latent_dim
    if queries is None:
        flops += 2.0 * h * n * qk
    else:
        latent += _keep_norm(model, queries, 1, a, kernels) + a * queries
        flops += 2.0 * queries * (h + n * qk)
    return latent, flops, qk, model.v_dim


def describe_mlp(model: ModelConfig, *, item_bytes: int, kernels: Kernels, share: Share | None = None) -> Half:
    """The half of a block that feeds forward; `model` is narrowed already where tensor-parallel ranks share it."""
    between, entered = (1.0, 1.0) if share is None else (share.between, share.entered)
    a, h, f = item_bytes, model.hidden_dim, model.ffn_width
    num_up = 2 if model.activation == "swiglu" else 1
    num_kept = _count_kept_inside(model, kernels) - 1  # and the last product's input
    normed = a * h * entered
    if _takes_fp8(kernels, h, f):
        normed = float(h * (kernels.input_copies if num_up == 2 else 1))  # of all tokens
    return Half(
        parts=("mlp_activation", "mlp", "mlp_norm"),
        before=0.0,
        core_input=a * f * num_up,
        core=f * (a * num_kept + _keep_input(kernels, a, f, h)),
        before_flops=2.0 * h * f * num_up,
        core_flops=float(_ELEMENTWISE * f),
        **_describe_frame(model, a, kernels, between, normed=normed),
    )


def _takes_fp8(kernels: Kernels, *widths: int) -> bool:
    """Whether the product of a linear layer of a rank, inputs and outputs of these widths, is in fp8."""
    return kernels.has_fp8 and all(width >= FP8_WIDTH and width % FP8_MULTIPLE == 0 for width in widths)


def _keep_input(kernels: Kernels, a: int, inputs: int, outputs: int) -> int:
    """Bytes of an element that a product keeps of its input."""
    return 1 if _takes_fp8(kernels, inputs, outputs) else a


def count_fp8_flops(model: ModelConfig, kernels: Kernels, *, has_experts: bool) -> float:
    """Forward FLOPs of one block a token in fp8 products; `model` is narrowed already. Experts have none."""
    h, n, f, d = model.hidden_dim, model.num_heads, model.ffn_width, model.head_width
    layers = [] if model.is_latent else [(h, (n + 2 * model.kv_heads) * d), (n * d, h)]
    if not has_experts:
        layers += [(h, f)] * (2 if model.activation == "swiglu" else 1) + [(f, h)]
    return sum(2.0 * i * o for i, o in layers if _takes_fp8(kernels, i, o))


def _count_kept_inside(model: ModelConfig, kernels: Kernels) -> int:
    """Tensors as wide as the middle of an MLP that backward needs. Of SwiGLU a compiled block makes silu(gate) again; a
    squared relu keeps the relu, not its input.
    """
    if model.activation == "swiglu":
        return 3 if kernels.is_compiled else 4
    return 2


def describe_experts(model: ModelConfig, *, item_bytes: int, kernels: Kernels, share: Share | None = None) -> Half:
    """The half of a block that has experts, with nothing dropped and all ranks getting equally many rows: what a token
    keeps in the router (its input in fp32, scores, choices and places), its rows before and behind the experts, and
    inside of them.

    `model` is the whole one: tensor-parallel ranks route 1/tp of the tokens each, a row goes to all etp ranks of its
    expert, and the shared expert is narrowed as an MLP is.
    """
    a, h, e, k, f = item_bytes, model.hidden_dim, model.num_experts or 0, model.router_top_k, model.expert_width
    tp, etp, between = (1, 1, 1.0) if share is None else (share.tp, share.etp, share.between)
    wide, shared = max(a, 4), model.shared_dim or 0
    num_up = 2 if model.activation == "swiglu" else 1
    num_kept = _count_kept_inside(model, kernels)
    rows, inner = k * etp / tp, (k * f + shared) / tp
    routed = (wide * e + k * (2 * wide + 3 * 8)) / tp + a * rows * h
    read = wide * h / tp  # what the router reads: the norm's result, or a wider copy of it
    entered = 1.0 if share is None else share.entered
    if shared and (a < wide or (tp > 1 and entered == 1)):  # else both read the same tokens
        read += a * h * entered
    return Half(
        parts=("mlp_activation", "mlp", "mlp_norm"),
        before=routed,
        core_input=routed + a * num_up * inner + a * rows * h,  # the core gives rows, which their sums need
        core=a * num_kept * inner + a * rows * h,
        before_flops=2.0 * h * (e / tp + num_up * inner),
        core_flops=_ELEMENTWISE * inner,
        **_describe_frame(model, a, kernels, between, normed=read),
    )


def _describe_frame(model: ModelConfig, a: int, kernels: Kernels, between: float, *, normed: float) -> dict[str, float]:
    """What both halves have alike: the input, the norm, what the first matrices read, the dropout mask."""
    h = model.hidden_dim
    return {
        "input": a * h * between,
        "norm": _keep_norm(model, h, 1, a, kernels) * between,
        "entering": a * h * between,
        "normed": normed,
        "mask": _keep_mask(model) * between,
        "norm_flops": float(_ELEMENTWISE * h) * between,
    }


def _keep_mask(model: ModelConfig) -> float:
    """Dropout's mask: a byte an element."""
    return model.hidden_dim if model.hidden_dropout else 0


def _is_widened(model: ModelConfig, a: int, kernels: Kernels) -> bool:
    """Whether a norm keeps a wider copy of its input instead of the input."""
    return model.norm == "RMSNorm" and not kernels.is_norm_fused and a < 4


def _keep_norm(model: ModelConfig, width: int, rows: int, a: int, kernels: Kernels, *, has_input: bool = True) -> float:
    """Bytes kept by a norm over `rows` vectors of `width` channels in all; its input may be kept by others already."""
    wide = max(a, 4)
    if model.norm == "LayerNorm":
        return (a * width if has_input else 0) + 8 * rows
    if kernels.is_norm_fused:
        return (a * width if has_input else 0) + 4 * rows
    return (wide * width if has_input or _is_widened(model, a, kernels) else 0) + wide * width + wide * rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes of activations of one micro-batch on a rank."""

    kept: int
    """On the device between forward and backward."""
    offloaded: int
    """In the CPU's memory meanwhile."""
    again: int
    """The largest part that is computed again, which is on the device while backward passes through it."""
    moment: int = 0
    """What the loss needs when backward begins, beyond what it keeps: scores and their gradient."""

    @property
    def peak(self) -> int:
        """On the device when backward is at its most demanding part."""
        return self.kept + max(self.again, self.moment)


def count_activation_bytes(
    model: ModelConfig,
    recompute: RecomputeConfig,
    parts: Sequence[Collection[str]],
    *,
    seq_len: int,
    micro_batch_size: int,
    item_bytes: int,
    kernels: Kernels = GPU,
    share: Share | None = None,
) -> Activations:
    """What one micro-batch keeps for backward.

    Args:
        model: a shape with its vocabulary.
        recompute: what is computed again, and how the rest is kept. Compression counts what is kept of the blocks at
            its width; the loss is kept as it is.
        parts: for each block of the model what selective recompute computes again (`choose_parts` says it).
        seq_len: tokens of a sample.
        micro_batch_size: samples.
        item_bytes: bytes of an activation: 8, 4 or 2.
        kernels: of the device.
        share: what the rank holds; the whole model if not given.
    """
    own = share or hold_all(model)
    tokens = seq_len * micro_batch_size / own.cp
    local = narrow(model, own.tp)
    attention = describe_attention(
        local,
        seq_len=seq_len,
        item_bytes=item_bytes,
        kernels=kernels,
        share=own,
        micro_batch_size=micro_batch_size,
    )
    num_further = model.num_mtp_layers if own.is_last else 0
    mlp = describe_mlp(local, item_bytes=item_bytes, kernels=kernels, share=own)
    experts = describe_experts(model, item_bytes=item_bytes, kernels=kernels, share=own)
    mlps = [experts if has_experts else mlp for has_experts in list_kinds(model, own)]
    blocks, again = _count_blocks(recompute, _pick(parts, own), own.chunks or (len(own.layers),), attention, mlps)
    stream = blocks + (_keep_mask(model) * own.between if own.is_first else 0)
    loss = moment = 0.0
    if own.is_last:
        a, h = item_bytes, model.hidden_dim
        stream += (_keep_norm(model, h, 1, a, kernels) * own.between + a * h) * (1 + num_further)
        stream += num_further * _count_further(model, a, kernels) * own.between
        loss, moment = _count_loss(model, own, tokens, a, kernels)
    stream *= min(_KEPT_BYTES[recompute.compression], item_bytes) / item_bytes * tokens
    kept, away = (loss, stream) if recompute.is_offloaded else (loss + stream, 0.0)
    return Activations(kept=int(kept), offloaded=int(away), again=int(again * tokens), moment=int(moment))


def _pick(parts: Sequence[Collection[str]], share: Share) -> list[Collection[str]]:
    """What is given for the blocks that a rank holds."""
    return [parts[layer] if parts else () for layer in share.layers]


def _count_loss(model: ModelConfig, share: Share, tokens: float, a: int, kernels: Kernels) -> tuple[float, float]:
    """Bytes that the loss keeps, and that it needs for a moment, of all tokens.

    On a rank with the whole vocabulary scores are kept as logarithms of probabilities in fp32, and backward makes their
    gradient twice; or they exist for a chunk of tokens, and the gradient of the hidden states is kept. Where ranks
    divide the vocabulary, they exist for a chunk of tokens too (CHUNK_SCORES).
    """
    wide, vocab, times = max(a, 4), model.vocab_size or 0, 1 + model.num_mtp_layers
    if share.tp == 1 and kernels.has_chunked_loss:
        return (a * model.hidden_dim + 16) * times * tokens, a * min(WHOLE_CHUNK_SCORES, tokens * vocab)
    if share.tp == 1:
        return (vocab * wide * times + 16) * tokens, 2 * wide * vocab * tokens
    rows = count_vocabulary_rows(model, share.tp)
    scores = min(max(CHUNK_SCORES, rows), tokens * rows)
    return (wide + 16) * times * tokens, (2 * wide + a) * scores + (wide + a) * rows * model.hidden_dim


def _count_further(model: ModelConfig, a: int, kernels: Kernels) -> float:
    """One depth of multi-token prediction without its block and outlet: two norms, their results side by side."""
    h = model.hidden_dim
    shared = _keep_norm(model, h, 1, a, kernels, has_input=False)  # what it reads is kept by the norm before it
    return shared + _keep_norm(model, h, 1, a, kernels) + 2 * a * h


def _count_blocks(
    recompute: RecomputeConfig,
    parts: Sequence[Collection[str]],
    lengths: Sequence[int],
    attention: Half,
    mlps: Sequence[Half],
) -> tuple[float, float]:
    """Bytes a token that the blocks keep, those of multi-token prediction last, and those of the largest part that is
    computed again.
    """
    wholes = [attention.count_kept(()) + mlp.count_kept(()) for mlp in mlps]
    if recompute.granularity == "full" and recompute.method == "block":
        num_again = recompute.num_layers or len(wholes)
        return len(wholes[:num_again]) * attention.input + sum(wholes[num_again:]), max(wholes[:num_again], default=0.0)
    if recompute.granularity == "full":
        runs = list(_cut_runs(wholes, lengths, recompute.num_layers or 1))
        return len(runs) * attention.input, max(map(sum, runs), default=0.0)
    if recompute.granularity == "none":
        return sum(wholes), 0
    all_parts = [*parts, *(parts[-1] if parts else () for _ in mlps[len(parts) :])]
    halves = [(half, names) for names, mlp in zip(all_parts, mlps, strict=True) for half in (attention, mlp)]
    saved = [half.count_kept(()) - half.count_kept(names) for half, names in halves]
    return sum(half.count_kept(names) for half, names in halves), max(saved, default=0.0)


def _cut_runs(wholes: Sequence[float], lengths: Sequence[int], length: int) -> Iterator[Sequence[float]]:
    """Runs of at most `length` blocks inside each chunk; every block of multi-token prediction is one."""
    end = 0
    for own in lengths:
        start, end = end, end + own
        yield from (wholes[first : min(first + length, end)] for first in range(start, end, length))
    yield from ([whole] for whole in wholes[end:])
