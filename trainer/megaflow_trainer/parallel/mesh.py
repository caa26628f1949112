"""The ranks of a run and the axes they form; built once and passed down.

Axes: `dp_replicate` is the only one in this version; the others join it here, in Megatron's rank order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megaflow.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What the launcher says of this process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """This rank's place on every axis. Groups are None where an axis has one rank: then nothing is sent."""

    rank: int
    world_size: int
    device: torch.device
    backend: str
    device_mesh: DeviceMesh | None = None
    dp_rank: int = 0
    dp_size: int = 1
    dp_group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks and writes for all."""
        return self.rank == 0


def choose_device(launch: Launch, backend: str | None) -> tuple[torch.device, str, list[str]]:
    """The device of this rank, the backend that serves it, and a line if that is not the one asked for.

    Raises:
        ConfigError: if this machine has GPUs, but fewer than ranks.
    """
    if backend == "gloo" or not torch.cuda.is_available():
        notes = ["--distributed-backend nccl: no GPU on this machine, gloo on the CPU is used"]
        return torch.device("cpu"), "gloo", notes if backend == "nccl" else []
    if launch.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {launch.rank} is number {launch.local_rank + 1} on this machine, which has "
            f"{torch.cuda.device_count()} GPUs; start --nproc_per_node={torch.cuda.device_count()}"
        )
    return torch.device("cuda", launch.local_rank), "nccl", []


def start_group(launch: Launch, store: dist.Store | None, backend: str) -> None:
    """Join the process group through `store`; a single process needs none. CPU tensors always travel by gloo."""
    if launch.world_size > 1:
        assert store is not None, "several ranks meet through a store"
        dist.init_process_group(
            backend="gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl",
            store=dist.PrefixStore("group", store),
            rank=launch.rank,
            world_size=launch.world_size,
        )


def build_mesh(launch: Launch, device: torch.device, backend: str) -> Mesh:
    """Lay the ranks out on the axes. The process group must have been joined if there are several."""
    if launch.world_size == 1:
        return Mesh(rank=0, world_size=1, device=device, backend=backend)
    device_mesh = init_device_mesh(device.type, (launch.world_size,), mesh_dim_names=("dp_replicate",))
    return Mesh(
        rank=launch.rank,
        world_size=launch.world_size,
        device=device,
        backend=backend,
        device_mesh=device_mesh,
        dp_rank=device_mesh.get_local_rank("dp_replicate"),
        dp_size=device_mesh.size(0),
        dp_group=device_mesh.get_group("dp_replicate"),
    )
