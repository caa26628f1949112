"""One run writes into a folder at a time."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from helpers.runs import TINY, one_rank
from megaflow.errors import FileAccessError
from megaflow_trainer.config import read_command
from megaflow_trainer.training.lock import hold_folders, take_lock
from megaflow_trainer.training.orphan import end_with_launcher


def test_a_second_run_is_refused_with_the_process_of_the_first(tmp_path: Path) -> None:
    with pytest.raises(FileAccessError) as caught, take_lock(tmp_path, "--save") as _:  # type: ignore[union-attr]
        take_lock(tmp_path, "--save", patience_s=0)
    assert f"another run (process {os.getpid()} on " in str(caught.value)
    assert str(caught.value).endswith("writes here; wait until it has ended, or choose another --save")


def test_a_released_folder_is_free(tmp_path: Path) -> None:
    for _ in range(2):
        file = take_lock(tmp_path, "--save", patience_s=0)
        assert file is not None
        file.close()


def test_the_lock_of_a_killed_process_is_gone(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time; from megaflow_trainer.training.lock import take_lock\n"
        f"file = take_lock(pathlib.Path({str(tmp_path)!r}), '--save'); print('held', flush=True); time.sleep(300)"
    )
    environment = {**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(FileAccessError, match=f"process {process.pid} on "):
            take_lock(tmp_path, "--save", patience_s=0)
        process.kill()
        process.wait()
    file = take_lock(tmp_path, "--save", patience_s=0)
    assert file is not None
    file.close()


@pytest.mark.parametrize("flag", ["--save", "--run-dir"])
def test_a_run_holds_the_folders_it_writes(tmp_path: Path, flag: str) -> None:
    flags = [*TINY, "--train-iters", "1", "--data-path", "x", "--save", f"{tmp_path}/a", "--run-dir", f"{tmp_path}/b"]
    config, _ = read_command(flags, world_size=1)
    folder = tmp_path / ("a" if flag == "--save" else "b")
    with hold_folders(config, one_rank()), pytest.raises(FileAccessError, match=f"choose another {flag}"):
        take_lock(folder, flag, patience_s=0)
    with hold_folders(config, one_rank(), patience_s=0):
        pass


def test_one_folder_by_two_spellings_is_held_once(tmp_path: Path) -> None:
    flags = [
        *TINY,
        "--train-iters",
        "1",
        "--data-path",
        "x",
        "--save",
        f"{tmp_path}/a",
        "--run-dir",
        f"{tmp_path}/./a/",
    ]
    config, _ = read_command(flags, world_size=1)
    with hold_folders(config, one_rank(), patience_s=0):
        pass


def test_a_file_system_without_locks_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert take_lock(tmp_path, "--save") is None


def test_a_process_that_no_launcher_started_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a thread is started")

    monkeypatch.setattr(threading, "Thread", fail)
    end_with_launcher({})
    end_with_launcher({"LOCAL_RANK": "0"})


ORPHAN = """
import os, signal, time
from megaflow_trainer.training import orphan
parents = iter([1, 2])
os.getppid = lambda: next(parents)
{handler}
orphan.end_with_launcher({{'LOCAL_RANK': '0', 'TORCHELASTIC_RUN_ID': 'x'}}, grace_s=0.1)
time.sleep(60)
"""


@pytest.mark.parametrize(
    "handler, code",
    [("", -signal.SIGTERM), ("signal.signal(signal.SIGTERM, lambda *_: None)", -signal.SIGKILL)],
    ids=["before training", "waiting for a peer for ever"],
)
def test_a_rank_whose_launcher_is_gone_is_asked_to_stop_and_then_killed(handler: str, code: int) -> None:
    environment = {**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path)}
    command = [sys.executable, "-c", ORPHAN.format(handler=handler)]
    assert subprocess.run(command, env=environment, check=False).returncode == code


def test_a_rank_that_stops_when_asked_ends_with_its_own_code() -> None:
    environment = {**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path)}
    code = ORPHAN.format(handler="signal.signal(signal.SIGTERM, lambda *_: os._exit(75))").replace("0.1", "60")
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 75
