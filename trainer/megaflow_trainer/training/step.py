"""One step: accumulate, reduce, clip, move. The loss and its gradient are means over the tokens of the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.optim.clip import clip_factor
from megaflow_trainer.optim.optimizer import Optimizer
from megaflow_trainer.optim.schedule import StepPlan
from megaflow_trainer.parallel.apply import ParallelModel
from megaflow_trainer.parallel.busy import StepSpans
from megaflow_trainer.parallel.collectives import sum_over
from megaflow_trainer.parallel.graphs import MicroBatchGraph
from megaflow_trainer.parallel.load import LoadReport
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.pipeline import MicroBatch, Pipeline
from megaflow_trainer.parallel.saved import SavedReport
from megaflow_trainer.parallel.seed import number_samples
from megaflow_trainer.parallel.traffic import Flow
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
    """This rank's samples, in the order of `sample_losses`; none on a rank that computes no losses."""
    sample_losses: list[Tensor] = field(default_factory=list)
    """Of each of them the sum of its losses and the number of predictions, one tensor `[2, b]` a micro-batch."""
    spans: StepSpans | None = None
    """When this rank computed, where the model is cut into stages."""
    flows: dict[tuple[str, str], Flow] = field(default_factory=dict)
    """What this rank sent, by axis and kind; the waiting is timed where the norm of the weights is measured."""
    load: LoadReport | None = None
    """What experts were chosen, where the model has experts and somebody needs it."""


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
    Sends an all-reduce of loss and count over all ranks that read other tokens, and what the gradients need. With
    `has_norm` the report holds the norm of the weights.
    """
    mesh.traffic.start(is_timed=has_norm)
    with clock.phase(OPTIMIZER):
        model.module.train()
        model.gradients.start(plan.num_micro_batches)
        totals = torch.zeros(2, dtype=torch.float64, device=mesh.device)  # sum of losses, tokens that count
    report = StepReport(totals[0], totals[0], plan)
    lift, sides = _choose_lift(optimizer, config), SideLosses(mesh, config.model.num_mtp_layers)
    if model.load is not None:
        model.load.start(lift)
    if model.pipeline is not None:
        batches = [take_own(model, feed.next()) for _ in range(plan.num_micro_batches)]
        keys = [_number_samples(plan, number, mesh, config) for number in range(plan.num_micro_batches)]
        with clock.phase(BACKWARD):  # forward too: stages do both in turn
            add_pipeline(totals, model.pipeline, batches, keys, lift=lift, report=report)
        report.spans = model.pipeline.spans
        for found, counted in model.pipeline.side_losses:
            sides.add(found, counted)
        feed.prepare()
    for number in range(0 if model.pipeline is not None else plan.num_micro_batches):
        batch = take_own(model, feed.next())
        numbers = _number_samples(plan, number, mesh, config)
        with clock.phase(FORWARD if model.graph is None else BACKWARD):  # a graph is of both
            if model.graph is None:
                loss_sum, by_sample = sum_losses(model, batch, numbers, lift)
            else:
                loss_sum, by_sample = replay_losses(model, model.graph, batch, numbers)
            totals[0].add_(loss_sum.detach())
            totals[1].add_(batch.num_tokens)  # a scalar: a tensor made of it would wait for the device
            sides.add(model.side_losses, batch.mask)
            report.sample_ids += batch.sample_ids
            report.sample_losses.append(by_sample)
        if model.graph is None:
            with clock.phase(BACKWARD):
                (loss_sum if lift == 1 else loss_sum * lift).backward()
                del loss_sum  # its graph is cleared away here, not somewhere between phases
        feed.prepare()
    with clock.phase(COMMUNICATION):
        sum_over(totals, mesh.loss_group, mesh.meter("world"))
        model.gradients.reduce()
        report.side_losses = sides.reduce()
        if model.fp8 is not None and model.fp8.scales is not None:
            model.fp8.scales.advance()
        report.load = None if model.load is None else model.load.finish(totals[1], is_wanted=has_norm)
    with clock.phase(OPTIMIZER):
        num_tokens = totals[1].clamp(min=1) * lift
        report.loss, report.grad_norm = totals[0] / totals[1].clamp(min=1), model.gradients.norm() / num_tokens
        _move(model, optimizer, report, config, num_tokens=num_tokens)
        if model.load is not None:
            model.load.move_biases(report.load, is_skipped=report.is_skipped)
        report.param_norm = model.measure_norm() if has_norm else None
        report.saved = None if model.saved is None else model.saved.report
    report.flows = mesh.traffic.take()
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
    optimizer.step(report.plan.lr, report.plan.weight_decay, factor=factor, found_inf=found_inf)
    model.gradients.share_weights()


def _choose_lift(optimizer: Optimizer, config: TrainConfig) -> float:
    """What the sum of losses is multiplied by before backward: 1, or in fp16 the loss scale over the tokens of a
    micro-batch, so that the scale lifts a mean as it does elsewhere.
    """
    if optimizer.scaler is None:
        return 1.0
    return optimizer.scaler.scale / (config.step.sizes.micro_batch_size * config.data.seq_len)


def sum_losses(
    model: ParallelModel, batch: DeviceBatch, keys: Tensor | None = None, lift: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Sum of the token losses that count in a micro-batch of this rank, float32 scalar, and of each sample the sum and
    the number of predictions, `[2, b]`, which takes no part in backward. Backward must be of the sum times `lift`.
    """
    mask = torch.ones(batch.tokens.shape, device=batch.tokens.device) if batch.mask is None else batch.mask
    weights = mask if lift == 1 else mask * lift
    losses = model(batch.tokens, batch.labels, keys, weights, batch.documents, batch.mask)  # [b, s]
    masked = losses if batch.mask is None else losses * mask
    return masked.sum(), torch.stack([masked.detach().sum(dim=1), mask.sum(dim=1)])


