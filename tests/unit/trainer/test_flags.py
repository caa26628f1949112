"""Every flag of --help changes something that can be seen: the model, the plan, the optimizer's step, or the run."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.pairs import write_pair
from helpers.runs import TINY, one_rank, run_tiny
from megaflow.errors import MegaflowError
from megaflow_trainer.config import TrainConfig, read_command
from megaflow_trainer.config.flags import FLAGS
from megaflow_trainer.config.layout import make_layout
from megaflow_trainer.config.stages import own_chunks, split_layers
from megaflow_trainer.ops.attention import attend_sdpa
from megaflow_trainer.ops.registry import Entry
from megaflow_trainer.optim.schedule import build_planner
from megaflow_trainer.parallel.apply import ParallelModel
from megaflow_trainer.parallel.context import KINDS as CONTEXT_KINDS
from megaflow_trainer.parallel.context import GatheredAttention, RingAttention, UlyssesAttention
from megaflow_trainer.parallel.data import MainGradients
from megaflow_trainer.parallel.saved import SavedActivations
from megaflow_trainer.training import build as build_module
from megaflow_trainer.training import kernels as kernels_module
from megaflow_trainer.training.build import build_model, build_optimizer
from megaflow_trainer.training.preflight import refuse_device

STEPS = 8
YARN = "--position-embedding-type rope --rotary-scaling yarn --rotary-scaling-factor 4"
BASE = (*TINY, "--train-iters", str(STEPS), "--data-path", "none")
ROPE = "--position-embedding-type rope"
EXPERTS = "--num-experts 4"
MANY = "--num-experts 8 --moe-router-group-topk 1 --moe-router-num-groups"
CAPACITY = f"{EXPERTS} --moe-expert-capacity-factor 0.5"
LATENT = f"{ROPE} --multi-latent-attention --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8"


def configure(flags: str) -> TrainConfig:
    return read_command([*BASE, *flags.split()], world_size=1)[0]


def see_model(flags: str) -> Any:
    """Shapes of the weights, losses in training, and gradients' norms."""
    config = configure(flags)
    model = build_model(config, one_rank())
    torch.manual_seed(3)
    tokens = torch.randint(60, (2, 17))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.sum().backward()
    shapes = [(name, tuple(weight.shape), weight.dtype) for name, weight in model.module.named_parameters()]
    return shapes, loss.tolist(), model.gradients.norm().item()


def see_saved(flags: str) -> Any:
    """Bytes kept between forward and backward, as they are and as asked."""
    model = build_model(configure(f"{flags} --num-layers 4 --hidden-size 64 --seq-length 64"), one_rank())
    weights = frozenset(weight.untyped_storage().data_ptr() for weight in model.module.parameters())
    kept = model.saved or SavedActivations(weights=weights)
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    with SavedActivations.hooks(kept):
        model.module(tokens, tokens)
    return kept.report.kept_bytes, kept.is_offloaded


def see_plan(flags: str) -> Any:
    """Rate, weight decay and batch of each step."""
    config = configure(flags)
    planner, consumed, plans = build_planner(config), 0, []
    for _ in range(config.last_step):
        plans.append(planner.plan(consumed))
        consumed += plans[-1].num_samples
    return plans, config.step.sizes


def see_step(flags: str) -> Any:
    """Weights and states after two steps of given gradients."""
    config = configure(flags)
    model = build_model(config, one_rank())
    optimizer = build_optimizer(model, config)
    torch.manual_seed(4)
    for _ in range(2):
        model.gradients.kept[0].normal_()
        optimizer.step(1e-2, config.optim.weight_decay)
    states = {name: (value.dtype, value.float().sum().item()) for name, value in optimizer.list_tensors().items()}
    apart = sum(master.data_ptr() != optimizer.weights[name].data_ptr() for name, master in optimizer.masters.items())
    scaler = optimizer.scaler
    for _ in range(3):
        if scaler is not None:
            scaler.update(is_finite=False)
    scale = None if scaler is None else (scaler.scale, scaler.is_static, scaler.window, scaler.hysteresis)
    weights = {name: weight.float().sum().item() for name, weight in model.module.named_parameters()}
    return states, apart, scale, weights, model.gradients.kept[0].dtype


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(tmp_path_factory.mktemp("data") / "toy_text_document")


