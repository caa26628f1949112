"""What only a GPU can show: the copy stream, device-side times, the flash kernel, and runs that equal the CPU's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.pairs import write_pair
from helpers.runs import read_curve, read_metrics, read_tensors, run_tiny
from helpers.saved import count_saved_bytes
from megaflow_trainer.checkpoint import dcp, store
from megaflow_trainer.checkpoint.saver import Saver
from megaflow_trainer.config.activations import GPU, count_activation_bytes
from megaflow_trainer.config.sections import ModelConfig, RecomputeConfig
from megaflow_trainer.model.gpt import build_gpt
from megaflow_trainer.model.init import init_weights
from megaflow_trainer.model.sockets import Sockets
from megaflow_trainer.ops.attention import attend_flash, attend_math, prefer_kernels
from megaflow_trainer.parallel.apply import Plan, parallelize
from megaflow_trainer.parallel.mesh import Launch, Mesh, build_mesh
from megaflow_trainer.training import run as run_module
from megaflow_trainer.training import step as step_module
from megaflow_trainer.training.clock import FORWARD, H2D, HOST_WAIT, LOADER_BOUND, PHASES, Clock
from megaflow_trainer.training.feed import Feed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")]
LENGTH = ("--train-iters", "8", "--global-batch-size", "8", "--micro-batch-size", "4", "--eod-mask-loss")


def one_gpu() -> Mesh:
    return build_mesh(Launch(), torch.device("cuda", 0), "nccl")


class PausingLoader:
    """Yields the same batch after a pause."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def __next__(self) -> Any:
        time.sleep(self.pause_s)
        rows = np.arange(10).reshape(2, 5)

        class Batch:
            tokens, labels, sample_ids, loss_mask = rows[:, :-1], rows[:, 1:], np.arange(2), None

        return Batch


def measure(pause_s: float, num_products: int) -> dict[str, float]:
    """Seconds by phase of 10 steps, each a pause of the loader and some matrix products on the device."""
    device = torch.device("cuda", 0)
    clock = Clock(device)
    feed = Feed(PausingLoader(pause_s), device, clock, vocab_size=10, eod_id=None)  # type: ignore[arg-type]
    matrix = torch.randn(4096, 4096, device=device)
    steps = []
    for _ in range(12):
        feed.next()
        with clock.phase(FORWARD):
            for _ in range(num_products):
                matrix @ matrix
        steps.append(clock.end_step())  # nothing waits here
    found = [times.read() for times in steps][2:]
    total = {name: sum(seconds[name] for _, seconds in found) for name in found[0][1]}
    return {**total, "step": sum(step_s for step_s, _ in found)}


def test_a_slow_source_is_loader_bound_and_nowhere_else() -> None:
    seconds = measure(0.02, 1)
    assert seconds[LOADER_BOUND] > 0.12
    assert seconds[HOST_WAIT] > 0.19
    assert sum(seconds[name] for name in PHASES) > 0.97 * seconds["step"]
    assert seconds[FORWARD] < 0.3 * seconds["step"]


def test_the_same_source_hidden_behind_compute_is_no_loader_bound_time() -> None:
    seconds = measure(0.005, 40)
    assert seconds[HOST_WAIT] > 0.045
    assert seconds[LOADER_BOUND] < 1e-3 * seconds["step"]
    assert seconds[FORWARD] > 0.97 * seconds["step"]
    assert 0 < seconds[H2D] < seconds["step"]


BIG = ["--num-layers", "8", "--hidden-size", "1024", "--num-attention-heads", "16", "--seq-length", "1024", "--bf16"]
"""Large enough that the device is behind the host, as it is in a run worth a GPU."""


def test_measured_phases_are_97_percent_of_a_step(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "toy", num_documents=400, document_tokens=600)
    flags = [
        "--train-iters",
        "30",
        "--global-batch-size",
        "128",
        "--micro-batch-size",
        "16",
        "--log-interval",
        "10",
        *BIG,
    ]
    run_tiny(prefix, [*flags, "--run-dir", str(tmp_path / "run")], one_gpu())
    for line in read_metrics(tmp_path / "run")[1:]:
        assert sum(line[f"{name}_s"] for name in PHASES) >= 0.97 * line["step_time_s"]
        assert line["loader_bound_s"] <= 1e-3 * line["step_time_s"]
        assert line["memory_peak_bytes"] > line["memory_weights_bytes"] + line["memory_optimizer_bytes"]


