"""`--profile`: a Chrome trace of some steps and a table of where they went, in `profile/` of the run folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.traffic import LABEL
from megaflow_trainer.training.clock import Clock
from megaflow_trainer.training.say import say

_PHASE = "phase: "
_ROWS = 15
_GAPS = 5


class Profiler:
    """Profiles the steps that the configuration names, on the ranks that it names.

    Args:
        config: which steps and ranks.
        mesh: this rank.
        clock: is told to name phases while steps are profiled.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, clock: Clock) -> None:
        own, self.mesh, self.clock = config.log, mesh, clock
        self.is_on = own.is_profiled and str(mesh.rank) in own.profile_ranks
        self.first, self.last = own.profile_start, own.profile_end
        self.has_host = not own.profiles_kernels_only or mesh.device.type != "cuda"
        self.folder = Path(own.run_dir or ".") / "profile"
        self.num_steps = 0
        self._profile: Any = None

    def __enter__(self) -> Profiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def before(self, step: int) -> None:
        """Begin if this is the first profiled step (of those that are left after a resume)."""
        if self.is_on and self._profile is None and self.first <= step <= self.last:
            activities = [ProfilerActivity.CPU] if self.has_host else []
            if self.mesh.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
                torch.cuda.synchronize(self.mesh.device)
            self._profile, self.num_steps = profile(activities=activities, acc_events=True), 0
            self._profile.start()
            self.clock.is_traced = self.mesh.traffic.is_traced = self.has_host

    def after(self, step: int) -> None:
        """End and write if this was the last profiled step; waits for the device then."""
        if self._profile is None:
            return
        self.num_steps += 1
        if step < self.last:
            return
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)
        done, self._profile = self._profile, None
        done.stop()
        self.clock.is_traced = self.mesh.traffic.is_traced = False
        self._write(done, step)

    def _write(self, done: Any, step: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        stem = self.folder / f"rank_{self.mesh.rank}_to_{step}"
        done.export_chrome_trace(f"{stem}.json")
        is_cuda = self.mesh.device.type == "cuda"
        table = format_table(done.events(), self.num_steps, is_cuda=is_cuda, has_host=self.has_host)
        Path(f"{stem}.txt").write_text(table + "\n", encoding="utf-8")
        say(self.mesh, f" profile of {self.num_steps} steps: {stem}.json for a trace viewer, the table in {stem}.txt")
        say(self.mesh, table)


def format_table(events: Sequence[Any], num_steps: int, *, is_cuda: bool, has_host: bool = True) -> str:
    """Phases, the operations with the most time of their own, and on a GPU how long no kernel ran. ms per step.

    Without `has_host` no operation on the host was traced: what calls of the driver leave in the trace is passed over,
    and the operations are kernels.
    """
    if not has_host:
        events = [event for event in events if event.device_type.name == "CUDA"]
    lines = _list_phases(events, num_steps) + _list_messages(events, num_steps)
    field = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    by_name: dict[str, tuple[float, int]] = {}
    for event in events:
        if not event.name.startswith((_PHASE, LABEL, "Profiler", "nccl:")):
            time, calls = by_name.get(event.name, (0.0, 0))
            by_name[event.name] = (time + getattr(event, field), calls + 1)
    title = "operation, by its own time on the device" if has_host else "kernel, by its time"
    lines += [*([""] if lines else []), f"{title:<60} {'ms/step':>10} {'calls/step':>11}"]
    for name, (time, calls) in sorted(by_name.items(), key=lambda item: -item[1][0])[:_ROWS]:
        lines.append(f"{name[:60]:<60} {time / 1e3 / num_steps:>10.3f} {calls / num_steps:>11.1f}")
    if is_cuda:
        ranges = (_PHASE, LABEL, "nccl:")  # what the host named shows on the device too, and is no kernel
        on_device = [e for e in events if e.device_type.name == "CUDA" and not e.name.startswith(ranges)]
        kernels = [(e.time_range.start, e.time_range.end) for e in on_device]
        if kernels:
            whole = max(end for _, end in kernels) - min(start for start, _ in kernels)
            lines += ["", f"no kernel ran for {1 - measure_union(kernels) / whole:.1%} of {whole / 1e3:.1f} ms"]
            lines += _list_gaps(on_device, num_steps)
        lines += _list_transfers(on_device, num_steps)
    return "\n".join(lines)


def _list_gaps(kernels: Sequence[Any], num_steps: int) -> list[str]:
    """Between which kernels none ran, where it was for longest in all; waiting of one step for the next is told too."""
    gaps: dict[tuple[str, str], list[float]] = {}
    before, reached = "", float("inf")
    for event in sorted(kernels, key=lambda event: event.time_range.start):
        if event.time_range.start > reached:
            gaps.setdefault((before, event.name), []).append(event.time_range.start - reached)
        if event.time_range.end > reached or not before:
            before, reached = event.name, event.time_range.end
    lines = [f"{'between kernel':<46} {'and kernel':<46} {'ms/step':>10} {'times/step':>11}"] if gaps else []
    for (first, second), lengths in sorted(gaps.items(), key=lambda item: -sum(item[1]))[:_GAPS]:
        between = f"{_shorten(first):<46} {_shorten(second):<46}"
        lines.append(f"{between} {sum(lengths) / 1e3 / num_steps:>10.3f} {len(lengths) / num_steps:>11.1f}")
    return lines


def _shorten(name: str) -> str:
    """A kernel's name without what it returns, where it is from and what it is called with."""
    return re.sub(r"^void |\(anonymous namespace\)::|\w+::", "", name).split("(")[0][:46]


def _list_phases(events: Sequence[Any], num_steps: int) -> list[str]:
    """Host time by phase; nothing where none is named."""
    phases = [event for event in events if event.name.startswith(_PHASE) and event.device_type.name == "CPU"]
    lines = [f"{'phase':<40} {'host ms/step':>14}"] if phases else []
    for name in dict.fromkeys(event.name for event in phases):
        total = sum(event.cpu_time_total for event in phases if event.name == name)
        lines.append(f"{name.removeprefix(_PHASE):<40} {total / 1e3 / num_steps:>14.3f}")
    return lines


def _list_messages(events: Sequence[Any], num_steps: int) -> list[str]:
    """Host time in calls that block and in waiting, by axis and kind; nothing for a single rank."""
    own = [event for event in events if event.name.startswith(LABEL) and event.device_type.name == "CPU"]
    lines = ["", f"{'sent to other ranks, by axis':<40} {'host ms/step':>14} {'calls/step':>11}"] if own else []
    for name in dict.fromkeys(event.name for event in own):
        times = [event.cpu_time_total for event in own if event.name == name]
        label = name.removeprefix(LABEL)
        lines.append(f"{label:<40} {sum(times) / 1e3 / num_steps:>14.3f} {len(times) / num_steps:>11.1f}")
    return lines


def _list_transfers(kernels: Sequence[Any], num_steps: int) -> list[str]:
    """Time of NCCL's kernels by kind, and how much of it no other kernel ran beside."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in kernels:
        kind = event.name.split("(")[0].removeprefix("ncclDevKernel_") if event.name.startswith("nccl") else ""
        spans.setdefault(kind, []).append((event.time_range.start, event.time_range.end))
    work = spans.pop("", [])
    lines = ["", f"{'NCCL kernel':<40} {'ms/step':>14} {'exposed ms':>11}"] if spans else []
    covered = measure_union(work)
    for kind, own in spans.items():
        total, exposed = measure_union(own), measure_union([*work, *own]) - covered
        lines.append(f"{kind[:40]:<40} {total / 1e3 / num_steps:>14.3f} {exposed / 1e3 / num_steps:>11.3f}")
    return lines


def measure_union(spans: Iterable[tuple[float, float]]) -> float:
    """How much is covered by spans that may overlap."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
