"""The run: build everything once, then one line a verb."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megaflow_trainer.checkpoint.initial import fill_weights, read_weights
from megaflow_trainer.config.batch import batch_phases
from megaflow_trainer.config.cost_table import choose_parts
from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.model.gpt import GPT, build_gpt
from megaflow_trainer.model.init import init_weights
from megaflow_trainer.model.sockets import Sockets
from megaflow_trainer.ops.attention import ATTENTION
from megaflow_trainer.ops.registry import Need, choose
from megaflow_trainer.optim.optimizer import DTYPES, Optimizer
from megaflow_trainer.optim.scaler import build_scaler
from megaflow_trainer.optim.schedule import build_planner
from megaflow_trainer.parallel.apply import ParallelModel, parallelize
from megaflow_trainer.parallel.collectives import do_on_first
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.training.clock import CHECKPOINT, EVAL, Clock
from megaflow_trainer.training.data import build_loader, open_data, with_vocabulary
from megaflow_trainer.training.evaluate import evaluate
from megaflow_trainer.training.feed import Feed
from megaflow_trainer.training.lock import hold_folders
from megaflow_trainer.training.manifest import write_manifest
from megaflow_trainer.training.metrics import MetricsLog, prepare_metrics, say
from megaflow_trainer.training.preflight import describe_needs, refuse_device
from megaflow_trainer.training.resume import Start, TrainState, resume_or_start, save_checkpoint
from megaflow_trainer.training.step import train_step
from megaflow_trainer.training.stop import EXIT_STOPPED, StopVote
from megaflow_trainer.training.stream_data import describe_batches


def train(config: TrainConfig, mesh: Mesh, notes: Sequence[str] = ()) -> int:
    """Train as the configuration says, from the last complete checkpoint on.

    Returns:
        0 when the run is finished, EXIT_STOPPED when it was asked to stop.

    Raises:
        MegaflowError: whatever the user, the files or the cluster got wrong, in one sentence.
    """
    refuse_device(config, mesh.device)
    data = open_data(config)
    config = with_vocabulary(config, data)
    model = build_model(config, mesh)
    optimizer, planner = build_optimizer(model, config), build_planner(config)
    with hold_folders(config, mesh), build_loader(data.train, config, mesh) as loader:
        state = TrainState(model=model, optimizer=optimizer, loader=loader, data_fingerprint=data.train.fingerprint)
        start = resume_or_start(config, state, mesh)
        consumed, clock = loader.consumed_samples, Clock(mesh.device)
        phases, last = batch_phases(config.step), config.last_step
        origin = describe_batches(phases, data.train, consumed=consumed, last_step=last)
        introduce(config, mesh, start, origin, [*notes, *data.notes])
        feed = Feed(loader, mesh.device, clock, vocab_size=data.vocab_size, eod_id=data.eod_id)
        with StopVote(mesh) as stop, MetricsLog(config, mesh, clock) as log:
            for step in range(start.step + 1, config.last_step + 1):
                plan = planner.plan(consumed)
                consumed += plan.num_samples
                report = train_step(model, optimizer, feed, mesh, clock, config, plan=plan)
                log.write(step, consumed, report)
                if data.valid and is_due(step, config.eval.every, config.last_step):
                    with clock.phase(EVAL):
                        log.write_validation(step, evaluate(model, data, config, mesh))
                is_stopping = stop.is_agreed()
                if config.checkpoint.save and (is_stopping or is_due(step, config.checkpoint.every, config.last_step)):
                    with clock.phase(CHECKPOINT):
                        save_checkpoint(config, step, state, mesh)
                if is_stopping:
                    say(mesh, f" stopped by SIGTERM after iteration {step}; {describe_restart(config)}")
                    return EXIT_STOPPED
    return 0


def is_due(step: int, every: int | None, last: int) -> bool:
    """Whether something done every `every` steps and after the last one is done now; 0 means never."""
    return every != 0 and (step == last or (every is not None and step % every == 0))


def describe_restart(config: TrainConfig) -> str:
    """What starting the run again will do."""
    if config.checkpoint.save is None:
        return "nothing was saved: give --save to be able to go on"
    return f"the same command goes on from the last checkpoint in {config.checkpoint.save}"


def build_model(config: TrainConfig, mesh: Mesh) -> ParallelModel:
    """The model with initial weights, ready for the mesh."""
    torch.set_float32_matmul_precision("high" if config.step.allows_tf32 else "highest")
    dtype = torch.float64 if config.step.dtype == "fp64" else DTYPES[config.step.dtype]
    need = Need(
        device=mesh.device, dtype=dtype, head_dim=config.model.head_width, has_window=config.model.window is not None
    )
    attention = choose("attention", ATTENTION, config.model.attention, need)
    model = build_gpt(config.model, Sockets(attention=attention.function), device=mesh.device, dtype=dtype)
    init_weights(model, config.model, seed=config.seed)
    if config.checkpoint.init_from is not None:
        start_from(Path(config.checkpoint.init_from), model, config, mesh)
    return parallelize(
        model,
        mesh,
        recompute=config.recompute,
        parts=choose_parts(config),
        grad_dtype=DTYPES[config.optim.main_grad_dtype],
        measure_every=config.log.every * config.step.sizes.num_micro_batches,
    )


def build_optimizer(model: ParallelModel, config: TrainConfig) -> Optimizer:
    """The optimizer over what the mesh left to this rank."""
    base = config.model.mup_base_dim
    ratio = 1.0 if base is None or config.optim.kind != "adamw" else base / config.model.hidden_dim
    parameters = model.gradients.parameters
    return Optimizer(parameters, config.optim, mup_ratio=ratio, scaler=build_scaler(config.step))


def start_from(folder: Path, model: GPT, config: TrainConfig, mesh: Mesh) -> None:
    """Take the initial weights from a folder; the first rank reads, `parallelize` sends them to the others."""
    assert config.model.vocab_size is not None, "known once the data are open"
    vocab_size, may_grow = config.model.vocab_size, config.checkpoint.grow

    def read() -> list[str]:
        weights, path = read_weights(folder)
        targets = dict(model.named_parameters())
        lines = fill_weights(targets, weights, path, vocab_size=vocab_size, may_grow=may_grow)
        return [f"initial weights from {path}", *lines]

    for line in do_on_first(read, mesh.dp_group):
        say(mesh, f" note: {line}")


def introduce(config: TrainConfig, mesh: Mesh, start: Start, data: dict[str, Any], notes: Sequence[str]) -> None:
    """Say once what is about to run, and write it into the run folder."""
    assert config.log.run_dir is not None, "resolved"
    folder = Path(config.log.run_dir)

    def prepare() -> None:
        write_manifest(folder, config, mesh, start_step=start.step, data=data)
        prepare_metrics(folder, keep_until=start.step if start.is_own else None)

    do_on_first(prepare, mesh.dp_group)
    for note in notes:
        say(mesh, f" note: {note}")
    for line in describe_needs(config, mesh.device):
        say(mesh, f" {line}")
    step = config.step
    say(
        mesh,
        f" training on {mesh.world_size} x {mesh.device.type} ({mesh.backend}, {step.dtype}): global batch "
        f"{step.global_batch_size} = {step.micro_batch_size} x {mesh.dp_size} x {step.num_micro_batches}, "
        f"iterations {start.step + 1} to {config.num_steps}, run folder {folder}",
    )
    if start.step >= config.last_step:
        say(mesh, f" nothing to do: iteration {start.step} is already complete; raise --train-iters to go on")
