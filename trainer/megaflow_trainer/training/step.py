"""One step: accumulate, reduce, clip, move. The loss and its gradient are means over the tokens of the global batch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.optim.clip import clip_factor
from megaflow_trainer.optim.optimizer import Optimizer
from megaflow_trainer.optim.scaler import LossScaler
from megaflow_trainer.optim.schedule import StepPlan
from megaflow_trainer.parallel.apply import ParallelModel
from megaflow_trainer.parallel.collectives import sum_over
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.saved import SavedReport
from megaflow_trainer.training.clock import COMMUNICATION, COMPUTE, OPTIMIZER, Clock
from megaflow_trainer.training.feed import DeviceBatch, Feed
from megaflow_trainer.training.side_losses import SideLosses


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step says of itself. Scalars stay on the device until the log needs them."""

    loss: Tensor
    grad_norm: Tensor
    plan: StepPlan
    loss_scale: float | None = None
    is_skipped: bool = False
    side_losses: dict[str, Tensor] = field(default_factory=dict)
    saved: SavedReport | None = None


def train_step(
    model: ParallelModel,
    optimizer: Optimizer,
    feed: Feed,
    mesh: Mesh,
    clock: Clock,
    config: TrainConfig,
    *,
    plan: StepPlan,
) -> StepReport:
    """Train on one global batch.

    Each micro-batch adds the *sum* of its token losses; what is summed is divided by the number of tokens that count in
    the whole global batch, so that the result does not depend on how the batch is cut into ranks and micro-batches.
    Sends two all-reduces over the data-parallel group: loss and count, and the gradients.
    """
    model.module.train()
    model.gradients.zero()
    totals = torch.zeros(2, dtype=torch.float64, device=mesh.device)  # sum of losses, tokens that count
    sides = SideLosses(mesh)
    lift = _choose_lift(optimizer, config)
    for _ in range(plan.num_micro_batches):
        batch = feed.next()
        with clock.phase(COMPUTE):
            loss_sum = sum_losses(model, batch)
            (loss_sum if lift == 1 else loss_sum * lift).backward()
            totals[0].add_(loss_sum.detach())
            totals[1].add_(batch.num_tokens)  # a scalar: a tensor made of it would wait for the device
            sides.add(model, batch)
    with clock.phase(COMMUNICATION):
        sum_over(totals, mesh.dp_group)
        model.gradients.reduce()
        side_losses = sides.reduce()
    with clock.phase(OPTIMIZER):
        num_tokens = totals[1].clamp(min=1) * lift
        grad_norm = model.gradients.norm() / num_tokens
        loss, saved = totals[0] / totals[1].clamp(min=1), None if model.saved is None else model.saved.report
        report = StepReport(loss, grad_norm, plan, side_losses=side_losses, saved=saved)
        if optimizer.scaler is not None:
            report = _judge(report, optimizer.scaler)
        if not report.is_skipped:
            factor = clip_factor(grad_norm, config.optim.clip_grad) / num_tokens
            model.gradients.scale(factor.to(torch.promote_types(model.gradients.buffer.dtype, torch.float32)))
            optimizer.step(plan.lr, plan.weight_decay)
    return report


def _choose_lift(optimizer: Optimizer, config: TrainConfig) -> float:
    """What the sum of losses is multiplied by before backward: 1, or in fp16 the loss scale over the tokens of a
    micro-batch, so that the scale lifts a mean as it does elsewhere.
    """
    if optimizer.scaler is None:
        return 1.0
    return optimizer.scaler.scale / (config.step.sizes.micro_batch_size * config.data.seq_len)


def _judge(report: StepReport, scaler: LossScaler) -> StepReport:
    """Whether an fp16 step counts; waits for the device. The norm is that of all ranks, so all decide alike."""
    is_finite, scale = bool(report.grad_norm.isfinite()), scaler.scale
    scaler.update(is_finite=is_finite)
    return dataclasses.replace(report, loss_scale=scale, is_skipped=not is_finite)


def sum_losses(model: ParallelModel, batch: DeviceBatch) -> Tensor:
    """Sum of the token losses that count in a micro-batch of this rank, float32 scalar."""
    losses = model(batch.tokens, batch.labels)  # [b, s]
    return losses.sum() if batch.mask is None else (losses * batch.mask).sum()
