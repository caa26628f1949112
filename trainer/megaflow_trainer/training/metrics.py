"""The log line of an interval, and the same values in full precision in `metrics.jsonl` (docs/metrics.md).

Loss, norm and rate are those of the iteration that the line names, so that a resumed run repeats them to the bit
wherever it was interrupted; `lm_loss_mean` is the mean over the `num_steps` steps of the interval. Times are means per
step. No iteration stands twice: a resumed run cuts the lines behind the step it goes on from, and a run that does not
go on from its own folder moves the lines of the run before it to `metrics.1.jsonl`.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.parallel.collectives import do_on_first, gather_objects
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.training.clock import ASIDE, BACKWARD, BESIDE, FORWARD, LOADER_BOUND, LOG, OPTIMIZER, PHASES
from megaflow_trainer.training.ledger import StepResult
from megaflow_trainer.training.memory import list_parts, measure_memory
from megaflow_trainer.training.say import say
from megaflow_trainer.training.sinks import Sink, open_sinks
from megaflow_trainer.training.speed import measure_speed

OWN_WORK = (FORWARD, BACKWARD, OPTIMIZER)
"""Phases in which a rank waits for no other."""


class MetricsLog:
    """Collects the results of steps and writes a line every `log.every` of them; only the first rank writes."""

    def __init__(self, config: TrainConfig, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.parts = {f"memory_{name}_bytes": size for name, size in list_parts(config, mesh.device).items()}
        self.results: list[StepResult] = []
        self.sinks: list[Sink] = []
        do_on_first(self._open, mesh.world_group)

    def _open(self) -> None:
        self.sinks = open_sinks(self.config)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sink in self.sinks:
            sink.close()

    def is_due(self, step: int) -> bool:
        """Whether a line is written after this step."""
        return step % self.config.log.every == 0 or step == self.config.last_step

    def write(self, result: StepResult) -> None:
        """Take the result of a step; at the end of an interval write the line. Gathers times of all ranks then."""
        self.results.append(result)
        if self.is_due(result.step):
            values = self._summarise()
            self._put(values)
            say(self.mesh, format_line(values, self.config.last_step))
            for line in describe_stragglers(values, self.config.guard.straggler_ratio):
                say(self.mesh, line)
            self._warn_of_dead(result, values)
            self.results = []

    def _warn_of_dead(self, result: StepResult, values: Mapping[str, Any]) -> None:
        load = result.report.load
        line = load.describe_dead() if load is not None and values.get("dead_experts") else None
        if line is not None:
            self._put({"iteration": result.step, "event": "dead_experts", "text": line})
            say(self.mesh, f" warning: {line}")

    def write_validation(self, step: int, loss: float) -> None:
        """Write the result of an evaluation."""
        self._put({"iteration": step, "valid_loss": loss})
        say(self.mesh, f" validation at iteration {step} | lm loss: {loss:.6E} | perplexity: {_perplexity(loss):.6E}")

    def write_event(self, event: Mapping[str, Any] | None) -> None:
        """Write something that happened; None: nothing did."""
        if event is not None:
            self._put(event)

    def _put(self, values: Mapping[str, Any]) -> None:
        for sink in self.sinks:
            sink.write(values)

    def _summarise(self) -> dict[str, Any]:
        last, count = self.results[-1], len(self.results)
        plan, report = last.report.plan, last.report
        seconds = {name: sum(result.seconds[name] for result in self.results) for name in last.seconds}
        step_s = sum(result.step_s for result in self.results) / count
        means = {f"{name}_s": seconds[name] / count for name in (*PHASES, *BESIDE)}
        other_s = step_s - sum(means[f"{name}_s"] for name in PHASES)
        values: dict[str, Any] = {
            "iteration": last.step,
            "consumed_samples": last.consumed_samples,
            "lr": plan.lr,
            "weight_decay": plan.weight_decay,
            "global_batch_size": plan.num_samples,
            "lm_loss": last.loss,
            "grad_norm": last.grad_norm,
            "param_norm": last.param_norm,
            "num_steps": count,
            "lm_loss_mean": sum(result.loss for result in self.results) / count,
            "skipped_steps": sum(result.is_skipped for result in self.results),
            "step_time_s": step_s,
            **means,
            "other_s": other_s,
            "device_idle_share": (means[f"{LOADER_BOUND}_s"] + means[f"{LOG}_s"] + max(other_s, 0.0)) / step_s,
            **{f"{name}_s": seconds[name] for name in ASIDE},
            **self._compare_ranks(means),
        }
        if report.loss_scale is not None:
            values["loss_scale"] = report.loss_scale
        values |= last.extras
        if last.traffic:
            values["communication"] = last.traffic
        num_samples = sum(result.report.plan.num_samples for result in self.results) / count
        values |= measure_speed(self.config, self.mesh, num_samples / step_s)
        return values | measure_memory(self.mesh.device) | self.parts

    def _compare_ranks(self, means: Mapping[str, float]) -> dict[str, Any]:
        """Own work and loader-bound time of every rank; nothing for a single one."""
        own = (sum(means[f"{name}_s"] for name in OWN_WORK), means[f"{LOADER_BOUND}_s"])
        every = gather_objects(own, self.mesh.world_group)
        if len(every) == 1:
            return {}
        return {
            "work_by_rank_s": [work for work, _ in every],
            "loader_bound_by_rank_s": [wait for _, wait in every],
        }


def describe_stragglers(values: Mapping[str, Any], ratio: float) -> list[str]:
    """A line for each rank that works or waits for its data much longer than the others' median; 0 asks for none."""
    works, waits = values.get("work_by_rank_s", []), values.get("loader_bound_by_rank_s", [])
    if len(works) < 2 or ratio == 0:
        return []
    lines, others = [], "the median of the others is"
    by_work, by_wait = sorted(works), sorted(waits)
    for rank, (work, wait) in enumerate(zip(works, waits, strict=True)):
        usual, waited = find_median_without(by_work, work), find_median_without(by_wait, wait)
        if work > ratio * usual:
            own = f"{work * 1e3:.1f} ms of its own work a step"
            lines.append(f" rank {rank} is slow: {own}, {others} {usual * 1e3:.1f}")
        if wait - waited > (ratio - 1) * usual:
            lines.append(f" rank {rank} waits for data: {wait * 1e3:.1f} ms a step, {others} {waited * 1e3:.1f}")
    return lines


