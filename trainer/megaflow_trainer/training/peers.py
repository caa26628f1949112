"""When a rank dies without a word, the others of its machine notice and leave too; and through the store in which the
ranks met, those of other machines.

A collective of NCCL waits for a dead peer for minutes, and a launcher gives the others half a minute more.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch.distributed as dist

from megaflow_trainer.config.exit_codes import RANK_LOST
from megaflow_trainer.training.processes import Process

POLL_S = 0.5
PATIENCE_S = 5.0
"""How long a rank may still take to end by itself after another one died: it may have more to say."""


class PeerWatch:
    """Watches the other ranks of a run from a thread.

    Args:
        rank: this rank.
        ranks: the process of every rank, as `meet` has found them; empty for a single rank, which has nothing to watch.
        store: where they met; None for a single rank.
        record: takes why this rank ends, where it is the one that writes that down.
        end: ends the process at once, with a code.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[Process],
        store: dist.Store | None,
        *,
        record: Callable[[str], object] = lambda reason: None,
        end: Callable[[int], object] = os._exit,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.rank, self.record, self.end, self.patience_s = rank, record, end, patience_s
        self.store = None if store is None else dist.PrefixStore("peers", store)
        self.siblings = {other: process for other, process in enumerate(ranks) if other != rank and process.is_here()}
        """The other ranks of this machine."""
        self.lost: int | None = None
        """A rank that died without a word."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peer watch", daemon=True)

    def start(self) -> None:
        """Begin to watch the others."""
        if self.store is not None:
            self._thread.start()

    def leave(self, *, is_well: bool) -> None:
        """Say that this rank ends, as it should or with a fault that it has told, and watch no more."""
        self._over.set()
        self._tell(f"{'left' if is_well else 'failed'}/{self.rank}")

    def stop(self) -> None:
        """Watch no more. A process must not end before: a thread that asks the store while Python ends aborts it."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(PATIENCE_S)

    def find_lost(self) -> int | None:
        """A rank of this machine that is gone without having said so; None if there is none."""
        if self.lost is None:
            gone = (rank for rank, process in self.siblings.items() if process.is_gone())
            self.lost = next((rank for rank in gone if not self._has(f"left/{rank}")), None)
        return self.lost

    def wait_for_lost(self, patience_s: float = PATIENCE_S) -> int | None:
        """As `find_lost`, with a moment for the system to clear a dead process away."""
        deadline = time.monotonic() + patience_s
        while self.find_lost() is None and self.siblings and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.lost

    def describe_lost(self) -> str:
        """What became of the rank that was lost, as far as this one can tell."""
        if self.lost is None:
            is_known = not self.is_store_gone()
            return "a rank of another machine died" if is_known else "the process that kept the store is gone"
        if self.is_store_gone():  # what the rank left there, nobody can read any more
            return f"rank {self.lost} died or ended with an error"
        return f"rank {self.lost} {'ended with an error' if self._has(f'failed/{self.lost}') else 'died'}"

    def is_writer(self) -> bool:
        """Whether this rank writes down how the run ended: the first one, or the second if that is the lost one."""
        return self.rank == (1 if self.lost == 0 else 0)

    def is_store_gone(self) -> bool:
        """Whether the store no longer answers: the process that kept it, a launcher or the first rank, has left."""
        try:
            return self.store is not None and self.store.check(["lost"]) is None
        except RuntimeError:
            return True

    def _watch(self) -> None:
        while not self._over.wait(POLL_S):
            if self.find_lost() is None and not self._has("lost"):
                continue
            self._tell("lost")
            if not self._over.wait(self.patience_s):
                reason = self.describe_lost()
                print(
                    f"error on rank {self.rank}: {reason}; the same command goes on from the last checkpoint",
                    file=sys.stderr,
                    flush=True,
                )
                if self.is_writer():
                    self.record(reason)
                self.end(RANK_LOST)
            return

    def _tell(self, key: str) -> None:
        if self.store is not None:
            with suppress(RuntimeError):  # nobody is left to read it
                self.store.set(key, "")

    def _has(self, key: str) -> bool:
        try:
            return self.store is not None and self.store.check([key])
        except RuntimeError:
            return False  # see `is_store_gone`
