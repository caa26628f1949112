"""A run that is asked to stop does so after the step in progress: all ranks decide alike, save, and leave."""

from __future__ import annotations

import enum
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from megaflow_trainer.parallel.mesh import Mesh

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What asks a run to stop; Slurm sends the second ahead of its time limit if told to."""


@contextmanager
def hold_signals(has_begun: Callable[[], bool]) -> Iterator[None]:
    """Signals end the process, as they do by themselves, until training has begun; behind the loop they do nothing.

    A rank that leaves has still to say and to write down why, and a launcher asks all to end as soon as one is gone.
    """

    def answer(number: int, frame: FrameType | None) -> None:
        if not has_begun():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, answer) for number in SIGNALS} if is_main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stop(enum.IntEnum):
    """Why all ranks stop now; of several reasons the largest."""

    NO = 0
    OUT_OF_TIME = 1
    SIGNAL = 2
    FAULT = 3
    """A rank cannot go on, and says why itself."""


class StopVote:
    """Asks after every step whether any rank has a reason to stop.

    The vote of one step is counted at the next, so that no rank waits for it: all ranks stop after the same step, one
    step later than the reason at most. It travels as one integer by gloo, beside the device's own traffic.

    Args:
        mesh: the ranks.
        deadline_s: when the time is up, by `now`; None for never.
        now: the host's clock in seconds.
    """

    def __init__(
        self, mesh: Mesh, *, deadline_s: float | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.mesh, self.deadline_s, self.now = mesh, deadline_s, now
        self.signal: signal.Signals | None = None
        """The signal that this rank got."""
        self._vote: tuple[torch.Tensor, dist.Work] | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopVote:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]
        if error is None:
            self._count()

    def is_agreed(self, *, has_fault: bool = False) -> Stop:
        """Whether all ranks stop now, and why; every rank calls it once a step and gets the same answer."""
        own = self._find_reason(has_fault)
        if self.mesh.world_group is None:
            return own
        agreed = self._count()
        vote = torch.tensor([int(own)])
        work = dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self.mesh.world_group, async_op=True)
        assert work is not None
        self._vote = (vote, work)
        return agreed

    def _find_reason(self, has_fault: bool) -> Stop:
        if has_fault:
            return Stop.FAULT
        if self.signal is not None:
            return Stop.SIGNAL
        is_late = self.deadline_s is not None and self.now() >= self.deadline_s
        return Stop.OUT_OF_TIME if is_late else Stop.NO

    def _count(self) -> Stop:
        if self._vote is None:
            return Stop.NO
        vote, work = self._vote
        work.wait()
        self._vote = None
        return Stop(int(vote.item()))

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
