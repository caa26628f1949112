"""What a run is between two steps: saved so that a restart goes on as if nothing had happened."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megaflow.errors import CheckpointError
from megaflow_trainer.checkpoint import store
from megaflow_trainer.checkpoint.dcp import check_tensors, list_shapes, load_tensors
from megaflow_trainer.checkpoint.held import Held, hold
from megaflow_trainer.checkpoint.initial import describe_source, fill_weights, read_weights
from megaflow_trainer.checkpoint.megatron import find_megatron
from megaflow_trainer.config.sections import CheckpointConfig, TrainConfig
from megaflow_trainer.parallel.collectives import do_on_first, gather_objects
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.seed import get_rng_state, seed_dropout, set_rng_state
from megaflow_trainer.training.feed import Feed
from megaflow_trainer.training.resume_megatron import continue_megatron
from megaflow_trainer.training.say import say
from megaflow_trainer.training.schedule_state import settle_schedule
from megaflow_trainer.training.state import Start, TrainState

CONTENTS = store.Contents(
    entries={"loader": dict, "world_size": int, "data_fingerprint": str, "config": dict},
)


def resume_or_start(config: TrainConfig, state: TrainState, mesh: Mesh) -> Start:
    """Load the checkpoint to go on from, if there is one. All ranks take the same.

    Raises:
        CheckpointError: if `--load` holds none, or the one found does not fit the model or the data.
        ConfigError: if its schedule is not this run's, and nothing says which one holds.
    """
    seed_dropout(config.seed, mesh)
    if config.checkpoint.save is not None:
        save = Path(config.checkpoint.save)
        do_on_first(lambda: store.prepare_folder(save), mesh.world_group)
    found = choose_checkpoint(config.checkpoint, mesh)
    for line in found.passed_over:
        say(mesh, f" passed over {line}")
    if found.path is None:
        if config.checkpoint.is_finetune:
            take_weights(config, state, mesh)
        elif config.checkpoint.load is not None and _holds_megatron(config.checkpoint.load, mesh):
            return continue_megatron(Path(config.checkpoint.load), config, state, mesh)
        return Start(config)
    start = load_checkpoint(found.path, config, state, mesh)
    say(mesh, f" resumed from {found.path}: going on after iteration {start.step}")
    return start


def choose_checkpoint(config: CheckpointConfig, mesh: Mesh) -> store.Found:
    """The last good checkpoint of `save`, else of `load` unless only its weights are wanted; none for a fresh start, or
    if `load` is Megatron-Core's.

    Raises:
        CheckpointError: if a folder holds checkpoints and none is good, or `load` is another folder and holds none.
    """
    found = store.Found(None, ())
    if config.save is not None:
        found = store.find_checkpoint(Path(config.save), CONTENTS, mesh.world_group)
    wants_load = config.load is not None and not config.is_finetune and not _is_same(config.load, config.save)
    if found.path is None and config.load is not None and wants_load:
        if _holds_megatron(config.load, mesh):
            return found
        found = store.find_checkpoint(Path(config.load), CONTENTS, mesh.world_group)
        if found.path is None:
            raise CheckpointError(f"--load {config.load}: no complete checkpoint there; drop the flag to start afresh")
    return found


def _holds_megatron(folder: str, mesh: Mesh) -> bool:
    return do_on_first(lambda: find_megatron(Path(folder)), mesh.world_group) is not None


def _is_same(one: str, other: str | None) -> bool:
    return other is not None and Path(one).resolve() == Path(other).resolve()


@torch.no_grad()
def take_weights(config: TrainConfig, state: TrainState, mesh: Mesh) -> None:
    """Fill the weights alone from `--load`: a checkpoint of this trainer, of Megatron-Core, or a Hugging Face folder.

    Raises:
        CheckpointError: if there is none, or a tensor does not fit.
    """
    assert config.checkpoint.load is not None, "checked with the configuration"
    folder = Path(config.checkpoint.load)
    assert config.model.vocab_size is not None, "known once the data are open"
    path, lines = fill_weights(
        {**state.list_masters(), **state.list_biases()},
        lambda: read_weights(folder, config.model, flag="--load"),
        mesh.world_group,
        vocab_size=config.model.vocab_size,
        may_grow=config.checkpoint.grow,
    )
    state.spread_masters()
    say(mesh, f" weights from {describe_source(path)}; everything else begins anew")
    for line in lines:
        say(mesh, f" note: {line}")


def go_to(feed: Feed, position: dict[str, Any], path: Path) -> None:
    """Let the loader stand where that of a checkpoint stood.

    Raises:
        CheckpointError: if the data, or the order of their samples, are others than those of the checkpoint.
    """
    try:
        feed.load_state_dict(position)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path}: {error}. Go on with the data and settings of that run, or take its weights alone to other data: "
            f"--finetune --load {shlex.quote(str(path.parent))} and another --save"
        ) from None


@torch.no_grad()
def load_checkpoint(path: Path, config: TrainConfig, state: TrainState, mesh: Mesh) -> Start:
    """Fill model, optimizer, random streams and the loader's position; returns where to go on."""
    saved = store.read_state(path)
    config = settle_schedule(config, saved, path)
    shapes = list_shapes(path)
    targets = list_targets(config, state, shapes)
    wanted: dict[str, tuple[int, ...]] = {}
    for part in gather_objects({name: held.shape for name, held in targets.items()}, mesh.world_group):
        wanted |= part
    if config.checkpoint.loads_optimizer:
        check_tensors(path, wanted, saved=_without_masters(shapes, wanted), known="optimizer/")
    masters = {name.replace("optimizer/master.", "model/"): shape for name, shape in wanted.items()}
    check_tensors(path, _keep(masters, "model/"), saved=shapes, known="model/")
    streams = {}
    if config.checkpoint.loads_rng:
        own = {name: value for name, value in get_rng_state(mesh).items() if f"rng/{name}.{mesh.rank}" in shapes}
        streams = {name: torch.empty_like(value) for name, value in own.items()}
        targets |= {f"rng/{name}.{mesh.rank}": hold(value) for name, value in streams.items()}
    load_tensors(targets, path, mesh.world_group)
    state.spread_masters()
    if config.checkpoint.loads_optimizer:
        load_scales(path, state, shapes, mesh)
    go_to(state.feed, saved["loader"], path)
    if config.checkpoint.loads_optimizer and state.optimizer.scaler is not None and saved.get("loss_scale"):
        state.optimizer.scaler.load_state_dict(saved["loss_scale"])
    state.spikes.load_state_dict(saved.get("spikes"))
    step = int(saved["iteration"])
    if streams:
        set_rng_state(streams, mesh)
    else:  # a rank that the saved run did not have, or none are wanted: a stream of its own from this step on
        seed_dropout(config.seed, mesh, step=step)
    save = config.checkpoint.save
    is_own = save is not None and _is_same(str(path.parent), save)
    return Start(config, step, is_own=is_own, source=str(path))


