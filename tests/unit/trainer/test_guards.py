"""What watches over a run, each apart: spikes, a hung step, lost ranks, memory that ran out, sinks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.pairs import write_pair
from helpers.runs import TINY, read_metrics, run_tiny
from megaflow import GPTDataset, IndexedDataset
from megaflow.blend import BlendedDataset
from megaflow.errors import ConfigError, MegaflowError
from megaflow_trainer.config import read_command
from megaflow_trainer.config.exit_codes import DIVERGED, FAULT, HUNG, MEANINGS, OUT_OF_MEMORY, RANK_LOST
from megaflow_trainer.training import build as build_module
from megaflow_trainer.training import step as step_module
from megaflow_trainer.training.clock import FORWARD, Clock
from megaflow_trainer.training.documents import Documents, describe_documents
from megaflow_trainer.training.guards import DivergedError
from megaflow_trainer.training.launch import find_code
from megaflow_trainer.training.manifest import Ending
from megaflow_trainer.training.oom import ShortageError, is_out_of_memory
from megaflow_trainer.training.peers import PeerWatch
from megaflow_trainer.training.processes import Process
from megaflow_trainer.training.sinks import make_strict
from megaflow_trainer.training.spikes import SpikeWatch
from megaflow_trainer.training.watchdog import Watchdog

LENGTH = ("--train-iters", "6", "--global-batch-size", "4", "--micro-batch-size", "2")
WAIT_S = 60


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(tmp_path_factory.mktemp("data") / "toy_text_document")


def judge(losses: list[float], threshold: float = 8.0) -> list[int]:
    """Places of the losses that are spikes."""
    watch = SpikeWatch(window=64, threshold=threshold)
    return [place for place, loss in enumerate(losses) if watch.judge(loss) is not None]


NOISE = [3.0 + 0.01 * ((7 * place) % 11 - 5) for place in range(40)]


def test_a_loss_far_above_the_usual_is_a_spike_and_noise_is_none() -> None:
    assert judge(NOISE) == []
    assert judge([*NOISE, 3.5, 3.0, 6.0, 3.0]) == [40, 42]  # the first does not hide the second
    assert judge([*NOISE, 2.0]) == []  # below is no spike
    assert judge([*NOISE, 3.5], threshold=0) == []
    assert judge([*NOISE, float("nan"), 3.0]) == []


def test_a_falling_loss_and_the_first_steps_are_no_spikes() -> None:
    assert judge([10.0 - 0.1 * place for place in range(60)]) == []
    assert judge([3.0, 3.0, 30.0]) == []
    assert judge([3.0] * 40) == []


def test_spikes_are_judged_alike_after_a_resume() -> None:
    first = SpikeWatch(window=64, threshold=8.0)
    for loss in NOISE:
        first.judge(loss)
    second = SpikeWatch(window=64, threshold=8.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.judge(3.4) == first.judge(3.4) is not None
    second.load_state_dict(None)
    assert second.judge(30.0) is None


def test_a_hung_step_is_told_with_its_stacks_and_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    clock, codes = Clock(torch.device("cpu")), []
    clock.step = 12
    with Watchdog(clock, tmp_path, 3, hang_s=0.2, end=codes.append, patience_s=0.0), clock.phase(FORWARD):
        deadline = time.monotonic() + WAIT_S
        while not codes and time.monotonic() < deadline:
            time.sleep(0.01)
    assert codes == [HUNG]
    stacks = (tmp_path / "stacks" / "rank_3.txt").read_text()
    assert stacks.startswith("rank 3 made no progress for 0.2 s: iteration 12, phase forward\n")
    assert "test_a_hung_step_is_told" in stacks
    assert "Current thread" in stacks
    assert "error: rank 3 made no progress for 0.2 s (--hang-timeout): iteration 12, phase" in capfd.readouterr().err


@pytest.mark.parametrize("process", [os.getpid(), 1], ids=["own", "another run's"])
def test_a_hung_run_writes_its_end_into_its_own_start(tmp_path: Path, process: int) -> None:
    clock, codes = Clock(torch.device("cpu")), []
    clock.step = 12
    (tmp_path / "run.json").write_text(json.dumps({"name": "gpt", "starts": [{"ranks": [{"process": process}]}]}))
    ending = Ending(iteration=11)
    with Watchdog(clock, tmp_path, 0, hang_s=0.1, ending=ending, end=codes.append, patience_s=0.0):
        deadline = time.monotonic() + WAIT_S
        while not codes and time.monotonic() < deadline:
            time.sleep(0.01)
    (start,) = json.loads((tmp_path / "run.json").read_text())["starts"]
    if process == os.getpid():
        assert (start["end"]["exit_code"], start["end"]["iteration"]) == (HUNG, 11)
        assert start["end"]["reason"] == "no progress for 0.1 s: iteration 12, phase other"
    else:
        assert "end" not in start


def test_a_run_that_gets_on_is_left_alone(tmp_path: Path) -> None:
    clock, codes = Clock(torch.device("cpu")), []
    hang_s, longest_s, beat_at = 1.0, 0.0, time.monotonic()
    with Watchdog(clock, tmp_path, 0, hang_s=hang_s, end=codes.append, patience_s=0.0):
        for _ in range(30):
            clock.beat()
            time.sleep(0.05)
            longest_s, beat_at = max(longest_s, time.monotonic() - beat_at), time.monotonic()
    if longest_s >= hang_s / 2:
        pytest.skip("this machine itself stood still")
    with Watchdog(clock, tmp_path, 0, hang_s=0.0, end=codes.append, patience_s=0.0):
        time.sleep(0.1)
    assert codes == []
    assert not (tmp_path / "stacks").exists()


@pytest.mark.parametrize("how", ["killed", "with an error", "as it should"])
def test_a_rank_that_dies_takes_the_others_with_it(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    store, codes, reasons = dist.HashStore(), [], []
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        ranks = [Process.find(os.getpid()), Process.find(process.pid)]
        sibling = PeerWatch(1, ranks, store)
        watch = PeerWatch(0, ranks, store, record=reasons.append, end=codes.append, patience_s=0.1)
        watch.start()
        assert watch.find_lost() is None
        if how != "killed":
            sibling.leave(is_well=how == "as it should")
        process.kill()
        process.wait()
    if how == "as it should":
        assert watch.wait_for_lost(patience_s=1.0) is None
        watch.leave(is_well=True)
        assert codes == []
        return
    assert watch.wait_for_lost() == 1
    deadline = time.monotonic() + WAIT_S
    while not codes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert codes == [RANK_LOST]
    word = "died" if how == "killed" else "ended with an error"
    assert reasons == [f"rank 1 {word}"]
    assert f"error on rank 0: rank 1 {word}; the same command goes on" in capfd.readouterr().err


def test_a_rank_that_died_before_the_watch_began_is_found_too() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        ranks = [Process.find(os.getpid()), Process.find(process.pid), Process("another-machine", process.pid, "1")]
        process.kill()
        process.wait()
    watch = PeerWatch(0, ranks, dist.HashStore())
    assert list(watch.siblings) == [1]
    assert watch.wait_for_lost(WAIT_S) == 1
    assert watch.describe_lost() == "rank 1 died"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell when a process began")
def test_a_process_is_told_from_a_later_one_of_its_number() -> None:
    own = Process.find(os.getpid())
    assert Process.parse(str(own)) == own
    assert own.is_here()
    assert not own.is_gone()
    assert Process(own.host, own.number, f"{int(own.birth) - 1}").is_gone()
    assert Process.parse("some/odd-host/7/99") == Process("some/odd-host", 7, "99")
    assert not Process("some/odd-host", 7, "99").is_here()


class GoneStore(dist.HashStore):
    """A store whose keeper has left."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("connection reset by peer")


