"""A run that makes no progress says where it stands, and ends."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from megaflow_trainer.config.exit_codes import HUNG
from megaflow_trainer.training.clock import Clock
from megaflow_trainer.training.manifest import Ending, note_end

PATIENCE_S = 5.0
"""How long a rank stays after its report, so that the others can write theirs before the launcher ends them."""


class Watchdog:
    """Watches the clock of a run from a thread of its own.

    Args:
        clock: counts what the run does.
        folder: the run folder; stacks go to `stacks/rank_N.txt` in it.
        rank: this rank.
        hang_s: seconds without progress that are too many; 0 for no watch.
        ending: how far the run got; the first rank writes into the run folder that it hung.
        end: ends the process at once, with a code.
    """

    def __init__(
        self,
        clock: Clock,
        folder: Path,
        rank: int,
        *,
        hang_s: float,
        ending: Ending | None = None,
        end: Callable[[int], object] = os._exit,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.clock, self.path, self.rank = clock, folder / "stacks" / f"rank_{rank}.txt", rank
        self.hang_s, self.ending, self.end, self.patience_s = hang_s, ending, end, patience_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self.hang_s > 0:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        beats, since = self.clock.beats, time.monotonic()
        while not self._over.wait(min(1.0, self.hang_s / 4)):
            if self.clock.beats != beats:
                beats, since = self.clock.beats, time.monotonic()
            elif time.monotonic() - since >= self.hang_s:
                self._report()
                self._over.wait(self.patience_s)
                self.end(HUNG)
                return

    def _report(self) -> None:
        where = f"iteration {self.clock.step}, phase {self.clock.current or 'other'}"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("w", encoding="utf-8") as file:
                file.write(f"rank {self.rank} made no progress for {self.hang_s:g} s: {where}\n")
                file.flush()
                faulthandler.dump_traceback(file)
            kept = f"stacks in {self.path}"
        except OSError as error:
            kept = f"stacks could not be written: {error.strerror}"
            faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
        print(
            f"error: rank {self.rank} made no progress for {self.hang_s:g} s (--hang-timeout): {where}; {kept}. Ranks "
            "in phase communication wait for the one that is not; the same command goes on from the last checkpoint",
            file=sys.stderr,
            flush=True,
        )
        if self.ending is not None and self.rank == 0:
            self.ending.exit_code, self.ending.reason = HUNG, f"no progress for {self.hang_s:g} s: {where}"
            note_end(self.path.parents[1], self.ending)
