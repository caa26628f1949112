"""When a rank dies without a word, the others of its machine notice and leave too; and through the store in which the
ranks met, those of other machines.

A collective of NCCL waits for a dead peer for minutes, and a launcher gives the others half a minute more.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from megaflow_trainer.config.exit_codes import RANK_LOST

POLL_S = 0.5
PATIENCE_S = 5.0
"""How long a rank may still take to end by itself after another one died: it may have more to say."""


class PeerWatch:
    """Watches the other ranks of a run from a thread.

    Args:
        rank: this rank.
        world_size: all ranks.
        store: where they met; None for a single rank, which has nothing to watch.
        record: takes why this rank ends, where it is the one that writes that down.
        end: ends the process at once, with a code.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: dist.Store | None,
        *,
        record: Callable[[str], object] = lambda reason: None,
        end: Callable[[int], object] = os._exit,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.rank, self.world_size, self.record, self.end, self.patience_s = rank, world_size, record, end, patience_s
        self.store = None if store is None else dist.PrefixStore("peers", store)
        self.lost: int | None = None
        """A rank that died without a word."""
        self._over, self._met = threading.Event(), threading.Event()
        self._siblings: dict[int, tuple[int, str]] = {}

    def start(self) -> None:
        """Tell the others how to recognise this process, and begin to watch them."""
        if self.store is not None:
            # Told before this returns: a rank that dies at once is known to the others all the same.
            self._tell(f"who/{self.rank}", f"{socket.gethostname()} {os.getpid()} {_read_birth(os.getpid())}")
            threading.Thread(target=self._watch, name="peer watch", daemon=True).start()

    def leave(self, *, is_well: bool) -> None:
        """Say that this rank ends, as it should or with a fault that it has told, and watch no more."""
        self._over.set()
        self._tell(f"{'left' if is_well else 'failed'}/{self.rank}")

    def find_lost(self) -> int | None:
        """A rank of this machine that is gone without having said so; None if there is none."""
        if self.lost is None:
            gone = [rank for rank, (process, born) in self._siblings.items() if _read_birth(process) != born]
            self.lost = next((rank for rank in gone if not self._has(f"left/{rank}")), None)
        return self.lost

    def is_writer(self) -> bool:
        """Whether this rank writes down how the run ended: the first one, or the second if that is the lost one."""
        return self.rank == (1 if self.lost == 0 else 0)

    def wait_for_lost(self, patience_s: float = PATIENCE_S) -> int | None:
        """As `find_lost`, with a moment for the ranks to have met and for the system to clear a dead process away."""
        deadline = time.monotonic() + patience_s
        if self.store is not None:
            self._met.wait(patience_s)
        while self.find_lost() is None and self._siblings and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.lost

    def _watch(self) -> None:
        try:
            self._meet()
        except RuntimeError:
            return  # the others never came: the start says so
        finally:
            self._met.set()
        while not self._over.wait(POLL_S):
            if self.find_lost() is None and not self._has("lost"):
                continue
            self._tell("lost")
            if not self._over.wait(self.patience_s):
                who = "a rank of another machine" if self.lost is None else f"rank {self.lost}"
                how = "ended with an error" if self._has(f"failed/{self.lost}") else "died"
                print(
                    f"error on rank {self.rank}: {who} {how}; the same command goes on from the last checkpoint",
                    file=sys.stderr,
                    flush=True,
                )
                if self.is_writer():
                    self.record(f"{who} {how}")
                self.end(RANK_LOST)
            return

    def _meet(self) -> None:
        assert self.store is not None, "started with a store only"
        keys = [f"who/{rank}" for rank in range(self.world_size)]
        while not self.store.check(keys):  # never a waiting call: it would keep the other threads from the store
            if self._over.wait(POLL_S):
                return
        who = [self.store.get(key).decode().split() for key in keys]
        self._siblings = {
            rank: (int(process), born)
            for rank, (host, process, born) in enumerate(who)
            if rank != self.rank and host == socket.gethostname()
        }

    def _tell(self, key: str, word: str = "") -> None:
        if self.store is not None:
            with suppress(RuntimeError):  # nobody is left to read it
                self.store.set(key, word)

    def _has(self, key: str) -> bool:
        if self.store is None:
            return False
        try:
            return self.store.check([key])
        except RuntimeError:
            return False  # the store is gone with the launcher, which is watched elsewhere


def _read_birth(process: int) -> str:
    """When a process began, in ticks, which no later process of the same number shares; "-" if it is gone."""
    if sys.platform != "linux":
        try:
            os.kill(process, 0)
        except OSError:
            return "-"
        return "alive"
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return "-"
    return "-" if fields[0] in ("Z", "X") else fields[19]
