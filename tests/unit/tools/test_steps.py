from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from steps import Outcome, Step, run_steps, sum_up

ROOT = Path(__file__).resolve().parents[3]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_every_step_runs_also_after_one_has_failed(capfd: pytest.CaptureFixture[str]):
    steps = [
        Step("first", python("print('one')")),
        Step("second", python("raise SystemExit(3)")),
        Step("third", ["no-such-program"]),
        Step("fourth", python("import os; print(os.environ['EXTRA'])"), {"EXTRA": "four"}),
    ]
    outcomes = run_steps(steps, os.environ)
    assert [outcome.exit_code for outcome in outcomes] == [0, 3, 127, 0]
    shown = capfd.readouterr()
    assert "one" in shown.out
    assert "four" in shown.out
    assert "no-such-program: No such file or directory" in shown.err


def test_the_summary_names_what_failed(capsys: pytest.CaptureFixture[str]):
    assert sum_up("checks", [Outcome("a", 0, 1.25), Outcome("b", 1, 2.0)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "checks: 1 of 2 FAILED: b, 3 s"
    assert "  a  ok, 1.2 s" in lines


def test_the_summary_of_a_clean_run_is_exit_code_0(capsys: pytest.CaptureFixture[str]):
    assert sum_up("checks", [Outcome("a", 0, 1.0)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "checks: all passed, 1 s"


def test_make_lists_its_targets():
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("build", "demo", "test", "test-all", "check", "bench", "clean"):
        assert f"make {target} " in done.stdout


def test_every_script_that_make_calls_is_there():
    words = (ROOT / "Makefile").read_text().split()
    scripts = [word for word in words if word.startswith("tools/") and not word.endswith(";")]
    assert len(scripts) >= 7
    for script in scripts:
        assert (ROOT / script).is_file(), script
