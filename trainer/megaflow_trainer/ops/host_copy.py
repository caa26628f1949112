"""Whole numbers on their way from a device to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """Begins to copy integers `[n]` when it is made. Who reads them waits until they are there, and not for what the
    device was given to do since.
    """

    def __init__(self, numbers: Tensor) -> None:
        self.numbers, self.arrival = numbers, None
        if numbers.is_cuda:
            self.numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self.numbers.copy_(numbers, non_blocking=True)
            self.arrival = torch.cuda.Event()
            self.arrival.record(torch.cuda.current_stream(numbers.device))

    def read(self) -> list[int]:
        """The numbers."""
        if self.arrival is not None:
            self.arrival.synchronize()
        found: list[int] = self.numbers.tolist()
        return found
