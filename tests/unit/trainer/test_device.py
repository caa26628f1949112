"""What a device cannot do is refused in one sentence before a model is built; devices are values here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.pairs import write_pair
from helpers.runs import TINY, run_tiny
from megaflow.errors import ConfigError
from megaflow_trainer.config import read_command
from megaflow_trainer.config.checks import Device, check_device
from megaflow_trainer.parallel.mesh import Launch, build_mesh
from megaflow_trainer.training import build as build_module
from megaflow_trainer.training import run as run_module
from megaflow_trainer.training.preflight import describe_shortage, find_capacity, refuse_device

RUN = (*TINY, "--train-iters", "1", "--data-path", "x", "--bf16")
NEEDS = "needs compute capability 8.9 or newer (Ada, Hopper, Blackwell), and"


def check(flags: list[str], name: str, capability: tuple[int, int] | None) -> list[str]:
    return check_device(read_command([*RUN, *flags], world_size=1)[0], Device(name, capability))


@pytest.mark.parametrize(
    "name, capability", [("Tesla V100", (7, 0)), ("NVIDIA A100", (8, 0)), ("NVIDIA RTX A6000", (8, 6))]
)
def test_fp8_on_an_old_gpu_is_refused_with_what_it_has(name: str, capability: tuple[int, int]) -> None:
    has = f"{name} has {capability[0]}.{capability[1]}; drop"
    assert check(["--fp8-hybrid"], name, capability) == [
        f"fp8 (--fp8-hybrid) {NEEDS} {has} --fp8-hybrid and keep --bf16"
    ]
    assert check(["--fp8-format", "e4m3"], name, capability) == [
        f"fp8 (--fp8-e4m3) {NEEDS} {has} --fp8-e4m3 and keep --bf16"
    ]
    assert check([], name, capability) == []


def test_fp8_without_a_gpu_is_refused() -> None:
    assert check(["--fp8-hybrid"], "cpu x86_64", None) == [
        "fp8 (--fp8-hybrid) needs a GPU, and this run is on cpu x86_64; drop --fp8-hybrid and keep --bf16"
    ]


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_a_gpu_that_has_it_may_use_fp8(capability: tuple[int, int]) -> None:
    assert check(["--fp8-hybrid"], "NVIDIA H200", capability) == []


def test_the_device_is_asked_before_data_are_opened_or_a_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*args: object) -> None:
        raise AssertionError("too late")

    monkeypatch.setattr(build_module, "build_model", forbidden)
    monkeypatch.setattr(run_module, "open_data", forbidden)
    with pytest.raises(ConfigError, match=r"fp8 \(--fp8-hybrid\) needs a GPU, and this run is on cpu"):
        run_tiny(write_pair(tmp_path / "d"), ["--train-iters", "1", "--bf16", "--fp8-hybrid"])


@pytest.mark.parametrize("name", ["flash_attn_4", "flash_attn_2", "transformer_engine", "flash", "cudnn"])
def test_an_attention_that_cannot_run_is_refused_before_data_are_opened(name: str) -> None:
    flags = ["--train-iters", "1", "--data-path", "/nowhere", "--attention-backend", name]
    with pytest.raises(ConfigError, match=f"^attention '{name}' cannot run here: .* needs a CUDA GPU and this machine"):
        run_tiny("/nowhere", flags)


def test_what_a_device_cannot_do_is_told_at_once() -> None:
    flags = [
        "--fp8-hybrid",
        "--norm-kernel",
        "liger",
        "--attention-backend",
        "flash_attn_4",
        "--attention-dropout",
        "0.1",
    ]
    config = read_command([*RUN, *flags], world_size=1)[0]
    with pytest.raises(ConfigError) as caught:
        refuse_device(config, torch.device("cpu"))
    fp8, norm, attention = str(caught.value).splitlines()
    assert fp8.startswith("fp8 (--fp8-hybrid) needs a GPU, and this run is on cpu")
    assert norm.startswith("--norm-kernel liger cannot run here: liger-kernel needs a CUDA GPU")
    assert attention.startswith("attention 'flash_attn_4' cannot run here: flash-attn-4 needs a CUDA GPU")
    graph = replace(config, step=replace(config.step, cuda_graph="local"))
    assert len(check_device(graph, Device("cpu x86_64", None))) == 2


def test_the_capability_is_that_of_the_ranks_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_command([*RUN, "--fp8-hybrid"], world_size=1)[0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0) if device.index else (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    with pytest.raises(ConfigError, match=r"and GPU 1 has 8\.0"):
        refuse_device(config, torch.device("cuda", 1))


def test_more_memory_than_the_device_has_is_told_before_the_run() -> None:
    assert describe_shortage(5 * 2**20, 5 * 2**20) is None
    said = describe_shortage(5 * 2**20 + 1, 5 * 2**20)
    assert said is not None
    assert said.startswith("note: that is more than the 5 MiB of the device")
    assert find_capacity(torch.device("cpu")) > 2**28


def test_a_mesh_makes_its_gpu_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches kernels on the current GPU, wherever their tensors are: rank 1 ended at its first update."""
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    mesh = build_mesh(Launch(), torch.device("cuda", 1), "nccl")
    assert taken == [mesh.device] == [torch.device("cuda", 1)]
    build_mesh(Launch(), torch.device("cpu"), "gloo")
    assert len(taken) == 1
