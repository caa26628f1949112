"""Losses that are logged beside the language-model loss, such as those of multi-token prediction."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megaflow_trainer.parallel.collectives import sum_over
from megaflow_trainer.parallel.mesh import Mesh


class SideLosses:
    """Sums over the micro-batches of a step, by name: the loss, and the predictions that count."""

    def __init__(self, mesh: Mesh, num_further: int) -> None:
        """Of `num_further` depths of multi-token prediction, also on ranks that compute none of them."""
        self.mesh = mesh
        self.totals = {
            f"mtp_{depth}": torch.zeros(2, dtype=torch.float64, device=mesh.device)
            for depth in range(1, num_further + 1)
        }

    def add(self, found: Mapping[str, tuple[Tensor, Tensor]], mask: Tensor | None) -> None:
        """Take the side losses of one forward, `[b, s]`, and where there are any, masked as the loss itself."""
        for name, (losses, is_known) in found.items():
            counted = is_known if mask is None else mask * is_known
            self.totals[name][0].add_((losses * counted).sum())
            self.totals[name][1].add_(counted.sum())

    def reduce(self) -> dict[str, Tensor]:
        """Means per prediction over all ranks, fp64 scalars on the device. Sends one all-reduce a name."""
        for total in self.totals.values():
            sum_over(total, self.mesh.loss_group, self.mesh.meter("world"))
        return {name: total[0] / total[1].clamp(min=1) for name, total in self.totals.items()}
