"""Micro-batches that are recorded once and replayed, with a recorder of the CPU; CUDA's is in test_fused_gpu.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.pairs import write_pair
from helpers.runs import one_rank, read_curve, read_metrics, run_tiny
from megaflow.errors import ConfigError
from megaflow_trainer.config import read_command
from megaflow_trainer.parallel.data import MainGradients
from megaflow_trainer.parallel.graphs import MicroBatchGraph
from megaflow_trainer.training import kernels as kernels_module
from megaflow_trainer.training import run as run_module

LENGTH = ("--train-iters", "4", "--global-batch-size", "8", "--micro-batch-size", "2")


class HostRecorder:
    """Replays by running again, without the hooks that a CUDA graph would not run, into results of fixed places."""

    def __init__(self, *_: object) -> None:
        self.gradients: MainGradients | None = None
        self.num_run, self.num_recorded = 0, 0

    def run(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        self.num_run += 1
        return work()

    def record(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
        self.num_recorded += 1
        assert self.gradients is not None
        assert self.gradients.is_held, "else hooks count a backward that computes nothing"
        gradients, before = self.gradients, [kept.clone() for kept in self.gradients.kept]
        places = work()
        for kept, value in zip(gradients.kept, before, strict=True):
            kept.copy_(value)  # recording computes nothing
        for place in places:
            place.fill_(torch.nan)

        def replay() -> None:
            with gradients.hold():
                results = work()
            for place, result in zip(places, results, strict=True):
                place.copy_(result)

        return places, replay


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[HostRecorder]:
    """The recorders of the runs of a test, which may be on the CPU."""
    made: list[HostRecorder] = []

    def make(gradients: MainGradients, recorder: HostRecorder, **options: Any) -> MicroBatchGraph:
        recorder.gradients = gradients
        made.append(recorder)
        return MicroBatchGraph(gradients, recorder, **options)

    monkeypatch.setattr(run_module, "refuse_device", lambda config, device: None)
    monkeypatch.setattr(kernels_module, "CudaRecorder", HostRecorder)
    monkeypatch.setattr(kernels_module, "MicroBatchGraph", make)
    return made


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--eod-mask-loss --hidden-dropout 0.2",
        "--position-embedding-type rope --swiglu --untie-embeddings-and-output-weights",
        "--zero-stage 1 --ddp-bucket-size 500",
        "--rampup-batch-size 4 4 16",
        "--eval-interval 2 --eval-iters 1",
    ],
)
def test_a_run_of_replayed_micro_batches_is_the_run_without(
    tmp_path: Path, recorders: list[HostRecorder], flags: str
) -> None:
    prefix = write_pair(tmp_path / "toy")
    words = [*LENGTH, *flags.split()]
    run_tiny(prefix, [*words, "--run-dir", str(tmp_path / "plain")])
    run_tiny(prefix, [*words, "--cuda-graph-impl", "local", "--run-dir", str(tmp_path / "graph")])
    assert read_curve(tmp_path / "graph") == read_curve(tmp_path / "plain")
    assert read_metrics(tmp_path / "graph", "validation_loss") == read_metrics(tmp_path / "plain", "validation_loss")
    (recorder,) = recorders
    assert (recorder.num_run, recorder.num_recorded) == (3, 1)


def test_the_flags_of_megatron_choose_and_the_first_ones_run_as_they_are(
    tmp_path: Path, recorders: list[HostRecorder]
) -> None:
    """--cuda-graph-warmup-steps"""
    prefix = write_pair(tmp_path / "toy")
    words = [*LENGTH, "--enable-cuda-graph", "--cuda-graph-scope", "full_iteration", "--run-dir", str(tmp_path)]
    run_tiny(prefix, [*words, "--cuda-graph-warmup-steps", "5"])
    assert (recorders[0].num_run, recorders[0].num_recorded) == (5, 1)


def make_graph(told: list[str]) -> tuple[MicroBatchGraph, HostRecorder, torch.nn.Linear]:
    model = torch.nn.Linear(3, 2)
    gradients, recorder = MainGradients(model, one_rank()), HostRecorder()
    recorder.gradients = gradients
    gradients.start()
    return MicroBatchGraph(gradients, recorder, num_warmup=1, tell=told.append), recorder, model


def test_other_shapes_run_as_they_are_and_results_are_copies() -> None:
    graph, recorder, model = make_graph([])

    def work(inputs: Any) -> tuple[Tensor, ...]:
        loss = model(inputs[0]).sum()
        loss.backward()
        return (loss.detach(),)

    inputs = [torch.full((rows, 3), value) for rows, value in ((1, 1.0), (2, 2.0), (4, 4.0), (2, 5.0), (2, 7.0))]
    found = [graph.run(work, (x, None))[0] for x in inputs]
    sums = [model(x).sum().item() for x in inputs]
    assert [x.item() for x in found] == pytest.approx(sums), "of each replay its own"
    assert (recorder.num_run, graph.num_replayed) == (2, 3)
    grad = next(main.main_grad for main in graph.gradients.parameters if main.name == "weight")
    assert grad.tolist() == [[1 + 4 + 16 + 10 + 14] * 3] * 2


@pytest.mark.parametrize(
    "message, words",
    [
        ("operation not permitted when stream is capturing\nmore", "operation not permitted when stream is capturing"),
        ("", "no reason given"),
    ],
)
def test_what_cannot_be_recorded_runs_as_it_is_and_says_why(message: str, words: str) -> None:
    told: list[str] = []
    graph, recorder, model = make_graph(told)

    def fail(work: Any) -> Any:
        model(torch.ones(1, 3)).sum().backward()
        raise RuntimeError(message)

    recorder.record = fail  # type: ignore[method-assign]
    for _ in range(3):
        assert graph.run(lambda inputs: (inputs[0] + 1,), (torch.ones(2),))[0].tolist() == [2, 2]
    assert told == [f"micro-batches are not replayed as a CUDA graph: {words}"]
    assert graph.num_replayed == 0
    assert model.weight.grad is None


def test_what_a_recording_that_failed_left_is_no_gradient() -> None:
    """A backward that ends before its hooks leaves gradients of memory that was only recorded."""
    graph, recorder, model = make_graph([])

    def fail(work: Any) -> Any:
        model.weight.grad = torch.full_like(model.weight, torch.nan)
        raise RuntimeError("capture failed")

    recorder.record = fail  # type: ignore[method-assign]
    for _ in range(2):  # the first one runs as it is
        graph.run(lambda inputs: (inputs[0] + 1,), (torch.ones(2),))
    assert graph.has_failed
    graph.gradients.reduce()
    assert [kept.abs().sum().item() for kept in graph.gradients.kept] == [0]


@pytest.mark.parametrize(
    ("flags", "ranks", "words"),
    [
        ("--pipeline-model-parallel-size 2", 2, r"parallel\.pp \(--pipeline-model-parallel-size\): ranks talk"),
        ("--tensor-model-parallel-size 2", 2, r"parallel\.tp .*: ranks talk to each other inside of micro-batches"),
        ("--zero-stage 2", 2, "buffers of gradients come and go"),
        ("--fp16", 1, "the loss scale changes"),
        ("--bf16 --fp8-hybrid", 1, "scales change from step to step"),
        ("--bf16 --fp8-format e4m3", 1, "scales change from step to step"),
        ("--num-experts 2", 1, "how many tokens an expert gets changes"),
        ("--attention-dropout 0.1", 1, "draws from a stream of the host"),
        ("--mtp-num-layers 1", 1, "its losses are read between micro-batches"),
        ("--reset-attention-mask", 1, "documents end anywhere"),
        ("--recompute-activations", 1, "random streams are replayed by the host"),
        ("--offload-activations", 1, "kept for backward is handled by the host"),
    ],
)
def test_what_changes_from_one_micro_batch_to_the_next_is_refused(flags: str, ranks: int, words: str) -> None:
    base = "--num-layers 2 --seq-length 16 --vocab-size 64 --train-iters 1 --data-path none --micro-batch-size 2"
    plain = f"{base} --attention-dropout 0 {flags}"
    assert read_command(plain.split(), world_size=ranks)[0].step.cuda_graph == "none"
    with pytest.raises(ConfigError, match=f"step.cuda_graph .*does not go with .*{words}.*; drop one of them"):
        read_command(f"{plain} --cuda-graph-impl local".split(), world_size=ranks)


def test_graphs_without_a_gpu_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"CUDA graphs \(--cuda-graph-impl local\) need a GPU"):
        run_tiny(write_pair(tmp_path / "toy"), [*LENGTH, "--cuda-graph-impl", "local", "--run-dir", str(tmp_path)])
