"""Several nodes, as two agents of torchrun on this machine: they train like one rank, and go on after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.launching import end, find_children, find_port, meet, start_agent, start_rank, wait_for
from helpers.pairs import write_pair
from helpers.runs import TINY, read_curve, run_tiny

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]

LENGTH = ("--train-iters", "8", "--global-batch-size", "4", "--micro-batch-size", "2")
LAYOUTS = {
    "dp2": (1, ""),
    "tp2_dp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2_over_nodes": (1, "--pipeline-model-parallel-size 2"),
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(tmp_path_factory.mktemp("data") / "toy_text_document")


def list_index_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".npy"}


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared_cache", "own_caches"])
@pytest.mark.parametrize("layout", ["dp2", "tp2_dp2"])
def test_two_nodes_train_like_one_rank(prefix: str, tmp_path: Path, layout: str, is_shared: bool) -> None:
    """Each node finds out by its own disk whether there is an index, and builds it if not."""
    nproc, words = LAYOUTS[layout]
    flags = [*TINY, *LENGTH, *words.split(), "--data-path", prefix, "--run-dir", str(tmp_path / "run")]
    options = meet(num_nodes=2)
    caches = [tmp_path / ("cache" if is_shared else f"cache{node}") for node in range(2)]
    agents = [
        start_agent(
            tmp_path / f"{node}.log", [*flags, "--data-cache-path", str(caches[node])], nproc=nproc, options=options
        )
        for node in range(2)
    ]
    assert end(agents) == [0, 0], [(tmp_path / f"{node}.log").read_text() for node in range(2)]
    run_tiny(prefix, [*LENGTH, "--run-dir", str(tmp_path / "one")])
    for one, two in zip(read_curve(tmp_path / "one"), read_curve(tmp_path / "run"), strict=True):
        assert two[1] == pytest.approx(one[1], abs=2e-5)
        assert two[2] == pytest.approx(one[2], rel=1e-5)
    first, second = (list_index_files(cache) for cache in caches)
    assert len(first) >= 3  # document, sample and shuffle index of the train part
    assert first == second


def test_stages_on_two_nodes_train_like_one_rank(prefix: str, tmp_path: Path) -> None:
    nproc, words = LAYOUTS["pp2_over_nodes"]
    flags = [*TINY, *LENGTH, *words.split(), "--data-path", prefix, "--run-dir", str(tmp_path / "run")]
    options = meet(num_nodes=2)
    agents = [start_agent(tmp_path / f"{node}.log", flags, nproc=nproc, options=options) for node in range(2)]
    assert end(agents) == [0, 0], [(tmp_path / f"{node}.log").read_text() for node in range(2)]
    run_tiny(prefix, [*LENGTH, "--run-dir", str(tmp_path / "one")])
    for one, two in zip(read_curve(tmp_path / "one"), read_curve(tmp_path / "run"), strict=True):
        assert two[1] == pytest.approx(one[1], abs=2e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the ranks in /proc")
@pytest.mark.parametrize("num_nodes, layout", [(1, "--tensor-model-parallel-size 2"), (2, "")], ids=["tp2", "2_nodes"])
def test_a_killed_rank_starts_all_anew_from_the_last_checkpoint(
    prefix: str, tmp_path: Path, num_nodes: int, layout: str
) -> None:
    length = ("--train-iters", "300", *LENGTH[2:], "--data-path", prefix)
    flags = [*TINY, *length, *layout.split(), "--save-interval", "10", "--save", str(tmp_path / "run")]
    options, logs = meet(num_nodes=num_nodes, restarts=1), [tmp_path / f"{node}.log" for node in range(num_nodes)]
    agents = [start_agent(log, flags, nproc=2 // num_nodes, options=options) for log in logs]
    speaks = next_to_speak(logs, agents)
    wait_for(logs[speaks], "saved iteration 10 ", agents)
    ranks = [rank for agent in agents for rank in find_children(agent.pid)]
    assert len(ranks) == 2
    os.kill(ranks[-1], signal.SIGKILL)
    codes = end(agents)
    text = "".join(log.read_text() for log in logs)
    assert codes == [0] * num_nodes, text
    assert text.count("going on after iteration") == 1
    run_tiny(prefix, [*length, "--run-dir", str(tmp_path / "one")])
    one, two = read_curve(tmp_path / "one"), read_curve(tmp_path / "run")
    assert [line[0] for line in two] == [line[0] for line in one]
    assert [line[1] for line in two] == pytest.approx([line[1] for line in one], abs=2e-4)


@pytest.mark.parametrize("lost, word", [(0, "rank 0 died or ended with an error"), (1, "rank 1 died")])
def test_without_torchrun_the_rank_that_is_left_says_which_one_died(
    prefix: str, tmp_path: Path, lost: int, word: str
) -> None:
    """The first rank keeps the store, and takes with it what stood there."""
    logs, port = [tmp_path / f"{rank}.log" for rank in range(2)], find_port()
    flags = [*TINY, *LENGTH[2:], "--data-path", prefix, "--train-iters", "100000", "--run-dir", str(tmp_path / "run")]
    ranks = [start_rank(log, flags, rank, size=2, port=port) for rank, log in enumerate(logs)]
    wait_for(logs[0], "iteration 5/", ranks)
    ranks[lost].kill()
    assert end(ranks)[1 - lost] == 78
    text = logs[1 - lost].read_text()
    assert [line.split("; ")[0].rpartition(": ")[2] for line in text.splitlines() if line.startswith("error")] == [word]
    end_of_run = json.loads((tmp_path / "run" / "run.json").read_text())["starts"][-1]["end"]
    assert (end_of_run["exit_code"], end_of_run["reason"]) == (78, word)


def next_to_speak(logs: list[Path], agents: Sequence[subprocess.Popen[str]]) -> int:
    """The node of the first rank: torchrun numbers nodes in an order of its own."""
    while True:
        for node, log in enumerate(logs):
            if "iteration 1/" in log.read_text():
                return node
        assert all(agent.poll() is None for agent in agents), [log.read_text() for log in logs]
