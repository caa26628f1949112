"""One step: accumulate, reduce, clip, move. The loss and its gradient are means over the tokens of the global batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.optim.adamw import AdamW
from megaflow_trainer.optim.clip import clip_factor
from megaflow_trainer.parallel.apply import ParallelModel
from megaflow_trainer.parallel.collectives import sum_over
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.training.clock import COMMUNICATION, COMPUTE, OPTIMIZER, Clock
from megaflow_trainer.training.feed import DeviceBatch, Feed


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step says of itself. Scalars stay on the device until the log needs them."""

    loss: Tensor
    grad_norm: Tensor
    lr: float


def train_step(
    model: ParallelModel,
    optimizer: AdamW,
    feed: Feed,
    mesh: Mesh,
    clock: Clock,
    config: TrainConfig,
    *,
    lr: float,
) -> StepReport:
    """Train on one global batch.

    Each micro-batch adds the *sum* of its token losses; what is summed is divided by the number of tokens that count in
    the whole global batch, so that the result does not depend on how the batch is cut into ranks and micro-batches.
    Sends two all-reduces over the data-parallel group: loss and count, and the gradients.
    """
    model.module.train()
    model.gradients.zero()
    totals = torch.zeros(2, dtype=torch.float64, device=mesh.device)  # sum of losses, tokens that count
    for _ in range(config.step.sizes.num_micro_batches):
        batch = feed.next()
        with clock.phase(COMPUTE):
            loss_sum = sum_losses(model, batch)
            loss_sum.backward()
            totals[0].add_(loss_sum.detach())
            totals[1].add_(batch.num_tokens)  # a scalar: a tensor made of it would wait for the device
    with clock.phase(COMMUNICATION):
        sum_over(totals, mesh.dp_group)
        model.gradients.reduce()
    with clock.phase(OPTIMIZER):
        num_tokens = totals[1].clamp(min=1)
        grad_norm = model.gradients.norm() / num_tokens
        model.gradients.scale((clip_factor(grad_norm, config.optim.clip_grad) / num_tokens).float())
        optimizer.step(lr)
    return StepReport(totals[0] / num_tokens, grad_norm, lr)


def sum_losses(model: ParallelModel, batch: DeviceBatch) -> Tensor:
    """Sum of the token losses that count in a micro-batch of this rank, float32 scalar."""
    losses = model(batch.tokens, batch.labels)  # [b, s]
    return losses.sum() if batch.mask is None else (losses * batch.mask).sum()
