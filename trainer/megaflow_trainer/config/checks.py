"""Rules that need more than one field: each check is a pure function that returns its faults, remedy included."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megaflow.errors import ConfigError
from megaflow_trainer.config.batch import MOST_GROWTHS, read_ramp_up, solve_batch
from megaflow_trainer.config.compiling import check_graphs, find_compile_obstacle
from megaflow_trainer.config.expert_section import check_experts
from megaflow_trainer.config.kernel_section import check_kernels
from megaflow_trainer.config.layout import (
    check_expert_ranks,
    check_ranks,
    check_sequence,
    check_tensor,
    list_divisors,
    make_layout,
)
from megaflow_trainer.config.sections import ModelConfig, ScheduleConfig, TrainConfig
from megaflow_trainer.config.stages import check_micro_batches, check_stages

FP8_CAPABILITY = (8, 9)
"""Ada; Hopper and Blackwell are above it."""


@dataclass(frozen=True, slots=True)
class Device:
    """What a run is started on, as values."""

    name: str
    capability: tuple[int, int] | None
    """Compute capability of a GPU; None for a CPU."""


def find_faults(config: TrainConfig, *, world_size: int) -> list[str]:
    """Every fault of the configuration that no section sees alone."""
    faults = (
        check_heads(config.model)
        + check_shape(config.model)
        + check_experts(config.model, num_layers=config.model.num_layers)
        + check_positions(config)
        + check_parallel(config, world_size=world_size)
        + check_duration(config)
        + check_schedule(config.schedule, peak=config.optim.lr)
        + check_data(config)
        + check_precision(config)
        + check_graphs(config)
        + check_recompute(config)
        + check_kernels(config)
        + check_loading(config)
    )
    return faults + ([] if faults else check_batch(config, world_size=world_size))


def check_heads(model: ModelConfig) -> list[str]:
    """The hidden size is cut into equal heads, and the heads into equal groups."""
    faults = []
    hidden, heads, groups = model.hidden_dim, model.num_heads, model.kv_heads
    if hidden % heads and model.head_dim is None and not model.is_latent:
        below, above = _find_divisors(hidden, heads)
        faults.append(
            f"model.hidden_dim {hidden} is not divisible by model.num_heads {heads}; use {below} or {above} heads"
        )
    if heads % groups:
        below, above = _find_divisors(heads, groups)
        faults.append(
            f"model.num_heads {heads} is not divisible by model.num_kv_heads {groups}; use {below} or {above} groups"
        )
    return faults


def check_shape(model: ModelConfig) -> list[str]:
    """What the parts of a model ask of each other."""
    faults = []
    if model.is_latent and (model.num_kv_heads is not None or model.head_dim is not None or model.qk_norm):
        faults.append(
            "model.is_latent has its own head widths and shares one latent vector among all heads; "
            "drop model.num_kv_heads, model.head_dim and model.qk_norm"
        )
    if model.is_latent and model.position_kind != "rope":
        faults.append("model.is_latent keeps positions in rotated channels; give model.position_kind rope")
    if model.position_kind == "rope" and not 0 < model.rotary_fraction <= 1:
        faults.append(f"model.rotary_fraction must be in (0, 1], got {model.rotary_fraction}")
    elif model.position_kind == "rope" and (model.rotary_dim == 0 or model.rotary_dim % 2):
        faults.append(
            f"a rotated part of {model.rotary_dim} channels has no pairs; make model.head_dim even and larger"
        )
    if model.rotary_mscale_all_dim and not model.is_latent:
        faults.append("model.rotary_mscale_all_dim is for model.is_latent; give that or drop this")
    if (model.rotary_mscale_all_dim or model.rotary_mscale != 1) and model.rotary_scaling != "yarn":
        faults.append("model.rotary_mscale and model.rotary_mscale_all_dim are for model.rotary_scaling yarn; give it")
    if model.rotary_base == 1:
        faults.append("model.rotary_base 1 turns all pairs of channels alike; give one above 1, such as 10000")
    if model.num_mtp_layers and model.tells_documents:
        faults.append(
            "model.resets_positions and resets_attention keep documents apart, and model.num_mtp_layers "
            f"{model.num_mtp_layers} predicts tokens beyond their ends; drop one of them"
        )
    if model.rotary_scaling != "none" and model.rotary_factor == 1:
        faults.append(f"model.rotary_scaling {model.rotary_scaling} needs model.rotary_factor above 1")
    return faults


def _find_divisors(total: int, near: int) -> tuple[int, int]:
    """The divisors of `total` next below and next above `near`."""
    fits = list_divisors(total)
    return max(n for n in fits if n < near or n == 1), min((n for n in fits if n > near), default=total)


def check_positions(config: TrainConfig) -> list[str]:
    """Every token of a sample has a row in the position table, and every depth of prediction has a label in it."""
    seq_len, positions, ahead = config.data.seq_len, config.model.max_positions, config.model.num_mtp_layers
    if ahead >= seq_len:
        text = f"model.num_mtp_layers {ahead} predicts {ahead} tokens beyond the next one, and data.seq_len {seq_len}"
        return [text + " has no such token; raise the second or lower the first"]
    if positions is None or seq_len <= positions:
        return []
    return [
        f"data.seq_len {seq_len} is longer than model.max_positions {positions}; raise the second or shorten the first"
    ]


def check_parallel(config: TrainConfig, *, world_size: int) -> list[str]:
    """The axes multiply out to the ranks and divide the model, and nothing is asked that this version does not have."""
    own, faults = config.parallel, []
    if own.zero == 3 and (config.recompute.compression != "none" or config.recompute.is_offloaded):
        faults.append(
            "parallel.zero 3 gathers weights for backward, which recompute.compression and is_offloaded would "
            "take for activations; drop them, or give zero 1 or 2"
        )
    obstacle = find_compile_obstacle(config)
    if config.step.is_compiled and obstacle is not None:
        remedy = "give zero 1 or 2" if own.zero == 3 else "use 1f1b or interleaved"
        faults.append(f"{obstacle}; {remedy}, or drop --compile")
    if own.zero == 3 and own.pp > 1 and own.schedule in ("zero_bubble", "zbv"):
        faults.append(
            f"parallel.schedule {own.schedule} takes backward apart, and parallel.zero 3 divides gradients when a "
            "block's backward is over; use 1f1b or interleaved, or give zero 1 or 2"
        )
    is_chained = config.recompute.method in (None, "uniform") and (config.recompute.num_layers or 1) > 1
    if own.zero == 3 and is_chained:
        faults.append(
            f"parallel.zero 3 gathers weights block by block, and recompute.num_layers {config.recompute.num_layers} "
            "computes blocks together; give recompute.num_layers 1"
        )
    sizes = check_ranks(own, world_size=world_size)
    shape = check_tensor(config.model, own) + check_sequence(config.model, own, seq_len=config.data.seq_len)
    shape += check_expert_ranks(config.model, own, seq_len=config.data.seq_len)
    return faults + sizes + shape + check_stages(config.model, own)


def check_duration(config: TrainConfig) -> list[str]:
    """A run has one length."""
    if config.num_steps is None and config.num_samples is None:
        return ["the run has no length; give num_steps or num_samples"]
    if config.num_steps is not None and config.num_samples is not None:
        return ["num_steps and num_samples are two lengths of one run; give one of them"]
    return []


def check_schedule(schedule: ScheduleConfig, *, peak: float) -> list[str]:
    """Warm-up and decay are each given once, in order, below the peak."""
    faults = []
    warmups = [name for name in ("warmup_steps", "warmup_samples", "warmup_fraction") if getattr(schedule, name)]
    if len(warmups) > 1:
        faults.append(" and ".join(f"schedule.{name}" for name in warmups) + " are one setting; give one of them")
    if schedule.decay_steps is not None and schedule.decay_samples is not None:
        faults.append("schedule.decay_steps and schedule.decay_samples are one setting; give one of them")
    for name in ("min_lr", "warmup_init"):
        if getattr(schedule, name) > peak:
            faults.append(f"schedule.{name} {getattr(schedule, name)} is above optim.lr {peak}; lower it")
    if schedule.wsd_steps is not None and schedule.wsd_samples is not None:
        faults.append("schedule.wsd_steps and schedule.wsd_samples are one setting; give one of them")
    warmup, decay = schedule.warmup_steps, schedule.decay_steps
    if warmup is not None and decay is not None and warmup >= decay:
        faults.append(
            f"schedule.warmup_steps {warmup} must be below schedule.decay_steps {decay}, which counts the warm-up too"
        )
    return faults


def check_data(config: TrainConfig) -> list[str]:
    """The data are named in one way, and the order can do what is asked of it."""
    own, samples = config.data, config.samples
    per_split = {"train": own.train_path, "valid": own.valid_path, "test": own.test_path}
    given = {
        "data.path": bool(own.path),
        **{f"data.{name}_path": bool(path) for name, path in per_split.items()},
        "data.args_path": own.args_path is not None,
        "data.per_split_args_path": own.per_split_args_path is not None,
        "data.is_mock": own.is_mock,
    }
    named = [name for name, is_given in given.items() if is_given]
    ways = {"split" if name.removesuffix("_path").removeprefix("data.") in per_split else name for name in named}
    faults = []
    if not named:
        faults.append("data.path is missing; give the prefix of a .bin/.idx pair made by megaflow-preprocess")
    elif len(ways) > 1:
        faults.append(f"{' and '.join(named)} each name the data; give one of them")
    elif ways == {"split"} and not own.train_path:
        faults.append(f"{' and '.join(named)} without data.train_path: a run needs a train part")
    if samples.order == "megatron" and (samples.shuffle != "samples" or samples.packing != "concatenate"):
        faults.append("samples.shuffle and samples.packing are for samples.order instant; give --sample-order instant")
    if samples.packing == "best_fit" and samples.shuffle == "documents":
        faults.append("samples.packing best_fit packs whole documents in any case; drop samples.shuffle documents")
    if samples.order == "megatron" and samples.blend_schedule is not None:
        faults.append(
            "samples.blend_schedule is for samples.order instant: Megatron's order would change from the first sample"
        )
    if own.keeps_documents_apart and config.model.num_mtp_layers:
        faults.append(
            "data.keeps_documents_apart keeps documents apart, and model.num_mtp_layers "
            f"{config.model.num_mtp_layers} predicts tokens beyond their ends; drop one of them"
        )
    if config.data.order == "cyclic" and samples.blend_schedule is not None:
        faults.append("data.order cyclic draws samples out of order, and samples.blend_schedule needs theirs; drop one")
    try:
        weights = [float(part) for part in config.data.split.split(",")]
    except ValueError:
        weights = []
    if len(weights) not in (1, 2, 3) or not min(weights) >= 0 or not 0 < sum(weights) < math.inf:
        faults.append(f"data.split must be up to three weights such as 969,30,1, got {config.data.split!r}")
    return faults


def check_batch(config: TrainConfig, *, world_size: int) -> list[str]:
    """The batch equation has a solution, ramp-up included, and the run holds at least one whole step."""
    dp = make_layout(config.parallel, world_size=world_size).dp
    try:
        sizes, ramp = solve_batch(config.step, dp=dp), read_ramp_up(config.step)
    except ConfigError as error:
        return [str(error)]
    faults = check_micro_batches(config.parallel, sizes.num_micro_batches)
    if config.num_samples is not None and config.num_samples < sizes.global_batch_size:
        faults.append(f"num_samples {config.num_samples} is less than one global batch of {sizes.global_batch_size}")
    unit = sizes.micro_batch_size * dp
    if ramp is not None and (ramp[0] % unit or ramp[1] % unit or (sizes.global_batch_size - ramp[0]) % ramp[1]):
        faults.append(
            f"step.ramp_up from {ramp[0]} by {ramp[1]} to {sizes.global_batch_size}: first batch and increment must be "
            f"multiples of micro batch x data-parallel ranks = {unit}, and the increments must meet the full batch"
        )
    elif ramp is not None and (sizes.global_batch_size - ramp[0]) // ramp[1] > MOST_GROWTHS:
        faults.append(
            f"step.ramp_up from {ramp[0]} by {ramp[1]} to {sizes.global_batch_size} takes more than {MOST_GROWTHS:,} "
            "increments; give a larger one"
        )
    elif ramp is not None and ramp[0] > sizes.global_batch_size:
        faults.append(f"step.ramp_up starts at {ramp[0]}, above the global batch of {sizes.global_batch_size}")
    return faults


def check_precision(config: TrainConfig) -> list[str]:
    """Settings of one precision are not given with another."""
    step, optim, faults = config.step, config.optim, []
    if step.loss_scale is not None and step.dtype != "fp16":
        faults.append(f"step.loss_scale is for fp16, and this run is {step.dtype}; give --fp16 or drop it")
    low, first = step.min_loss_scale, step.initial_loss_scale
    if step.loss_scale is None and low > first:
        faults.append(f"step.min_loss_scale {low} is above step.initial_loss_scale {first}; lower it")
    if step.is_all_bf16 and step.dtype != "bf16":
        faults.append(f"step.is_all_bf16 is for bf16, and this run is {step.dtype}; give --bf16 or drop it")
    if step.fp8 != "none" and step.dtype != "bf16":
        faults.append(f"step.fp8 is beside bf16, and this run is {step.dtype}; give --bf16 or drop it")
    own, num_layers = config.precision, config.model.num_layers
    if step.fp8 != "none" and own.keeps_ends and own.start_layers + own.end_layers >= num_layers:
        faults.append(
            f"precision.start_layers {own.start_layers} and precision.end_layers {own.end_layers} keep all of "
            f"model.num_layers {num_layers} in 16 bits, which leaves step.fp8 none; lower them or drop step.fp8"
        )
    if optim.main_dtype == "bf16" and step.dtype != "bf16":
        faults.append(f"optim.main_dtype bf16 is for bf16 runs, and this one is {step.dtype}; give --bf16 or drop it")
    if optim.adam_eps == 0 and optim.kind in ("adamw", "adam", "muon"):
        faults.append(
            "optim.adam_eps 0 divides 0 by 0 where a token has not occurred yet; give one above 0, such as 1e-8"
        )
    if step.dtype == "fp64" and optim.is_offloaded:
        faults.append("optim.is_offloaded is not for fp64, which compares runs; drop one of them")
    return faults


def check_recompute(config: TrainConfig) -> list[str]:
    """Settings of full and of selective recompute are given with it, and its blocks are there."""
    own, faults = config.recompute, []
    for name in ("method", "num_layers"):
        if getattr(own, name) is not None and own.granularity != "full":
            faults.append(
                f"recompute.{name} is for recompute.granularity full, and it is {own.granularity}; give full or drop it"
            )
    for name in ("modules", "budget"):
        if getattr(own, name) not in ((), None) and own.granularity != "selective":
            faults.append(
                f"recompute.{name} is for recompute.granularity selective, and it is {own.granularity}; give selective "
                "or drop it"
            )
    if own.modules and own.budget is not None:
        faults.append("recompute.modules and recompute.budget are two ways to choose parts; give one of them")
    if own.budget is not None and config.model.num_experts is not None:
        faults.append("recompute.budget knows what dense blocks cost, not experts; give recompute.modules")
    if own.num_layers is not None and own.num_layers > config.model.num_layers:
        faults.append(
            f"recompute.num_layers {own.num_layers} is above model.num_layers {config.model.num_layers}; lower it"
        )
    return faults


def check_device(config: TrainConfig, device: Device) -> list[str]:
    """What a device cannot do that the configuration asks of it."""
    faults = []
    if config.step.cuda_graph != "none" and device.capability is None:
        faults.append(
            f"CUDA graphs (--cuda-graph-impl local) need a GPU, and this run is on {device.name}; drop the flag"
        )
    if config.step.fp8 == "none":
        return faults
    flag = f"--fp8-{config.step.fp8}"
    if device.capability is None:
        faults.append(f"fp8 ({flag}) needs a GPU, and this run is on {device.name}; drop {flag} and keep --bf16")
    elif device.capability < FP8_CAPABILITY:
        found = f"{device.name} has {device.capability[0]}.{device.capability[1]}; drop {flag} and keep --bf16"
        faults.append(f"fp8 ({flag}) needs compute capability 8.9 or newer (Ada, Hopper, Blackwell), and {found}")
    return faults


def check_loading(config: TrainConfig) -> list[str]:
    """What is taken from a checkpoint needs one."""
    own = config.checkpoint
    if own.is_finetune and own.load is None:
        return ["checkpoint.is_finetune takes the weights of checkpoint.load; give checkpoint.load (--load)"]
    return []