def find_median_without(ordered: Sequence[float], value: float) -> float:
    """The median of all but `value`, one of at least two numbers in their order."""
    place, last = bisect_left(ordered, value), len(ordered) - 2
    low, high = (ordered[at + (at >= place)] for at in (last // 2, (last + 1) // 2))
    return (low + high) / 2


def format_line(values: Mapping[str, Any], num_steps: int) -> str:
    """The console line of an interval; times are means per step."""
    phases = " + ".join(f"{name.replace('_', ' ')} {values[f'{name}_s'] * 1e3:.2f}" for name in (*PHASES, "other"))
    mfu = f" | MFU: {values['mfu']:.1%} (causal {values['mfu_causal']:.1%})" if "mfu" in values else ""
    scale = f" | loss scale: {values['loss_scale']:.6g}" if "loss_scale" in values else ""
    if values.get("skipped_steps"):
        scale += f" | {'overflow' if 'loss_scale' in values else 'not finite'}: {values['skipped_steps']} steps skipped"
    extras = "".join(
        f" | {name[:-5]} loss: {values[name]:.6E}" for name in values if re.fullmatch(r"mtp_\d+_loss", name)
    )
    if "expert_entropy" in values:
        extras += describe_load(values)
    if "pipeline_bubble" in values:
        extras += f" | pipeline bubble: {values['pipeline_bubble']:.1%}"
    if "kept_bytes" in values:
        extras += (
            f" | activations kept (MiB): {values['kept_bytes'] / 2**20:.1f} of {values['saved_bytes'] / 2**20:.1f}"
        )
    if "saved_error" in values:
        extras += f", rounded by {values['saved_error']:.2E}"
    extras += describe_traffic(values.get("communication", {}))
    norm = "" if values.get("param_norm") is None else f" | params norm: {values['param_norm']:.6E}"
    return (
        f" iteration {values['iteration']}/{num_steps} | consumed samples: {values['consumed_samples']} | "
        f"lr: {values['lr']:.6E} | lm loss: {values['lm_loss']:.6E} | grad norm: {values['grad_norm']:.6E}"
        f"{norm}{scale}{extras} | "
        f"step time (ms): {values['step_time_s'] * 1e3:.2f} = {phases} | host wait (ms): "
        f"{values['host_wait_s'] * 1e3:.2f} | samples/s: {values['samples_per_s']:.2f} | "
        f"tokens/s/GPU: {values['tokens_per_s_per_gpu']:.0f} | TFLOP/s/GPU: {values['tflops_per_gpu']:.4g}{mfu} | "
        f"memory (MiB): {values['memory_now_bytes'] / 2**20:.0f}, peak {values['memory_peak_bytes'] / 2**20:.0f}"
    )


def describe_traffic(traffic: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """What the first rank sent along each axis in the last step, and how long it waited, as a part of the line."""
    parts = []
    for axis, kinds in traffic.items():
        sent, waited = (sum(kind[name] for kind in kinds.values()) for name in ("sent_bytes", "waited_s"))
        parts.append(f"{axis} {sent / 2**20:.2f}, {waited * 1e3:.2f}")
    return f" | sent (MiB), waited (ms): {'; '.join(parts)}" if parts else ""


def describe_load(values: Mapping[str, Any]) -> str:
    """The part of the line that is about experts."""
    tokens = "/".join(f"{values[f'expert_tokens_{name}']:.0f}" for name in ("min", "mean", "max"))
    text = f" | tokens per expert: {tokens}, entropy {values['expert_entropy']:.4f}"
    for name, spelled in (("balance_loss", "balance loss"), ("router_z_loss", "router z-loss")):
        text += f" | {spelled}: {values[name]:.6E}" if name in values else ""
    text += f" | bias norm: {values['expert_bias_norm']:.4E}" if "expert_bias_norm" in values else ""
    return text + (f" | dropped: {values['dropped_share']:.2%}" if values["dropped_share"] else "")


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))