MODEL = {
    "--seed": "--seed 7",
    "--num-layers": "--num-layers 3",
    "--hidden-size": "--hidden-size 64",
    "--num-attention-heads": "--num-attention-heads 2",
    "--preset": "--preset gpt2_small",
    "--kv-channels": "--kv-channels 16",
    "--num-query-groups": "--num-query-groups 2",
    "--ffn-hidden-size": "--ffn-hidden-size 48",
    "--activation": "--activation squared_relu",
    "--swiglu": "--swiglu",
    "--squared-relu": "--squared-relu",
    "--normalization": "--normalization RMSNorm",
    "--qk-layernorm": "--qk-layernorm",
    "--disable-bias-linear": "--disable-bias-linear",
    "--add-qkv-bias": ("--disable-bias-linear", "--disable-bias-linear --add-qkv-bias"),
    "--position-embedding-type": "--position-embedding-type none",
    "--use-rotary-position-embeddings": "--use-rotary-position-embeddings",
    "--rotary-base": (ROPE, f"{ROPE} --rotary-base 100"),
    "--rotary-percent": (ROPE, f"{ROPE} --rotary-percent 0.5"),
    "--rotary-interleaved": (ROPE, f"{ROPE} --rotary-interleaved"),
    "--rotary-scaling": (ROPE, f"{ROPE} --rotary-scaling linear --rotary-scaling-factor 2"),
    "--rotary-scaling-factor": tuple(f"{ROPE} --rotary-scaling ntk --rotary-scaling-factor {x}" for x in (2, 4)),
    "--rotary-original-positions": tuple(
        f"{ROPE} --rotary-scaling llama3 --rotary-scaling-factor 2 --rotary-original-positions {x}" for x in (8, 64)
    ),
    "--mscale": (YARN, f"{YARN} --mscale 0.5"),
    "--mscale-all-dim": (f"{LATENT} {YARN}", f"{LATENT} {YARN} --mscale-all-dim 1"),
    "--window-size": "--window-size 4",
    "--multi-latent-attention": (ROPE, LATENT),
    "--q-lora-rank": (LATENT, f"{LATENT} --q-lora-rank 8"),
    "--kv-lora-rank": (LATENT, f"{LATENT} --kv-lora-rank 12"),
    "--qk-head-dim": (LATENT, f"{LATENT} --qk-head-dim 12"),
    "--qk-pos-emb-head-dim": (LATENT, f"{LATENT} --qk-pos-emb-head-dim 8"),
    "--v-head-dim": (LATENT, f"{LATENT} --v-head-dim 4"),
    "--mtp-num-layers": "--mtp-num-layers 1",
    "--mtp-loss-scaling-factor": ("--mtp-num-layers 1", "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.7"),
    "--max-position-embeddings": "--max-position-embeddings 32",
    "--vocab-size": "--vocab-size 200",
    "--make-vocab-size-divisible-by": "--make-vocab-size-divisible-by 200",
    "--untie-embeddings-and-output-weights": "--untie-embeddings-and-output-weights",
    "--hidden-dropout": "--hidden-dropout 0.3",
    "--attention-dropout": "--attention-dropout 0.3",
    "--init-method-std": "--init-method-std 0.1",
    "--no-scaled-output-init": "--no-scaled-output-init",
    "--mup-base-hidden-size": "--mup-base-hidden-size 16",
    "--norm-epsilon": "--norm-epsilon 0.1",
    "--layernorm-epsilon": "--layernorm-epsilon 0.1",
    "--attention-backend": "--attention-backend math",
    "--bf16": "--bf16",
    "--fp16": "--fp16",
    "--fp64": "--fp64",
    "--num-experts": EXPERTS,
    "--moe-layer-freq": (EXPERTS, f"{EXPERTS} --moe-layer-freq 2"),
    "--moe-ffn-hidden-size": (EXPERTS, f"{EXPERTS} --moe-ffn-hidden-size 24"),
    "--moe-shared-expert-intermediate-size": (EXPERTS, f"{EXPERTS} --moe-shared-expert-intermediate-size 24"),
    "--moe-router-topk": (EXPERTS, f"{EXPERTS} --moe-router-topk 3"),
    "--moe-router-score-function": (EXPERTS, f"{EXPERTS} --moe-router-score-function sigmoid"),
    "--moe-router-pre-softmax": (EXPERTS, f"{EXPERTS} --moe-router-pre-softmax"),
    "--moe-router-num-groups": (f"{MANY} 2", f"{MANY} 4"),
    "--moe-router-group-topk": (f"{MANY} 4", f"{MANY} 4 --moe-router-group-topk 2"),
    "--moe-router-topk-scaling-factor": (EXPERTS, f"{EXPERTS} --moe-router-topk-scaling-factor 2"),
    "--moe-input-jitter-eps": (EXPERTS, f"{EXPERTS} --moe-input-jitter-eps 0.5"),
    "--moe-router-load-balancing-type": tuple(
        f"{EXPERTS} --moe-aux-loss-coeff 1 --moe-router-load-balancing-type {x}" for x in ("aux_loss", "seq_aux_loss")
    ),
    "--moe-aux-loss-coeff": (EXPERTS, f"{EXPERTS} --moe-aux-loss-coeff 1"),
    "--moe-z-loss-coeff": (EXPERTS, f"{EXPERTS} --moe-z-loss-coeff 1"),
    "--moe-expert-capacity-factor": (EXPERTS, CAPACITY),
    "--moe-token-drop-policy": (CAPACITY, f"{CAPACITY} --moe-token-drop-policy position"),
}
BLOCK = "--recompute-granularity full --recompute-method block"
SAVED = {
    "--recompute-granularity": "--recompute-granularity full",
    "--recompute-activations": "--recompute-activations",
    "--checkpoint-activations": "--checkpoint-activations",
    "--enable-activation-checkpointing": "--enable-activation-checkpointing",
    "--recompute-method": (
        "--recompute-granularity full --recompute-num-layers 2",
        f"{BLOCK} --recompute-num-layers 2",
    ),
    "--recompute-num-layers": (BLOCK, f"{BLOCK} --recompute-num-layers 1"),
    "--checkpoint-num-layers": (BLOCK, f"{BLOCK} --checkpoint-num-layers 1"),
    "--recompute-modules": ("--recompute-activations", "--recompute-activations --recompute-modules attention mlp"),
    "--recompute-budget": tuple(f"--recompute-activations --recompute-budget {x}" for x in (0, 0.02)),
    "--compress-activations": "--compress-activations bf16",
    "--offload-activations": "--offload-activations",
}
WARM = "--lr-warmup-iters 2 --lr-warmup-init"
WSD = "--lr-decay-style WSD"
RAMP = "--global-batch-size 8 --micro-batch-size 2"
PLAN = {
    "--lr": "--lr 0.5",
    "--min-lr": "--min-lr 1e-4",
    "--lr-decay-style": "--lr-decay-style cosine",
    "--lr-decay-iters": "--lr-decay-iters 4",
    "--lr-decay-samples": "--lr-decay-samples 4",
    "--lr-warmup-iters": "--lr-warmup-iters 3",
    "--lr-warmup-samples": "--lr-warmup-samples 3",
    "--lr-warmup-fraction": "--lr-warmup-fraction 0.5",
    "--lr-warmup-init": (f"{WARM} 0", f"{WARM} 1e-4"),
    "--lr-wsd-decay-iters": (WSD, f"{WSD} --lr-wsd-decay-iters 4"),
    "--lr-wsd-decay-samples": (WSD, f"{WSD} --lr-wsd-decay-samples 4"),
    "--lr-wsd-decay-style": (
        f"{WSD} --lr-wsd-decay-iters 4",
        f"{WSD} --lr-wsd-decay-iters 4 --lr-wsd-decay-style linear",
    ),
    "--weight-decay": "--weight-decay 0.3",
    "--start-weight-decay": tuple(f"--weight-decay-incr-style linear --start-weight-decay {x}" for x in (0, 0.1)),
    "--end-weight-decay": "--end-weight-decay 0.3",
    "--weight-decay-incr-style": tuple(
        f"--start-weight-decay 0 --weight-decay-incr-style {x}" for x in ("linear", "cosine")
    ),
    "--micro-batch-size": "--micro-batch-size 2",
    "--global-batch-size": "--global-batch-size 4",
    "--num-micro-batches": "--num-micro-batches 2",
    "--gradient-accumulation-steps": "--gradient-accumulation-steps 2",
    "--rampup-batch-size": (RAMP, f"{RAMP} --rampup-batch-size 2 2 12"),
    "--train-iters": "--train-iters 9",
}
STEP = {
    "--optimizer": "--optimizer lion",
    "--no-decay": "--no-decay blocks.*",
    "--adam-beta1": "--adam-beta1 0.5",
    "--adam-beta2": "--adam-beta2 0.5",
    "--adam-eps": "--adam-eps 0.1",
    "--sgd-momentum": ("--optimizer sgd", "--optimizer sgd --sgd-momentum 0.5"),
    "--muon-momentum": ("--optimizer muon", "--optimizer muon --muon-momentum 0.5"),
    "--main-params-dtype": ("--bf16", "--bf16 --main-params-dtype bf16"),
    "--main-grads-dtype": ("--bf16", "--bf16 --main-grads-dtype bf16"),
    "--exp-avg-dtype": "--exp-avg-dtype bf16",
    "--exp-avg-sq-dtype": "--exp-avg-sq-dtype bf16",
    "--optimizer-cpu-offload": "--optimizer-cpu-offload",
    "--all-bf16": ("--bf16", "--bf16 --all-bf16"),
    "--loss-scale": ("--fp16", "--fp16 --loss-scale 64"),
    "--initial-loss-scale": ("--fp16", "--fp16 --initial-loss-scale 64"),
    "--min-loss-scale": ("--fp16 --initial-loss-scale 2", "--fp16 --initial-loss-scale 2 --min-loss-scale 2"),
    "--loss-scale-window": ("--fp16", "--fp16 --loss-scale-window 5"),
    "--hysteresis": ("--fp16", "--fp16 --hysteresis 1"),
}
REFUSED = {
    "--use-flash-attn": ("model", "flash attention needs a CUDA GPU"),
    "--fp8-format": ("hybrid", r"fp8 \(--fp8-hybrid\) needs a GPU"),
    "--fp8-hybrid": ("", r"fp8 \(--fp8-hybrid\) needs a GPU"),
    "--fp8-e4m3": ("", r"fp8 \(--fp8-e4m3\) needs a GPU"),
}
PP2 = "--num-layers 4 --pipeline-model-parallel-size 2"
LAYOUT: dict[str, str | tuple[str, str]] = {
    "--tensor-model-parallel-size": "--tensor-model-parallel-size 2",
    "--pipeline-model-parallel-size": "--pipeline-model-parallel-size 2",
    "--context-parallel-size": "--context-parallel-size 2",
    "--expert-model-parallel-size": (EXPERTS, f"{EXPERTS} --expert-model-parallel-size 2"),
    "--expert-tensor-parallel-size": (EXPERTS, f"{EXPERTS} --expert-tensor-parallel-size 2"),
    "--pipeline-schedule": (PP2, f"{PP2} --pipeline-schedule zbv"),
    "--num-virtual-stages-per-pipeline-rank": (
        f"{PP2} --pipeline-schedule zero_bubble",
        f"{PP2} --pipeline-schedule zero_bubble --num-virtual-stages-per-pipeline-rank 2",
    ),
    "--pipeline-model-parallel-layout": (PP2, f"{PP2} --pipeline-model-parallel-layout Ettt|tL"),
    "--use-distributed-optimizer": "--use-distributed-optimizer",
    "--zero-stage": "--zero-stage 2",
    "--num-distributed-optimizer-instances": (
        "--zero-stage 1",
        "--zero-stage 1 --num-distributed-optimizer-instances 2",
    ),
    "--ddp-bucket-size": "--ddp-bucket-size 1000",
    "--no-overlap": "--no-overlap",
}
OWN_TEST = {
    **dict.fromkeys(
        ("--data-path", "--init-from", "--load", "--grow"), "test_data_flags_that_name_other_data_or_load_weights"
    ),
    "--eod-mask-loss": "test_predictions_made_at_the_end_of_a_document_are_left_out",
    **dict.fromkeys(
        ("--tokenizer-model", "--vocab-file", "--vocab", "--merge-file"), "test_a_tokenizer_that_is_not_there_is_named"
    ),
    **dict.fromkeys(
        ("--compile", "--no-compile", "--no-gradient-accumulation-fusion"),
        "test_what_makes_steps_faster_is_handed_to_the_model",
    ),
    "--cp-comm-type": "test_ranks_that_share_sequences_attend_as_the_flag_says",
    "--tokenizer-type": "test_an_unknown_tokenizer_type_is_named",
    **dict.fromkeys(("--num-workers", "--prefetch"), "test_threads_and_prefetch_change_the_loader_and_not_the_samples"),
    "--sequence-parallel": "test_a_flag_without_effect_here_says_so_and_changes_no_loss",
    "--distributed-backend": "test_the_backend_is_the_one_asked_for_where_a_gpu_is_at_hand",
}
"""Flags that one of the tests below observes by itself."""
FUSED_FLAGS = (
    *("--no-fused-optimizer", "--no-attention-timing"),
    *("--cuda-graph-impl", "--enable-cuda-graph", "--cuda-graph-warmup-steps"),
)
"""Flags that test_fused.py, test_attention_timing.py and test_graphs.py observe."""
EXPERT_FLAGS = (
    *("--moe-token-dispatcher-type", "--moe-shared-expert-overlap", "--moe-expert-kernel", "--moe-grouped-gemm"),
    *("--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", "--moe-pad-expert-input-to-capacity"),
)
"""Flags that test_expert_flags.py observes."""
FP8_FLAGS = (
    *("--fp8-recipe", "--fp8-amax-history-len", "--fp8-amax-compute-algo", "--fp8-margin", "--first-last-layers-bf16"),
    *("--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16"),
)
"""Flags that test_fp8.py observes."""
KERNEL_FLAGS = (
    *(
        "--transformer-impl",
        "--norm-kernel",
        "--gate-kernel",
        "--rotary-kernel",
        "--loss-kernel",
        "--fp8-kernel",
        "--adam-kernel",
    ),
)
"""Flags that test_layer_packages.py observes."""
DATA_FLAGS = (
    *("--train-data-path", "--valid-data-path", "--test-data-path", "--data-args-path", "--per-split-data-args-path"),
    *("--mock-data", "--sample-order", "--sample-shuffle", "--sample-packing", "--blend-weights", "--blend-schedule"),
    *("--data-cache-path", "--num-dataset-builder-threads", "--fim-rate", "--fim-spm-rate", "--fim-prefix-token"),
    *("--fim-middle-token", "--fim-suffix-token", "--reset-position-ids", "--reset-attention-mask"),
    *("--dataloader-type", "--dataloader-inter-document-masking"),
)
"""Flags that test_data_flags.py and test_documents_apart.py observe."""

