"""What `--profile` writes: a trace and a table of where steps went, of operations and kernels or of kernels alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity

from helpers.pairs import write_pair
from helpers.runs import TINY, one_rank, run_tiny
from megaflow_trainer.config import read_command
from megaflow_trainer.training import profile as profile_module
from megaflow_trainer.training.clock import Clock
from megaflow_trainer.training.profile import Profiler, format_table, measure_union

LENGTH = ("--train-iters", "6", "--global-batch-size", "4", "--micro-batch-size", "2")


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(tmp_path_factory.mktemp("data") / "toy_text_document")


def test_a_profile_leaves_a_trace_and_a_table(prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*LENGTH, "--profile", "--profile-step-start", "3", "--profile-step-end", "4", "--run-dir", str(tmp_path)]
    run_tiny(prefix, flags)
    trace = json.loads((tmp_path / "profile" / "rank_0_to_4.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("phase: forward") == names.count("phase: backward") == 4  # two micro-batches in two steps
    assert "aten::addmm" in names
    table = (tmp_path / "profile" / "rank_0_to_4.txt").read_text()
    for word in ("loader_bound", "forward", "backward", "optimizer", "calls/step"):
        assert word in table
    assert "profile of 2 steps" in capsys.readouterr().out


def test_a_rank_that_is_not_named_is_not_profiled(prefix: str, tmp_path: Path) -> None:
    run_tiny(prefix, [*LENGTH, "--profile", "--profile-ranks", "1", "2", "--run-dir", str(tmp_path)])
    assert not (tmp_path / "profile").exists()


def test_time_covered_by_kernels_counts_overlap_once() -> None:
    assert measure_union([(0, 2), (1, 3), (5, 6), (5.5, 5.7)]) == 4
    assert measure_union([]) == 0


def test_a_profile_tells_between_which_kernels_none_ran() -> None:
    def event(name: str, start: float, end: float) -> FunctionEvent:
        return FunctionEvent(1, name, 0, start, end, use_device="cuda", device_type=DeviceType.CUDA)

    add = "void at::native::(anonymous namespace)::add_rows<at::native::Add<float>, 4>(int, float*)"
    events = [
        event(add, 5000, 6000),  # behind the long product, not behind the copy that lies inside of it
        event("product", 0, 4000),
        event("copy", 1000, 2000),
        event("product", 7000, 9000),
        event(add, 12000, 13000),
        event("copy", 12500, 13000),  # beside the sum
        event("copy", 13000, 14000),  # at once
    ]
    lines = format_table(events, 2, is_cuda=True, has_host=False).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("between kernel"))
    assert lines[start - 1] == "no kernel ran for 35.7% of 14.0 ms"
    assert [line.split() for line in lines[start + 1 :]] == [
        ["product", "add_rows<Add<float>,", "4>", "2.000", "1.0"],
        ["add_rows<Add<float>,", "4>", "product", "0.500", "0.5"],
    ]


def test_a_profile_tells_messages_by_axis_and_what_of_nccl_was_exposed() -> None:
    def event(name: str, start: float, end: float, device: str = "CUDA") -> SimpleNamespace:
        times = {"cpu_time_total": end - start, "self_device_time_total": end - start}
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, device_type=SimpleNamespace(name=device), time_range=span, **times)

    events = [
        event("sent: tp all_reduce", 0, 3000, "CPU"),
        event("sent: tp all_reduce", 5000, 6000, "CPU"),
        event("sent: tp all_reduce", 0, 3000),  # the range as the device saw it: no kernel of its own
        event("gemm", 0, 4000),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(int)", 3000, 6000),
        event("nccl:all_reduce", 3000, 6000),  # the same by torch's name: counted once
        event("ncclDevKernel_SendRecv(int)", 1000, 2000),
        event("gemm", 7000, 8000),
    ]
    rows = [line.split() for line in format_table(events, 2, is_cuda=True).splitlines()]
    assert ["tp", "all_reduce", "2.000", "1.0"] in rows
    assert ["AllReduce_Sum_f32_RING_LL", "1.500", "1.000"] in rows  # a third of it ran beside a product
    assert ["SendRecv", "0.500", "0.000"] in rows
    assert not any(row and row[0].startswith("nccl:") for row in rows)
    assert ["no", "kernel", "ran", "for", "12.5%", "of", "8.0", "ms"] in rows


def test_a_profile_without_the_host_lists_kernels_alone() -> None:
    def event(name: str, start: float, end: float, device: DeviceType = DeviceType.CUDA) -> FunctionEvent:
        return FunctionEvent(1, name, 0, start, end, use_device="cuda", device_type=device)

    events = [
        event("cudaLaunchKernel", 0, 9000, DeviceType.CPU),  # the driver's calls are in such a trace
        event("gemm", 0, 4000),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(int)", 3000, 6000),
        event("gemm", 7000, 8000),
    ]
    lines = format_table(events, 2, is_cuda=True, has_host=False).splitlines()
    assert lines[0].split() == ["kernel,", "by", "its", "time", "ms/step", "calls/step"]
    assert [line.split()[0] for line in lines[1:3]] == ["gemm", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(int)"]
    assert [line.split()[1:] for line in lines[1:3]] == [["2.500", "1.0"], ["1.500", "0.5"]]
    rows = [line.split() for line in lines[3:]]
    assert rows[1] == ["no", "kernel", "ran", "for", "12.5%", "of", "8.0", "ms"]
    assert rows[-1] == ["AllReduce_Sum_f32_RING_LL", "1.500", "1.000"]
    assert not any(word in "\n".join(lines) for word in ("phase", "host", "cudaLaunchKernel"))


def test_a_profile_of_kernels_alone_is_told_to_be_none_on_a_cpu(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = ["--profile-step-start", "3", "--profile-step-end", "3", "--run-dir", str(tmp_path)]
    run_tiny(prefix, [*LENGTH, "--profile", "--profile-kernels-only", *steps])
    assert "note: --profile-kernels-only has no effect on a CPU" in capsys.readouterr().out
    assert "forward" in (tmp_path / "profile" / "rank_0_to_3.txt").read_text()


def test_a_profile_of_kernels_alone_traces_no_operations_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(profile_module, "profile", lambda **options: made.append(options) or MagicMock())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    gpu, words = dataclasses.replace(one_rank(), device=torch.device("cuda")), ["--profile", "--profile-kernels-only"]
    named = []
    for flags in (words[:1], words):
        config = read_command([*TINY, "--data-path", "x", "--train-iters", "20", *flags], world_size=1)[0]
        clock = Clock(torch.device("cpu"))
        Profiler(config, gpu, clock).before(10)
        named.append((clock.is_traced, gpu.traffic.is_traced))
    assert [options["activities"] for options in made] == [
        [ProfilerActivity.CPU, ProfilerActivity.CUDA],
        [ProfilerActivity.CUDA],
    ]
    assert named == [(True, True), (False, False)]
