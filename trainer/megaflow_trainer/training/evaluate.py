"""Validation: the mean loss per token over the first global batches of the valid part, the same ones every time."""

from __future__ import annotations

import torch

from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.parallel.apply import ParallelModel
from megaflow_trainer.parallel.collectives import sum_over
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.training.clock import Clock
from megaflow_trainer.training.data import RunData, open_valid
from megaflow_trainer.training.feed import Feed
from megaflow_trainer.training.step import add_pipeline, sum_losses, take_own


@torch.no_grad()
def evaluate(model: ParallelModel, data: RunData, config: TrainConfig, mesh: Mesh, clock: Clock) -> float:
    """Mean validation loss in nats per token. Sends one all-reduce over the ranks that read other tokens; `clock` is
    told that the run gets on.
    """
    model.module.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    with open_valid(data, config, mesh) as loader:
        feed = Feed(
            loader,
            mesh.device,
            Clock(mesh.device),
            vocab_size=data.vocab_size,
            eod_id=data.eod_id,
            document_end=data.document_end,
            by_documents=data.by_documents,
        )
        count = config.step.sizes.num_micro_batches
        for _ in range(config.eval.steps):
            batches = [take_own(model, feed.next()) for _ in range(count)]
            if model.pipeline is not None:
                add_pipeline(totals, model.pipeline, batches, [None] * count)
                clock.beat()
                continue
            for batch in batches:
                totals[0].add_(sum_losses(model, batch)[0])
                totals[1].add_(batch.num_tokens)
                clock.beat()
    sum_over(totals, mesh.loss_group)
    loss_sum, num_tokens = totals.tolist()
    return float(loss_sum / max(num_tokens, 1))
