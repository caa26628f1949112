"""Every way to compute against the recorded fp32 curves, on the CPU and where there is one on a GPU; and none of them
changes what a run in fp32 gives after it, in the same process, from what it gave before.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import make_golden
from helpers.fake_packages import install, install_apex, install_engine, install_liger, install_torchao
from helpers.pairs import write_pair
from helpers.runs import TINY, one_rank, read_metrics, run_tiny
from megaflow_trainer.config import read_command
from megaflow_trainer.ops import packages
from megaflow_trainer.ops.attention import ATTENTION
from megaflow_trainer.ops.layer_packages import PARTS
from megaflow_trainer.ops.registry import Need
from megaflow_trainer.parallel import precision
from megaflow_trainer.parallel.kernels import list_parts
from megaflow_trainer.parallel.mesh import Launch, Mesh, build_mesh

pytestmark = pytest.mark.golden
H200 = torch.device("cuda", 0)
FP8 = ("--bf16", "--fp8-hybrid")
PATHS: dict[str, tuple[str, ...]] = {
    "bf16": ("--bf16",),
    "all_bf16": ("--bf16", "--all-bf16"),
    "fp16": ("--fp16", "--initial-loss-scale", "1024"),
    "fp8_tensorwise": FP8,
    "fp8_delayed": (*FP8, "--fp8-recipe", "delayed"),
    "fp8_rowwise": ("--bf16", "--fp8-format", "e4m3", "--fp8-recipe", "rowwise"),
}
PACKAGES: dict[str, tuple[str, ...]] = {
    "flash_attn_4": ("--bf16", "--attention-backend", "flash_attn_4"),
    "transformer_engine": ("--bf16", "--transformer-impl", "transformer_engine"),
    "transformer_engine_attention": ("--bf16", "--attention-backend", "transformer_engine"),
    "transformer_engine_fp8": (*FP8, "--transformer-impl", "transformer_engine"),
    "liger": ("--bf16", "--norm-kernel", "liger", "--loss-kernel", "liger"),
    "apex": ("--bf16", "--norm-kernel", "apex", "--adam-kernel", "apex"),
    "apex_sums": ("--bf16", "--wgrad-kernel", "apex"),
    "torchao": (*FP8, "--fp8-kernel", "torchao"),
}
LARGEST = {"fp16": 1e-3, "bf16": 3e-3, "all_bf16": 0.03}
"""How far a loss may be from that in fp32, in nats; in fp8 and by packages 5e-3. Weights that are kept in bf16 alone
lose what steps are smaller than their rounding.
"""

SAME = {"cpu": 1e-6, "cuda": 1e-5}
"""How far a loss in fp32 may be from that of the same run before, relative to it: other ways are 1e-4 away and more."""
Losses = dict[str, list[float]]


def run(name: str, flags: tuple[str, ...], folder: Path, mesh: Mesh) -> list[float]:
    """Losses of a model whose curve is recorded."""
    words = [*make_golden.MODELS[name].split(), *flags, "--run-dir", str(folder)]
    run_tiny(write_pair(folder.parent / "toy_text_document"), words, mesh)
    return [line["lm_loss"] for line in read_metrics(folder)]


def read_recorded(name: str) -> list[float]:
    losses: list[float] = json.loads((make_golden.CURVES / f"{name}.json").read_text(encoding="utf-8"))["lm_loss"]
    return losses


def run_plainly(folder: Path, mesh: Mesh) -> Losses:
    """Losses in fp32 of every model, near those that are recorded."""
    found = {name: run(name, (), folder / name, mesh) for name in make_golden.MODELS}
    for name, losses in found.items():
        assert losses == pytest.approx(read_recorded(name), abs=1e-5 if mesh.device.type == "cpu" else 2e-3)
    return found


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """Losses in fp32 on the CPU before any path was taken."""
    return run_plainly(tmp_path_factory.mktemp("before"), one_rank())


@pytest.fixture(scope="module")
def before_on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """Losses in fp32 on the GPU before any path was taken on it."""
    return run_plainly(tmp_path_factory.mktemp("before"), one_gpu())


def one_gpu() -> Mesh:
    return build_mesh(Launch(), H200, "nccl")


def is_same(losses: list[float], others: list[float], mesh: Mesh) -> bool:
    return bool(losses == pytest.approx(others, rel=SAME[mesh.device.type], abs=0))


def compare(path: str, flags: tuple[str, ...], name: str, folder: Path, mesh: Mesh, before: Losses) -> None:
    found = run(name, flags, folder / "path", mesh)
    assert found == pytest.approx(read_recorded(name), abs=LARGEST.get(path, 5e-3))
    assert found[-1] < found[0] - 0.3
    assert not is_same(found, before[name], mesh), "it is another way"
    assert is_same(run(name, (), folder / "plain", mesh), before[name], mesh), "fp32 is what it was"


@pytest.mark.parametrize("name", make_golden.MODELS)
@pytest.mark.parametrize("path", PATHS)
def test_a_path_follows_the_recorded_curve(
    path: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: Losses
) -> None:
    monkeypatch.setattr(precision, "FP8_WIDTH", 16)  # else none of these layers would be large enough
    monkeypatch.setattr("megaflow_trainer.training.run.refuse_device", lambda config, device: None)
    compare(path, PATHS[path], name, tmp_path, one_rank(), before)


@pytest.mark.parametrize("name", make_golden.MODELS)
def test_a_run_in_fp32_that_computes_in_bf16_would_be_seen(name: str, tmp_path: Path, before: Losses) -> None:
    """Though it is nearer to fp32 than a GPU is to the recorded curve, by the tolerance of a GPU too."""
    spoilt = run(name, ("--bf16",), tmp_path / "spoilt", one_rank())
    assert spoilt == pytest.approx(read_recorded(name), abs=2e-3)
    for kind in SAME:
        mesh = dataclasses.replace(one_rank(), device=torch.device(kind))
        assert is_same(before[name], before[name], mesh)
        assert not is_same(spoilt, before[name], mesh)


def find_lack(flags: tuple[str, ...], device: torch.device) -> str | None:
    """What a machine lacks for a path: a package, or what its GPU would have to be. Anything else that ends a run is a
    fault.
    """
    config, _ = read_command([*TINY, "--train-iters", "1", "--data-path", "x", *flags], world_size=1)
    if config.step.fp8 != "none" and torch.cuda.get_device_capability(device) < (8, 9):
        return "this GPU has no fp8"
    usual = Need(device=device, dtype=torch.bfloat16, head_dim=64)  # which every kernel takes
    lacks = [PARTS[part].find_obstacle(device) for part in list_parts(config.kernels)]
    lacks += [entry.obstacle(usual) for entry in ATTENTION if entry.name == config.model.attention]
    return next(filter(None, lacks), None)


@pytest.mark.parametrize("path", [*PATHS, *PACKAGES])
def test_a_path_is_skipped_for_want_of_its_package_alone(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    flags = {**PATHS, **PACKAGES}[path]
    packages._load.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(packages.importlib, "import_module", import_nothing)
        lack = find_lack(flags, H200)
        assert (lack is None) == (path in PATHS)
        assert lack is None or "is not installed" in lack
    packages._load.cache_clear()
    install_apex(monkeypatch)
    install_engine(monkeypatch)
    install_liger(monkeypatch)
    install_torchao(monkeypatch)
    install(
        monkeypatch,
        transformer_engine__pytorch__DotProductAttention=None,
        flash_attn__cute__flash_attn_func=None,
        flash_attn__cute__interface___flash_attn_bwd=None,
    )
    assert find_lack(flags, H200) is None
    packages._load.cache_clear()


def import_nothing(name: str) -> None:
    raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.filterwarnings("ignore")  # packages, and torch's compiler, warn of themselves
@pytest.mark.parametrize("name", make_golden.MODELS)
@pytest.mark.parametrize("path", [*PATHS, *PACKAGES])
def test_a_path_on_a_gpu_follows_the_recorded_curve(
    path: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before_on_gpu: Losses
) -> None:
    flags = {**PATHS, **PACKAGES}[path]
    lack = find_lack(flags, H200)
    if lack is not None:
        pytest.skip(lack)
    monkeypatch.setattr(precision, "FP8_WIDTH", 16)
    compare(path, flags, name, tmp_path, one_gpu(), before_on_gpu)
