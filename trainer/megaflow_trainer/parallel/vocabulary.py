"""Cross entropy with the output projection when each rank holds a run of the vocabulary's rows.

Maths. With z = scale * x W^T over the real tokens of the vocabulary, the loss of a token with label y is
log(sum_j exp(z_j - m)) + m - z_y, m the largest score. Each rank has the z of its rows; m is a maximum over ranks, the
sum and z_y are sums over ranks (z_y is 0 on ranks that do not hold y). Rows that pad the vocabulary are cut off before
anything is computed, so that they enter neither the loss nor a gradient.

The scores are the largest tensor of a small model, so they exist for one chunk of tokens at a time. Where the weights
of the sum of losses are known (`AccumulatingVocabularyLoss`) their gradient is made at once, as in `ops/accumulate.py`;
else (`VocabularyLoss`) they are computed again in backward from x, W and the logarithm of the sum.

Communication. Forward: two all-reduces a chunk, of c and 2 c numbers; or one all-gather of 3 c, which travels while the
scores of the next chunk are computed. Backward: none here; the gradient of x is a term of a sum, which the entry
(`overlap.py`) completes.

Legend: b micro-batch, s sequence, h hidden, c tokens of a chunk, v this rank's real tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megaflow_trainer.config.activations import CHUNK_SCORES
from megaflow_trainer.ops.linear import add_product_
from megaflow_trainer.parallel.collectives import sum_over
from megaflow_trainer.parallel.overlap import Sharers, Travel, enter, start_gather
from megaflow_trainer.parallel.traffic import Meter, sending


@dataclass(frozen=True, slots=True)
class VocabularyLoss:
    """The model's loss socket on a rank that holds the rows `rows` of the output projection."""

    ranks: Sharers
    rows: range
    chunk_scores: int = CHUNK_SCORES

    def __call__(self, x: Tensor, weight: Tensor, target: Tensor, *, vocab_size: int, scale: float) -> Tensor:
        """Loss in nats per token, float32 (float64 from float64), `[b, s]`, the same on every rank.

        Args:
            x: normed hidden states, `[b, s, h]`, or this rank's part of them under sequence parallelism.
            weight: this rank's rows of the output projection.
            target: token ids, int64, `[b, s]`, the same on every rank.
            vocab_size: rows of the full projection that are real tokens.
            scale: what scores are multiplied by.
        """
        x, num_real = enter(x, self.ranks), count_real(self.rows, vocab_size)
        chunk = size_chunk(self.chunk_scores, self.ranks, vocab_size)
        place = _Place(self.ranks.group, self.rows.start, scale, chunk, self.ranks.meter)
        losses: Tensor = _LinearCrossEntropy.apply(x.flatten(0, 1), weight[:num_real], target.flatten(), place)
        return losses.view(target.shape)


def count_real(rows: range, vocab_size: int) -> int:
    """Rows of a rank that are real tokens."""
    return min(max(vocab_size - rows.start, 0), len(rows))


