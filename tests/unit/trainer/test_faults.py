"""Who says a fault: the first rank for all, or the rank that has it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megaflow_trainer.training.faults import FaultBoard
from megaflow_trainer.training.last_word import VARIABLE


def make_boards(patience_s: float) -> list[FaultBoard]:
    store = dist.HashStore()
    return [FaultBoard(rank, store, patience_s=patience_s) for rank in range(3)]


def test_a_fault_of_all_ranks_is_said_by_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    boards = make_boards(patience_s=10.0)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda board: board.report("no data"), boards))
    assert capsys.readouterr().err == "error: no data\n"


def test_a_fault_of_one_rank_is_said_by_it_with_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    boards = make_boards(patience_s=0.05)
    assert not boards[0].has_any()
    boards[2].report("disk full")
    assert capsys.readouterr().err == "error on rank 2: disk full\n"
    assert boards[0].has_any()


def test_two_different_faults_are_both_said(capsys: pytest.CaptureFixture[str]) -> None:
    boards = make_boards(patience_s=10.0)
    boards[0].report("one thing")
    boards[1].report("another")
    assert capsys.readouterr().err == "error: one thing\nerror on rank 1: another\n"


def test_a_single_rank_needs_no_board(capsys: pytest.CaptureFixture[str]) -> None:
    board = FaultBoard(0, None)
    board.report("no data")
    assert capsys.readouterr().err == "error: no data\n"
    assert not board.has_any()


def test_a_store_that_left_with_its_keeper_tells_nothing() -> None:
    class Gone(dist.Store):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Broken pipe")

    board = FaultBoard(1, dist.HashStore())
    board.store = Gone()
    assert not board.has_any()


def test_torchrun_reads_the_sentence_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "error.json"))
    FaultBoard(0, None).report("corpsu: no dataset")
    assert "traceback : error: corpsu: no dataset\n" in show_as_torchrun(tmp_path)
    FaultBoard(2, dist.HashStore(), patience_s=0.05).report("disk full")
    assert "traceback : error: disk full\n" in show_as_torchrun(tmp_path)


def test_a_sentence_that_nobody_waits_for_is_only_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in ("", str(tmp_path / "gone" / "error.json")):
        monkeypatch.setenv(VARIABLE, place)
        FaultBoard(0, None).report("no data")
        assert capsys.readouterr().err == "error: no data\n"
    assert list(tmp_path.iterdir()) == []


def show_as_torchrun(folder: Path) -> str:
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(folder / "error.json"))
    return str(ChildFailedError("trainer/pretrain.py", {0: failure}))
