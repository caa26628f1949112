"""A stage of a pipeline as torch's schedules drive it, with what they leave open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import P2POp, get_rank
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.stage import _RecvInfo

from megaflow_trainer.parallel.busy import Busy
from megaflow_trainer.parallel.traffic import Traffic


class Whole(nn.Module):
    """A chunk whose weights are divided, as torch's stages call it.

    They know FSDP2's modules, and keep weights and gradients of one gathered from a step's first micro-batch to its
    last. Here a micro-batch gathers and divides for itself, as without a pipeline.
    """

    def __init__(self, chunk: nn.Module) -> None:
        super().__init__()
        self.chunk = chunk

    def forward(self, *args: Any, **options: Any) -> Any:
        """The chunk's."""
        return self.chunk(*args, **options)


class Stage(PipelineStage):
    """A stage that measures how long it computes, hands gradients on as soon as they are there, and has memory for what
    it receives only from then on until that is used: torch's has it for all micro-batches of a step, all the time.
    """

    def __init__(
        self, chunk: nn.Module, number: int, *, sweep: Callable[[], None], busy: Busy, traffic: Traffic, **options: Any
    ) -> None:
        super().__init__(Whole(chunk) if isinstance(chunk, FSDPModule) else chunk, number, **options)
        self.sweep, self.busy, self.traffic = sweep, busy, traffic
        self.held: dict[int, list[Any]] = {}

    def _prepare_forward_infra(self, *args: Any, **options: Any) -> Any:
        with self._without_memory():
            return super()._prepare_forward_infra(*args, **options)

    def _prepare_backward_infra(self, *args: Any, **options: Any) -> None:
        with self._without_memory():
            super()._prepare_backward_infra(*args, **options)

    @contextmanager
    def _without_memory(self) -> Iterator[None]:
        """Where buffers are made as shapes alone."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        """Activations of the stage before."""
        self._give_memory(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        """Gradients of the stage behind."""
        self._give_memory(self.grad_recv_info.get(bwd_chunk_id, ()))
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _give_memory(self, infos: tuple[Any, ...]) -> None:
        for info in infos:
            if isinstance(info, _RecvInfo):
                needs_grad = info.buffer.requires_grad
                info.buffer = torch.empty_like(info.buffer, device=self.device).requires_grad_(needs_grad)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        """Activations to the next stage."""
        return self._count(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        """Gradients to the stage before."""
        return self._count(super().get_bwd_send_ops(bwd_chunk_id))

    def _count(self, ops: list[P2POp]) -> list[P2POp]:
        for op in ops:
            size = op.tensor.numel() * op.tensor.element_size()
            self.traffic.count("pp", "send", size, is_background=True)
        return ops

    def _get_init_p2p_neighbors_ops(self) -> list[P2POp]:
        """First messages to the neighbours, for the backend's sake; in a V a neighbour may be this very rank, to which
        gloo cannot send.
        """
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != get_rank()]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Forward of a micro-batch; what it received lives as long as backward needs it."""
        with self.busy.measure():
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _leave_memory(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Backward of a micro-batch, or its part for the stage before. Then the graph lives until the other part: torch
        detaches results and holds the nodes that it goes on from, but those of Python's functions only as long as
        something else does.
        """
        if not kwargs.get("full_backward", True):
            outputs = self.fwd_cache[bwd_chunk_id][0]
            self.held[bwd_chunk_id] = [x.view_as(x).grad_fn for x in outputs if x.requires_grad]
        with self.busy.measure():
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        _leave_memory(self.grad_recv_info.get(bwd_chunk_id, ()))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """The part of backward that gives weights' gradients, for which autograd runs no hooks."""
        with self.busy.measure():
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
            self.held.pop(bwd_chunk_id, None)
            self.sweep()

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """What goes back to the chunk before on this rank: nothing in evaluation, where torch asks for it too."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else None

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Takes what comes back from the chunk behind on this rank."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


def _leave_memory(infos: tuple[Any, ...]) -> None:
    """Keep the shapes of buffers only; who needs what is in them holds it."""
    for info in infos:
        if isinstance(info, _RecvInfo):
            needs_grad = info.buffer.requires_grad
            info.buffer = torch.empty_like(info.buffer, device="meta").requires_grad_(needs_grad)
