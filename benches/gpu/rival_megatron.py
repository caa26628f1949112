#!/usr/bin/env python3
"""Training steps of Megatron-Core with Transformer Engine: the rival of `train.py`, on the same rows.

Needs megatron_core 0.19, transformer_engine 2.20 and flash-attn-4 on the path. Steps are whole: forward, backward,
clipping, AdamW; tokens are random and already on the GPU, which favours the rival. Two recipes:

- `bf16`: weights, gradients and moments in bf16, torch's fused AdamW (megaflow's `--all-bf16`).
- `fp32`: its own DistributedDataParallel and distributed optimizer with fp32 gradients, masters and moments; weight
  gradients are added by the products in fp32, collectives overlap with backward and forward.

Before it is timed its attention is compared with torch's, since Transformer Engine 2.20 hands flash-attn 4 (4.0.0b36)
the window (-1, 0) for "all earlier tokens", which that takes for a window that holds no token: fast, and the output
has nothing to do with attention. `mend_windows` hands it over as flash-attn means it.

Prints one JSON line: tokens/s over all ranks (median of the steps), peak memory, exposed communication of a step.

    torchrun --nproc_per_node=1 benches/gpu/rival_megatron.py gpt-1.3b --recipe fp32
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
from train import ROWS

VOCAB = 50304


def offer_fused_sums() -> None:
    """Stand in for apex's extension that adds a weight gradient in the product, if it is not installed."""

    def add_product(x: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
        rows = grad.reshape(-1, grad.shape[-1]).t()
        torch.addmm(main_grad, rows, x.reshape(-1, x.shape[-1]), out_dtype=main_grad.dtype, out=main_grad)

    name = "fused_weight_gradient_mlp_cuda"
    if importlib.util.find_spec(name) is None:
        module: Any = types.ModuleType(name)
        module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = add_product
        sys.modules[name] = module


def mend_windows() -> None:
    """Let Transformer Engine say "no window" to flash-attn 4 in its own words: None, where it says -1 or, causal, 0."""
    from transformer_engine.pytorch.attention.dot_product_attention import backends

    given = backends.flash_attn_func_v4

    def attend(
        *tensors: torch.Tensor, window_size: tuple[int | None, int | None] = (None, None), **options: Any
    ) -> Any:
        left, right = window_size
        if left is None or left < 0:
            left, right = None, None if options.get("causal") or right is None or right < 0 else right
        return given(*tensors, window_size=(left, right), **options)

    if given is not None:
        backends.flash_attn_func_v4 = attend


def check_attention(sizes: argparse.Namespace) -> float:
    """The largest difference of its attention from torch's, results and gradients, over the largest value.

    Raises:
        SystemExit: if it is above 2e-2: what is timed would be no attention.
    """
    from transformer_engine.pytorch import DotProductAttention

    heads, width = sizes.num_attention_heads, sizes.hidden_size // sizes.num_attention_heads
    core = DotProductAttention(heads, width, attention_dropout=0.0, qkv_format="sbhd", attn_mask_type="causal")
    shape = (sizes.seq_length, 2, heads, width)
    own = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    wide = [x.detach().float().requires_grad_() for x in own]
    slope = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    core(*own).view(shape).backward(slope)
    plain = torch.nn.functional.scaled_dot_product_attention(*(x.permute(1, 2, 0, 3) for x in wide), is_causal=True)
    plain.permute(2, 0, 1, 3).backward(slope.float())
    pairs = [(x.grad, y.grad) for x, y in zip(own, wide, strict=True)]
    pairs.append((core(*own).view(shape), plain.permute(2, 0, 1, 3)))
    largest = max(((x.float() - y).abs().max() / y.abs().max()).item() for x, y in pairs)
    if not largest <= 2e-2:
        raise SystemExit(f"its attention is none: {largest:.2g} of the largest value away from torch's")
    return largest


def read_row(row: str) -> argparse.Namespace:
    """The sizes of a row of `train.py`, read from its flags."""
    parser = argparse.ArgumentParser()
    for name in ("num-layers", "hidden-size", "num-attention-heads", "seq-length", "micro-batch-size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--global-batch-size", type=int, required=True)
    parser.add_argument("--ffn-hidden-size", type=int)
    parser.add_argument("--num-experts", type=int)
    parser.add_argument("--moe-router-topk", type=int)
    parser.add_argument("--moe-aux-loss-coeff", type=float)
    parser.add_argument("--normalization", default="LayerNorm")
    parser.add_argument("--position-embedding-type", default="learned_absolute")
    for name in ("swiglu", "disable-bias-linear", "untie-embeddings-and-output-weights", "all-bf16"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--moe-router-force-load-balancing", action="store_true")
    return parser.parse_args(ROWS[row].split())


def configure(sizes: argparse.Namespace, options: argparse.Namespace) -> Any:
    """Megatron's configuration: everything that its documentation names for speed and that these models can use."""
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    is_main = options.recipe == "fp32"
    values: dict[str, Any] = {
        "num_layers": sizes.num_layers,
        "hidden_size": sizes.hidden_size,
        "num_attention_heads": sizes.num_attention_heads,
        "ffn_hidden_size": sizes.ffn_hidden_size or 4 * sizes.hidden_size,
        "normalization": sizes.normalization,
        "add_bias_linear": not sizes.disable_bias_linear,
        "gated_linear_unit": sizes.swiglu,
        "activation_func": torch.nn.functional.silu if sizes.swiglu else torch.nn.functional.gelu,
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "apply_rope_fusion": sizes.position_embedding_type == "rope",
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": options.loss,
        "gradient_accumulation_fusion": is_main and not options.no_fusion,
        "masked_softmax_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "tensor_model_parallel_size": options.tp,
        "sequence_parallel": options.tp > 1,
        "attention_backend": AttnBackend[options.attention],
    }
    if sizes.num_experts:
        values |= {
            "num_moe_experts": sizes.num_experts,
            "moe_router_topk": sizes.moe_router_topk,
            "moe_aux_loss_coeff": sizes.moe_aux_loss_coeff,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_router_force_load_balancing": sizes.moe_router_force_load_balancing,
            "moe_grouped_gemm": True,
            "moe_token_dispatcher_type": options.dispatcher,
            "moe_permute_fusion": True,
            "moe_router_fusion": not options.no_fusion,
            "expert_model_parallel_size": options.ep,
        }
    if options.fp8:
        values |= {"fp8": "hybrid", "fp8_recipe": options.fp8}
    if options.graphs:
        values |= {"cuda_graph_impl": options.graphs, "use_te_rng_tracker": True}
    return TransformerConfig(**values)


def build(sizes: argparse.Namespace, options: argparse.Namespace) -> Any:
    """The model on this rank's GPU, in bf16."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = configure(sizes, options)
    experts = sizes.num_experts
    spec = get_gpt_layer_with_transformer_engine_spec(num_experts=experts, moe_grouped_gemm=bool(experts))
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=sizes.seq_length,
        position_embedding_type=sizes.position_embedding_type,
        share_embeddings_and_output_weights=not sizes.untie_embeddings_and_output_weights,
    )
    return config, model.cuda().to(torch.bfloat16)


def make_plain_step(model: Any, forward: Callable[[], torch.Tensor], num_micro: int) -> Callable[[], None]:
    """A step of the recipe `bf16`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)

    def step() -> None:
        for _ in range(num_micro):
            (forward() / num_micro).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def make_main_step(
    config: Any, model: Any, sizes: argparse.Namespace, num_micro: int, batch: tuple[torch.Tensor, ...]
) -> Callable[[], None]:
    """A step of the recipe `fp32`."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    is_shared = dist.get_world_size() > config.tensor_model_parallel_size
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=is_shared,
        overlap_param_gather=is_shared,
        use_distributed_optimizer=True,
        average_in_collective=True,
    )
    wrapped = DistributedDataParallel(config, ddp, model)
    own = OptimizerConfig(
        optimizer="adam",
        lr=1e-4,
        weight_decay=0.1,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        overlap_param_gather=is_shared,
        clip_grad=1.0,
    )
    optimizer = get_megatron_optimizer(own, [wrapped])
    config.no_sync_func = wrapped.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    if is_shared:
        config.param_sync_func = wrapped.start_param_sync
    run = get_forward_backward_func()

    def forward(iterator: Iterator[Any], part: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        tokens, positions, labels = batch
        return part(tokens, positions, None, labels=labels), lambda losses: (losses.float().mean(), {})

    def step() -> None:
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        run(
            forward_step_func=forward,
            data_iterator=None,
            model=[wrapped],
            num_microbatches=num_micro,
            seq_length=sizes.seq_length,
            micro_batch_size=sizes.micro_batch_size,
            forward_only=False,
        )
        optimizer.step()

    return step


def profile_step(step: Callable[[], None]) -> list[tuple[str, float, float]]:
    """What ran on the GPU in one step: name, start and end in microseconds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        step()
        torch.cuda.synchronize()
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def measure_exposed(kernels: list[tuple[str, float, float]]) -> float:
    """Seconds in which a kernel of NCCL ran and no other."""
    spans = [(start, end, "nccl" in name.lower()) for name, start, end in kernels]
    moments = sorted([(a, 1, is_nccl) for a, _, is_nccl in spans] + [(b, -1, is_nccl) for _, b, is_nccl in spans])
    running, last, exposed = {True: 0, False: 0}, 0.0, 0.0
    for moment, change, is_nccl in moments:
        if running[True] and not running[False]:
            exposed += moment - last
        running[is_nccl] += change
        last = moment
    return exposed / 1e6


def list_longest(kernels: list[tuple[str, float, float]], count: int) -> list[tuple[str, float, int]]:
    """The kernels with the most time: name, milliseconds and calls of the step."""
    totals: dict[str, tuple[float, int]] = {}
    for name, start, end in kernels:
        time, calls = totals.get(name, (0.0, 0))
        totals[name] = time + (end - start) / 1e3, calls + 1
    longest = sorted(totals.items(), key=lambda item: -item[1][0])[:count]
    return [(name[:120], round(time, 3), calls) for name, (time, calls) in longest]


def parse_options() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("row", choices=sorted(ROWS))
    parser.add_argument("--recipe", choices=("bf16", "fp32"), default="fp32", help="see above (default: fp32)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks, with sequence parallelism")
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel ranks")
    parser.add_argument("--fp8", choices=("tensorwise", "delayed"), help="products in fp8, by this recipe")
    parser.add_argument("--loss", choices=("native", "te"), default="te", help="kernel of the loss (default: te)")
    parser.add_argument("--graphs", choices=("local", "transformer_engine"), help="CUDA graphs of layers")
    parser.add_argument(
        "--attention",
        choices=("auto", "flash", "fused"),
        default="auto",
        help="flash-attn 4 or cuDNN (default: auto, Transformer Engine's choice)",
    )
    parser.add_argument("--no-fusion", action="store_true", help="without fp32 sums in products and fused routers")
    parser.add_argument(
        "--dispatcher", choices=("alltoall", "allgather"), default="alltoall", help="of tokens to experts"
    )
    parser.add_argument("--force-balance", action="store_true", help="routers choose at random, so that load is even")
    parser.add_argument("--kernels", type=int, default=0, help="list so many kernels with the most time (default: 0)")
    parser.add_argument("--steps", type=int, default=8, help="steps that are timed, after 4 others (default: 8)")
    return parser.parse_args()


def join_ranks(options: argparse.Namespace) -> None:
    """This rank's GPU, its groups and its random streams."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1" if options.tp > 1 else "8")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")

    offer_fused_sums()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tp, expert_model_parallel_size=options.ep
    )
    model_parallel_cuda_manual_seed(1, te_rng_tracker=bool(options.graphs), use_cudagraphable_rng=bool(options.graphs))


def time_steps(step: Callable[[], None], count: int) -> float:
    """Median seconds of `count` steps, behind four others."""
    for _ in range(4):
        step()
    times = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def main() -> None:
    """Train a few steps, and print what they took."""
    options = parse_options()
    join_ranks(options)
    sizes = read_row(options.row)
    sizes.moe_router_force_load_balancing |= options.force_balance
    mend_windows()
    config, model = build(sizes, options)
    error = check_attention(sizes)
    shape = (sizes.micro_batch_size, sizes.seq_length)
    tokens, labels = (torch.randint(0, VOCAB, shape, device="cuda") for _ in range(2))
    positions = torch.arange(sizes.seq_length, device="cuda").expand(shape).contiguous()
    num_micro = sizes.global_batch_size // sizes.micro_batch_size // (dist.get_world_size() // options.tp)
    if options.recipe == "bf16":
        step = make_plain_step(model, lambda: model(tokens, positions, None, labels=labels).float().mean(), num_micro)
    else:
        step = make_main_step(config, model, sizes, num_micro, (tokens, positions, labels))
    seconds = time_steps(step, options.steps)
    peak = torch.cuda.max_memory_allocated()
    kernels = profile_step(step) if dist.get_world_size() > 1 or options.kernels else []
    if dist.get_rank() == 0:
        line = {
            "row": options.row,
            "recipe": options.recipe,
            "tokens_per_s": round(sizes.global_batch_size * sizes.seq_length / seconds),
            "step_time_s": seconds,
            "memory_peak_bytes": peak,
            "exposed_communication_s": measure_exposed(kernels),
            "attention_error": error,
            "kernels": list_longest(kernels, options.kernels),
            "options": {name: value for name, value in vars(options).items() if value},
        }
        print(json.dumps(line), flush=True)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
