"""How long a step takes under a layout, predicted by formula: for comparing layouts, not for promising speed.

Computing. Matrix products run at PRODUCT_RATE of the GPU's dense peak (those of blocks in fp8 at FP8_RATE), and
everything else is bound by memory: it moves PASSES bytes, in compiled blocks COMPILED_PASSES, for each byte that a
forward without recompute keeps. They were set on one H200 with this trainer, seven uncompiled runs from 124M to 16
layers of Llama 7B, with and without recompute, and eight compiled ones from 124M to 6.7B, three of them in fp8: the
rate is that of a large product there, the others were fitted; predictions were within 12 % of each run, and 6 % of each
compiled one (docs/planning.md).

Communication. Rates are LINK_RATE of what the makers state. Collectives of tensor, context and expert parallelism are
counted as exposed, and experts as getting equally many tokens; gradients hide behind the last backward, and weights of
ZeRO behind the first forward, as long as these last (ZeRO 2 and 3: behind every micro-batch). These parts were not
measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megaflow_trainer.config.activations import (
    GPU,
    count_activation_bytes,
    count_fp8_flops,
    describe_attention,
    describe_experts,
    describe_mlp,
)
from megaflow_trainer.config.arithmetic import count_flops_per_token, count_state_bytes
from megaflow_trainer.config.compiling import find_kernels
from megaflow_trainer.config.cost_table import ITEM_BYTES, choose_parts, count_block_flops
from megaflow_trainer.config.hardware import Gpu
from megaflow_trainer.config.memory import find_layout
from megaflow_trainer.config.sections import ParallelConfig, RecomputeConfig, TrainConfig
from megaflow_trainer.config.shares import (
    Share,
    count_held_experts,
    count_held_parameters,
    count_vocabulary_rows,
    find_share,
    list_kinds,
    narrow,
)

PRODUCT_RATE, FP8_RATE = 0.80, 1.25
"""Of the peak in bf16."""
PASSES, COMPILED_PASSES = 22.0, 10.0
LINK_RATE = 0.7


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of a step, and what follows from them."""

    compute_s: float
    """Of all micro-batches on the slowest stage."""
    tensor_s: float
    context_s: float
    expert_s: float
    """Tokens that travel to their experts and back."""
    pipeline_s: float
    """Messages between stages."""
    bubble_s: float
    """Waiting for other stages."""
    data_s: float
    """Gradients and weights of data parallelism that hide behind nothing."""
    optimizer_s: float
    tokens: int
    num_gpus: int
    mfu: float = 0.0
    mfu_causal: float = 0.0

    @property
    def total_s(self) -> float:
        """The step."""
        return self.compute_s + self.communication_s + self.bubble_s + self.optimizer_s

    @property
    def communication_s(self) -> float:
        """Exposed communication."""
        return self.tensor_s + self.context_s + self.expert_s + self.pipeline_s + self.data_s

    @property
    def tokens_per_s(self) -> float:
        """Of all GPUs."""
        return self.tokens / self.total_s


def predict_step(config: TrainConfig, gpu: Gpu, *, gpus_per_node: int = 8) -> StepTime:
    """The time of a step of a resolved configuration with its vocabulary."""
    own, sizes, layout = config.parallel, config.step.sizes, find_layout(config)
    count = sizes.num_micro_batches
    found = [find_share(config.model, own, pp_rank=rank, num_micro_batches=count) for rank in range(own.pp)]
    model = config.model
    shares = list({(tuple(list_kinds(model, own)), own.is_first, own.is_last): own for own in found}.values())
    tokens = config.data.seq_len * sizes.micro_batch_size / own.cp
    stages = [_time_stage(config, share, gpu, tokens) for share in shares]
    tensor = max(_time_tensor(config, share, gpu, tokens, gpus_per_node) for share in shares)
    ring = max(_time_ring(config, share, gpu, tokens, gpus_per_node) for share in shares)
    travel = max(_time_experts(config, share, gpu, tokens, gpus_per_node) for share in shares)
    message = _time_message(config, gpu, tokens, gpus_per_node)
    micro_s = max(stages) + tensor + ring + travel + message
    bubble = (own.pp - 1) / (2 if own.schedule == "zbv" else own.virtual_stages)
    held, experts = max((count_held_parameters(model, share), count_held_experts(model, share)) for share in shares)
    divisor = layout.dp_shard * layout.cp if own.zero else 1
    apart = layout.edp_shard if own.zero and shares[0].has_experts_apart else divisor
    stepped = (held - experts) / divisor + experts / apart
    time = StepTime(
        compute_s=max(stages) * count,
        tensor_s=tensor * count,
        context_s=ring * count,
        expert_s=travel * count,
        pipeline_s=message * count,
        bubble_s=bubble * micro_s,
        data_s=_time_data(config, gpu, (held, experts), micro_s, gpus_per_node),
        optimizer_s=_count_moved(config, stepped, held) / (PRODUCT_RATE * gpu.memory_rate),
        tokens=sizes.global_batch_size * config.data.seq_len,
        num_gpus=layout.size,
    )
    per_gpu = time.tokens_per_s / layout.size / gpu.peak_flops
    full, causal = (
        count_flops_per_token(config.model, seq_len=config.data.seq_len, is_causal=is_causal) * per_gpu
        for is_causal in (False, True)
    )
    return dataclasses.replace(time, mfu=full, mfu_causal=causal)


