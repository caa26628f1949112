"""SIGTERM ends a run after the step in progress: all ranks decide alike, save, and leave."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from megaflow_trainer.parallel.mesh import Mesh

EXIT_STOPPED = 75
"""Exit code of a run that was asked to stop and can be started again with the same command."""


class StopVote:
    """Asks after every step whether any rank got the signal.

    The vote of one step is counted at the next, so that no rank waits for it: all ranks stop after the same step, one
    step later than the signal at most. It travels as one integer by gloo, beside the device's own traffic.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.is_asked = False
        self._vote: tuple[torch.Tensor, dist.Work] | None = None
        self._before: object = None

    def __enter__(self) -> StopVote:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)  # type: ignore[arg-type]
        if error is None:
            self._count()

    def is_agreed(self) -> bool:
        """Whether all ranks stop now; every rank calls it once a step and gets the same answer."""
        if self.mesh.dp_group is None:
            return self.is_asked
        agreed = self._count()
        vote = torch.tensor([int(self.is_asked)])
        work = dist.all_reduce(vote, group=self.mesh.dp_group, async_op=True)
        assert work is not None
        self._vote = (vote, work)
        return agreed

    def _count(self) -> bool:
        if self._vote is None:
            return False
        vote, work = self._vote
        work.wait()
        self._vote = None
        return bool(vote.item())

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.is_asked = True
