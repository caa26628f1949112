"""How a run ends when something is wrong: one sentence, said once, and a code that is not zero."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch.distributed as dist

from megaflow_trainer.training.last_word import leave_last_word


class FaultBoard:
    """Where ranks leave their faults, so that a fault of all is said by the first rank only.

    Several ranks share it through the store in which they met; a single rank needs none.
    """

    def __init__(self, rank: int, store: dist.Store | None, *, patience_s: float = 5.0) -> None:
        self.rank = rank
        self.patience_s = patience_s
        self.store = None if store is None else dist.PrefixStore("faults", store)

    def report(self, message: str) -> None:
        """Say a fault of this rank, unless the first rank has the same and says it."""
        if self.rank == 0:
            print(f"error: {message}", file=sys.stderr, flush=True)
            leave_last_word(os.environ, message)
            self._leave(message)
        else:
            self._leave(message)
            if self._read_first() != message:
                print(f"error on rank {self.rank}: {message}", file=sys.stderr, flush=True)
                leave_last_word(os.environ, message)

    def mark(self) -> None:
        """Let the other ranks know that this one leaves with an error of its own, which it shows itself."""
        self._leave("")

    def has_any(self) -> bool:
        """Whether some rank has left a fault: then a broken connection here is only its echo."""
        try:
            return self.store is not None and self.store.check(["any"])
        except RuntimeError:
            return False  # nobody can tell any more

    def _leave(self, message: str) -> None:
        if self.store is not None:
            try:
                self.store.set(str(self.rank), message)
                self.store.set("any", "")
            except RuntimeError:
                pass  # nobody is left to read it

    def _read_first(self) -> str | None:
        """The fault of the first rank, waiting a little for it; None if it has none."""
        if self.store is None:
            return None
        try:
            self.store.wait(["0"], timedelta(seconds=self.patience_s))
            return self.store.get("0").decode()
        except RuntimeError:
            return None
