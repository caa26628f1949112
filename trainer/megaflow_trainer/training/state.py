"""What a run is between two steps, and where it begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megaflow_trainer.checkpoint.held import Held, hold
from megaflow_trainer.config.fields import to_dict
from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.optim.optimizer import Optimizer
from megaflow_trainer.parallel.apply import ParallelModel
from megaflow_trainer.parallel.load import list_biases
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.seed import get_rng_state
from megaflow_trainer.training.feed import Feed
from megaflow_trainer.training.schedule_state import describe_schedule
from megaflow_trainer.training.spikes import SpikeWatch


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins: the last complete step, and whether its own folder held it (else its log begins anew)."""

    config: TrainConfig
    step: int = 0
    is_own: bool = False
    source: str | None = None
    """The checkpoint it goes on from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """What is trained, where it reads, and what its watches remember."""

    model: ParallelModel
    optimizer: Optimizer
    feed: Feed
    data_fingerprint: str
    spikes: SpikeWatch

    def list_held(self, mesh: Mesh) -> dict[str, Held]:
        """What this rank holds of all there is to save: model/NAME, optimizer/STATE.NAME, fp8/LAYER, rng/KIND.RANK;
        each rank has its own streams. Waits for weights that are on their way from other ranks.
        """
        shards = self.model.parts.shards
        weights = {
            f"model/{name}": hold(weight, shards[name], start=start)
            for name, weight, start in self.model.gradients.list_weights()
        }
        weights |= {f"model/{name}": held for name, held in self.list_biases().items()}
        weights |= self.list_scales()
        streams = {f"rng/{name}.{mesh.rank}": hold(value) for name, value in get_rng_state(mesh).items()}
        return {**weights, **self.list_states(), **streams}

    def list_states(self) -> dict[str, Held]:
        """What this rank holds of the optimizer's states, and of masters that are not the weights: optimizer/..."""
        held = {}
        for main in self.model.gradients.parameters:
            for key, value in self.optimizer.list_states(main.name).items():
                is_scalar = value.dim() == 0
                own = hold(value) if is_scalar else hold(value, self.model.parts.shards[main.name], start=main.start)
                held[f"optimizer/{key}.{main.name}"] = own
        return held

    def list_masters(self) -> dict[str, Held]:
        """What this rank holds of the masters, by the names of the weights."""
        shards = self.model.parts.shards
        return {
            main.name: hold(self.optimizer.masters[main.name], shards[main.name], start=main.start)
            for main in self.model.gradients.parameters
        }

    def list_biases(self) -> dict[str, Held]:
        """The biases of routers, which are no weights, by their names."""
        return {name: hold(bias) for name, bias in list_biases(self.model.module).items()}

    def list_scales(self) -> dict[str, Held]:
        """What delayed scales of fp8 remember: fp8/LAYER, the same on every rank that has a part of the layer."""
        fp8 = self.model.fp8
        states = {} if fp8 is None or fp8.scales is None else fp8.scales.list_states()
        return {f"fp8/{name}": hold(state) for name, state in states.items()}

    def spread_masters(self) -> None:
        """Round masters that were filled into the weights, on all ranks that use them."""
        self.optimizer.copy_to_weights()
        self.model.gradients.share_weights()
        self.model.gradients.receive_weights()
        if self.model.fp8 is not None and self.model.fp8.scales is not None:
            self.model.fp8.scales.begin()

    def describe(self, config: TrainConfig, mesh: Mesh) -> dict[str, Any]:
        """Everything else to save, as JSON."""
        loader = self.feed.state_dict()
        return {
            "loader": loader,
            "consumed_samples": loader["consumed_samples"],
            "loss_scale": self.optimizer.scaler.state_dict() if self.optimizer.scaler else None,
            "schedule": describe_schedule(config),
            "spikes": self.spikes.state_dict(),
            "world_size": mesh.world_size,
            "data_fingerprint": self.data_fingerprint,
            "config": to_dict(config),
        }
