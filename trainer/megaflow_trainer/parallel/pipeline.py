"""Pipeline parallelism: each stage holds some of the layers, and micro-batches travel through the stages.

Maths. None of its own: a stage computes its layers on what the stage before sends, and hands the gradient of that back.
The first chunk looks tokens up, the last one computes losses. Where the last one's output projection is the embedding
(or multi-token prediction looks tokens up), both ends hold a copy of it: equal values, one gradient, the sum of both
(`GradientSum` on `embedding_group`, late: the ends are done at other times), answered for by the first stage.

Communication. Forward one `[b, s, h]` a micro-batch and border, backward its gradient; under sequence parallelism 1/tp
of it. The schedules are torch's; this module gives them stages and takes losses.

Bubble. With p stages, m micro-batches and one chunk a rank a rank waits (p - 1) / (m + p - 1) of a step, with v chunks
(p - 1) / (v m + p - 1); zero-bubble schedules fill the gaps with the part of backward that gives weights' gradients.
`StepSpans.idle` is what was measured: the part of the step in which this rank computed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from megaflow_trainer.config.sections import ParallelConfig
from megaflow_trainer.config.stages import count_chunks, own_chunks, split_layers
from megaflow_trainer.model.context import Context, make_context
from megaflow_trainer.model.gpt import GPT, Absent
from megaflow_trainer.parallel.busy import Busy, StepSpans
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.saved import SavedActivations, keep_saved
from megaflow_trainer.parallel.shards import GradientSum, Piece, Shard, ShardMap
from megaflow_trainer.parallel.stage import Stage

SCHEDULES: dict[str, Callable[..., Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
_SINGLE = ("gpipe", "1f1b")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What a micro-batch is to a pipeline: tokens `[b, s]`, labels as `GPT.forward` takes them, weights of the losses,
    keys of the dropout, documents of the tokens.
    """

    tokens: Tensor
    labels: Tensor
    mask: Tensor | None
    keys: Tensor | None
    documents: Tensor | None = None


