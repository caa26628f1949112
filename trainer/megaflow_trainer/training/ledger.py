"""Hands on the numbers of a step once the device has them: on a GPU one step late, so that nobody waits for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megaflow_trainer.parallel.traffic import read_flows
from megaflow_trainer.training.clock import LOG, Clock, StepTimes
from megaflow_trainer.training.step import StepReport


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step in numbers of the host."""

    step: int
    consumed_samples: int
    loss: float
    grad_norm: float
    param_norm: float | None
    is_skipped: bool
    extras: dict[str, float]
    """Losses that are logged apart, what one micro-batch kept for backward where that is not plain, and the part of the
    step in which this rank waited for other stages of a pipeline.
    """
    traffic: dict[str, dict[str, dict[str, float]]]
    """What this rank sent and waited for, by axis and kind."""
    report: StepReport
    step_s: float
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Entry:
    step: int
    consumed: int
    report: StepReport
    times: StepTimes
    values: Tensor  # loss, gradient norm, weights' norm, skipped, others: float64, on its way to the host
    names: tuple[str, ...]  # of the others


class Ledger:
    """Takes the reports of steps and gives back those whose numbers have arrived."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._entries: list[_Entry] = []

    def add(self, step: int, consumed: int, report: StepReport) -> list[StepResult]:
        """End a step. Returns the results that can be had without waiting for its end."""
        with self.clock.phase(LOG):
            values, names = _collect(report)
        self._entries.append(_Entry(step, consumed, report, self.clock.end_step(), values, names))
        with self.clock.phase(LOG):
            return self._take(keep=1 if report.loss.is_cuda else 0)

    def flush(self) -> list[StepResult]:
        """The results of all steps so far; waits for the device."""
        return self._take(keep=0)

    def _take(self, *, keep: int) -> list[StepResult]:
        ready = self._entries[: len(self._entries) - keep]
        self._entries = self._entries[len(ready) :]
        return [_read(entry) for entry in ready]


def _collect(report: StepReport) -> tuple[Tensor, tuple[str, ...]]:
    """The numbers of a step as one tensor on its way to the host, and the names of the losses behind the first four."""
    is_skipped = report.is_skipped
    skipped = is_skipped if isinstance(is_skipped, Tensor) else torch.tensor(is_skipped)
    norm = report.param_norm
    others = {f"{name}_loss": loss for name, loss in report.side_losses.items()}
    others |= {} if report.load is None else report.load.list_values()
    if report.saved is not None and report.saved.error is not None:
        others["saved_error"] = report.saved.error
    parts = [report.loss, report.grad_norm, report.loss if norm is None else norm, skipped, *others.values()]
    values = torch.stack([part.to(report.loss.device, torch.float64) for part in parts])
    if values.is_cuda:
        values = values.to("cpu", non_blocking=True)  # pinned by torch; there at the end of the step
    return values, tuple(others)


def _read(entry: _Entry) -> StepResult:
    step_s, seconds = entry.times.read()  # waits for the end of the step, and so for the values
    loss, grad_norm, param_norm, skipped, *others = entry.values.tolist()
    report = entry.report
    extras = dict(zip(entry.names, others, strict=True))
    if report.saved is not None:
        extras |= {"saved_bytes": report.saved.num_bytes, "kept_bytes": report.saved.kept_bytes}
    traffic = read_flows(report.flows)
    if report.spans is not None:
        extras["pipeline_bubble"] = report.spans.idle
        if "send" in traffic.get("pp", {}):
            traffic["pp"]["send"]["waited_s"] = report.spans.idle_s
    return StepResult(
        step=entry.step,
        consumed_samples=entry.consumed,
        loss=loss,
        grad_norm=grad_norm,
        param_norm=None if report.param_norm is None else param_norm,
        is_skipped=bool(skipped),
        extras=extras,
        traffic=traffic,
        report=report,
        step_s=step_s,
        seconds=seconds,
    )
