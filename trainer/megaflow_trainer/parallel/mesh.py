"""The ranks of a run and the axes they form; built once and passed down.

The order of the axes is in `config/layout.py`. Beside the groups of single axes there are those of several: gradients
are summed over data and context, losses over all ranks but those that share a layer. A group is made of the same ranks
only once, and only by its own ranks; torch names it by how many this rank has made before, so that every rank makes
equally many.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megaflow.errors import ConfigError
from megaflow_trainer.config.layout import AXES, EXPERT_AXES, Layout
from megaflow_trainer.config.sections import ParallelConfig
from megaflow_trainer.parallel.traffic import Meter, Traffic


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What the launcher says of this process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    base: int = 0
    """Processes of the process group before rank 0 of this run: not 0 if several runs share one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """This rank's place on every axis. Groups are None where they have one rank: then nothing is sent."""

    rank: int
    world_size: int
    device: torch.device
    backend: str
    layout: Layout = field(default_factory=Layout)
    base: int = 0
    """Processes of the process group before rank 0 of this run."""
    device_mesh: DeviceMesh | None = None
    """The axes `AXES`, for what torch does itself; None for a single rank."""
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    """What this rank sends in the step in progress."""
    tp_rank: int = 0
    cp_rank: int = 0
    dp_rank: int = 0
    pp_rank: int = 0
    world_group: dist.ProcessGroup | None = None
    """All ranks of the run."""
    tp_group: dist.ProcessGroup | None = None
    """Ranks that share layers."""
    cp_group: dist.ProcessGroup | None = None
    """Ranks that share sequences."""
    pp_group: dist.ProcessGroup | None = None
    """The stages of one pipeline, first to last."""
    dp_group: dist.ProcessGroup | None = None
    """Ranks with the same weights and other samples."""
    gradient_group: dist.ProcessGroup | None = None
    """Ranks with the same weights and other tokens: data and context."""
    shard_group: dist.ProcessGroup | None = None
    """Those of them among which ZeRO divides states: shards and context."""
    replicate_group: dist.ProcessGroup | None = None
    """Those with the same part of the states."""
    loss_group: dist.ProcessGroup | None = None
    """Ranks whose losses add up to that of the batch: all but those that share layers."""
    model_group: dist.ProcessGroup | None = None
    """Ranks that hold one model together: layers and stages."""
    ep_rank: int = 0
    etp_rank: int = 0
    edp_rank: int = 0
    ep_group: dist.ProcessGroup | None = None
    """Ranks that share the experts of a layer."""
    etp_group: dist.ProcessGroup | None = None
    """Ranks that share one expert."""
    expert_group: dist.ProcessGroup | None = None
    """Ranks that hold all experts of a layer together: those of the two groups above, experts first."""
    edp_group: dist.ProcessGroup | None = None
    """Ranks with the same experts: gradients of experts are summed over them."""
    edp_shard_group: dist.ProcessGroup | None = None
    """Those of them among which ZeRO divides states of experts."""
    edp_replicate_group: dist.ProcessGroup | None = None
    """Those with the same part of the states of experts."""
    own_group: dist.ProcessGroup | None = None
    """This rank alone, for what torch divides among a group, and here among one; None for a single rank."""
    kv_group: dist.ProcessGroup | None = None
    """Ranks with the same key/value head, where there are fewer heads than tensor-parallel ranks."""
    embedding_group: dist.ProcessGroup | None = None
    """First and last stage, where the first one's embedding is the last one's output projection."""

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks and writes for all."""
        return self.rank == 0

    def meter(self, axis: str) -> Meter:
        """What counts messages along an axis: tp, cp, ep, dp, pp or world."""
        return Meter(self.traffic, axis)

    @property
    def dp_size(self) -> int:
        """Ranks that read different samples."""
        return self.layout.dp

    @property
    def tp_size(self) -> int:
        """Ranks that share layers."""
        return self.layout.tp

    @property
    def is_replica_first(self) -> bool:
        """Whether this is the first of the ranks with the same weights."""
        return self.dp_rank == 0 and self.cp_rank == 0


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


LAUNCH_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def keep_launch_order(parallel: ParallelConfig) -> list[str]:
    """Let kernels of all streams begin in the order in which they are launched, where collectives of tensor parallelism
    are to travel beside products, unless the environment says otherwise; a line that says so.

    A product takes all of a GPU until it is done. What is to travel beside it is launched first, and begins first only
    so. Not with ZeRO 3, whose gathers of weights are launched long before they may begin. The driver reads the variable
    when it starts.
    """
    if parallel.tp == 1 or not parallel.overlaps or parallel.zero == 3 or LAUNCH_QUEUES in os.environ:
        return []
    os.environ[LAUNCH_QUEUES] = "1"
    return [f"{LAUNCH_QUEUES}=1, so that collectives begin before the products beside them; set it to have another"]


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


def build_mesh(launch: Launch, device: torch.device, backend: str, layout: Layout | None = None) -> Mesh:
    """Lay the ranks out on the axes; without a layout all of them are data parallel.

    The process group must have been joined if there are several ranks. A GPU becomes this process's current one: Triton
    launches a kernel there, wherever its tensors are.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    layout = layout or Layout(dp_replicate=launch.world_size)
    assert layout.size == launch.world_size, "checked with the configuration"
    if launch.world_size == 1:
        return Mesh(rank=0, world_size=1, device=device, backend=backend, layout=layout, traffic=Traffic(device))
    groups, rank = _Groups(launch.base), launch.rank

    def make(*along: str, axes: tuple[str, ...] = AXES) -> dist.ProcessGroup | None:
        return groups.make(layout.peers(rank, along, axes))

    place, expert_place = layout.place(rank), layout.place(rank, EXPERT_AXES)
    sharers, stages = layout.peers(rank, ("tp",)), layout.peers(rank, ("pp",))
    first_sharer = place["tp"] // layout.kv_copies * layout.kv_copies
    return Mesh(
        rank=rank,
        world_size=launch.world_size,
        device=device,
        backend=backend,
        layout=layout,
        base=launch.base,
        traffic=Traffic(device),
        device_mesh=_make_device_mesh(groups, layout, rank, device),
        tp_rank=place["tp"],
        cp_rank=place["cp"],
        dp_rank=place["dp_replicate"] * layout.dp_shard + place["dp_shard"],
        pp_rank=place["pp"],
        world_group=make(*AXES),
        tp_group=make("tp"),
        cp_group=make("cp"),
        pp_group=make("pp"),
        dp_group=make("dp_replicate", "dp_shard"),
        gradient_group=make("dp_replicate", "dp_shard", "cp"),
        shard_group=make("dp_shard", "cp"),
        replicate_group=make("dp_replicate"),
        loss_group=make("pp", "dp_replicate", "dp_shard", "cp"),
        model_group=make("pp", "tp"),
        ep_rank=expert_place["ep"],
        etp_rank=expert_place["etp"],
        edp_rank=expert_place["edp_replicate"] * layout.edp_shard + expert_place["edp_shard"],
        ep_group=make("ep", axes=EXPERT_AXES),
        etp_group=make("etp", axes=EXPERT_AXES),
        expert_group=make("ep", "etp", axes=EXPERT_AXES),
        edp_group=make("edp_replicate", "edp_shard", axes=EXPERT_AXES),
        edp_shard_group=make("edp_shard", axes=EXPERT_AXES),
        edp_replicate_group=make("edp_replicate", axes=EXPERT_AXES),
        own_group=groups.make([rank], is_kept_single=True),
        kv_group=groups.make(sharers[first_sharer : first_sharer + layout.kv_copies]),
        embedding_group=groups.make_ends(stages, rank),
    )


