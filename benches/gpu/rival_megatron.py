#!/usr/bin/env python3
"""Training steps of Megatron-Core with Transformer Engine: the rival of `train.py`, on the same rows.

Needs megatron_core 0.19, and but for `--transformer-impl local` transformer_engine 2.20 and flash-attn-4, on the
path. Steps are whole: forward, backward, clipping, AdamW, by its own schedule (which marks the first micro-batch of a
step: without that Transformer Engine would go on with the fp8 weights of the first step) and its own
DistributedDataParallel; tokens are random and already on the GPU, which favours the rival. Weight gradients are added
by the products. Two recipes:

- `bf16`: weights, gradients and moments in bf16, torch's fused AdamW (megaflow's `--all-bf16`), since its own optimizer
  keeps masters in fp32; ranks of data parallelism reduce gradients in bf16 and hold all states.
- `fp32`: its distributed optimizer with fp32 gradients, masters and moments; collectives overlap with backward and
  forward.

Before it is timed its attention is compared with torch's, since Transformer Engine 2.20 hands flash-attn 4 (4.0.0b36)
the window (-1, 0) for "all earlier tokens", which that takes for a window that holds no token: fast, and the output
has nothing to do with attention. `mend_windows` hands it over as flash-attn means it. Before gradients are added in
bf16 a small layer is tried: if Transformer Engine's kernel does not add in bf16, they are added apart, and the line
says so.

Prints one JSON line: tokens/s over all ranks (median of the steps), peak memory, exposed communication of a step.

    torchrun --standalone --nproc_per_node=1 benches/gpu/rival_megatron.py gpt-1.3b --recipe fp32
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from keys import record_rival
from rival_parts import list_longest, measure_exposed, print_line, profile_step, time_steps
from rows import ROWS, VOCAB, read_sizes
from timing import need_gpu


def offer_fused_sums() -> None:
    """Stand in for apex's extension that adds a weight gradient in the product, if it is not installed."""

    def add_product(x: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
        rows, x = grad.reshape(-1, grad.shape[-1]).t(), x.reshape(-1, x.shape[-1])
        wide = {} if main_grad.dtype == x.dtype else {"out_dtype": main_grad.dtype}
        torch.addmm(main_grad, rows, x, out=main_grad, **wide)

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


def find_largest(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The largest difference over the largest value that is wanted; by torch's maximum, which passes on what is not a
    number, where Python's passes over it.
    """
    return float(torch.stack([(x.float() - y).abs().max() / y.abs().max() for x, y in pairs]).max())


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
    largest = find_largest(pairs)
    if not largest <= 2e-2:
        raise SystemExit(f"its attention is none: {largest:.2g} of the largest value away from torch's")
    return largest


def find_sum_obstacle(options: argparse.Namespace) -> str | None:
    """Why Transformer Engine's products cannot add gradients in bf16, tried on a small layer; None if they can."""
    import transformer_engine.pytorch as engine

    layer = engine.Linear(256, 128, bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.ones_like(layer.weight)
    x, slope = (torch.randn(512, width, device="cuda", dtype=torch.bfloat16) for width in (256, 128))
    try:
        with engine.fp8_autocast(enabled=bool(options.fp8)):
            y = layer(x)
        y.backward(slope)
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    wanted = 1 + slope.float().t() @ x.float()
    away = ((layer.weight.main_grad.float() - wanted).abs().max() / wanted.abs().max()).item()
    return None if away <= (0.2 if options.fp8 else 2e-2) else f"sums are {away:.2g} of the largest value away"


def configure(sizes: argparse.Namespace, options: argparse.Namespace) -> Any:
    """Megatron's configuration: everything that its documentation names for speed and that these models can use."""
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

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
        "apply_rope_fusion": sizes.position_embedding_type == "rope" and not options.local,
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "native" if options.local else options.loss,
        "gradient_accumulation_fusion": options.adds,
        "masked_softmax_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "tensor_model_parallel_size": options.tp,
        "sequence_parallel": options.tp > 1,
        "attention_backend": AttnBackend["auto" if options.local else options.attention],
    }
    if sizes.num_experts:
        values |= {
            "num_moe_experts": sizes.num_experts,
            "moe_router_topk": sizes.moe_router_topk,
            "moe_aux_loss_coeff": sizes.moe_aux_loss_coeff,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_router_force_load_balancing": sizes.moe_router_force_load_balancing,
            "moe_grouped_gemm": not options.local,
            "moe_token_dispatcher_type": options.dispatcher,
            "moe_permute_fusion": not options.local,
            "moe_router_fusion": not options.no_fusion and not options.local,
            "expert_model_parallel_size": options.ep,
        }
    if options.fp8:
        values |= {"fp8": "hybrid", "fp8_recipe": options.fp8}
    if options.recompute:
        values |= {"recompute_granularity": "selective", "recompute_modules": [options.recompute]}
    if options.graphs:
        values |= {"cuda_graph_impl": options.graphs, "use_te_rng_tracker": True}
    return TransformerConfig(**values)


def build(sizes: argparse.Namespace, options: argparse.Namespace) -> Any:
    """The model on this rank's GPU, in bf16."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = configure(sizes, options)
    experts = sizes.num_experts
    if options.local:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(num_experts=experts, normalization=sizes.normalization)
    else:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=bool(experts)
        )
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=sizes.seq_length,
        position_embedding_type=sizes.position_embedding_type,
        share_embeddings_and_output_weights=not sizes.untie_embeddings_and_output_weights,
    )
    return config, model.cuda().to(torch.bfloat16)


def wrap(config: Any, model: Any, recipe: str) -> Any:
    """The model in its DistributedDataParallel, which the schedule of `config` is told of."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    is_main, is_shared = recipe == "fp32", dist.get_world_size() > config.tensor_model_parallel_size
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=is_main,
        overlap_grad_reduce=is_shared,
        overlap_param_gather=is_shared and is_main,
        use_distributed_optimizer=is_main,
        average_in_collective=True,
    )
    wrapped = DistributedDataParallel(config, ddp, model)
    config.no_sync_func = wrapped.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    if is_shared and is_main:
        config.param_sync_func = wrapped.start_param_sync
    return wrapped


def make_plain_update(wrapped: Any) -> Callable[[], None]:
    """Clipping and AdamW of the recipe `bf16`, on the gradients where they were added."""
    weights = list(wrapped.parameters())
    optimizer = torch.optim.AdamW(weights, lr=1e-4, weight_decay=0.1, fused=True)
    is_divided = wrapped.config.tensor_model_parallel_size * wrapped.config.expert_model_parallel_size > 1

    def update() -> None:
        for weight in weights:
            weight.grad = weight.main_grad
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in weights])
        if is_divided:  # what several ranks hold counts more than once: the same factor everywhere, at the same cost
            norm = norm.square()
            dist.all_reduce(norm)
            norm = norm.sqrt()
        torch.nn.utils.clip_grads_with_norm_(weights, 1.0, norm)
        optimizer.step()
        for weight in weights:
            weight.grad = None

    return update