def test_what_a_lost_rank_left_in_a_store_that_is_gone_is_not_guessed() -> None:
    ranks = [Process.find(os.getpid()), Process(Process.find(1).host, 1, "-")]
    watch = PeerWatch(0, ranks, None)
    watch.store = GoneStore()
    assert watch.is_store_gone()
    assert watch.describe_lost() == "the process that kept the store is gone"
    assert watch.find_lost() == 1
    assert watch.describe_lost() == "rank 1 died or ended with an error"


ENDS = """
import os, time
import torch.distributed as dist
from megaflow_trainer.training import peers
from megaflow_trainer.training.processes import Process

peers.POLL_S = 0.0
own = Process.find(os.getpid())
store = dist.TCPStore("localhost", 0, 1, True)
watches = [peers.PeerWatch(0, (own, own), store) for _ in range(8)]
for watch in watches:
    watch.start()
time.sleep(0.1)
for watch in watches:
    watch.leave(is_well=True)
    watch.stop()
"""


def test_a_process_does_not_end_while_its_watch_asks_the_store() -> None:
    """Python ends threads that come back from C++ by unwinding them, which C++ does not bear."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", ENDS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_single_rank_watches_nobody() -> None:
    watch = PeerWatch(0, (), None)
    watch.start()
    assert watch.wait_for_lost() is None
    watch.leave(is_well=True)


@pytest.mark.parametrize(
    "error, is_shortage",
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            True,
        ),
        (MemoryError(), True),
        (RuntimeError("Connection closed by peer"), False),
    ],
)
def test_what_says_that_memory_ran_out(error: BaseException, is_shortage: bool) -> None:
    assert is_out_of_memory(error) is is_shortage


def test_running_out_of_memory_tells_the_breakdown_and_what_to_change_in_order(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(step_module, "sum_losses", fail)
    with pytest.raises(ShortageError) as caught:
        run_tiny(prefix, [*LENGTH, "--run-dir", str(tmp_path)])
    lines = str(caught.value).splitlines()
    assert lines[0] == "out of memory on cpu: CUDA out of memory. Tried to allocate 2.00 GiB"
    for word in ("weights", "gradients", "optimizer", "activations", "peak"):
        assert word in lines[1]
    order = ["--micro-batch-size 1", "--recompute-granularity", "--bf16", "--compress-activations"]
    order += ["--use-distributed-optimizer", "--optimizer-cpu-offload", "--tensor-model-parallel-size"]
    assert [line.split(". ")[1].startswith(word) for line, word in zip(lines[3:], order, strict=True)] == [True] * 7
    assert find_code(caught.value) == OUT_OF_MEMORY
    end = json.loads((tmp_path / "run.json").read_text())["starts"][0]["end"]
    assert end["reason"].startswith("OutOfMemoryError: CUDA out of memory")


def test_another_error_is_left_as_it_is(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(build_module, "build_model", fail)
    with pytest.raises(RuntimeError, match="something else"):
        run_tiny(prefix, [*LENGTH, "--run-dir", str(tmp_path)])


@pytest.mark.parametrize(
    "flags, spikes",
    [
        ((), [20]),
        (("--spike-window", "16"), [20]),
        (("--spike-threshold", "0"), []),
        (("--spike-threshold", "1e6"), []),
    ],
    ids=["default", "short window", "off", "high"],
)
def test_a_run_tells_its_spikes_as_it_is_asked_to(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], spikes: list[int]
) -> None:
    keep, counts = step_module.sum_losses, [0]

    def spoil(model: Any, batch: Any, *rest: Any) -> Any:
        loss, by_sample = keep(model, batch, *rest)
        counts[0] += 1
        return (loss * 20, by_sample * torch.tensor([[20.0], [1.0]])) if counts[0] == 40 else (loss, by_sample)

    monkeypatch.setattr(step_module, "sum_losses", spoil)
    run_tiny(prefix, ["--train-iters", "22", *LENGTH[2:], *flags, "--run-dir", str(tmp_path)])
    assert [event["iteration"] for event in read_metrics(tmp_path, "event")] == spikes


def test_every_end_has_its_own_code() -> None:
    assert len(set(MEANINGS)) == len(MEANINGS)
    assert find_code(DivergedError("x")) == DIVERGED
    assert find_code(MegaflowError("x")) == FAULT


@pytest.mark.parametrize("bad", range(1, 4))
def test_steps_that_are_not_finite_are_skipped_counted_and_end_the_run_after_n(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    keep, counts = step_module.sum_losses, [0]

    def spoil(model: Any, batch: Any, *rest: Any) -> Any:
        loss, by_sample = keep(model, batch, *rest)
        counts[0] += 1
        return (loss * torch.nan, by_sample * torch.nan) if 3 <= counts[0] < 3 + 2 * bad else (loss, by_sample)

    monkeypatch.setattr(step_module, "sum_losses", spoil)
    flags = [*LENGTH, "--run-dir", str(tmp_path), "--max-nonfinite-steps", "3"]
    if bad == 3:
        with pytest.raises(DivergedError, match="not finite in 3 iterations in a row, up to iteration 4"):
            run_tiny(prefix, flags)
    else:
        run_tiny(prefix, flags)
    events = read_metrics(tmp_path, "event")
    assert [(event["iteration"], event["in_a_row"]) for event in events] == [(2 + n, 1 + n) for n in range(bad)]
    skipped = [line["skipped_steps"] for line in read_metrics(tmp_path)]
    assert skipped[: 1 + bad] == [0] + [1] * bad


def test_tensorboard_gets_the_same_numbers(prefix: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = [*LENGTH, "--tensorboard-dir", str(tmp_path / "tb"), "--run-dir", str(tmp_path / "run")]
    run_tiny(prefix, [*flags, "--split", "80,20,0", "--eval-interval", "3", "--eval-iters", "1"])
    found = EventAccumulator(str(tmp_path / "tb")).Reload()
    lines = read_metrics(tmp_path / "run")
    for name in ("lm_loss", "loader_bound_s", "memory_weights_bytes"):
        points = [(point.step, point.value) for point in found.Scalars(name)]
        assert points == [(line["iteration"], pytest.approx(line[name], rel=1e-6)) for line in lines]
    assert [point.step for point in found.Scalars("valid_loss")] == [3, 6]


def test_wandb_gets_the_same_numbers(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Run:
        def log(self, values: dict[str, Any], step: int) -> None:
            calls.append((step, values))

        def finish(self) -> None:
            calls.append("finished")

    def init(**settings: Any) -> Run:
        calls.append(settings)
        return Run()

    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    own = ["--wandb-project", "p", "--wandb-entity", "team", "--wandb-exp-name", "n"]
    run_tiny(prefix, [*LENGTH, *own, "--run-dir", str(tmp_path)])
    assert (calls[0]["project"], calls[0]["entity"], calls[0]["name"]) == ("p", "team", "n")
    assert calls[0]["config"]["optim"]["lr"] == 1e-3
    lines = read_metrics(tmp_path)
    assert [(step, values["lm_loss"]) for step, values in calls[1:-1]] == [
        (n["iteration"], n["lm_loss"]) for n in lines
    ]
    assert calls[-1] == "finished"


def test_a_sink_that_is_not_installed_is_one_sentence(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # import fails
    with pytest.raises(ConfigError, match="--wandb-project needs the package wandb: `pip install wandb`"):
        run_tiny(prefix, [*LENGTH, "--wandb-project", "p", "--run-dir", str(tmp_path)])
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="--tensorboard-dir needs the package tensorboard"):
        run_tiny(prefix, [*LENGTH, "--tensorboard-dir", str(tmp_path / "t"), "--run-dir", str(tmp_path)])


def test_numbers_that_json_does_not_have_become_null() -> None:
    values = {"a": float("nan"), "b": [1.5, float("inf")], "c": {"d": -float("inf"), "e": "x"}, "f": (1, True)}
    assert make_strict(values) == {"a": None, "b": [1.5, None], "c": {"d": None, "e": "x"}, "f": [1, True]}


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--keep-last -1", "checkpoint.keep_last (--keep-last) must be >= 0"),
        ("--profile-step-start 5 --profile-step-end 4", "log.profile_end (--profile-step-end) must be >= 5"),
        ("--profile-ranks x", "log.profile_ranks (--profile-ranks) takes whole numbers, got 'x'"),
        ("--schedule-from me", "must be one of command, checkpoint, both, got 'me'"),
        ("--max-nonfinite-steps 0", "guard.max_bad_steps (--max-nonfinite-steps) must be >= 1"),
        ("--spike-window 4", "guard.spike_window (--spike-window) must be >= 16"),
        ("--finetune", "give checkpoint.load (--load)"),
    ],
)
def test_wrong_settings_are_said(flags: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_command([*TINY, *LENGTH, "--data-path", "x", *flags.split()], world_size=1)
    assert words in str(caught.value)


def test_samples_of_a_blend_name_the_pair_and_its_documents(tmp_path: Path) -> None:
    parts = [
        GPTDataset(IndexedDataset(write_pair(tmp_path / name, num_documents=count)), seq_len=16, num_samples=40, seed=3)
        for name, count in (("a", 20), ("b", 30))
    ]
    blend = BlendedDataset(parts, [0.5, 0.5], num_samples=40)
    documents = Documents(blend)
    for sample in range(40):
        number, place = blend.locate(sample)
        found = documents.name_all([sample])[sample]
        assert {item["pair"] for item in found} == {str(tmp_path / "ab"[number])}
        assert sorted(item["document"] for item in found) == sorted({piece[0] for piece in parts[number].pieces(place)})
    assert describe_documents([{"pair": "/x/a", "document": 3, "origin": None}]) == "document 3 of a"
    assert Documents(object()).name_all([3]) == {3: []}
