"""Which tokens of a sample see which: the earlier ones, of a window, of the same document.

Legend: b micro-batch, S tokens of a whole sample.
"""

from __future__ import annotations

import torch
from torch import Tensor


def make_mask(start: int, length: int, seen: int, window: int | None, device: torch.device) -> Tensor:
    """`[length, seen]`, true where the query at `start` + row sees the key at column."""
    distance = torch.arange(start, start + length, device=device)[:, None] - torch.arange(seen, device=device)
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


class DocumentMask:
    """The documents of a micro-batch. Masks made of them are kept, so that all layers share one.

    Args:
        numbers: the document of each token, int64 `[b, S]`, ascending in a sample; of whole samples on every rank.
    """

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers
        self._masks: dict[tuple[int, int, int, int | None], Tensor] = {}

    def make_mask(self, start: int, length: int, seen: int, window: int | None) -> Tensor:
        """As `make_mask`, false between documents, `[b, 1, length, seen]`."""
        key = (start, length, seen, window)
        if key not in self._masks:
            same = self.numbers[:, start : start + length, None] == self.numbers[:, None, :seen]
            self._masks[key] = (same & make_mask(*key, self.numbers.device))[:, None]
        return self._masks[key]
