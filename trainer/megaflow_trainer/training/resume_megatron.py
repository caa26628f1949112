"""Going on with a run of Megatron-LM from its `torch_dist` checkpoint: weights, optimizer states, place in the data.

What the checkpoint says in pickles (arguments, schedule, random streams) is not read: rate and batch follow from this
run's flags, the iteration from the name of the folder, the samples consumed from both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from megaflow.errors import CheckpointError
from megaflow_trainer.checkpoint.held import Held
from megaflow_trainer.checkpoint.initial import fill_weights, read_weights
from megaflow_trainer.checkpoint.megatron import find_megatron, list_kinds, read_iteration, read_megatron
from megaflow_trainer.config.batch import count_samples
from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.parallel.collectives import do_on_first
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.seed import seed_dropout
from megaflow_trainer.training.say import say
from megaflow_trainer.training.state import Start, TrainState

MOMENTS = ("exp_avg", "exp_avg_sq")


@torch.no_grad()
def continue_megatron(load: Path, config: TrainConfig, state: TrainState, mesh: Mesh) -> Start:
    """Fill weights and optimizer, and go to the sample behind the checkpoint's last iteration. All ranks call it.

    Raises:
        CheckpointError: on all ranks, if the checkpoint does not tell what going on needs, with what can be done.
    """
    path, step, kinds = do_on_first(lambda: _inspect(load, config, state), mesh.world_group)
    assert config.model.vocab_size is not None, "known once the data are open"
    group, vocab_size = mesh.world_group, config.model.vocab_size

    def fill(targets: Mapping[str, Held], kind: str | None) -> None:
        def read() -> tuple[dict[str, torch.Tensor], Path]:
            if kind is None:
                return read_weights(load, config.model, flag="--load")
            return read_megatron(path, config.model, kind), path

        fill_weights(targets, read, group, vocab_size=vocab_size, may_grow=False)

    fill(state.list_masters(), None)
    if config.checkpoint.loads_optimizer:
        held = state.list_states()
        for kind in MOMENTS:
            fill({name.removeprefix(f"optimizer/{kind}."): own for name, own in held.items() if _is(name, kind)}, kind)
        for name, own in held.items():
            if _is(name, "step"):
                own.local.fill_(step)
    state.spread_masters()
    consumed = count_samples(config.step, step)
    state.feed.load_state_dict({**state.feed.state_dict(), "consumed_samples": consumed})
    seed_dropout(config.seed, mesh, step=step)
    states = f"optimizer states ({', '.join(kinds)})" if config.checkpoint.loads_optimizer else "fresh optimizer states"
    say(
        mesh,
        f" resumed from Megatron-Core's {path}: weights and {states}; going on after iteration {step} and {consumed} "
        "samples, by this run's batch sizes; rate and decay by its flags, random streams begin anew",
    )
    return Start(config, step, source=str(path))


def _is(name: str, kind: str) -> bool:
    return name.startswith(f"optimizer/{kind}.")


def _inspect(load: Path, config: TrainConfig, state: TrainState) -> tuple[Path, int, list[str]]:
    """The checkpoint, its iteration and the kinds of states that it holds."""
    path = find_megatron(load)
    assert path is not None, "found before"
    step = read_iteration(path)
    if step is None:
        raise CheckpointError(
            f"--load {path}: a checkpoint of Megatron-Core whose folder names no iteration (iter_0000500), so "
            "that a run cannot go on from it; give --finetune to take its weights"
        )
    if "position" in state.feed.state_dict():
        raise CheckpointError(
            f"--load {path}: a run of Megatron-Core does not go on in text that is tokenized while it trains; name the "
            "pair that it read, or give --finetune to take its weights"
        )
    kinds = list_kinds(path)
    missing = [kind for kind in MOMENTS if kind not in kinds]
    if config.checkpoint.loads_optimizer and (config.optim.kind != "adamw" or missing):
        why = (
            f"holds no {' and '.join(missing)} by the names of weights (the distributed optimizer's dp_reshardable "
            "names buckets; Megatron's --dist-ckpt-optim-fully-reshardable saves what is read here)"
            if missing
            else f"is of Adam, and this run's optimizer is {config.optim.kind}"
        )
        raise CheckpointError(
            f"--load {path}: the optimizer's part of this checkpoint of Megatron-Core {why}; give --no-load-optim to "
            "go on with fresh states, or --finetune to take the weights alone"
        )
    return path, step, sorted(kinds)