@contextmanager
def refusing_waits() -> Iterator[None]:
    """Whatever lets the host wait for the GPU's numbers (`.item()`, `.tolist()`, `nonzero`, a copy to or from memory
    that is not pinned) raises a RuntimeError.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_a_wait_of_the_host_is_seen() -> None:
    number = torch.ones((), device="cuda")
    for wait in (number.item, number.tolist, number.cpu):
        with refusing_waits(), pytest.raises(RuntimeError, match="synchroniz"):
            wait()
    assert number.item() == 1


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_a_step_waits_for_nothing_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is never synchronised as a whole, nor asked for a number from the third step on, before which kernels
    are made and compared; and a bad step is skipped without asking it. Experts are left out: they wait once a layer.
    """
    waits: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waits.append("device"))
    keep, counts = step_module.sum_losses, [0]

    def spoil(model: Any, batch: Any, *rest: Any) -> Any:
        loss, by_sample = keep(model, batch, *rest)
        counts[0] += 1
        return (loss * torch.nan, by_sample * torch.nan) if counts[0] == 5 else (loss, by_sample)

    monkeypatch.setattr(step_module, "sum_losses", spoil)
    train_step, steps = run_module.train_step, [0]

    def watch(*given: Any, **options: Any) -> Any:
        steps[0] += 1
        with refusing_waits() if steps[0] > 2 else nullcontext():
            return train_step(*given, **options)

    monkeypatch.setattr(run_module, "train_step", watch)
    run_tiny(write_pair(tmp_path / "toy"), [*LENGTH, "--run-dir", str(tmp_path / "run")], one_gpu())
    assert waits == []
    assert steps == [8]
    lines = read_metrics(tmp_path / "run")
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 0, 0, 0, 0, 0]
    norms = [line["param_norm"] for line in lines]
    assert norms[2] == norms[1] != norms[3]
    (event,) = read_metrics(tmp_path / "run", "event")
    assert (event["iteration"], event["kind"]) == (3, "loss")
    assert sum(item["loss"] is None for item in event["samples"]) == 4


def test_a_checkpoint_holds_what_was_there_when_it_was_asked_for(tmp_path: Path) -> None:
    weight = torch.ones(1 << 24, device="cuda")
    saver = Saver(tmp_path, None)
    for step in (1, 2):  # the second time the pinned memory of the first is used again
        weight.fill_(float(step))
        saver.start(step, {"model/w": weight}, {})
        weight.zero_()
        saver.finish()
        found = dcp.read_tensors(store.name_folder(tmp_path, step), "model/")["w"]
        assert (found.min().item(), found.max().item()) == (step, step)


def test_a_profile_shows_the_kernels(tmp_path: Path) -> None:
    flags = [*LENGTH, "--profile", "--profile-step-start", "5", "--profile-step-end", "6", "--run-dir", str(tmp_path)]
    run_tiny(write_pair(tmp_path / "toy"), flags, one_gpu())
    table = (tmp_path / "profile" / "rank_0_to_6.txt").read_text()
    assert "no kernel ran for " in table
    assert "phase" in table


def test_a_profile_of_kernels_alone_has_their_times(tmp_path: Path) -> None:
    steps = ["--profile-step-start", "5", "--profile-step-end", "6", "--run-dir", str(tmp_path)]
    run_tiny(write_pair(tmp_path / "toy"), [*LENGTH, "--profile", "--profile-kernels-only", *steps], one_gpu())
    table = (tmp_path / "profile" / "rank_0_to_6.txt").read_text()
    first = table.splitlines()[1]  # the kernel with the most time
    assert float(first.split()[-2]) > 0
    assert "no kernel ran for " in table
    assert not any(word in table for word in ("phase", "aten::", "cudaLaunchKernel"))


def test_flash_attention_equals_attention_written_out() -> None:
    q, k, v = torch.randn(3, 2, 4, 64, 32, device="cuda").bfloat16()
    torch.testing.assert_close(
        attend_flash(q, k, v, dropout=0.0), attend_math(q, k, v, dropout=0.0), atol=2e-2, rtol=2e-2
    )


def test_a_gpu_run_equals_the_cpus(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "toy")
    for name, mesh, flags in (("cpu", None, []), ("gpu", one_gpu(), []), ("bf16", one_gpu(), ["--bf16"])):
        run_tiny(prefix, [*LENGTH, *flags, "--run-dir", str(tmp_path / name)], mesh)
    for cpu, gpu, bf16 in zip(*(read_curve(tmp_path / name) for name in ("cpu", "gpu", "bf16")), strict=True):
        assert gpu[1] == pytest.approx(cpu[1], abs=1e-4)
        assert gpu[2] == pytest.approx(cpu[2], rel=1e-3)
        assert bf16[1] == pytest.approx(cpu[1], abs=2e-2)