def make_main_update(wrapped: Any) -> Callable[[], None]:
    """Clipping and AdamW of the recipe `fp32`."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    own = OptimizerConfig(
        optimizer="adam",
        lr=1e-4,
        weight_decay=0.1,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        overlap_param_gather=wrapped.ddp_config.overlap_param_gather,
        clip_grad=1.0,
    )
    optimizer = get_megatron_optimizer(own, [wrapped])

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


def make_step(config: Any, model: Any, sizes: argparse.Namespace, options: argparse.Namespace) -> Callable[[], None]:
    """A whole step on random tokens, by Megatron's own schedule."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    wrapped = wrap(config, model, options.recipe)
    update = make_plain_update(wrapped) if options.recipe == "bf16" else make_main_update(wrapped)
    run = get_forward_backward_func()
    shape = (sizes.micro_batch_size, sizes.seq_length)
    tokens, labels = (torch.randint(0, VOCAB, shape, device="cuda") for _ in range(2))
    positions = torch.arange(sizes.seq_length, device="cuda").expand(shape).contiguous()

    def forward(iterator: Iterator[Any], part: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        losses = part(tokens, positions, None, labels=labels)
        return losses, lambda found: (found.float().mean(), {})

    def step() -> None:
        wrapped.zero_grad_buffer()
        run(
            forward_step_func=forward,
            data_iterator=None,
            model=[wrapped],
            num_microbatches=options.num_micro,
            seq_length=sizes.seq_length,
            micro_batch_size=sizes.micro_batch_size,
            forward_only=False,
        )
        update()

    return step


def parse_options() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("row", choices=sorted(ROWS), metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--sizes", default="", metavar="FLAGS", help="sizes that differ from the row's, as megaflow's")
    parser.add_argument("--recipe", choices=("bf16", "fp32"), default="fp32", help="see above (default: fp32)")
    parser.add_argument(
        "--transformer-impl",
        choices=("transformer_engine", "local"),
        default="transformer_engine",
        help="whose layers: Transformer Engine's (default) or Megatron-Core's own, without it",
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks, with sequence parallelism")
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel ranks")
    parser.add_argument("--fp8", choices=("tensorwise", "delayed"), help="products in fp8, by this recipe")
    parser.add_argument("--recompute", choices=("mlp", "core_attn"), help="a part of blocks that is computed again")
    parser.add_argument("--loss", choices=("native", "te"), default="te", help="kernel of the loss (default: te)")
    parser.add_argument("--graphs", choices=("local",), help="CUDA graphs of layers")
    parser.add_argument(
        "--attention",
        choices=("auto", "flash", "fused"),
        default="auto",
        help="flash-attn 4 or cuDNN (default: auto, Transformer Engine's choice)",
    )
    parser.add_argument("--no-fusion", action="store_true", help="without sums in products and fused routers")
    parser.add_argument(
        "--dispatcher", choices=("alltoall", "allgather"), default="alltoall", help="of tokens to experts"
    )
    parser.add_argument("--force-balance", action="store_true", help="routers choose at random, so that load is even")
    parser.add_argument("--kernels", type=int, default=0, help="list so many kernels with the most time (default: 0)")
    parser.add_argument("--steps", type=int, default=8, help="steps that are timed, after 4 others (default: 8)")
    options = parser.parse_args()
    options.local = options.transformer_impl == "local"
    if options.local and (options.fp8 or options.tp > 1):
        parser.error(
            "--transformer-impl local goes with neither --fp8 nor --tp: its layers have no fp8, its norms no sequence "
            "parallelism"
        )
    for name, least in (("steps", 1), ("kernels", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be >= {least}, got {getattr(options, name)}")
    return options


def check_place(options: argparse.Namespace) -> None:
    """See that it was started as it must be, where it can run.

    Raises:
        SystemExit: with a sentence that tells what is missing.
    """
    if "LOCAL_RANK" not in os.environ:
        command = f"torchrun --standalone --nproc_per_node=1 benches/gpu/rival_megatron.py {options.row}"
        sys.exit(f"error: this is started by torchrun, one process a GPU: {command}")
    need_gpu("training steps")
    for name in ("megatron", *(() if options.local else ("transformer_engine",))):
        if importlib.util.find_spec(name) is None:
            sys.exit(f"error: {name} is not installed for {sys.executable}")


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


def count_micro_batches(sizes: argparse.Namespace, tp: int) -> int:
    """Micro-batches of a step on a rank.

    Raises:
        SystemExit: if the ranks cannot share the global batch.
    """
    share = sizes.micro_batch_size * (dist.get_world_size() // tp)
    if sizes.global_batch_size % share:
        sys.exit(f"error: {sizes.global_batch_size} samples a step are no multiple of {share}, one micro-batch a rank")
    return sizes.global_batch_size // share


def measure(sizes: argparse.Namespace, options: argparse.Namespace) -> None:
    """Train a few steps, and print what they took."""
    notes, error = [], None
    options.num_micro, options.adds = count_micro_batches(sizes, options.tp), not options.no_fusion
    if not options.local:
        mend_windows()
        obstacle = find_sum_obstacle(options) if options.adds and options.recipe == "bf16" else None
        if obstacle is not None:
            options.adds = False
            notes.append(f"weight gradients are added apart: Transformer Engine's kernel does not in bf16: {obstacle}")
    config, model = build(sizes, options)
    if not options.local:
        error = check_attention(sizes)
    step = make_step(config, model, sizes, options)
    seconds = time_steps(step, options.steps)
    kernels = profile_step(step) if dist.get_world_size() > 1 or options.kernels else []
    if dist.get_rank() == 0:
        print_line(
            {"row": options.row, "side": "megatron-core", **record_rival(options, sizes, dist.get_world_size())},
            sizes.global_batch_size * sizes.seq_length,
            seconds,
            exposed_communication_s=measure_exposed(kernels),
            attention_error=error,
            notes=notes,
            kernels=list_longest(kernels, options.kernels),
        )


def main() -> None:
    """Command line."""
    options = parse_options()
    check_place(options)
    sizes = read_sizes(f"{ROWS[options.row].shape} {options.sizes}")
    sizes.moe_router_force_load_balancing |= options.force_balance
    if options.local:
        options.attention = "local"
    join_ranks(options)
    try:
        measure(sizes, options)
    except torch.OutOfMemoryError as lack:
        sys.exit(f"error: out of memory: {next(iter(str(lack).splitlines()), 'no reason given')}")
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