WATCH: dict[str, str | tuple[str, str]] = {
    "--async-save": ("--no-async-save", "--async-save"),
    "--no-async-save": "--no-async-save",
    "--keep-last": "--keep-last 2",
    "--keep-every": "--keep-every 3",
    "--finetune": ("--load x", "--load x --finetune"),
    "--no-load-optim": "--no-load-optim",
    "--no-load-rng": "--no-load-rng",
    "--schedule-from": "--schedule-from command",
    "--override-opt_param-scheduler": "--override-opt_param-scheduler",
    "--override-opt-param-scheduler": "--override-opt-param-scheduler",
    "--use-checkpoint-opt_param-scheduler": "--use-checkpoint-opt_param-scheduler",
    "--use-checkpoint-opt-param-scheduler": "--use-checkpoint-opt-param-scheduler",
    "--tensorboard-dir": "--tensorboard-dir x",
    "--wandb-project": "--wandb-project x",
    "--wandb-entity": "--wandb-entity x",
    "--wandb-exp-name": "--wandb-exp-name x",
    "--profile": "--profile",
    "--profile-step-start": "--profile-step-start 3",
    "--profile-step-end": "--profile-step-end 30",
    "--profile-ranks": "--profile-ranks 0 1",
    "--max-nonfinite-steps": "--max-nonfinite-steps 9",
    "--spike-threshold": "--spike-threshold 4",
    "--spike-window": "--spike-window 32",
    "--exit-duration-in-mins": "--exit-duration-in-mins 5",
    "--exit-interval": "--exit-interval 5",
    "--hang-timeout": "--hang-timeout 60",
    "--straggler-ratio": "--straggler-ratio 2",
}
"""Flags of checkpoints, sinks and guards: what they do is in test_resume.py and test_guards.py."""