class _Groups:
    """Process groups by their ranks, so that no two are of the same ranks."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def make(self, ranks: Sequence[int], *, is_kept_single: bool = False) -> dist.ProcessGroup | None:
        """The group of these ranks, among them this one; every one of them calls this in the same order."""
        key = tuple(dict.fromkeys(self.base + rank for rank in ranks))
        if len(key) < 2 and not is_kept_single:
            return None
        if key not in self.made:
            is_world = len(key) == dist.get_world_size()
            group = dist.group.WORLD if is_world else dist.new_group(list(key), use_local_synchronization=True)
            assert group is not None, "the process group has been joined"
            self.made[key] = group
        return self.made[key]

    def make_ends(self, stages: Sequence[int], rank: int) -> dist.ProcessGroup | None:
        """The group of the first and the last stage; the ones between make another, to have made equally many."""
        if rank in (stages[0], stages[-1]):
            return self.make([stages[0], stages[-1]])
        dist.new_group([self.base + stage for stage in stages[1:-1]], use_local_synchronization=True)
        return None


def _make_device_mesh(groups: _Groups, layout: Layout, rank: int, device: torch.device) -> DeviceMesh:
    single = [groups.make(layout.peers(rank, (axis,)), is_kept_single=True) for axis in AXES]
    ranks = groups.base + torch.arange(layout.size).view(layout.sizes())
    return DeviceMesh.from_group(single, device.type, mesh=ranks, mesh_dim_names=AXES)  # type: ignore[arg-type]
