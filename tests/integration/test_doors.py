"""Every door tells its version, completes, has no colours where nobody looks, and ends in quiet on Ctrl-C."""

from __future__ import annotations

import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import megaflow
from megaflow.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
DESK = ("plan", "diagnose", "doctor", "smoke", "report")
DOORS = {
    **{name: [f"tools/{name}.py"] for name in DESK},
    "megaflow": ["-m", "megaflow.cli.main"],
    "preprocess": ["-m", "megaflow.cli.preprocess"],
    "pretrain": ["trainer/pretrain.py"],
}
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT / "trainer")])}


def call(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]


@pytest.mark.parametrize("words", [*DOORS.values(), ["trainer/convert_hf.py"], ["tools/demo.py"]], ids=str)
def test_a_door_tells_its_version(words: list[str]) -> None:
    done = call(*words, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert megaflow.__version__ in done.stdout
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize("door", [name for name in DOORS if name != "pretrain"])
def test_help_is_plain_text_with_every_flag_explained(door: str) -> None:
    done = call(*DOORS[door], "--help")
    assert done.returncode == 0
    assert "\033" not in done.stdout
    assert len(done.stdout.splitlines()) > 8


def complete(tmp_path: Path, *words: str) -> list[str]:
    """What bash would offer for a line."""
    (tmp_path / "completion").write_text(call("-m", "megaflow.cli.main", "completion", "bash").stdout)
    for name, module in (("megaflow", "main"), ("megaflow-preprocess", "preprocess")):
        script = f'#!/bin/sh\nexec {sys.executable} -m megaflow.cli.{module} "$@"\n'
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    line = " ".join(f"'{word}'" for word in words)
    program = (
        f"source {tmp_path}/completion; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; "
        '_megaflow; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", program], env={**ENVIRONMENT, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_commands_and_flags(tmp_path: Path) -> None:
    assert set(COMMANDS) <= set(complete(tmp_path, "megaflow", ""))
    assert complete(tmp_path, "megaflow", "ver") == ["verify"]
    assert complete(tmp_path, "megaflow", "inspect", "--ru") == ["--run"]
    assert "--on-bad-record" in complete(tmp_path, "megaflow-preprocess", "--on")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"\b{name}\b", text) for name in COMMANDS)


def test_another_shell_is_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "tcsh" in capsys.readouterr().err


