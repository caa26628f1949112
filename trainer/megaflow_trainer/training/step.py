"""One step: accumulate, reduce, clip, move. The loss and its gradient are means over the tokens of the global batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.optim.clip import clip_factor
from megaflow_trainer.optim.optimizer import Optimizer
from megaflow_trainer.optim.schedule import StepPlan
from megaflow_trainer.parallel.apply import ParallelModel
from megaflow_trainer.parallel.collectives import sum_over
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.saved import SavedReport
from megaflow_trainer.training.clock import BACKWARD, COMMUNICATION, FORWARD, OPTIMIZER, Clock
from megaflow_trainer.training.feed import DeviceBatch, Feed
from megaflow_trainer.training.side_losses import SideLosses


@dataclass(slots=True)
class StepReport:
    """What a step says of itself. Tensors stay on the device until somebody needs them."""

    loss: Tensor
    grad_norm: Tensor
    plan: StepPlan
    is_skipped: Tensor | bool = False
    """Whether the update was left out because loss or gradient was not finite; all ranks alike."""
    loss_scale: float | None = None
    param_norm: Tensor | None = None
    side_losses: dict[str, Tensor] = field(default_factory=dict)
    saved: SavedReport | None = None
    sample_ids: list[int] = field(default_factory=list)
    """This rank's samples, in the order of `sample_losses`."""
    sample_losses: list[Tensor] = field(default_factory=list)
    """Mean loss of each of them, one tensor `[b]` a micro-batch."""


def train_step(
    model: ParallelModel,
    optimizer: Optimizer,
    feed: Feed,
    mesh: Mesh,
    clock: Clock,
    config: TrainConfig,
    *,
    plan: StepPlan,
    has_norm: bool = False,
) -> StepReport:
    """Train on one global batch.

    Each micro-batch adds the *sum* of its token losses; what is summed is divided by the number of tokens that count in
    the whole global batch, so that the result does not depend on how the batch is cut into ranks and micro-batches.
    Sends two all-reduces over the data-parallel group: loss and count, and the gradients. With `has_norm` the report
    holds the norm of the weights.
    """
    with clock.phase(OPTIMIZER):
        model.module.train()
        model.gradients.zero()
        totals = torch.zeros(2, dtype=torch.float64, device=mesh.device)  # sum of losses, tokens that count
    report = StepReport(totals[0], totals[0], plan)
    lift, sides = _choose_lift(optimizer, config), SideLosses(mesh)
    for _ in range(plan.num_micro_batches):
        batch = feed.next()
        with clock.phase(FORWARD):
            loss_sum, by_sample = sum_losses(model, batch)
            totals[0].add_(loss_sum.detach())
            totals[1].add_(batch.num_tokens)  # a scalar: a tensor made of it would wait for the device
            sides.add(model, batch)
            report.sample_ids += batch.sample_ids
            report.sample_losses.append(by_sample)
        with clock.phase(BACKWARD):
            (loss_sum if lift == 1 else loss_sum * lift).backward()
    with clock.phase(COMMUNICATION):
        sum_over(totals, mesh.dp_group)
        model.gradients.reduce()
        report.side_losses = sides.reduce()
    with clock.phase(OPTIMIZER):
        num_tokens = totals[1].clamp(min=1) * lift
        report.loss, report.grad_norm = totals[0] / totals[1].clamp(min=1), model.gradients.norm() / num_tokens
        _move(model, optimizer, report, config, num_tokens=num_tokens)
        report.param_norm = model.measure_norm() if has_norm else None
        report.saved = None if model.saved is None else model.saved.report
    return report


def _move(
    model: ParallelModel, optimizer: Optimizer, report: StepReport, config: TrainConfig, *, num_tokens: Tensor
) -> None:
    """Update the weights, unless loss or gradient is not finite. Both are those of all ranks, so all decide alike.

    A GPU decides for itself where the optimizer can, so that nobody waits for it; else the host reads the decision.
    """
    is_bad = ~(report.grad_norm.isfinite() & report.loss.isfinite())
    report.is_skipped, found_inf = is_bad, None
    if optimizer.skips_on_device and optimizer.scaler is None and is_bad.is_cuda:
        found_inf = is_bad.to(torch.float32)
    else:
        report.is_skipped = bool(is_bad)
    if optimizer.scaler is not None:
        report.loss_scale = optimizer.scaler.scale
        optimizer.scaler.update(is_finite=not report.is_skipped)
    if found_inf is None and report.is_skipped:
        return
    factor = clip_factor(report.grad_norm, config.optim.clip_grad) / num_tokens
    model.gradients.scale(factor.to(torch.promote_types(model.gradients.buffer.dtype, torch.float32)))
    optimizer.step(report.plan.lr, report.plan.weight_decay, found_inf=found_inf)


def _choose_lift(optimizer: Optimizer, config: TrainConfig) -> float:
    """What the sum of losses is multiplied by before backward: 1, or in fp16 the loss scale over the tokens of a
    micro-batch, so that the scale lifts a mean as it does elsewhere.
    """
    if optimizer.scaler is None:
        return 1.0
    return optimizer.scaler.scale / (config.step.sizes.micro_batch_size * config.data.seq_len)


def sum_losses(model: ParallelModel, batch: DeviceBatch) -> tuple[Tensor, Tensor]:
    """Sum of the token losses that count in a micro-batch of this rank, float32 scalar, and the mean of each sample,
    `[b]`, which takes no part in backward.
    """
    losses = model(batch.tokens, batch.labels)  # [b, s]
    if batch.mask is None:
        return losses.sum(), losses.detach().mean(dim=1)
    masked = losses * batch.mask
    return masked.sum(), masked.detach().sum(dim=1) / batch.mask.sum(dim=1).clamp(min=1)
