"""Saving while training goes on: tensors are copied aside in one pass, a thread writes the copy.

The copy is ordered behind the work of the step on the device, so the step waits for no more than that pass. All ranks
write their parts; when all parts are on the disk the first rank publishes. The thread's traffic goes over a group of
its own, so that it cannot mix with that of the steps. One checkpoint is written at a time: the next one waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from megaflow_trainer.checkpoint import store
from megaflow_trainer.checkpoint.dcp import PartWriter, describe_failure, save_tensors
from megaflow_trainer.checkpoint.held import Held, as_held

_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was published: its folder, and how long the thread took for it."""

    step: int
    path: Path
    write_s: float


class Saver:
    """Saves into one folder; every rank has one and makes the same calls.

    Args:
        root: the `--save` folder.
        group: ranks that save together; None for one. A group for gloo that nothing else uses.
        keeping: which checkpoints stay.
        is_async: whether `start` returns before the checkpoint is published.
        on_progress: called as the writing gets on, and while somebody waits for it.
    """

    def __init__(
        self,
        root: Path,
        group: dist.ProcessGroup | None,
        *,
        keeping: store.Keeping = store.KEEP_ALL,
        is_async: bool = True,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.root, self.group, self.keeping, self.is_async = root, group, keeping, is_async
        self.on_progress = on_progress
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._saved: list[Saved] = []
        self._copies: dict[str, Tensor] = {}

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:  # only after an error: a checkpoint begun by all may still get whole
            self._thread.join(_PATIENCE_S)

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows of a checkpoint that could not be written; `finish` raises the reason."""
        return self._error is not None

    def start(self, step: int, tensors: Mapping[str, Held | Tensor], state: Mapping[str, Any]) -> None:
        """Save the run after `step`: what this rank holds of tensors, by name, and a state for JSON.

        Raises:
            FileAccessError: if the checkpoint before this one could not be written.
        """
        self.finish()
        held = {name: as_held(tensor) for name, tensor in tensors.items()}
        copies, arrived = self._copy(held), None
        if any(tensor.local.is_cuda for tensor in held.values()):
            arrived = torch.cuda.Event()
            arrived.record()
        self._thread = threading.Thread(
            target=self._write,
            args=(step, held, copies, dict(state), arrived),
            name=f"save {step}",
            daemon=True,
        )
        self._thread.start()
        if not self.is_async:
            self.finish()

    def take_saved(self) -> list[Saved]:
        """The checkpoints published since the last call; only the first rank of the group knows them."""
        found, self._saved = self._saved, []
        return found

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one.

        Raises:
            FileAccessError: if it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise store.cannot_write(self.root, describe_failure(error)) from None

    def _copy(self, tensors: Mapping[str, Held]) -> dict[str, Tensor]:
        """Copies of what this rank holds, in the CPU's memory; what a GPU copies into is pinned, and kept for later."""
        made = {}
        for name, tensor in tensors.items():
            local = tensor.local
            if local.is_cuda:
                target = self._copies.get(name)
                if target is None or target.shape != local.shape:
                    target = torch.empty_like(local, device="cpu", pin_memory=True)
                    self._copies[name] = target
                target.copy_(local.detach(), non_blocking=True)
            else:
                target = local.detach().clone()
            made[name] = target
        return made

    def _write(
        self,
        step: int,
        tensors: dict[str, Held],
        copies: dict[str, Tensor],
        state: dict[str, Any],
        arrived: torch.cuda.Event | None,
    ) -> None:
        """What the thread does: of the run's own tensors it reads shapes only."""
        began = time.perf_counter()
        if arrived is not None:
            arrived.synchronize()

        def publish(layout: dict[str, Any], files: dict[str, dict[str, Any]]) -> None:
            path = store.publish(self.root, step, state, layout=layout, files=files, keeping=self.keeping)
            self._saved.append(Saved(step, path, time.perf_counter() - began))

        writer = PartWriter(
            store.name_aside(self.root, step),
            prepare=lambda: store.make_aside(self.root, step),
            finish=publish,
            on_progress=self.on_progress,
        )
        try:
            save_tensors(tensors, writer, self.group, copies=copies)
        except (Exception, CheckpointException) as error:  # raised again by `finish`, in the thread that trains
            self._error = error