class Chunk(nn.Module):
    """A run of layers as a stage of the pipeline, with the ends of the model where they belong to it.

    The parts are those of `model`, which holds all chunks of this rank under their names in the whole model.
    """

    def __init__(self, model: GPT, layers: range, *, number: int, num_chunks: int) -> None:
        super().__init__()
        self.number, self.is_first, self.is_last = number, number == 0, number == num_chunks - 1
        self.blocks = nn.ModuleList(model.blocks[layer] for layer in layers)
        ends: list[nn.Module | None] = [model.embedding, model.positions] if self.is_first else []
        if self.is_last:
            ends += [model.norm, model.head, model.further, model.embedding]
        self.ends = nn.ModuleList(end for end in ends if end is not None)
        self.positions: Tensor | None = None
        """Places of this rank's tokens in their samples, int64 `[s]` on the CPU; 0, 1, ... if not given."""
        self.saved: SavedActivations | None = None
        """What is done with what forward keeps for backward."""
        self._model = [model]  # in a list: its parameters are not all this chunk's

    @property
    def side_losses(self) -> dict[str, tuple[Tensor, Tensor]]:
        """What the last forward in training left to be logged apart."""
        return self._model[0].side_losses

    def forward(
        self,
        x: Tensor,
        *,
        labels: Tensor,
        keys: Tensor | None = None,
        documents: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Tokens `[b, s]` or the stage before's `[b, s, h]` to `[b, s, h]`, or on the last chunk to losses `[b, s]`."""
        options = {"keys": keys, "positions": self.positions, "documents": documents, "weights": weights}
        with keep_saved(self.saved):
            model = self._model[0]
            return self._compute(model, x, labels, make_context(model.places, labels, **options))

    def _compute(self, model: GPT, x: Tensor, labels: Tensor, context: Context) -> Tensor:
        if self.is_first:
            x = model.embed(x, context)
        for block in self.blocks:
            x = block(x, context)
        return model.compute_loss(x, labels, context) if self.is_last else x


def split_pipeline(model: GPT, mesh: Mesh, parallel: ParallelConfig) -> list[Chunk]:
    """Leave this rank's chunks in a model, whose weights need have no memory yet; the other parts become absent."""
    runs, own = split_layers(model.config, parallel), own_chunks(parallel, mesh.pp_rank)
    kept = {layer for number in own for layer in runs[number]}
    for layer in range(len(model.blocks)):
        if layer not in kept:
            model.blocks[layer] = Absent()
    is_first, is_last = 0 in own, count_chunks(parallel) - 1 in own
    has_copy = is_last and (model.config.tied_embeddings or model.config.num_mtp_layers > 0)
    if not is_first:
        model.positions = None
    if not is_last:
        model.norm, model.head, model.further = Absent(), None, nn.ModuleList()
    if not is_first and not has_copy:
        model.embedding = Absent()  # type: ignore[assignment]
    return [Chunk(model, runs[number], number=number, num_chunks=count_chunks(parallel)) for number in own]


def join_copies(model: GPT, mesh: Mesh, parts: ShardMap, parallel: ParallelConfig) -> None:
    """Let both ends of the pipeline add their gradients of the embedding, and the first one answer for it.

    Only where both hold it, on different ranks.
    """
    has_copies = model.config.tied_embeddings or model.config.num_mtp_layers > 0
    is_one_rank = count_chunks(parallel) - 1 in own_chunks(parallel, 0)
    if mesh.embedding_group is None or is_one_rank or not has_copies:
        return
    shard, length = parts.shards["embedding.weight"], len(model.embedding.weight)
    term = GradientSum(mesh.embedding_group, 0, 0, length, is_late=True)
    parts.sums["embedding.weight"] = (*parts.sums.get("embedding.weight", ()), term)
    if mesh.pp_rank > 0:
        pieces = tuple(Piece(piece.start, piece.length, is_owned=False) for piece in shard.pieces)
        parts.shards["embedding.weight"] = Shard(shard.shape, shard.dim, pieces)


class Pipeline:
    """Runs micro-batches through the stages.

    Args:
        chunks: of this rank.
        mesh: the ranks.
        parallel: schedule and chunks.
        width: channels of what travels between stages.
        dtype: of it.
        sweep: moves gradients that autograd left without hooks to their buffer.
        divided: the dim of `[b, s, h]` along which ranks of tensor parallelism divide what travels, if they do.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        mesh: Mesh,
        parallel: ParallelConfig,
        *,
        width: int,
        dtype: torch.dtype,
        sweep: Callable[[], None],
        divided: int | None = None,
    ) -> None:
        self.chunks, self.mesh, self.parallel = chunks, mesh, parallel
        self.width, self.dtype, self.sweep, self.divided = width, dtype, sweep, divided
        self.busy = Busy(mesh.device)
        self.lift = 1.0
        self.sample_losses: list[Tensor] = []
        """Of each sample of the last step the sum of its losses and the predictions, `[2, b]` a micro-batch."""
        self.side_losses: list[tuple[dict[str, tuple[Tensor, Tensor]], Tensor]] = []
        """Of each micro-batch of the last step in training what is logged apart, as the model leaves it, and how much
        each token counts, `[b, s]`."""
        self.schedules: dict[tuple[int, bool], Any] = {}

    @property
    def has_loss(self) -> bool:
        """Whether this rank computes losses."""
        return self.chunks[-1].is_last

    @property
    def spans(self) -> StepSpans:
        """When this rank computed in the last step; `idle` of them is the measured bubble."""
        return self.busy.step

    def run(self, batches: Sequence[MicroBatch], *, lift: float = 1.0, is_training: bool = True) -> Tensor:
        """Forward, and in training backward, of a step's micro-batches.

        Args:
            batches: the same on every stage.
            lift: what losses are multiplied by before backward.
            is_training: whether there is a backward.

        Returns:
            Sum of the losses, float64 scalar; 0 on ranks that compute none.
        """
        schedule = self._find_schedule(len(batches), batches[0].tokens.shape, is_training=is_training)
        self.lift, self.sample_losses, self.side_losses = lift, [], []
        options: dict[str, Any] = {"labels": torch.cat([batch.labels for batch in batches])}
        if any(batch.mask is not None for batch in batches):
            options["weights"] = torch.cat([_weigh(batch) for batch in batches])
        if batches[0].keys is not None:
            options["keys"] = torch.cat([batch.keys for batch in batches if batch.keys is not None])
        if batches[0].documents is not None:
            options["documents"] = torch.cat([batch.documents for batch in batches if batch.documents is not None])
        tokens = (torch.cat([batch.tokens for batch in batches]),) if self.chunks[0].is_first else ()
        losses: list[Tensor] = []
        target = torch.cat([_weigh(batch) for batch in batches]) if self.has_loss else None
        with self.busy.measure_step():
            step = schedule.step if is_training else schedule.eval
            extra = {"return_outputs": False} if is_training else {}
            step(*tokens, target=target, losses=losses if self.has_loss else None, **extra, **options)
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for loss in losses:
            total += loss.detach() / lift
        return total

    def _find_schedule(self, count: int, shape: Sequence[int], *, is_training: bool) -> Any:
        """The schedule for `count` micro-batches; torch's stages keep buffers for that many."""
        key = (count, is_training)
        if key not in self.schedules:
            stages = [self._make_stage(chunk, shape) for chunk in self.chunks]
            is_single = self.parallel.schedule in _SINGLE
            kind = self.parallel.schedule
            if kind == "1f1b" and count < self.parallel.pp:  # nothing is sent back before all are in
                kind = "gpipe"
            make = SCHEDULES[kind]
            own = stages[0] if is_single else stages
            self.schedules[key] = make(own, count, loss_fn=self._sum_losses, scale_grads=False)
        return self.schedules[key]

    def _make_stage(self, chunk: Chunk, shape: Sequence[int]) -> Stage:
        own = [size // self.mesh.tp_size if dim == self.divided else size for dim, size in enumerate(shape)]
        hidden = torch.empty((*own, self.width), dtype=self.dtype, device="meta")
        tokens = torch.empty(tuple(shape), dtype=torch.int64, device="meta")
        losses = torch.empty(tuple(shape), dtype=torch.promote_types(self.dtype, torch.float32), device="meta")
        return Stage(
            chunk,
            chunk.number,
            sweep=self.sweep,
            busy=self.busy,
            traffic=self.mesh.traffic,
            num_stages=count_chunks(self.parallel),
            device=self.mesh.device,
            input_args=(tokens if chunk.is_first else hidden,),
            output_args=(losses if chunk.is_last else hidden,),
            group=self.mesh.pp_group,
        )

    def _sum_losses(self, losses: Tensor, weights: Tensor) -> Tensor:
        masked = losses * weights
        self.sample_losses.append(torch.stack([masked.detach().sum(dim=1), weights.sum(dim=1)]))
        self.side_losses.append((self.chunks[-1].side_losses, weights))
        total = masked.sum()
        return total if self.lift == 1 else total * self.lift


def _weigh(batch: MicroBatch) -> Tensor:
    return torch.ones_like(batch.tokens, dtype=torch.float32) if batch.mask is None else batch.mask
