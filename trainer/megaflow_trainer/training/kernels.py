"""What a run computes with on its device: the attention kernel, compiled blocks, CUDA graphs."""

from __future__ import annotations

import dataclasses
import importlib.util

import torch

from megaflow.errors import ConfigError
from megaflow_trainer.config.compiling import find_default_obstacle
from megaflow_trainer.config.cost_table import choose_parts
from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.model.attention import core_options
from megaflow_trainer.ops.attention import ATTENTION
from megaflow_trainer.ops.attention_timing import (
    LARGEST_ERROR,
    AttentionShape,
    Choice,
    choose_by_time,
    find_error,
    find_joined_error,
    find_refusal,
    time_attention,
)
from megaflow_trainer.ops.registry import Entry, Need, choose
from megaflow_trainer.optim.optimizer import DTYPES
from megaflow_trainer.parallel.collectives import do_on_first
from megaflow_trainer.parallel.data import MainGradients
from megaflow_trainer.parallel.fsdp import DividedGradients
from megaflow_trainer.parallel.graphs import CudaRecorder, MicroBatchGraph
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.training.say import say


def find_dtype(config: TrainConfig) -> torch.dtype:
    """What products are computed in."""
    return torch.float64 if config.step.dtype == "fp64" else DTYPES[config.step.dtype]


def find_attention_need(config: TrainConfig, device: torch.device) -> Need:
    """What a run asks of the attention kernel."""
    own = config.model
    return Need(
        device=device,
        dtype=find_dtype(config),
        head_dim=own.qk_dim + own.qk_rotary_dim if own.is_latent else own.head_width,
        value_dim=own.v_dim if own.is_latent else None,
        has_dropout=own.attention_dropout > 0,
        has_window=own.window is not None,
        has_documents=own.resets_attention,
    )


def choose_attention(config: TrainConfig, mesh: Mesh, need: Need) -> Entry:
    """The attention kernel, as `choose_core` takes it; of heads side by side only where that may be used and gives the
    results of three tensors.

    Raises:
        ConfigError: if the one asked for cannot run here.
    """
    entry = choose_core(config, mesh, need)
    if entry.joined is None:
        return entry
    model, shape = config.model, find_attention_shape(config)
    if not can_join(config):
        return dataclasses.replace(entry, joined=None)
    is_turned = model.rotary_dim > 0
    error = do_on_first(lambda: find_joined_error(entry, shape, need, is_turned=is_turned), mesh.world_group)
    if error <= LARGEST_ERROR:
        return entry
    say(
        mesh,
        f" note: gradients of queries, keys and values are joined by a pass of its own: written as one tensor by "
        f"{entry.package} they differ from those of three by {error:.2g} of the largest value",
    )
    return dataclasses.replace(entry, joined=None)


def can_join(config: TrainConfig) -> bool:
    """Whether the core of attention may be handed queries, keys and values as they lie side by side: one product makes
    them, nothing but torch's rotation comes between, this rank has all tokens of its heads, and the core is not what is
    computed again.
    """
    model = config.model
    is_plain = not model.is_latent and not model.qk_norm and not model.resets_attention
    is_again = any("attention_core" in parts for parts in choose_parts(config))
    return is_plain and config.kernels.rotary == "torch" and config.parallel.cp == 1 and not is_again


def choose_core(config: TrainConfig, mesh: Mesh, need: Need) -> Entry:
    """The attention kernel: the one asked for, or on GPUs the fastest by the first rank's clock, or the first usable.

    What ranks that share sequences compute by the kernel, if anything, is the core of some heads, and bounds between
    documents come with each batch: for both the order decides. A kernel that is asked for must compute the run's shape,
    and one of an optional package must give torch's results.

    Raises:
        ConfigError: if the one asked for cannot run here.
    """
    model, cp = config.model, config.parallel.cp
    usual = choose("attention", ATTENTION, model.attention, need)
    has_core = cp == 1 or config.parallel.cp_kind == "a2a"
    if mesh.device.type != "cuda" or model.resets_attention or not has_core:
        return usual
    shape = find_attention_shape(config)
    if model.attention != "auto":
        if usual.package is not None or (model.is_attention_timed and usual.is_timed):
            fault = do_on_first(lambda: find_fault(usual, shape, need), mesh.world_group)
            if fault is not None:
                raise ConfigError(f"attention {usual.name!r} {fault}; use --attention-backend auto")
        return usual
    if not model.is_attention_timed or cp > 1:
        return usual
    choice, faults = do_on_first(lambda: race(shape, need), mesh.world_group)
    for name, fault in faults.items():
        say(mesh, f" note: attention {name!r} is left out: it {fault}")
    if choice is None:
        return usual
    say(mesh, f" attention at {shape}: {choice}")
    return choose("attention", ATTENTION, choice.name, need)


