"""What is done about a step that went wrong: it is told with its documents, counted, and after too many the run ends.

Loss and gradient norm are those of all ranks, so every rank judges alike, at the same step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from megaflow.errors import MegaflowError
from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.parallel.collectives import gather_objects
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.training.documents import Documents, describe_documents
from megaflow_trainer.training.ledger import StepResult
from megaflow_trainer.training.say import say
from megaflow_trainer.training.spikes import SpikeWatch

_SHOWN = 4
"""Samples that a line on the console names; metrics.jsonl has all."""


class DivergedError(MegaflowError, RuntimeError):
    """Loss or gradient were not finite too many times in a row."""


class Guard:
    """Judges the results of steps.

    Args:
        config: thresholds.
        mesh: the ranks that tell each other which samples they had.
        documents: names the documents of samples.
        spikes: what is known of the last losses.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, documents: Documents, spikes: SpikeWatch) -> None:
        self.config, self.mesh, self.documents, self.spikes = config, mesh, documents, spikes
        self.num_bad = 0
        """Bad steps in a row."""

    def judge(self, result: StepResult) -> dict[str, Any] | None:
        """Look at one step.

        Returns:
            What to write down of it, or None if all is well.

        Raises:
            DivergedError: on all ranks, if it was one bad step too many.
        """
        kind = self._find_fault(result)
        if kind is not None:
            self.num_bad += 1
            return self._tell_bad(result, kind)
        if not result.is_skipped:
            self.num_bad = 0
            height = self.spikes.judge(result.loss)
            if height is not None:
                return self._tell_spike(result, height)
        return None

    def check(self, event: dict[str, Any] | None) -> None:
        """End the run if there were too many bad steps in a row; `event` is the last one.

        Raises:
            DivergedError: on all ranks alike.
        """
        if event is not None and self.num_bad >= self.config.guard.max_bad_steps:
            raise DivergedError(
                f"loss or gradient were not finite in {self.num_bad} iterations in a row, up to iteration "
                f"{event['iteration']} (--max-nonfinite-steps {self.config.guard.max_bad_steps}); their samples are in "
                "metrics.jsonl. No weight was changed by them: go on from the last checkpoint with a lower --lr, a "
                "longer warm-up or --clip-grad 1.0; in fp16 look at the loss scale"
            )

    def _find_fault(self, result: StepResult) -> str | None:
        """What was not finite. An overflow that fp16's loss scale is still to answer is no fault."""
        scaler_can_help = result.report.loss_scale is not None and result.report.loss_scale > (
            self.config.step.min_loss_scale if self.config.step.loss_scale is None else math.inf
        )
        if not math.isfinite(result.loss):
            return "loss"
        return "gradient" if result.is_skipped and not scaler_can_help else None

    def _tell_bad(self, result: StepResult, kind: str) -> dict[str, Any]:
        samples = self._gather(result)
        guilty = [item for item in samples if item["loss"] is None]
        say(
            self.mesh,
            f" iteration {result.step}: the {kind} is not finite, the update is skipped ({self.num_bad} in a row); "
            + self._describe("samples whose loss is not finite", guilty, "its samples", samples),
        )
        return {"event": "nonfinite", "kind": kind, "in_a_row": self.num_bad, **_place(result), "samples": samples}

    def _tell_spike(self, result: StepResult, height: float) -> dict[str, Any]:
        samples = self._gather(result)
        say(
            self.mesh,
            f" iteration {result.step}: loss spike: {result.loss:.6E}, {height:.1f} deviations above the usual; "
            + self._describe("samples with the largest loss", samples, "its samples", samples),
        )
        return {"event": "spike", "loss": result.loss, "deviations": height, **_place(result), "samples": samples}

    def _gather(self, result: StepResult) -> list[dict[str, Any]]:
        """The samples of all ranks with their losses and documents, the largest loss first, those not finite before."""
        pairs = [pair for part in result.report.sample_losses for pair in part.T.tolist()]
        own = [(sample, self.mesh.rank, *pair) for sample, pair in zip(result.report.sample_ids, pairs, strict=True)]
        rows = join_shared(row for rows in gather_objects(own, self.mesh.world_group) for row in rows)
        names = self.documents.name_all([sample for sample, _, _ in rows]) if self.mesh.is_first else {}
        found = [
            {"sample": sample, "rank": rank, "loss": loss, "documents": names.get(sample, [])}
            for sample, rank, loss in rows
        ]
        return sorted(found, key=lambda item: (item["loss"] is not None, -(item["loss"] or 0.0), item["sample"]))

    def _describe(self, what: str, some: list[dict[str, Any]], other: str, every: list[dict[str, Any]]) -> str:
        shown = some or every
        names = [
            f"{item['sample']}" + (f" ({describe_documents(item['documents'])})" if item["documents"] else "")
            for item in shown[:_SHOWN]
        ]
        rest = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        return f"{what if some else other}: {'; '.join(names)}{rest}"


def join_shared(rows: Iterable[tuple[int, int, float, float]]) -> list[tuple[int, int, float | None]]:
    """One row a sample from those of the ranks that share it, each with its part of the losses.

    Args:
        rows: sample, rank, sum of losses, number of predictions.

    Returns:
        Sample, first rank that had it, mean loss; None for a loss that is not finite.
    """
    found: dict[int, tuple[int, float, float]] = {}
    for sample, rank, loss, count in rows:
        first, loss_before, count_before = found.get(sample, (rank, 0.0, 0.0))
        found[sample] = (first, loss_before + loss, count_before + count)
    joined: list[tuple[int, int, float | None]] = []
    for sample, (rank, loss, count) in found.items():
        mean = loss / max(count, 1.0)
        joined.append((sample, rank, mean if math.isfinite(mean) else None))
    return joined


def _place(result: StepResult) -> dict[str, Any]:
    return {"iteration": result.step, "consumed_samples": result.consumed_samples}
