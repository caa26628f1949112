"""What a run is between two steps: saved so that a restart goes on as if nothing had happened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megaflow import Loader
from megaflow.errors import CheckpointError
from megaflow_trainer.checkpoint import store
from megaflow_trainer.config.fields import to_dict
from megaflow_trainer.config.sections import CheckpointConfig, TrainConfig
from megaflow_trainer.optim.optimizer import Optimizer
from megaflow_trainer.parallel.apply import ParallelModel
from megaflow_trainer.parallel.collectives import do_on_first, gather_objects
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.seed import get_rng_state, seed_dropout, set_rng_state
from megaflow_trainer.training.metrics import say

CONTENTS = store.Contents(
    files=("model", "optimizer", "rng"),
    entries={"loader": dict, "world_size": int, "data_fingerprint": str, "config": dict},
)


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins: the last complete step, and whether its own folder held it (else its log begins anew)."""

    step: int = 0
    is_own: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """What is trained and where it reads."""

    model: ParallelModel
    optimizer: Optimizer
    loader: Loader
    data_fingerprint: str


def save_checkpoint(config: TrainConfig, step: int, state: TrainState, mesh: Mesh) -> None:
    """Save the run after `step`. The first rank writes; all ranks wait until the checkpoint is published.

    Raises:
        FileAccessError: on every rank, if it could not be written.
    """
    assert config.checkpoint.save is not None, "asked only when there is a folder"
    root = Path(config.checkpoint.save)
    streams = gather_objects(get_rng_state(mesh), mesh.dp_group)
    files: dict[str, dict[str, Tensor]] = {
        "model": dict(state.model.module.named_parameters()),
        "optimizer": state.optimizer.list_tensors(),
        "rng": {f"{name}.{rank}": value for rank, own in enumerate(streams) for name, value in own.items()},
    }
    rest = {
        "loader": state.loader.state_dict(),
        "loss_scale": state.optimizer.scaler.state_dict() if state.optimizer.scaler else None,
        "world_size": mesh.world_size,
        "data_fingerprint": state.data_fingerprint,
        "config": to_dict(config),
    }
    path = do_on_first(lambda: store.write_checkpoint(root, step, files, rest), mesh.dp_group)
    say(mesh, f" saved iteration {step} in {path}")


def resume_or_start(config: TrainConfig, state: TrainState, mesh: Mesh) -> Start:
    """Load the checkpoint to go on from, if there is one. All ranks take the same.

    Raises:
        CheckpointError: if `--load` holds none, or the one found does not fit the model or the data.
    """
    seed_dropout(config.seed, mesh)
    found = do_on_first(lambda: choose_checkpoint(config.checkpoint), mesh.dp_group)
    for line in found.passed_over:
        say(mesh, f" passed over {line}")
    if found.path is None:
        return Start()
    step = load_checkpoint(found.path, config, state, mesh)
    say(mesh, f" resumed from {found.path}: going on after iteration {step}")
    save = config.checkpoint.save
    return Start(step, is_own=save is not None and _is_same(str(found.path.parent), save))


def choose_checkpoint(config: CheckpointConfig) -> store.Found:
    """The last good checkpoint of `save`, else of `load`; none for a fresh start.

    Raises:
        FileAccessError: if the `save` folder cannot be written.
        CheckpointError: if a folder holds checkpoints and none is good, or `load` is another folder and holds none.
    """
    found = store.Found(None, ())
    if config.save is not None:
        store.prepare_folder(Path(config.save))
        found = store.find_checkpoint(Path(config.save), CONTENTS)
    if found.path is None and config.load is not None and not _is_same(config.load, config.save):
        found = store.find_checkpoint(Path(config.load), CONTENTS)
        if found.path is None:
            raise CheckpointError(f"--load {config.load}: no complete checkpoint there; drop the flag to start afresh")
    return found


def _is_same(one: str, other: str | None) -> bool:
    return other is not None and Path(one).resolve() == Path(other).resolve()


@torch.no_grad()
def load_checkpoint(path: Path, config: TrainConfig, state: TrainState, mesh: Mesh) -> int:
    """Fill model, optimizer, random streams and the loader's position; returns the step that was complete."""
    saved = store.read_state(path)
    weights, moments = store.read_tensors(path, "model"), store.read_tensors(path, "optimizer")
    full = {name: moments.pop(f"master.{name}", weight) for name, weight in weights.items()}
    own = state.optimizer.list_tensors()
    store.fill_tensors(dict(state.model.module.named_parameters()), weights, path)
    store.fill_tensors(state.optimizer.masters, full, path)
    store.fill_tensors({name: own[name] for name in own if not name.startswith("master.")}, moments, path)
    state.optimizer.copy_to_weights()
    state.loader.load_state_dict(saved["loader"])
    if state.optimizer.scaler is not None and saved.get("loss_scale"):
        state.optimizer.scaler.load_state_dict(saved["loss_scale"])
    _restore_streams(path, config, int(saved["iteration"]), mesh)
    return int(saved["iteration"])


def _restore_streams(path: Path, config: TrainConfig, step: int, mesh: Mesh) -> None:
    """Each rank goes on with its own stream; a rank that the saved run did not have starts one at this step."""
    saved = store.read_tensors(path, "rng")
    own = {name.split(".")[0]: value for name, value in saved.items() if name.endswith(f".{mesh.dp_rank}")}
    if own:
        set_rng_state(own, mesh)
    else:
        seed_dropout(config.seed, mesh, step=step)
