"""Building a run: everything the loop needs, made once and in order."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megaflow import Loader
from megaflow.processors import count_processors
from megaflow_trainer.checkpoint.held import hold
from megaflow_trainer.checkpoint.initial import describe_source, fill_weights, read_weights
from megaflow_trainer.config.batch import batch_phases
from megaflow_trainer.config.cost_table import choose_parts
from megaflow_trainer.config.layout import Layout
from megaflow_trainer.config.sections import KernelConfig, TrainConfig
from megaflow_trainer.config.stages import describe_stages
from megaflow_trainer.model.experts import count_stacked
from megaflow_trainer.model.gpt import GPT, build_gpt
from megaflow_trainer.model.init import init_weights
from megaflow_trainer.model.sockets import Sockets
from megaflow_trainer.ops.grouped import choose_product
from megaflow_trainer.optim.optimizer import DTYPES, Optimizer
from megaflow_trainer.optim.scaler import build_scaler
from megaflow_trainer.optim.schedule import Planner, build_planner
from megaflow_trainer.parallel.apply import ParallelModel, Plan, parallelize
from megaflow_trainer.parallel.collectives import do_on_first
from megaflow_trainer.parallel.fsdp import can_divide
from megaflow_trainer.parallel.load import list_biases
from megaflow_trainer.parallel.matrices import Matrices
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.shards import ShardMap
from megaflow_trainer.training.clock import Clock
from megaflow_trainer.training.data import RunData, sampler_of
from megaflow_trainer.training.documents import Documents
from megaflow_trainer.training.feed import Feed
from megaflow_trainer.training.guards import Guard
from megaflow_trainer.training.kernels import (
    choose_attention,
    choose_compile,
    choose_graph,
    find_attention_need,
    find_dtype,
)
from megaflow_trainer.training.manifest import Origin, describe_data, write_manifest
from megaflow_trainer.training.preflight import describe_needs, refuse_parts
from megaflow_trainer.training.resume import resume_or_start
from megaflow_trainer.training.say import say
from megaflow_trainer.training.sinks import prepare_metrics
from megaflow_trainer.training.spikes import SpikeWatch
from megaflow_trainer.training.state import Start, TrainState
from megaflow_trainer.training.stream_data import describe_batches


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What the loop uses."""

    config: TrainConfig
    mesh: Mesh
    data: RunData
    state: TrainState
    start: Start
    planner: Planner
    clock: Clock
    feed: Feed
    guard: Guard

    @property
    def folder(self) -> Path:
        """The run folder."""
        assert self.config.log.run_dir is not None, "resolved"
        return Path(self.config.log.run_dir)


def set_up(config: TrainConfig, data: RunData, loader: Loader, mesh: Mesh, notes: Sequence[str]) -> Run:
    """Build model and optimizer, fill them from the last complete checkpoint, and say once what is about to run.

    Raises:
        MegaflowError: whatever the user, the files or the cluster got wrong, in one sentence.
    """
    model = build_model(config, mesh)
    optimizer = build_optimizer(model, config)
    spikes = SpikeWatch(window=config.guard.spike_window, threshold=config.guard.spike_threshold)
    clock = Clock(mesh.device)
    feed = Feed(
        loader,
        mesh.device,
        clock,
        vocab_size=data.vocab_size,
        eod_id=data.eod_id,
        document_end=data.document_end,
        by_documents=data.by_documents,
    )
    state = TrainState(
        model=model, optimizer=optimizer, feed=feed, data_fingerprint=data.train.fingerprint, spikes=spikes
    )
    start = resume_or_start(config, state, mesh)
    config = start.config  # the checkpoint's schedule, if that is to hold
    run = Run(
        config=config,
        mesh=mesh,
        data=data,
        state=state,
        start=start,
        planner=build_planner(config),
        clock=clock,
        feed=feed,
        guard=Guard(config, mesh, Documents(data.train), spikes),
    )
    introduce(run, notes)
    return run


