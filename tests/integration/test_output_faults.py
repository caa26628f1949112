"""Faults of standard output: closed, full, or without the letters of a path. One sentence, never a traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.pairs import write_pair

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "tests/golden/runs/flat-loss"
PATHS = os.pathsep.join([str(ROOT / "python"), str(ROOT / "trainer")])
CLOSED = "standard output is closed; leave it open, or send it to a file or /dev/null"
FULL = "standard output cannot be written: No space left on device; make room, or send it elsewhere"
FULL_DEVICE = Path("/dev/full")

DOORS = {
    "plan": (["tools/plan.py", "--preset", "gpt2_small"], "error: ", 1),
    "doctor": (["tools/doctor.py", "--no-collective", "--save", "FOLDER"], "error: ", 1),
    "diagnose": (["tools/diagnose.py", "FOLDER/run"], "error: ", 1),
    "report": (["tools/report.py", "FOLDER/run", "--output", "FOLDER/page.html"], "error: ", 1),
    "stats": (["-m", "megaflow", "stats", "FOLDER/pair"], "megaflow stats: ", 5),
    "inspect": (["-m", "megaflow", "inspect", "FOLDER/pair", "--json"], "megaflow inspect: ", 5),
    "verify": (["-m", "megaflow", "verify", "--no-stamp", "FOLDER/pair"], "megaflow verify: ", 5),
    "export": (["-m", "megaflow", "export", "FOLDER/pair", "--ids", "--output", "-"], "megaflow export: ", 5),
    "preprocess": (["-m", "megaflow.cli.preprocess", "--help"], "megaflow-preprocess: ", 5),
    "pretrain": (["trainer/pretrain.py", "--help"], "error: ", 1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose name is not ASCII, with a run and a pair."""
    made = tmp_path_factory.mktemp("é→😀", numbered=False)
    shutil.copytree(RUN, made / "run")
    write_pair(made / "pair")
    return made


def call(door: str, folder: Path, redirection: str, **variables: str) -> tuple[int, str, str]:
    """Code, standard output and the lines of standard error that are no progress."""
    words = [word.replace("FOLDER", str(folder)) for word in DOORS[door][0]]
    environment = {**os.environ, "PYTHONPATH": PATHS, **variables}
    line = f'"$0" "$@" {redirection}'
    done = subprocess.run(
        ["sh", "-c", line, sys.executable, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in done.stderr.splitlines(keepends=True) if not line.startswith(("planning ", "doctor: "))]
    return done.returncode, done.stdout, "".join(said)


@pytest.mark.parametrize("door", [name for name in DOORS if name != "pretrain"])
def test_a_closed_output_is_told(door: str, folder: Path) -> None:
    _, begin, code = DOORS[door]
    assert call(door, folder, ">&-") == (code, "", f"{begin}{CLOSED}\n")


@pytest.mark.skipif(not FULL_DEVICE.exists(), reason="no /dev/full here")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("door", DOORS)
def test_a_full_output_is_told(door: str, unbuffered: str, folder: Path) -> None:
    _, begin, code = DOORS[door]
    found, _, said = call(door, folder, f">{FULL_DEVICE}", PYTHONUNBUFFERED=unbuffered)
    if (door, unbuffered, found) == ("preprocess", "1", 0):  # newer argparse lets such a fault of its help pass
        assert said == ""
        return
    assert (found, said.splitlines()[-1]) == (code, f"{begin}{FULL}")
    assert "Traceback" not in said


@pytest.mark.parametrize("door", ["plan", "doctor", "diagnose", "report", "stats", "inspect", "verify", "export"])
def test_a_path_that_the_encoding_lacks_is_escaped(door: str, folder: Path) -> None:
    found, out, said = call(door, folder, "", LC_ALL="C", PYTHONIOENCODING="ascii")
    assert found == (3 if door == "diagnose" else 0)
    assert "Error" not in said
    assert out.isascii()
    if door in ("doctor", "diagnose", "report"):
        assert "\\xe9\\u2192\\U0001f600" in out
    if door == "inspect":
        assert json.loads(out)["prefix"] == str(folder / "pair")


def test_a_closed_standard_error_is_no_fault(folder: Path) -> None:
    for door, code in (("doctor", 0), ("diagnose", 3), ("stats", 0)):
        found, out, _ = call(door, folder, "2>&-")
        assert (found, len(out) > 100) == (code, True), door


def test_a_run_whose_output_is_closed_trains_and_logs_to_its_files(tmp_path: Path) -> None:
    model = "--num-layers 1 --hidden-size 16 --num-attention-heads 1 --seq-length 16 --micro-batch-size 1"
    words = f"{model} --mock-data --vocab-size 64 --train-iters 2 --eval-iters 0 --log-interval 1".split()
    line = '"$0" trainer/pretrain.py "$@" >&-'
    done = subprocess.run(
        ["sh", "-c", line, sys.executable, *words, "--run-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    rows = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows if "lm_loss" in row] == [1, 2]