def bubble_share(parallel: ParallelConfig, num_micro_batches: int) -> float:
    """Part of a step in which a rank waits for other stages: (p - 1) / (v m + p - 1)."""
    wait = (parallel.pp - 1) / parallel.virtual_stages
    return wait / (num_micro_batches + wait)


def _count_moved(config: TrainConfig, stepped: float, held: float) -> float:
    """Bytes that a step moves: of each weight that a rank steps master and moments, read and written, main gradient and
    weight; of each that it holds main gradients zeroed, added to and measured.
    """
    own = count_state_bytes(config.model, config.step, config.optim, num_parameters=1)
    has_master = config.optim.main_dtype != config.step.dtype
    weight = own["weights"] * (1 if has_master else 2)
    return (2 * own["optimizer"] + own["gradients"] + weight) * stepped + 4 * own["gradients"] * held


def _time_stage(config: TrainConfig, share: Share, gpu: Gpu, tokens: float) -> float:
    """Forward and backward of one micro-batch on a rank, without communication."""
    model, local, item = config.model, narrow(config.model, share.tp), ITEM_BYTES[config.step.dtype]
    kinds, kernels = list_kinds(model, share), find_kernels(config)
    costs = {kind: count_block_flops(local, seq_len=config.data.seq_len, has_experts=kind) for kind in set(kinds)}
    blocks = [costs[kind] for kind in kinds]
    plain = count_activation_bytes(
        model,
        RecomputeConfig(),
        (),
        seq_len=config.data.seq_len,
        micro_batch_size=config.step.sizes.micro_batch_size,
        item_bytes=item,
        share=share,
        kernels=kernels,
    )
    flops = 3 * sum(blocks) + _count_again(config, share, blocks)
    in_fp8 = sum(count_fp8_flops(local, kernels, has_experts=kind) for kind in kinds)
    in_fp8 *= flops / sum(blocks) if blocks else 0
    seconds = (flops - in_fp8) / PRODUCT_RATE + in_fp8 / FP8_RATE
    if share.is_last:
        head = 6 * model.hidden_dim * count_vocabulary_rows(model, share.tp) * (1 + model.num_mtp_layers)
        seconds += head / PRODUCT_RATE
    passes = COMPILED_PASSES if kernels.is_compiled else PASSES
    return seconds * tokens / gpu.peak_flops + passes * plain.kept / (PRODUCT_RATE * gpu.memory_rate)


def _count_again(config: TrainConfig, share: Share, blocks: Sequence[float]) -> float:
    """FLOPs a token of what is computed again of the layers, forward FLOPs of `blocks` given."""
    own = config.recompute
    if own.granularity == "none":
        return 0.0
    if own.granularity == "full":
        part = own.num_layers if own.method == "block" else None
        return sum(blocks[: min(len(share.layers), part or len(share.layers))])
    local, item, parts = narrow(config.model, share.tp), ITEM_BYTES[config.step.dtype], choose_parts(config)
    attention = describe_attention(local, seq_len=config.data.seq_len, item_bytes=item, kernels=GPU, share=share)
    mlp = describe_mlp(local, item_bytes=item, kernels=GPU, share=share)
    experts = describe_experts(config.model, item_bytes=item, kernels=GPU, share=share)
    halves = [(attention, experts if has_experts else mlp) for has_experts in list_kinds(config.model, share)]
    return sum(
        half.count_flops(parts[layer]) for layer, both in zip(share.layers, halves, strict=False) for half in both
    )


