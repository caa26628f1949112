"""Losses that are logged beside the language-model loss, such as those of multi-token prediction."""

from __future__ import annotations

import torch
from torch import Tensor

from megaflow_trainer.parallel.apply import ParallelModel
from megaflow_trainer.parallel.collectives import sum_over
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.training.feed import DeviceBatch


class SideLosses:
    """Sums over the micro-batches of a step, by name: the loss, and the predictions that count."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.totals: dict[str, Tensor] = {}

    def add(self, model: ParallelModel, batch: DeviceBatch) -> None:
        """Take the side losses of the model's last forward, masked as the loss itself."""
        for name, losses in model.side_losses.items():
            total = self.totals.setdefault(name, torch.zeros(2, dtype=torch.float64, device=self.mesh.device))
            if batch.mask is None:
                total[0].add_(losses.sum())
                total[1].add_(losses.numel())
            else:
                mask = batch.mask[:, : losses.shape[1]]  # the last predictions have no label
                total[0].add_((losses * mask).sum())
                total[1].add_(mask.sum())

    def reduce(self) -> dict[str, Tensor]:
        """Means per prediction over all ranks, fp64 scalars on the device. Sends one all-reduce a name."""
        for total in self.totals.values():
            sum_over(total, self.mesh.loss_group, self.mesh.meter("world"))
        return {name: total[0] / total[1].clamp(min=1) for name, total in self.totals.items()}