def test_every_flag_is_in_one_of_the_tables() -> None:
    tables: list[Any] = [MODEL, SAVED, PLAN, STEP, REFUSED, LAYOUT, SEEN, OWN_TEST]
    tables += [DATA_FLAGS, EXPERT_FLAGS, FUSED_FLAGS, FP8_FLAGS, KERNEL_FLAGS, WATCH]
    assert sorted(name for table in tables for name in table) == sorted(flag.name for flag in FLAGS)


def test_what_makes_steps_faster_is_handed_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """What both do is in test_accumulate.py."""
    plans: list[Any] = []
    made = ParallelModel(torch.nn.Module(), None, None)  # type: ignore[arg-type]
    monkeypatch.setattr(build_module, "parallelize", lambda model, mesh, plan, fill: plans.append(plan) or made)
    gpu = dataclasses.replace(one_rank(), device=torch.device("cuda"))
    monkeypatch.setattr(build_module, "choose_attention", lambda *_: Entry(name="sdpa", function=attend_sdpa))
    obstacles = [None, None, None, None, None, "no triton"]
    monkeypatch.setattr(kernels_module, "find_compiler_obstacle", lambda device: obstacles[len(plans)])
    pp2 = "--pipeline-model-parallel-size 2"
    zbv = f"{pp2} --num-layers 4 --pipeline-schedule zbv"
    for flags in ("--no-compile", "--compile", "--no-gradient-accumulation-fusion", pp2, zbv, ""):
        config = read_command([*BASE, *flags.split()], world_size=1 + ("2" in flags))[0]
        build_model(config, gpu)
    assert [plan.is_compiled for plan in plans] == [False, True, True, True, False, False]
    assert [plan.accumulates for plan in plans] == [True, True, False, True, False, True]
    assert kernels_module.choose_compile(configure(""), torch.device("cpu")) == (False, None)
    assert kernels_module.choose_compile(configure("--compile"), torch.device("cpu")) == (True, None)


