"""The ranks of one start agree on a part of the store that no earlier start has written to.

torchrun keeps its store when it starts all ranks anew after a fault, and it tells them neither how often it did nor the
same number on every node; what the dead ranks left there (a fault, a lost peer, addresses) would be taken for true.

Every rank leaves a name of its own that no other start has: a random word and its process. The first one lists the
names that it finds; a rank whose name is in the list answers. A list with a name of a dead rank gets too few answers,
and is made anew when the rank's successor has left its name.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megaflow_trainer.training.processes import Process

POLL_S = 0.1
PATIENCE = timedelta(minutes=30)
"""How long ranks wait for each other: nodes of a cluster may start far apart."""

NEWS_S = 30.0
"""How often a rank that waits says for whom."""


@dataclass(frozen=True)
class Meeting:
    """The ranks of one start."""

    store: dist.Store
    """The part of the store that is theirs alone."""
    ranks: tuple[Process, ...]
    """The process of every rank."""


def meet(
    store: dist.Store, rank: int, world_size: int, *, patience: timedelta = PATIENCE, news_s: float = NEWS_S
) -> Meeting:
    """Wait for all ranks of this start.

    The first rank says on stderr for whom it waits, every `news_s` seconds.

    Raises:
        RuntimeError: if they do not come within `patience`.
    """
    board, own = dist.PrefixStore("meeting", store), f"{uuid.uuid4().hex[:12]}:{Process.find(os.getpid())}"
    board.set(f"here/{rank}", own)
    began = time.monotonic()
    news_at, deadline = began + news_s, began + patience.total_seconds()
    answered, names = "", list[str]()
    while True:
        if rank == 0:
            _list_names(board, world_size)
        current = board.get("list").decode() if board.check(["list"]) else ""
        if current != answered and (listed := board.get(f"names/{current}").decode().split())[rank] == own:
            board.add(f"answers/{current}", 1)
            answered, names = current, listed
        if answered and board.add(f"answers/{answered}", 0) == world_size:
            ranks = tuple(Process.parse(name.partition(":")[2]) for name in names)
            return Meeting(dist.PrefixStore(f"start/{answered}", store), ranks)
        if time.monotonic() > deadline:
            missing = _describe_missing(board, world_size)
            raise RuntimeError(f"rank {rank} waited for the other {world_size - 1} ranks in vain ({missing})")
        if rank == 0 and time.monotonic() > news_at:
            waited, news_at = time.monotonic() - began, time.monotonic() + news_s
            print(
                f"waiting for the ranks: {_describe_missing(board, world_size)} after {waited:.0f} s", file=sys.stderr
            )
        time.sleep(POLL_S)


def _describe_missing(board: dist.Store, world_size: int) -> str:
    """Which ranks have not come, the first eight by number."""
    missing = [rank for rank in range(world_size) if not board.check([f"here/{rank}"])]
    if not missing:
        return "all have come once, some of an earlier start"
    listed = ", ".join(str(rank) for rank in missing[:8]) + (", ..." if len(missing) > 8 else "")
    return f"{len(missing)} of {world_size} have not come: {listed}"


def _list_names(board: dist.Store, world_size: int) -> None:
    """List the names that are there, if every rank has left one."""
    keys = [f"here/{rank}" for rank in range(world_size)]
    if not board.check(keys):
        return
    names = " ".join(board.get(key).decode() for key in keys)
    current = hashlib.sha256(names.encode()).hexdigest()[:16]
    if not board.check([f"names/{current}"]):
        board.set(f"names/{current}", names)
        board.set("list", current)
