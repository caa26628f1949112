"""Any rank of any layout in this process, without the others: the shapes of its part of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megaflow_trainer.config import TrainConfig
from megaflow_trainer.config.layout import Layout, make_layout
from megaflow_trainer.parallel.apply import ParallelModel
from megaflow_trainer.parallel.mesh import Launch, Mesh, build_mesh
from megaflow_trainer.training.build import build_model


@contextmanager
def fake_mesh(layout: Layout, rank: int) -> Iterator[Mesh]:
    """The mesh of a rank whose groups send nothing, on the device `meta`."""
    world_size = layout.size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield build_mesh(Launch(rank=rank, world_size=world_size), torch.device("meta"), "gloo", layout)
    finally:
        dist.destroy_process_group()


def find_layout(config: TrainConfig, world_size: int) -> Layout:
    """The layout of a configuration."""
    return make_layout(config.parallel, world_size=world_size, num_kv_heads=config.model.kv_heads)


@dataclasses.dataclass(frozen=True, slots=True)
class RankPart:
    """What a rank holds: of each weight the runs it answers for, in rows, and bytes of its training state."""

    owned: dict[str, list[tuple[int, int, tuple[int, ...], int]]]
    """By name: first row, rows, shape of the full weight and dim along which it is cut."""
    experts: frozenset[str]
    """Names of those that lie on other ranks than the layers around them."""
    weights: int
    gradients: int
    optimizer: int

    @property
    def state_bytes(self) -> int:
        """Of weights, gradients and optimizer together."""
        return self.weights + self.gradients + self.optimizer


def build_part(config: TrainConfig, layout: Layout, rank: int) -> RankPart:
    """Build the part of a rank, parallelism and gradients included, and describe it."""
    with fake_mesh(layout, rank) as mesh:
        model = build_model(config, mesh)
        owned = {
            name: [(piece.start, piece.length, shard.shape, shard.dim) for piece in shard.pieces if piece.is_owned]
            for name, shard in model.parts.shards.items()
        }
        return RankPart(owned, model.parts.experts, *count_bytes(model, config))


def count_bytes(model: ParallelModel, config: TrainConfig) -> tuple[int, int, int]:
    """Bytes of weights, main gradients and optimizer: masters that are no weights, and two moments."""
    stepped = sum(main.weight.numel() for main in model.gradients.parameters)
    weights = sum(_local(weight).nbytes for weight in model.module.parameters())
    has_masters = config.step.dtype != "fp32" and config.parallel.zero < 3
    gradients = sum(grad.untyped_storage().nbytes() for grad in model.gradients.kept)  # ZeRO 1 keeps whole buckets
    return weights, gradients, stepped * (12 if has_masters else 8)


def _local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if hasattr(weight, "to_local") else weight