@pytest.mark.parametrize("flag", OWN_TEST)
def test_a_flag_with_a_test_of_its_own_is_named_in_it(flag: str) -> None:
    words = inspect.getsource(globals()[OWN_TEST[flag]]).replace('"', " ").replace("'", " ").split()
    assert flag in words


def compare(name: str, given: str | tuple[str, ...], see: Callable[[str], Any]) -> None:
    before, after = ("", given) if isinstance(given, str) else given
    assert name in after
    assert see(before) != see(after)


@pytest.mark.parametrize("name", [name for name in MODEL if name not in ("--preset", "--attention-backend")])
def test_a_flag_that_changes_the_model(name: str) -> None:
    compare(name, MODEL[name], see_model)


def test_a_preset_changes_the_model_and_a_backend_the_kernel() -> None:
    shape = configure("--preset llama3_8b --num-attention-heads 16").model
    assert (shape.activation, shape.norm, shape.num_kv_heads, shape.rotary_base) == ("swiglu", "RMSNorm", 8, 500000.0)
    assert (shape.num_layers, shape.hidden_dim) == (2, 32)  # those that other flags give
    kernel = build_model(configure("--attention-backend math"), one_rank()).module.blocks[0].attention.core  # type: ignore[index,union-attr]
    assert kernel.__name__ == "attend_math"