def replay_losses(
    model: ParallelModel, graph: MicroBatchGraph, batch: DeviceBatch, keys: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`sum_losses` and its backward as one graph; both results are detached."""

    def work(inputs: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        tokens, labels, mask, keys = inputs
        assert tokens is not None, "as given"
        assert labels is not None, "as given"
        loss_sum, by_sample = sum_losses(model, DeviceBatch(tokens, labels, mask, 0.0), keys)
        loss_sum.backward()
        return loss_sum.detach(), by_sample

    loss_sum, by_sample = graph.run(work, (batch.tokens, batch.labels, batch.mask, keys))
    return loss_sum, by_sample


def take_own(model: ParallelModel, batch: DeviceBatch) -> DeviceBatch:
    """This rank's tokens of a micro-batch, and its share of the predictions that count."""
    if model.positions is None:
        return batch
    return DeviceBatch(
        model.take_own(batch.tokens),
        model.take_labels(batch.labels),
        None if batch.mask is None else model.take_own(batch.mask),
        batch.num_tokens * len(model.positions) / batch.tokens.shape[1],
        batch.sample_ids,
        batch.documents,  # whole: own tokens see those of other ranks
    )


def add_pipeline(
    totals: Tensor,
    pipeline: Pipeline,
    batches: Sequence[DeviceBatch],
    keys: Sequence[Tensor | None],
    *,
    lift: float = 1.0,
    report: StepReport | None = None,
) -> None:
    """Run micro-batches through the stages, with backward if there is a report; the ranks that compute losses add
    losses and tokens to `totals` and samples to the report.
    """
    given = [
        MicroBatch(batch.tokens, batch.labels, batch.mask, key, batch.documents)
        for batch, key in zip(batches, keys, strict=True)
    ]
    loss_sum = pipeline.run(given, lift=lift, is_training=report is not None)
    if not pipeline.has_loss:
        return
    totals[0].add_(loss_sum)
    totals[1].add_(sum(batch.num_tokens for batch in batches))
    if report is not None:
        report.sample_ids += [sample for batch in batches for sample in batch.sample_ids]
        report.sample_losses += pipeline.sample_losses


def _number_samples(plan: StepPlan, micro_batch: int, mesh: Mesh, config: TrainConfig) -> Tensor | None:
    """Numbers from which the noise of this rank's samples of a micro-batch follows; None without any."""
    if not config.model.has_noise:
        return None
    size = config.step.sizes.micro_batch_size
    first = plan.first_sample + (micro_batch * mesh.dp_size + mesh.dp_rank) * size
    return number_samples(config.seed, first, size, mesh)