def build_model(config: TrainConfig, mesh: Mesh) -> ParallelModel:
    """The model with initial weights, ready for the mesh; a mesh on the device `meta` gives its shapes alone."""
    torch.set_float32_matmul_precision("high" if config.step.allows_tf32 else "highest")
    dtype = find_dtype(config)
    attention = choose_attention(config, mesh, find_attention_need(config, mesh.device))
    kernels = KernelConfig() if mesh.device.type == "meta" else config.kernels  # shapes alone need none
    refuse_parts(kernels, mesh.device)
    is_wide = config.parallel.zero == 3 and can_divide(mesh, config.model)  # then weights are their own masters
    kept = torch.promote_types(dtype, torch.float32) if is_wide else dtype
    product = choose_product(
        config.model.expert_kernel,
        mesh.device,
        dtype,
        rows_per_group=count_rows_per_expert(config, mesh.layout),
        widths=(config.model.hidden_dim, config.model.expert_width // mesh.layout.etp),
    )
    sockets = Sockets(attention=attention.function, joined=attention.joined, product=product)
    model = build_gpt(config.model, sockets, device=torch.device("meta"), dtype=kept)

    def fill(model: GPT, parts: ShardMap) -> None:
        model.to_empty(device=mesh.device)
        init_weights(model, config.model, seed=config.seed, parts=parts.shards, threads=count_threads(mesh))
        if config.checkpoint.init_from is not None:
            start_from(Path(config.checkpoint.init_from), model, parts, config, mesh)

    plan = Plan(
        parallel=config.parallel,
        recompute=config.recompute,
        recomputed_parts=choose_parts(config),
        compute_dtype=dtype,
        grad_dtype=DTYPES[config.optim.main_grad_dtype],
        is_compiled=choose_compile(config, mesh.device)[0],
        tell=lambda why: say(mesh, f" note: {why}"),
        is_traceable=attention.is_traceable,
        accumulates=_can_accumulate(config, mesh),
        fp8=config.step.fp8,
        precision=config.precision,
        kernels=kernels,
        seq_len=config.data.seq_len,
        micro_batch=config.step.sizes.micro_batch_size,
        measure_every=config.log.every * config.step.sizes.num_micro_batches,
    )
    made = parallelize(model, mesh, plan, None if mesh.device.type == "meta" else fill)
    return dataclasses.replace(made, graph=choose_graph(config, mesh, made.gradients))


def count_threads(mesh: Mesh) -> int:
    """Threads that draw this rank's initial weights: its share of this host's processors, at most 8."""
    own = count_processors()
    if own == os.cpu_count():  # not bound to a share
        own //= torch.cuda.device_count() if mesh.device.type == "cuda" else mesh.world_size
    return max(1, min(8, own))


def count_rows_per_expert(config: TrainConfig, layout: Layout) -> float:
    """Rows of a micro-batch that an expert gets on average: every rank routes a part of its tokens, and all ranks that
    share a layer's experts send it theirs. In a dense model as if there was one.
    """
    routed = config.step.sizes.micro_batch_size * config.data.seq_len / (layout.cp * layout.tp)
    chosen = config.model.router_top_k / (config.model.num_experts or 1)
    return routed * chosen * layout.ep * layout.etp


def _can_accumulate(config: TrainConfig, mesh: Mesh) -> bool:
    """Whether products add to main gradients: on GPUs, where backward goes through each of them once."""
    own, recompute = config.parallel, config.recompute
    is_chained = recompute.method == "uniform" and (recompute.num_layers or 1) > 1
    is_apart = own.pp > 1 and own.schedule in ("zero_bubble", "zbv")
    return config.step.accumulates_in_products and mesh.device.type == "cuda" and not is_chained and not is_apart


def build_optimizer(model: ParallelModel, config: TrainConfig) -> Optimizer:
    """The optimizer over what the mesh left to this rank."""
    base = config.model.mup_base_dim
    ratio = 1.0 if base is None or config.optim.kind != "adamw" else base / config.model.hidden_dim
    parameters, own = model.gradients.parameters, config.parallel
    stacks, matrices, mesh = count_stacked(model.module), None, model.gradients.mesh
    if config.optim.kind == "muon" and (own.tp > 1 or mesh.layout.etp > 1 or own.zero > 0):
        matrices = Matrices(parameters, model.parts, mesh, is_divided=own.zero > 0, stacks=stacks)
    return Optimizer(
        parameters,
        config.optim,
        mup_ratio=ratio,
        kernel=config.kernels.adam,
        scaler=build_scaler(config.step),
        matrices=matrices,
        stacks=stacks,
    )


def start_from(folder: Path, model: GPT, parts: ShardMap, config: TrainConfig, mesh: Mesh) -> None:
    """Take the initial weights from a folder; the first rank reads."""
    assert config.model.vocab_size is not None, "known once the data are open"
    targets = {name: hold(weight.data, parts.shards[name]) for name, weight in model.named_parameters()}
    targets |= {name: hold(bias) for name, bias in list_biases(model).items()}
    path, lines = fill_weights(
        targets,
        lambda: read_weights(folder, config.model),
        mesh.world_group,
        vocab_size=config.model.vocab_size,
        may_grow=config.checkpoint.grow,
    )
    for line in (f"initial weights from {describe_source(path)}", *lines):
        say(mesh, f" note: {line}")


def introduce(run: Run, notes: Sequence[str]) -> None:
    """Say once what is about to run, and write it into the run folder."""
    config, mesh, start = run.config, run.mesh, run.start
    batches = describe_batches(
        batch_phases(config.step),
        run.data.train,
        consumed=run.feed.consumed_samples,
        last_step=config.last_step,
        sampler=sampler_of(config),
    )
    data = {**batches, "train": describe_data(run.data.train)}
    if run.data.valid is not None:
        data["valid"] = describe_data(run.data.valid)
    write_manifest(run.folder, config, mesh, Origin(step=start.step, checkpoint=start.source, data=data))
    do_on_first(lambda: prepare_metrics(run.folder, keep_until=start.step if start.is_own else None), mesh.world_group)
    for note in notes:
        say(mesh, f" note: {note}")
    if config.log.is_profiled and config.log.profiles_kernels_only and mesh.device.type != "cuda":
        say(mesh, " note: --profile-kernels-only has no effect on a CPU, which runs operations and no kernels")
    for line in describe_needs(config, mesh.device):
        say(mesh, f" {line}")
    obstacle = choose_compile(config, mesh.device)[1]
    if obstacle is not None:
        say(mesh, f" note: blocks are not compiled: {obstacle}")
    obstacle = run.state.optimizer.obstacle
    if obstacle is not None and mesh.device.type == "cuda" and config.optim.kind == "adamw":
        say(mesh, f" note: AdamW moves the weights in several passes and not in one: {obstacle}")
    if run.state.model.fp8 is not None:
        say(mesh, f" {run.state.model.fp8.describe()}")
    if config.parallel.pp > 1:
        say(mesh, f" layers on pipeline ranks: {describe_stages(config.model, config.parallel)}")
    if start.step >= config.last_step:
        say(
            mesh,
            f" nothing to do: iteration {start.step} is already complete; a larger --train-iters goes on, with "
            "--override-opt_param-scheduler where the length of the run decides the rate",
        )
        return
    step = config.step
    say(
        mesh,
        f" training on {mesh.world_size} x {mesh.device.type} ({mesh.layout}, {mesh.backend}, {step.dtype}): "
        f"global batch {step.global_batch_size} = {step.micro_batch_size} x {mesh.dp_size} x {step.num_micro_batches}, "
        f"iterations {start.step + 1} to {config.num_steps}, run folder {run.folder}",
    )
    if config.checkpoint.save is None:
        say(mesh, " note: no --save: this run leaves its log, and no checkpoint")
