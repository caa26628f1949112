"""Validation: the mean loss per token over the first global batches of the valid part, the same ones every time."""

from __future__ import annotations

import torch

from megaflow import GPTDataset
from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.parallel.apply import ParallelModel
from megaflow_trainer.parallel.collectives import sum_over
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.training.clock import Clock
from megaflow_trainer.training.data import build_loader
from megaflow_trainer.training.feed import Feed
from megaflow_trainer.training.step import sum_losses


@torch.no_grad()
def evaluate(
    model: ParallelModel, dataset: GPTDataset, config: TrainConfig, mesh: Mesh, *, eod_id: int | None
) -> float:
    """Mean validation loss in nats per token. Sends one all-reduce over the data-parallel group."""
    model.module.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    with build_loader(dataset, config, mesh) as loader:
        feed = Feed(loader, mesh.device, Clock(mesh.device), eod_id=eod_id)
        for _ in range(config.eval.steps * config.step.sizes.num_micro_batches):
            batch = feed.next()
            totals += torch.stack([sum_losses(model, batch).double(), totals.new_tensor(batch.num_tokens)])
    sum_over(totals, mesh.dp_group)
    loss_sum, num_tokens = totals.tolist()
    return float(loss_sum / max(num_tokens, 1))
