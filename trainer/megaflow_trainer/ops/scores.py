"""Cross entropy of a chunk of scores with its gradient at once: in plain torch, to be compiled, and by a kernel.

Legend: t tokens, v vocabulary (padded).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from megaflow_trainer.ops.trial import try_kernel

Score = Callable[[Tensor, Tensor, Tensor, float, int], tuple[Tensor, Tensor]]
"""From scores, targets, weights, scale and vocabulary to losses and gradient; the scores may be overwritten."""


def score_chunk(
    scores: Tensor, target: Tensor, weights: Tensor, scale: float, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Losses of a chunk of tokens, and the gradient of their weighted sum.

    Args:
        scores: before scaling, `[t, v]`.
        target: token ids, int64 `[t]`.
        weights: with which losses are summed, float32 `[t]`.
        scale: what scores are multiplied by.
        vocab_size: columns that are real tokens.

    Returns:
        Losses, float32 `[t]`, and the gradient, `[t, v]` in the dtype of `scores`.
    """
    columns = torch.arange(scores.shape[-1], device=scores.device)
    wide = scores.float() * scale
    wide = torch.where(columns < vocab_size, wide, float("-inf"))
    largest = wide.amax(-1, keepdim=True)
    powers = (wide - largest).exp()
    total = powers.sum(-1, keepdim=True)
    losses = (largest + total.log()).squeeze(-1) - wide.gather(-1, target[:, None]).squeeze(-1)
    grad = (powers / total - (columns == target[:, None]).float()) * (weights[:, None] * scale)
    return losses, grad.to(scores.dtype)


def prefer_kernel(other: Score) -> Score:
    """The kernel where it can be made and computes what `score_chunk` does, else `other`; decided at the first call."""

    def score(scores: Tensor, target: Tensor, weights: Tensor, scale: float, vocab_size: int) -> tuple[Tensor, Tensor]:
        run = _find_kernel(scores.device, scores.dtype, scores.shape[1]) if scores.is_cuda else None
        if run is None:
            return other(scores, target, weights, scale, vocab_size)
        losses = torch.empty(len(scores), dtype=torch.float32, device=scores.device)
        run(scores, target, weights, losses, scale, vocab_size)
        return losses, scores

    return score


@functools.cache
def _find_kernel(device: torch.device, dtype: torch.dtype, num_columns: int) -> Callable[..., None] | None:
    """The kernel, compiled and compared with plain torch once for each dtype and vocabulary; None, and a warning, where
    it fails.
    """

    def make() -> tuple[Callable[..., None], list[str]]:
        from megaflow_trainer.ops.scores_kernel import score_in_place

        return score_in_place, _compare(score_in_place, device, dtype, num_columns)

    found, why = try_kernel(make)
    if found is None:
        _tell(f"a kernel could not be made: {why}")
        return None
    run, wrong = found
    if wrong:
        _tell(f"the kernel that this version of Triton makes gives wrong {' and '.join(wrong)} in {dtype}")
        return None
    return run


def _tell(why: str) -> None:
    warnings.warn(f"scores of the vocabulary are read more often than they need be, since {why}", stacklevel=4)


def _compare(run: Callable[..., None], device: torch.device, dtype: torch.dtype, num_columns: int) -> list[str]:
    """Which of the results are further from those of plain torch than two units of the last place."""
    vocab_size = max(num_columns - 47, 1)
    steps = torch.arange(3 * num_columns, device=device, dtype=torch.float32)
    scores = (20 * (steps * 0.37).sin()).view(3, num_columns).to(dtype)
    target = torch.tensor([0, vocab_size // 2, vocab_size - 1], device=device)
    weights = torch.tensor([1.0, 0.0, 0.5], device=device)
    wanted_losses, wanted = score_chunk(scores, target, weights, 0.5, vocab_size)
    losses = torch.empty(3, device=device)
    run(scores, target, weights, losses, 0.5, vocab_size)
    kind = torch.finfo(dtype)
    near, step = 2 * max(kind.eps, 8e-6), kind.smallest_normal * kind.eps  # of fp16 most gradients are subnormal
    same = {"losses": torch.allclose(losses, wanted_losses, rtol=1e-5, atol=1e-5)}
    same["gradients"] = torch.allclose(scores.float(), wanted.float(), rtol=near, atol=max(1e-9, 2 * step))
    return [name for name, is_same in same.items() if not is_same]