def _find_rate(gpu: Gpu, span: int, gpus_per_node: int, group: int) -> float:
    """Bytes per second of a collective over `group` ranks whose farthest are `span` ranks apart.

    Beyond one machine every rank of the group there has a network card of its own.
    """
    if span <= gpus_per_node:
        return LINK_RATE * gpu.link_rate
    neighbours = max(1, group * gpus_per_node // span)
    return LINK_RATE * min(gpu.link_rate, gpu.net_rate * neighbours)


def _time_tensor(config: TrainConfig, share: Share, gpu: Gpu, tokens: float, gpus_per_node: int) -> float:
    """Two all-reduces a block and direction, and those of what is computed again."""
    tp = share.tp
    if tp == 1:
        return 0.0
    times = 6 if config.recompute.granularity == "full" else 4
    sent = 2 * (tp - 1) / tp * tokens * config.model.hidden_dim * ITEM_BYTES[config.step.dtype]
    return times * len(share.layers) * sent / _find_rate(gpu, tp, gpus_per_node, tp)


def _time_ring(config: TrainConfig, share: Share, gpu: Gpu, tokens: float, gpus_per_node: int) -> float:
    """Keys and values round the ranks, forward and backward, and their gradients in fp32."""
    if share.cp == 1:
        return 0.0
    local, item = narrow(config.model, share.tp), ITEM_BYTES[config.step.dtype]
    width = 2 * local.kv_heads * local.head_width
    if local.is_latent:
        width = local.num_heads * (local.qk_dim + local.qk_rotary_dim + local.v_dim)
    sent = (share.cp - 1) * tokens * width * (2 * item + 4)
    rate = _find_rate(gpu, share.tp * share.cp, gpus_per_node, share.cp)
    return len(share.layers) * sent / rate


def _time_experts(config: TrainConfig, share: Share, gpu: Gpu, tokens: float, gpus_per_node: int) -> float:
    """Rows to their experts and back, forward and backward, to all ranks that share an expert."""
    own, ranks, count = config.parallel, share.ep * share.etp, sum(list_kinds(config.model, share))
    if ranks == 1 or count == 0:
        return 0.0
    times = 6 if config.recompute.granularity == "full" else 4
    rows = tokens / share.tp * (ranks if own.dispatcher == "allgather" else config.model.router_top_k * share.etp)
    sent = (ranks - 1) / ranks * rows * config.model.hidden_dim * ITEM_BYTES[config.step.dtype]
    return times * count * sent / _find_rate(gpu, ranks, gpus_per_node, ranks)


def _time_message(config: TrainConfig, gpu: Gpu, tokens: float, gpus_per_node: int) -> float:
    """What a stage sends on and back for a micro-batch."""
    own, layout = config.parallel, find_layout(config)
    if own.pp == 1:
        return 0.0
    size = tokens * config.model.hidden_dim * ITEM_BYTES[config.step.dtype]
    size /= own.tp if own.sequence_parallel else 1
    return 2 * own.virtual_stages * size / _find_rate(gpu, layout.size, gpus_per_node, 1)


def _time_data(config: TrainConfig, gpu: Gpu, held: tuple[int, int], micro_s: float, gpus_per_node: int) -> float:
    """Gradients and weights that travel longer than what they hide behind; `held`: all weights, and experts' alone."""
    own, layout, count = config.parallel, find_layout(config), config.step.sizes.num_micro_batches
    ranks = layout.dp * layout.cp
    if max(ranks, layout.edp) == 1:
        return 0.0
    item = ITEM_BYTES[config.step.dtype]
    total, experts = held
    part = (ranks - 1) / ranks * (total - experts) / _find_rate(gpu, own.tp * ranks, gpus_per_node, ranks)
    same = layout.edp if layout.has_experts_apart else ranks
    part += (same - 1) / same * experts / _find_rate(gpu, own.tp * ranks, gpus_per_node, same)
    reduce_s, gather_s = 4 * part, item * part
    if not own.overlaps:
        return 2 * reduce_s if own.zero == 0 else reduce_s * (count if own.zero > 1 else 1) + gather_s
    backward_s, forward_s = micro_s * 2 / 3, micro_s / 3
    if own.zero == 0:
        return max(0.0, 2 * reduce_s - backward_s)
    if own.zero == 3:
        return count * max(0.0, reduce_s + 2 * gather_s - micro_s)
    times = count if own.zero == 2 else 1
    return times * max(0.0, reduce_s - backward_s) + max(0.0, gather_s - forward_s)