def load_scales(path: Path, state: TrainState, shapes: Mapping[str, tuple[int, ...]], mesh: Mesh) -> None:
    """Fill what delayed scales of fp8 remember, where the checkpoint has as much of it; else they begin anew."""
    fp8 = state.model.fp8
    if fp8 is None or fp8.scales is None:
        return
    wanted = {name: held for name, held in state.list_scales().items() if shapes.get(name) == held.shape}
    load_tensors(wanted, path, mesh.world_group)
    fp8.scales.set_units()


def list_targets(config: TrainConfig, state: TrainState, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Held]:
    """What to fill, by the names it has in the checkpoint.

    Masters are filled from saved masters where there are any, else from the weights (another precision); the weights
    follow from the masters.
    """
    targets = {}
    for name, master in state.list_masters().items():
        full = f"optimizer/master.{name}"
        targets[full if full in shapes else f"model/{name}"] = master
    targets |= {f"model/{name}": bias for name, bias in state.list_biases().items()}
    if config.checkpoint.loads_optimizer:
        targets |= {name: own for name, own in state.list_states().items() if not name.startswith("optimizer/master.")}
    return targets


def _keep(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in shapes.items() if name.startswith(prefix)}


def _without_masters(
    shapes: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """What the checkpoint holds, without masters that this run does not ask for."""
    return {name: s for name, s in shapes.items() if name in wanted or not name.startswith("optimizer/master.")}
