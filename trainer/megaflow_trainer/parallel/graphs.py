"""Forward and backward of a micro-batch as one CUDA graph: the host launches it at once instead of kernel by kernel.

A graph replays the same kernels on the same memory. So inputs are copied into places of their own, results are copied
out, and everything that the host does in a micro-batch must be the same each time: shapes, what counts in the loss as a
number, no collectives. Hooks of gradients do not run in a replay: the sums are in the buffers, and `reduce` sends them.

The first micro-batches run as they are, on the stream that is recorded later, so that everything is compiled, tuned and
in its place; then one is recorded, which computes nothing, and every one from it on is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megaflow.errors import first_line
from megaflow_trainer.parallel.data import MainGradients

Work = Callable[[Sequence[Tensor | None]], tuple[Tensor, ...]]
"""Forward and backward: from inputs to what is to be known of them, detached."""


class Recorder(Protocol):
    """Runs and records work of a device."""

    def run(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Run `work` as it will be recorded."""

    def record(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
        """Where the results of `work` will be, and what runs it again. Raises RuntimeError if that cannot be."""


class CudaRecorder:
    """Records CUDA graphs on a stream of its own. Other threads may use the device meanwhile (copies, NCCL)."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """On the stream, between what came before and what comes after on the current one."""
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            results = work()
        current.wait_stream(self.stream)
        for result in results:
            result.record_stream(current)
        return results

    def record(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
        """A CUDA graph with memory of its own."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            results = work()
        return results, graph.replay


class MicroBatchGraph:
    """Replays micro-batches, the first of which run as they are.

    Args:
        gradients: the main gradients, whose buffers stay in their places.
        recorder: of the device.
        num_warmup: micro-batches before one is recorded.
        tell: is told once if recording fails, after which all run as they are.
    """

    def __init__(
        self,
        gradients: MainGradients,
        recorder: Recorder,
        *,
        num_warmup: int,
        tell: Callable[[str], None] = lambda why: None,
    ) -> None:
        self.gradients, self.recorder, self.num_warmup, self.tell = gradients, recorder, num_warmup, tell
        self.num_run, self.num_replayed, self.has_failed = 0, 0, False
        self.inputs: tuple[Tensor | None, ...] = ()
        self.results: tuple[Tensor, ...] = ()
        self.replay: Callable[[], None] | None = None

    def run(self, work: Work, inputs: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """The results of a micro-batch, whose gradients are added to the main ones.

        Args:
            work: the same in every call but for what it is given.
            inputs: on the device; a micro-batch of other shapes than the recorded one runs as it is.
        """
        if self.replay is None and not self.has_failed and self.num_run >= self.num_warmup:
            self._record(work, inputs)
        if self.replay is None or not self._fits(inputs):
            self.num_run += 1
            return self.recorder.run(lambda: work(inputs))
        for place, given in zip(self.inputs, inputs, strict=True):
            if place is not None and given is not None:
                place.copy_(given)
        self.replay()
        self.num_replayed += 1
        return tuple(result.clone() for result in self.results)

    def _record(self, work: Work, inputs: Sequence[Tensor | None]) -> None:
        self.inputs = tuple(None if given is None else given.clone() for given in inputs)
        try:
            with self.gradients.hold():
                self.results, self.replay = self.recorder.record(lambda: work(self.inputs))
        except RuntimeError as error:
            self.has_failed, self.inputs, self.replay = True, (), None
            self.gradients.forget_loose()
            self.tell(f"micro-batches are not replayed as a CUDA graph: {first_line(error)}")

    def _fits(self, inputs: Sequence[Tensor | None]) -> bool:
        return [_describe(given) for given in inputs] == [_describe(place) for place in self.inputs]


def _describe(x: Tensor | None) -> tuple[torch.Size, torch.dtype] | None:
    return None if x is None else (x.shape, x.dtype)
