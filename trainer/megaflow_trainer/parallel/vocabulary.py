"""Cross entropy with the output projection when each rank holds a run of the vocabulary's rows.

Maths. With z = scale * x W^T over the real tokens of the vocabulary, the loss of a token with label y is
log(sum_j exp(z_j - m)) + m - z_y, m the largest score. Each rank has the z of its rows; m is a maximum over ranks, the
sum and z_y are sums over ranks (z_y is 0 on ranks that do not hold y). Rows that pad the vocabulary are cut off before
anything is computed, so that they enter neither the loss nor a gradient.

The scores are the largest tensor of a small model, so they exist for one chunk of tokens at a time and are computed
again in backward from x, W and the logarithm of the sum.

Communication. Forward: two all-reduces a chunk, of c and 2 c numbers. Backward: none here; the gradient of x is a term
of a sum, which the entry (`copy_into` or `gather_tokens`) completes.

Legend: b micro-batch, s sequence, h hidden, c tokens of a chunk, v this rank's real tokens of the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megaflow_trainer.config.activations import CHUNK_SCORES
from megaflow_trainer.parallel.collectives import copy_into, gather_tokens, sum_over
from megaflow_trainer.parallel.traffic import Meter, sending


@dataclass(frozen=True, slots=True)
class VocabularyLoss:
    """The model's loss socket on a rank that holds the rows `rows` of the output projection."""

    group: dist.ProcessGroup
    rows: range
    is_sequence: bool
    chunk_scores: int = CHUNK_SCORES
    meter: Meter | None = None

    def __call__(self, x: Tensor, weight: Tensor, target: Tensor, *, vocab_size: int, scale: float) -> Tensor:
        """Loss in nats per token, float32 (float64 from float64), `[b, s]`, the same on every rank.

        Args:
            x: normed hidden states, `[b, s, h]`, or `[b, s/tp, h]` under sequence parallelism.
            weight: this rank's rows of the output projection.
            target: token ids, int64, `[b, s]`, the same on every rank.
            vocab_size: rows of the full projection that are real tokens.
            scale: what scores are multiplied by.
        """
        x = (gather_tokens if self.is_sequence else copy_into)(x, self.group, meter=self.meter)
        num_real = min(max(vocab_size - self.rows.start, 0), len(self.rows))
        # By what all ranks know: their numbers of rows differ, and chunks of other lengths would not meet.
        chunk = max(1, self.chunk_scores * dist.get_world_size(self.group) // vocab_size)
        place = _Place(self.group, self.rows.start, scale, chunk, self.meter)
        losses: Tensor = _LinearCrossEntropy.apply(x.flatten(0, 1), weight[:num_real], target.flatten(), place)
        return losses.view(target.shape)


@dataclass(frozen=True, slots=True)
class _Place:
    group: dist.ProcessGroup
    start: int
    scale: float
    chunk: int
    meter: Meter | None


def _score(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Scores in fp32 (fp64 from fp64), `[c, v]`."""
    scores = F.linear(x, weight)
    return scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale


def _find_label(target: Tensor, start: int, num_real: int) -> tuple[Tensor, Tensor]:
    """Column of each label on this rank (0 if it has none), and whether it has it; `[c]`."""
    column = target - start
    is_here = (column >= 0) & (column < num_real)
    return column.masked_fill(~is_here, 0), is_here


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor, place: _Place) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        losses, log_sums = x.new_empty(len(x), dtype=wide), x.new_empty(len(x), dtype=wide)
        for first in range(0, len(x), place.chunk):
            own = slice(first, first + place.chunk)
            losses[own], log_sums[own] = _compute_chunk(x[own], weight, target[own], place)
        ctx.save_for_backward(x, weight, target, log_sums)
        ctx.place = place
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, target, log_sums = ctx.saved_tensors
        place: _Place = ctx.place
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros_like(weight, dtype=log_sums.dtype)
        for first in range(0, len(x), place.chunk):
            own = slice(first, first + place.chunk)
            slope = (_score(x[own], weight, place.scale) - log_sums[own, None]).exp_()  # softmax, [c, v]
            if len(weight):
                column, is_here = _find_label(target[own], place.start, len(weight))
                slope.scatter_add_(1, column[:, None], -is_here.to(slope.dtype)[:, None])
            slope = slope.mul_(grad[own, None] * place.scale).to(x.dtype)
            grad_x[own] = slope @ weight
            grad_weight += slope.T @ x[own]
        return grad_x, grad_weight.to(weight.dtype), None, None


def _compute_chunk(x: Tensor, weight: Tensor, target: Tensor, place: _Place) -> tuple[Tensor, Tensor]:
    """Loss and logarithm of the sum of exponentials of each token, `[c]`."""
    scores = _score(x, weight, place.scale)  # [c, v]
    largest = scores.amax(1) if len(weight) else scores.new_full((len(x),), -math.inf)
    with sending(place.meter, "all_reduce", largest, place.group):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=place.group)
    sums = (scores - largest[:, None]).exp().sum(1)
    hits = torch.zeros_like(sums)
    if len(weight):
        column, is_here = _find_label(target, place.start, len(weight))
        hits = scores.gather(1, column[:, None])[:, 0].masked_fill(~is_here, 0)
    both = torch.stack([sums, hits])
    sum_over(both, place.group, place.meter)
    log_sums = both[0].log() + largest
    return log_sums - both[1], log_sums
