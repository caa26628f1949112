"""Losses and gradients by the kernel beside plain torch, on any device. As a script: on a CPU, by interpretation.

Legend: t tokens, v vocabulary (padded).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megaflow_trainer.ops.scores import score_chunk

SHAPES = ((5, 64, 64), (3, 100, 97), (4, 300, 257), (2, 1, 1), (2, 130, 5))
"""Tokens, columns, vocabulary: one block of 64 columns and several, whole and not, one without a real token."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KINDS = ("plain", "steep", "none", "infinite")


def list_cases(device: torch.device) -> Iterator[tuple[str, tuple[Tensor, Tensor, Tensor, float, int]]]:
    """Name, and what `score_chunk` is handed: flat and steep scores, what is not a number, and infinite ones."""
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        for t, v, vocab_size in SHAPES:
            for kind in KINDS:
                scores = torch.randn(t, v, generator=generator) * (60 if kind == "steep" else 2)
                if kind in ("none", "infinite"):
                    scores[0, vocab_size // 2] = torch.nan if kind == "none" else torch.inf
                scores[:, vocab_size:] = 100.0  # padding: larger than all, and not to be seen
                target = torch.randint(0, vocab_size, (t,), generator=generator)
                weights = torch.rand(t, generator=generator) * torch.tensor([1.0, 0.0]).repeat(t)[:t]
                given = (scores.to(dtype).to(device), target.to(device), weights.to(device))
                for scale in (1.0, 0.3):
                    yield f"{dtype} {(t, v, vocab_size)} {kind} {scale}", (*given, scale, vocab_size)


def find_differences(device: torch.device, tile: tuple[int, int]) -> dict[str, float]:
    """By case: the largest difference of losses, and of gradients over the rounding of their dtype and the weight."""
    from megaflow_trainer.ops.scores_kernel import score_in_place

    found = {}
    for name, (scores, target, weights, scale, vocab_size) in list_cases(device):
        wanted_losses, wanted = score_chunk(scores, target, weights, scale, vocab_size)
        losses, own = torch.full_like(weights, -1.0), scores.clone()
        score_in_place(own, target, weights, losses, scale, vocab_size, tile=tile)
        assert torch.equal(losses.isnan(), wanted_losses.isnan()), name
        assert torch.equal(own.isnan(), wanted.isnan()), name
        assert not own[:, vocab_size:].nan_to_num().any(), name
        near = (losses - wanted_losses).nan_to_num().abs() / wanted_losses.nan_to_num().abs().clamp(min=1.0)
        kind = torch.finfo(scores.dtype)
        step = kind.eps * (wanted.float().nan_to_num().abs() + kind.smallest_normal) + 1e-6 * weights[:, None]
        found[name + " losses"] = float(near.max())
        found[name + " gradients"] = float(((own.float() - wanted.float()).nan_to_num().abs() / step).max())
    return found


def main() -> None:
    """Differences by case."""
    found = find_differences(torch.device("cpu"), (64, 4))
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