def size_chunk(chunk_scores: int, ranks: Sharers, vocab_size: int) -> int:
    """Tokens of a chunk, by what all ranks know: their numbers of rows differ, and chunks of other lengths would not
    meet.
    """
    return max(1, chunk_scores * ranks.size // vocab_size)


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


def measure_scores(scores: Tensor, column: Tensor, is_here: Tensor, scale: float) -> Tensor:
    """What ranks tell each other of a chunk: each token's largest score here, the sum of exponentials from it, and the
    label's score (0 where another rank has it); float32 `[3, c]` from `[c, v]`.
    """
    wide = scores.float() * scale
    largest = wide.amax(-1)
    total = (wide - largest[:, None]).exp().sum(-1)
    hit = wide.gather(-1, column[:, None]).squeeze(-1)
    return torch.stack([largest, total, torch.where(is_here, hit, 0.0)])


def slope_scores(
    scores: Tensor, log_sums: Tensor, column: Tensor, is_here: Tensor, weights: Tensor, scale: float
) -> Tensor:
    """The gradient of the weighted sum of losses, `[c, v]` in the dtype of `scores`."""
    columns = torch.arange(scores.shape[-1], device=scores.device)
    is_label = (columns == column[:, None]) & is_here[:, None]
    chances = (scores.float() * scale - log_sums[:, None]).exp()
    return ((chances - is_label.float()) * (weights[:, None] * scale)).to(scores.dtype)


@dataclass(frozen=True, slots=True)
class AccumulatingVocabularyLoss:
    """Takes the place of the model's loss where the weights of the sum are known before it.

    Args:
        ranks: that share the vocabulary.
        rows: this rank's.
        main_grad: of the projection's rows, `[v, h]`, to which the gradient is added.
        measure: `measure_scores`, compiled or not.
        slope: `slope_scores`, compiled or not.
        chunk_scores: scores that exist at once.
    """

    ranks: Sharers
    rows: range
    main_grad: Tensor
    measure: Callable[..., Tensor] = measure_scores
    slope: Callable[..., Tensor] = slope_scores
    chunk_scores: int = CHUNK_SCORES

    def __call__(
        self, x: Tensor, weight: Tensor, target: Tensor, weights: Tensor, *, vocab_size: int, scale: float
    ) -> Tensor:
        """Loss in nats per token, float32 `[b, s]`, to be summed with exactly these weights and differentiated once.

        Args:
            x: normed hidden states, `[b, s, h]`, or this rank's part of them under sequence parallelism.
            weight: this rank's rows of the output projection, `[v, h]`.
            target: token ids, int64 `[b, s]`, the same on every rank.
            weights: float32 `[b, s]`; backward's gradient must equal them.
            vocab_size: rows of the full projection that are real tokens.
            scale: what scores are multiplied by.
        """
        x, num_real = enter(x, self.ranks), count_real(self.rows, vocab_size)
        chunk = size_chunk(self.chunk_scores, self.ranks, vocab_size)
        given = (x.flatten(0, 1), weight[:num_real], target.flatten(), weights.flatten())
        losses: Tensor = _Accumulating.apply(*given, self, scale, chunk)
        return losses.view(target.shape)


@dataclass(slots=True)
class _Chunk:
    """Scores of some tokens, whose numbers travel."""

    own: slice
    scores: Tensor
    column: Tensor
    is_here: Tensor
    travel: Travel


class _Accumulating(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        weights: Tensor,
        loss: AccumulatingVocabularyLoss,
        scale: float,
        chunk: int,
    ) -> Tensor:
        grad_x = torch.empty_like(x)
        losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
        main_grad = loss.main_grad[: len(weight)]

        def start(first: int) -> _Chunk:
            own = slice(first, first + chunk)
            scores, numbers = x[own] @ weight.t(), x.new_zeros(3, len(target[own]), dtype=torch.float32)
            column, is_here = _find_label(target[own], loss.rows.start, len(weight))
            if len(weight):
                numbers = loss.measure(scores, column, is_here, scale)
            else:
                numbers[0] = -math.inf
            return _Chunk(own, scores, column, is_here, start_gather(numbers, loss.ranks.group, loss.ranks.meter))

        def finish(part: _Chunk) -> None:
            largest, totals, hits = part.travel.finish().unbind(1)  # of all ranks, [tp, c] each
            peak = largest.amax(0)
            log_sums = (totals * (largest - peak).exp()).sum(0).log() + peak
            losses[part.own] = log_sums - hits.sum(0)
            if not len(weight):
                grad_x[part.own] = 0
                return
            slope = loss.slope(part.scores, log_sums, part.column, part.is_here, weights[part.own], scale)
            torch.mm(slope, weight, out=grad_x[part.own])
            add_product_(main_grad, slope, x[part.own])

        waiting: _Chunk | None = None
        for first in range(0, len(x), chunk):
            begun = start(first)
            if waiting is not None:
                finish(waiting)
            waiting = begun
        if waiting is not None:
            finish(waiting)
        ctx.save_for_backward(grad_x)
        return losses

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        (grad_x,) = ctx.saved_tensors
        return grad_x, None, None, None, None, None, None