def start(words: Sequence[str | Path], **variables: str) -> subprocess.Popen[str]:
    """A command in a group of its own, as a terminal starts it."""
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env={**ENVIRONMENT, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def stop(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Ctrl-C, which a terminal sends to all of the group, and how it ended."""
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    return process.returncode, said


def test_smoke_takes_no_file_for_its_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    done = call("tools/smoke.py", "--folder", str(tmp_path / "file"))
    assert done.returncode == 2
    assert f"--folder {tmp_path / 'file'}: expected a folder, or a name that is free, found a file" in done.stderr


def test_ctrl_c_ends_a_command_in_one_line(tmp_path: Path) -> None:
    process = start(["tools/smoke.py"], TMPDIR=str(tmp_path))
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("megaflow_smoke_*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    assert stop(process) == (130, "stopped by Ctrl-C\n")
    assert list(tmp_path.glob("megaflow_smoke_*")) == []


@pytest.mark.parametrize(
    ("words", "module", "sentence"),
    [
        (["tools/plan.py"], "yaml", "stopped by Ctrl-C\n"),
        (["tools/diagnose.py", "RUN"], "yaml", "stopped by Ctrl-C\n"),
        (["tools/doctor.py"], "tempfile", "stopped by Ctrl-C\n"),
        (["-m", "megaflow", "stats", "PREFIX"], "numpy", "megaflow: stopped by Ctrl-C\n"),
        (
            ["-c", "from megaflow.cli.start import preprocess; preprocess()"],
            "dataclasses",
            "megaflow-preprocess: stopped",
        ),
        (["trainer/pretrain.py"], "yaml", "stopped by Ctrl-C\n"),
        (["trainer/convert_hf.py", "export", "CHECKPOINTS", "FOLDER"], "yaml", "stopped by Ctrl-C\n"),
    ],
    ids=lambda part: str(part)[:30],
)
def test_ctrl_c_while_a_command_is_still_imported_is_one_line(
    words: list[str], module: str, sentence: str, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    (tmp_path / f"{module}.py").write_text(f"import os, time\nos.mkdir({str(begun)!r})\ntime.sleep(60)\n")
    process = start(words, PYTHONPATH=os.pathsep.join([str(tmp_path), ENVIRONMENT["PYTHONPATH"]]))
    deadline = time.monotonic() + 60
    while not begun.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    code, said = stop(process)
    assert code == 130
    assert said.startswith(sentence)
    assert said.count("\n") == 1


OTHERS = {"check_python", "merge_datasets", "preprocess_data"}
"""Not by `run_door`: one that any Python can read, and two that end as the data commands do."""


@pytest.mark.parametrize("script", sorted(ROOT.glob("tools/*.py")), ids=lambda path: path.stem)
def test_every_tool_ends_as_the_desk_does(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    if 'if __name__ == "__main__":' in text and script.stem not in OTHERS:
        assert text.endswith('if __name__ == "__main__":\n    sys.exit(run_door(main))\n')


def test_ctrl_c_ends_doctor_in_one_line() -> None:
    process = start(["tools/doctor.py"])
    assert process.stdout is not None
    assert "python" in process.stdout.readline()
    assert stop(process) == (130, "stopped by Ctrl-C\n")


def test_ctrl_c_ends_a_long_plan_in_one_line() -> None:
    process = start(["tools/plan.py", "--gpus", "2048", "--preset", "deepseek_v3", "--micro-batch-size", *"1248"])
    time.sleep(3)
    code, said = stop(process)
    *progress, last = said.splitlines()
    assert (code, last) == (130, "stopped by Ctrl-C")
    assert all(line.startswith("planning ") for line in progress)


def test_ctrl_c_ends_long_statistics_in_one_line(tmp_path: Path) -> None:
    tokens = 2**31 - 1
    index = struct.pack("<9sQBQQiq2q", b"MMIDIDX\0\0", 1, 8, 1, 2, tokens, 0, 0, 1)
    (tmp_path / "long.idx").write_bytes(index)
    with (tmp_path / "long.bin").open("wb") as file:
        file.truncate(2 * tokens)  # a hole: no space on the disk
    process = start(["-m", "megaflow", "stats", str(tmp_path / "long")])
    time.sleep(2)
    code, said = stop(process)
    assert code == 130
    assert said.splitlines()[-1].endswith("stopped by Ctrl-C")
    assert "Traceback" not in said


READ = {
    "plan": ["tools/plan.py", "--preset", "gpt2_small"],
    "diagnose": ["tools/diagnose.py", "tests/golden/runs/flat-loss"],
    "doctor": ["tools/doctor.py", "--no-collective"],
    "completion": ["-m", "megaflow", "completion", "bash"],
    "pretrain": ["trainer/pretrain.py", "--help"],
}


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("door", READ)
def test_a_reader_that_has_gone_is_no_fault(door: str, unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # before the command begins: its first write finds nobody
    try:
        done = subprocess.run(
            [sys.executable, *READ[door]],
            cwd=ROOT,
            env={**ENVIRONMENT, "PYTHONUNBUFFERED": unbuffered},
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writer)
    said = [line for line in done.stderr.splitlines() if not line.startswith(("planning ", "doctor: "))]
    assert (done.returncode, said) == (0, [])


def test_a_reader_that_goes_in_the_middle_is_no_fault() -> None:
    line = f"'{sys.executable}' -u tools/plan.py --preset gpt2_small | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if not line.startswith("planning ")] == []
    assert done.stdout.splitlines()[-1] == "0"
