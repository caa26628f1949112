"""The log line of an interval, and the same values in full precision in `metrics.jsonl`.

Loss, norm and rate are those of the iteration that the line names, so that a resumed run repeats them to the bit
wherever it was interrupted; `lm_loss_mean` is the mean over the `num_steps` steps of the interval. Times are means per
step. No iteration stands twice: a resumed run cuts the lines behind the step it goes on from, and a run that does not
go on from its own folder moves the lines of the run before it to `metrics.1.jsonl`.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import resource
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch

from megaflow.errors import FileAccessError
from megaflow_trainer.config.arithmetic import count_flops_per_token, find_peak_flops
from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.training.clock import ASIDE, PHASES, Clock
from megaflow_trainer.training.manifest import describe_device
from megaflow_trainer.training.step import StepReport

METRICS = "metrics.jsonl"


def say(mesh: Mesh, line: str) -> None:
    """Print a line once for all ranks."""
    if mesh.is_first:
        print(line, flush=True)


def prepare_metrics(folder: Path, *, keep_until: int | None) -> None:
    """Make the metrics file of a run folder ready to be written on; one rank calls it.

    Args:
        folder: the run folder; it exists.
        keep_until: the last iteration whose lines this run continues; None if it continues none.

    Raises:
        FileAccessError: if the file cannot be written.
    """
    path = folder / METRICS
    try:
        if keep_until is None:
            if path.is_file() and path.stat().st_size:
                number = next(number for number in itertools.count(1) if not _list_aside(path, number).exists())
                path.rename(_list_aside(path, number))
        elif path.is_file():
            lines = path.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if _read_iteration(line) <= keep_until]
            if kept != lines:
                aside = path.with_suffix(".writing")
                aside.write_bytes(b"".join(kept))
                aside.replace(path)
        path.open("ab").close()
    except OSError as error:
        raise _cannot_write(path, error) from None


def _list_aside(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def _read_iteration(line: bytes) -> float:
    """The iteration of a line; infinite for one that was cut off when its writer was killed."""
    try:
        return float(json.loads(line)["iteration"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def _cannot_write(path: Path, error: OSError) -> FileAccessError:
    return FileAccessError(f"{path}: cannot be written: {error.strerror}; choose another --run-dir")


class MetricsLog:
    """Collects the reports of steps and writes a line every `log.every` of them; only the first rank writes."""

    def __init__(self, config: TrainConfig, mesh: Mesh, clock: Clock) -> None:
        self.config, self.mesh, self.clock = config, mesh, clock
        self.reports: list[StepReport] = []
        self.file: TextIO | None = None
        if mesh.is_first:
            assert config.log.run_dir is not None, "resolved"
            self.path = Path(config.log.run_dir) / METRICS
            try:
                self.file = self.path.open("a", encoding="utf-8")
            except OSError as error:
                raise _cannot_write(self.path, error) from None

    def __enter__(self) -> MetricsLog:
        self.clock.collect()  # what came before the first step is not part of it
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.file is not None:
            self.file.close()

    def write(self, step: int, consumed_samples: int, report: StepReport) -> None:
        """Take the report of a step; at the end of an interval read the device and write the line."""
        self.reports.append(report)
        if step % self.config.log.every == 0 or step == self.config.last_step:
            values = self._summarise(step, consumed_samples)
            self._write_json(values)
            say(self.mesh, format_line(values, self.config.last_step))
            self.reports = []

    def write_validation(self, step: int, loss: float) -> None:
        """Write the result of an evaluation."""
        self._write_json({"iteration": step, "valid_loss": loss})
        say(self.mesh, f" validation at iteration {step} | lm loss: {loss:.6E} | perplexity: {_perplexity(loss):.6E}")

    def _summarise(self, step: int, consumed_samples: int) -> dict[str, Any]:
        wall_s, seconds = self.clock.collect()
        count = len(self.reports)
        step_s = (wall_s - sum(seconds[name] for name in ASIDE)) / count
        losses = torch.stack([report.loss for report in self.reports]).tolist()
        phases = {f"{name}_s": seconds[name] / count for name in (*PHASES, "host_wait")}
        values = {
            "iteration": step,
            "consumed_samples": consumed_samples,
            "lr": self.reports[-1].plan.lr,
            "weight_decay": self.reports[-1].plan.weight_decay,
            "global_batch_size": self.reports[-1].plan.num_samples,
            "lm_loss": losses[-1],
            "grad_norm": self.reports[-1].grad_norm.item(),
            "num_steps": count,
            "lm_loss_mean": sum(losses) / count,
            "step_time_s": step_s,
            **phases,
            "other_s": step_s - sum(phases[f"{name}_s"] for name in PHASES),
            **{f"{name}_s": seconds[name] for name in ASIDE},
        }
        if self.reports[-1].loss_scale is not None:
            values |= {"loss_scale": self.reports[-1].loss_scale}
            values |= {"skipped_steps": sum(report.is_skipped for report in self.reports)}
        values |= describe_extras(self.reports[-1])
        num_samples = sum(report.plan.num_samples for report in self.reports) / count
        return values | self._measure_speed(num_samples / step_s) | {"memory_bytes": measure_memory(self.mesh.device)}

    def _measure_speed(self, samples_per_s: float) -> dict[str, float]:
        config = self.config
        tokens_per_s = samples_per_s * config.data.seq_len / self.mesh.world_size
        full, causal = (
            count_flops_per_token(config.model, seq_len=config.data.seq_len, is_causal=is_causal)
            for is_causal in (False, True)
        )
        speed = {
            "samples_per_s": samples_per_s,
            "tokens_per_s_per_gpu": tokens_per_s,
            "tflops_per_gpu": full * tokens_per_s / 1e12,
        }
        peak = find_peak_flops(describe_device(self.mesh.device), config.step.dtype)
        if peak is not None:
            speed |= {"mfu": full * tokens_per_s / peak, "mfu_causal": causal * tokens_per_s / peak}
        return speed

    def _write_json(self, values: dict[str, Any]) -> None:
        if self.file is not None:
            try:
                self.file.write(json.dumps(values) + "\n")
                self.file.flush()
            except OSError as error:
                raise _cannot_write(self.path, error) from None


def describe_extras(report: StepReport) -> dict[str, float]:
    """Losses that are logged apart, and what one micro-batch kept for backward where that is not plain."""
    values: dict[str, float] = {f"{name}_loss": loss.item() for name, loss in report.side_losses.items()}
    if report.saved is not None:
        values |= {"saved_bytes": report.saved.num_bytes, "kept_bytes": report.saved.kept_bytes}
        if report.saved.error is not None:
            values["saved_error"] = report.saved.error.item()
    return values


def format_line(values: dict[str, Any], num_steps: int) -> str:
    """The console line of an interval; times are means per step."""
    phases = " + ".join(f"{name.replace('_', ' ')} {values[f'{name}_s'] * 1e3:.2f}" for name in (*PHASES, "other"))
    mfu = f" | MFU: {values['mfu']:.1%} (causal {values['mfu_causal']:.1%})" if "mfu" in values else ""
    scale = f" | loss scale: {values['loss_scale']:.6g}" if "loss_scale" in values else ""
    if values.get("skipped_steps"):
        scale += f" | overflow: {values['skipped_steps']} steps skipped"
    extras = "".join(
        f" | {name[:-5]} loss: {values[name]:.6E}" for name in values if re.fullmatch(r"mtp_\d+_loss", name)
    )
    if "kept_bytes" in values:
        extras += (
            f" | activations kept (MiB): {values['kept_bytes'] / 2**20:.1f} of {values['saved_bytes'] / 2**20:.1f}"
        )
    if "saved_error" in values:
        extras += f", rounded by {values['saved_error']:.2E}"
    return (
        f" iteration {values['iteration']}/{num_steps} | consumed samples: {values['consumed_samples']} | "
        f"lr: {values['lr']:.6E} | lm loss: {values['lm_loss']:.6E} | grad norm: {values['grad_norm']:.6E}"
        f"{scale}{extras} | "
        f"step time (ms): {values['step_time_s'] * 1e3:.2f} = {phases} | samples/s: {values['samples_per_s']:.2f} | "
        f"tokens/s/GPU: {values['tokens_per_s_per_gpu']:.0f} | TFLOP/s/GPU: {values['tflops_per_gpu']:.4g}{mfu} | "
        f"memory (MiB): {values['memory_bytes'] / 2**20:.0f}"
    )


def measure_memory(device: torch.device) -> int:
    """Peak bytes: allocated on a GPU, resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts in bytes there, in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))