def race(shape: AttentionShape, need: Need) -> tuple[Choice | None, dict[str, str]]:
    """The fastest entry at a shape, and what is wrong with those of packages that could serve and may not."""
    faults: dict[str, str] = {}

    def measure(entry: Entry) -> float | None:
        fault = None if entry.package is None else find_fault(entry, shape, need)
        if fault is not None:
            faults[entry.name] = fault
            return None
        return time_attention(entry, shape, need)

    return choose_by_time(ATTENTION, need, measure), faults


def find_fault(entry: Entry, shape: AttentionShape, need: Need) -> str | None:
    """Why a kernel does not serve a shape, or None: it refuses, or gives other results than torch."""
    reason = find_refusal(entry, shape, need)
    if reason is not None:
        return f"refuses {shape} on this GPU, or has not enough memory for it: {reason}"
    error = None if entry.package is None else measure_error(entry, shape, need)
    if error is None or error <= LARGEST_ERROR:
        return None
    return (
        f"gives other results than torch's on this GPU, by {error:.2g} of the largest value at {shape}: releases of "
        f"{entry.package} and of what it uses do not fit together, install others"
    )


def measure_error(entry: Entry, shape: AttentionShape, need: Need) -> float | None:
    """How far an entry's results are from those of torch's kernels, without dropout; None if these do not compute the
    shape, such as a long window, whose mask torch holds: there is nothing to compare with.
    """
    return find_error(entry, ATTENTION[0], dataclasses.replace(shape, dropout=0.0), need)


def find_attention_shape(config: TrainConfig) -> AttentionShape:
    """A call of the attention core on a rank: all tokens of its part of the heads, which ranks that share sequences
    divide once more (`--cp-comm-type a2a`).
    """
    model, ranks = config.model, config.parallel.tp * config.parallel.cp
    return AttentionShape(
        b=config.step.sizes.micro_batch_size,
        n=max(model.num_heads // ranks, 1),
        g=max((model.num_heads if model.is_latent else model.kv_heads) // ranks, 1),
        s=config.data.seq_len,
        d=model.qk_dim + model.qk_rotary_dim if model.is_latent else model.head_width,
        e=model.v_dim if model.is_latent else model.head_width,
        dropout=model.attention_dropout,
        options=core_options(model),
    )


def choose_compile(config: TrainConfig, device: torch.device) -> tuple[bool, str | None]:
    """Whether blocks are compiled, and on a GPU why not, unless a flag says so."""
    if config.step.is_compiled is not None or device.type != "cuda":
        return bool(config.step.is_compiled), None
    obstacle = find_default_obstacle(config) or find_compiler_obstacle(device)
    return obstacle is None, obstacle


def find_compiler_obstacle(device: torch.device) -> str | None:
    """Why torch's compiler cannot serve a GPU, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if torch.cuda.get_device_capability(device) < (7, 0):
        return f"triton needs compute capability 7.0, and {torch.cuda.get_device_name(device)} has less"
    return None


def choose_graph(
    config: TrainConfig, mesh: Mesh, gradients: MainGradients | DividedGradients
) -> MicroBatchGraph | None:
    """What replays micro-batches, if that is asked for."""
    if config.step.cuda_graph == "none" or mesh.device.type == "meta":
        return None
    assert isinstance(gradients, MainGradients), "checked with the configuration"
    return MicroBatchGraph(
        gradients,
        CudaRecorder(mesh.device),
        num_warmup=config.step.graph_warmup,
        tell=lambda why: say(mesh, f" note: {why}"),
    )