def test_a_gpu_run_resumes_with_its_own_dropout(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "toy")
    flags = [*LENGTH, "--bf16", "--hidden-dropout", "0.2", "--save-interval", "4"]
    run_tiny(prefix, [*flags, "--save", str(tmp_path / "straight")], one_gpu())
    (tmp_path / "resumed").mkdir()
    (tmp_path / "straight" / "iter_0000004").rename(tmp_path / "resumed" / "iter_0000004")
    run_tiny(prefix, [*flags, "--save", str(tmp_path / "resumed")], one_gpu())
    for straight, resumed in zip(read_curve(tmp_path / "straight")[4:], read_curve(tmp_path / "resumed"), strict=True):
        assert resumed[1] == pytest.approx(straight[1], abs=1e-3)
    assert "rng/cuda.0" in read_tensors(tmp_path / "resumed", 8)


def test_mfu_is_shown_on_a_known_gpu(tmp_path: Path) -> None:
    run_tiny(write_pair(tmp_path / "toy"), [*LENGTH, "--bf16", "--run-dir", str(tmp_path)], one_gpu())
    name = torch.cuda.get_device_name()
    assert ("mfu" in read_metrics(tmp_path)[0]) == any(known in name for known in ("A100", "H100", "H200", "B200"))


LLAMA: dict[str, Any] = {
    "norm": "RMSNorm",
    "position_kind": "rope",
    "activation": "swiglu",
    "linear_bias": False,
    "num_kv_heads": 2,
    "tied_embeddings": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": LLAMA,
    "qwen": {**LLAMA, "qk_norm": True},
    "window": {"window": 64, "attention_dropout": 0.0},
    "latent": {
        **LLAMA,
        "num_kv_heads": None,
        "is_latent": True,
        "kv_latent_dim": 128,
        "qk_dim": 64,
        "qk_rotary_dim": 32,
        "v_dim": 64,
    },
    "nemotron": {**LLAMA, "norm": "LayerNorm", "activation": "squared_relu"},
}


@pytest.mark.parametrize("mode", ["none", "full", "cores", "attention", "everything"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_kept_bytes_by_formula_are_those_of_the_gpus_kernels(shape: dict[str, Any], mode: str) -> None:
    base: dict[str, Any] = {"num_layers": 3, "hidden_dim": 256, "num_heads": 4, "max_positions": 512}
    config = ModelConfig(**(base | {"vocab_size": 1000, "vocab_multiple": 8} | shape))
    modes = {"cores": ("attention_core", "mlp_activation"), "attention": ("attention",)}
    modes["everything"] = ("attention", "attention_norm", "mlp", "mlp_norm")
    recompute = RecomputeConfig(
        granularity=mode if mode in ("none", "full") else "selective",
        method="uniform" if mode == "full" else None,
        modules=modes.get(mode, ()),
    )
    device = torch.device("cuda", 0)
    model = build_gpt(config, Sockets(), device=device, dtype=torch.bfloat16)
    init_weights(model, config, seed=1)
    wrapped = parallelize(model, one_gpu(), Plan(recompute=recompute))
    tokens = torch.randint(1000, (2, 513), device=device)
    with prefer_kernels(device):
        found, _ = count_saved_bytes(model, lambda: wrapped(tokens[:, :-1], tokens[:, 1:]))
    counted = count_activation_bytes(
        config, recompute, [recompute.modules] * 3, seq_len=512, micro_batch_size=2, item_bytes=2, kernels=GPU
    )
    assert counted.kept == pytest.approx(found, rel=0.02)


def test_offloaded_and_compressed_activations_leave_the_gpu(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "toy")
    flags = [*LENGTH, "--bf16", "--hidden-size", "64", "--seq-length", "64"]
    for name, extra in (("plain", []), ("away", ["--offload-activations"]), ("fp8", ["--compress-activations", "fp8"])):
        run_tiny(prefix, [*flags, *extra, "--run-dir", str(tmp_path / name)], one_gpu())
    plain, away, fp8 = (read_curve(tmp_path / name) for name in ("plain", "away", "fp8"))
    assert [line[1] for line in away] == pytest.approx([line[1] for line in plain], abs=1e-3)
    assert fp8[0][1] == pytest.approx(plain[0][1], abs=1e-3)
    last = read_metrics(tmp_path / "fp8")[-1]
    assert last["kept_bytes"] == last["saved_bytes"] / 2
    assert 0 < last["saved_error"] < 4e-2