@pytest.mark.parametrize("name", WATCH)
def test_a_flag_of_what_watches_over_the_run(name: str) -> None:
    compare(name, WATCH[name], configure)


@pytest.mark.parametrize("name", SAVED)
def test_a_flag_that_changes_what_is_kept_for_backward(name: str) -> None:
    compare(name, SAVED[name], see_saved)


@pytest.mark.parametrize("name", PLAN)
def test_a_flag_that_changes_the_plan(name: str) -> None:
    compare(name, PLAN[name], see_plan)


@pytest.mark.parametrize("name", STEP)
def test_a_flag_that_changes_a_step(name: str) -> None:
    compare(name, STEP[name], see_step)


def see_layout(flags: str) -> Any:
    """The layout of four ranks, and the buffers of one."""
    words = [*TINY, "--train-iters", "1", "--data-path", "x", *flags.split()]
    config = read_command(words, world_size=4)[0]
    parallel = config.parallel
    one = dataclasses.replace(parallel, tp=1, pp=1, cp=1, ep=1, etp=None, dp_replicate=1)
    gradients = build_model(dataclasses.replace(configure(""), parallel=one), one_rank()).gradients
    assert isinstance(gradients, MainGradients)
    stages = split_layers(config.model, parallel), own_chunks(parallel, 0)
    return make_layout(parallel, world_size=4), stages, len(gradients.buckets), gradients.options


