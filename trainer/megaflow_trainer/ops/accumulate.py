"""The output projection with its loss, which adds the weight's gradient to its main gradient itself.

Linear layers do so in `ops/linear.py`: a plain one leaves a gradient in the weight's dtype, which is then added to the
fp32 buffer: two roundings, and 6 more bytes moved per weight and micro-batch (bf16). There and here the product
dW += dy^T x accumulates in fp32 and writes fp32 once (`addmm` with an output dtype, cuBLAS; elsewhere the product is
widened and added).

The loss goes further: scores are the largest tensor of a small model, so they exist for one
chunk of tokens at a time, and their gradient is made at once, since the weights with which losses are summed are known
before the sum. What is kept for backward is the gradient of the hidden states.

Legend: t tokens, h hidden, v vocabulary (padded).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megaflow_trainer.config.activations import WHOLE_CHUNK_SCORES
from megaflow_trainer.ops.linear import add_product_
from megaflow_trainer.ops.scores import Score, score_chunk


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        weights: Tensor,
        options: AccumulatingLoss,
        scale: float,
        vocab_size: int,
    ) -> Tensor:
        chunk = max(1, options.chunk_scores // weight.shape[0])
        grad_x = torch.empty_like(x)
        losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
        for start in range(0, len(x), chunk):
            run = slice(start, start + chunk)
            scores = x[run] @ weight.t()
            losses[run], grad = options.score(scores, target[run], weights[run], scale, vocab_size)
            torch.mm(grad, weight, out=grad_x[run])
            add_product_(options.main_grad, grad, x[run])
            del scores, grad  # before those of the next chunk are made
        ctx.save_for_backward(grad_x)
        return losses

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        (grad_x,) = ctx.saved_tensors
        return grad_x, None, None, None, None, None, None


class AccumulatingLoss:
    """Cross entropy with the output projection whose gradients are made in forward.

    Args:
        main_grad: of the projection, `[v, h]`.
        score: `score_chunk`, compiled or not, or what does the same.
        chunk_scores: scores that exist at once.
    """

    def __init__(
        self,
        main_grad: Tensor,
        *,
        score: Score = score_chunk,
        chunk_scores: int = WHOLE_CHUNK_SCORES,
    ) -> None:
        self.main_grad, self.score, self.chunk_scores = main_grad, score, chunk_scores

    def __call__(
        self, x: Tensor, weight: Tensor, target: Tensor, weights: Tensor, *, vocab_size: int, scale: float
    ) -> Tensor:
        """Loss in nats per token, float32 `[b, s]`, to be summed with exactly these weights and differentiated once.

        Args:
            x: normed hidden states, `[b, s, h]`.
            weight: output projection, `[v, h]`.
            target: token ids, int64 `[b, s]`.
            weights: float32 `[b, s]`; backward's gradient must equal them, as that of `(losses * weights).sum()` does.
            vocab_size: rows of `weight` that are real tokens.
            scale: what scores are multiplied by.
        """
        losses: Tensor = _Loss.apply(
            x.flatten(0, 1), weight, target.flatten(), weights.flatten(), self, scale, vocab_size
        )
        return losses.view(target.shape)