def test_ranks_that_share_sequences_attend_as_the_flag_says() -> None:
    flags = "--context-parallel-size 2 --cp-comm-type"
    words = [[*TINY, "--train-iters", "1", "--data-path", "x", *f"{flags} {kind}".split()] for kind in CONTEXT_KINDS]
    found = [CONTEXT_KINDS[read_command(line, world_size=2)[0].parallel.cp_kind] for line in words]
    assert found == [RingAttention, GatheredAttention, UlyssesAttention]


@pytest.mark.parametrize("name", LAYOUT)
def test_a_flag_that_changes_the_layout(name: str) -> None:
    compare(name, LAYOUT[name], see_layout)


@pytest.mark.parametrize("name", REFUSED)
def test_a_flag_that_is_refused_here_and_what_is_not_is_accepted(name: str) -> None:
    value, words = REFUSED[name]
    if value == "model":
        with pytest.raises(MegaflowError, match=words):
            build_model(configure(name), one_rank())
    else:
        config = configure(f"--bf16 {name} {value}")
        assert config.step.fp8 == (value or name.removeprefix("--fp8-"))
        with pytest.raises(MegaflowError, match=words):
            refuse_device(config, torch.device("cpu"))


def observe(prefix: str, folder: Path, flags: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What a run leaves: its values line by line, what it said, its files."""
    capsys.readouterr()
    words = flags.replace("DIR", str(folder)).split()
    data = [] if "--data-path" in words else ["--data-path", prefix]
    length = [] if "--train-samples" in words else ["--train-iters", "4"]
    config, notes = read_command([*TINY, *length, "--run-dir", str(folder / "run"), *data, *words], world_size=1)
    from megaflow_trainer.training.run import train

    assert train(config, one_rank(), notes) == 0
    lines = [json.loads(line) for line in (Path(str(config.log.run_dir)) / "metrics.jsonl").read_text().splitlines()]
    exact = [[line.get(key) for key in ("iteration", "lm_loss", "grad_norm", "valid_loss")] for line in lines]
    said = [line.strip() for line in capsys.readouterr().out.splitlines() if "note:" in line or "resumed" in line]
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_dir())
    name = json.loads((Path(str(config.log.run_dir)) / "run.json").read_text())["name"]
    return {"curve": exact, "said": said, "folders": files, "name": name, "tf32": torch.get_float32_matmul_precision()}


EVAL = "--eval-interval 2 --eval-iters 1 --split 80,20,0"
SEEN = {
    "--split": ("", "--split 50,50,0", "curve"),
    "--seq-length": ("", "--seq-length 8", "curve"),
    "--clip-grad": ("--optimizer sgd", "--optimizer sgd --clip-grad 0.01", "curve"),
    "--tf32": ("", "--tf32", "tf32"),
    "--train-samples": ("", "--train-samples 5", "curve"),
    "--eval-interval": ("--split 80,20,0 --eval-iters 1", EVAL, "curve"),
    "--eval-iters": (EVAL, EVAL.replace("iters 1", "iters 3"), "curve"),
    "--save": ("", "--save DIR/ckpt", "folders"),
    "--save-interval": ("--save DIR/ckpt", "--save DIR/ckpt --save-interval 1", "folders"),
    "--log-interval": ("", "--log-interval 2", "curve"),
    "--run-dir": ("", "--run-dir DIR/other", "folders"),
    "--run-name": ("", "--run-name mine", "name"),
}


@pytest.mark.parametrize("name", SEEN)
def test_a_flag_that_changes_the_run(
    name: str, prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after, aspect = SEEN[name]
    assert name in after
    one, two = (
        observe(prefix, tmp_path / kind, flags, capsys) for kind, flags in (("before", before), ("after", after))
    )
    assert one[aspect] != two[aspect]


def test_data_flags_that_name_other_data_or_load_weights(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = observe(prefix, tmp_path / "plain", f"--save {tmp_path}/ckpt", capsys)
    other = write_pair(tmp_path / "other_text_document", document_tokens=30)
    assert observe(prefix, tmp_path / "a", f"--data-path {other}", capsys)["curve"] != plain["curve"]
    begun = observe(prefix, tmp_path / "b", f"--init-from {tmp_path}/ckpt", capsys)
    assert begun["curve"][0][1] != plain["curve"][0][1]
    longer = "--train-iters 6 --override-opt_param-scheduler"
    resumed = observe(prefix, tmp_path / "c", f"--load {tmp_path}/ckpt {longer}", capsys)
    assert [line[0] for line in resumed["curve"]] == [5, 6]
    with pytest.raises(MegaflowError, match="--grow keeps"):
        observe(prefix, tmp_path / "d", f"--num-layers 3 --init-from {tmp_path}/ckpt", capsys)
    grown = observe(prefix, tmp_path / "e", f"--num-layers 3 --init-from {tmp_path}/ckpt --grow", capsys)
    assert "note: layers 2 to 2 keep their initial weights" in grown["said"]


def test_predictions_made_at_the_end_of_a_document_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = write_pair(tmp_path / "own_text_document")
    tokenizer = {"type": "test", "vocab_size": 64, "eod_id": 0, "fingerprint": "f" * 16}
    Path(f"{made}.json").write_text(json.dumps({"format_version": 1, "tokenizer": tokenizer}))
    one, two = (observe(made, tmp_path / str(len(flags)), flags, capsys) for flags in ("", "--eod-mask-loss"))
    assert one["curve"] != two["curve"]


@pytest.mark.parametrize(
    "flags, said", [("--sequence-parallel", "--sequence-parallel has no effect at tensor-parallel size 1")]
)
def test_a_flag_without_effect_here_says_so_and_changes_no_loss(
    flags: str, said: str, prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = observe(prefix, tmp_path / "a", "", capsys), observe(prefix, tmp_path / "b", flags, capsys)
    assert next(line for line in two["said"] if line not in one["said"]).startswith(f"note: {said}")
    assert one["curve"] == two["curve"]


@pytest.mark.parametrize("name", ["--tokenizer-model", "--vocab-file", "--vocab", "--merge-file"])
def test_a_tokenizer_that_is_not_there_is_named(name: str, prefix: str, tmp_path: Path) -> None:
    words = "merge-file needs the vocabulary" if name == "--merge-file" else r"none\.json"
    with pytest.raises(MegaflowError, match=words):
        run_tiny(prefix, ["--train-iters", "1", name, str(tmp_path / "none.json")])


def test_an_unknown_tokenizer_type_is_named(prefix: str) -> None:
    with pytest.raises(MegaflowError, match="NoSuchTokenizer"):
        run_tiny(prefix, ["--train-iters", "1", "--tokenizer-type", "NoSuchTokenizer"])


@pytest.mark.parametrize("flags", ["--num-workers 0", "--prefetch 1"])
def test_threads_and_prefetch_change_the_loader_and_not_the_samples(
    flags: str, prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megaflow_trainer.training import data

    seen: list[dict[str, Any]] = []
    loader = data.Loader
    monkeypatch.setattr(data, "Loader", lambda *args, **kwargs: seen.append(kwargs) or loader(*args, **kwargs))
    one, two = observe(prefix, tmp_path / "a", "", capsys), observe(prefix, tmp_path / "b", flags, capsys)
    assert seen[0] != seen[1]
    assert one["curve"] == two["curve"]


def test_the_backend_is_the_one_asked_for_where_a_gpu_is_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    from megaflow_trainer.parallel.mesh import Launch, choose_device

    def choose(flags: str) -> tuple[str, str, list[str]]:
        device, backend, notes = choose_device(Launch(), configure(flags).parallel.backend)
        return device.type, backend, notes

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose("") == choose("--distributed-backend nccl") == ("cuda", "nccl", [])
    assert choose("--distributed-backend gloo") == ("cpu", "gloo", [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose("--distributed-backend nccl") == (
        *("cpu", "gloo"),
        ["--distributed-backend nccl: no GPU on this machine, gloo on the CPU is used"],
    )
