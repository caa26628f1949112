"""What the desk's commands do alike: faults of the flags reach scripts too, and no long work is silent."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import diagnose
import doctor
import plan
import smoke
import waiting
from doctor_checks import Asked, Line

FAULTS: list[tuple[Callable[[list[str]], int], list[str], int, str]] = [
    (plan.main, ["--gpus", "0"], 2, "--gpus must be >= 1, got 0"),
    (plan.main, ["--gpus", "many"], 2, "argument --gpus: invalid int value: 'many'"),
    (plan.main, ["--num-heads", "7"], 2, "--num-heads is not a flag of this trainer"),
    (plan.main, ["--config", "nowhere.yaml"], 2, "--config nowhere.yaml: no such recipe"),
    (doctor.main, ["--checkpoints", "0"], 2, "--checkpoints must be >= 1, got 0"),
    (doctor.main, ["--preset-name", "x"], 2, "unrecognized arguments: --preset-name x"),
    (smoke.main, ["--ranks", "0"], 2, "--ranks must be >= 1, got 0"),
    (smoke.main, ["--flags", "'"], 2, "--flags cannot be read: No closing quotation"),
    (diagnose.main, [], 2, "the following arguments are required: RUN"),
    (diagnose.main, ["nowhere"], 1, "nowhere: not a run folder"),
]


@pytest.mark.parametrize(("main", "words", "code", "sentence"), FAULTS, ids=lambda part: str(part)[:40])
def test_a_fault_of_the_flags_is_one_json_object_for_scripts(
    main: Callable[[list[str]], int], words: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*more: str) -> tuple[int, str, str]:
        try:
            found = main([*words, *more])
        except SystemExit as end:
            found = int(end.code or 0)
        said = capsys.readouterr()
        return found, said.out, said.err

    plain_code, plain_out, plain_said = run()
    found, out, said = run("--json")
    assert (found, plain_code) == (code, code)
    content = json.loads(out)
    assert list(content) == ["error"]
    assert content["error"].startswith(sentence)
    assert plain_out == ""
    assert said == plain_said  # people read the same
    assert said.endswith(f"error: {content['error']}\n")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of what is waited for come at once."""
    monkeypatch.setattr(waiting, "LINE_EVERY_S", 0.02)
    monkeypatch.setattr(waiting, "REDRAW_EVERY_S", 0.01)
    monkeypatch.setattr(waiting, "SOON_S", 0.0)


def test_doctor_shows_each_finding_at_once_and_says_what_it_waits_for(
    impatient: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[tuple[str, str]] = []

    def check_first(asked: Asked) -> Iterator[Line]:
        yield Line("ok", "first", "found")

    def check_second(asked: Asked) -> Iterator[Line]:
        deadline = time.monotonic() + 10
        while not any("second" in err for _, err in said) and time.monotonic() < deadline:
            time.sleep(0.05)
            said.append(capsys.readouterr())
        yield Line("ok", "second", "found too")

    monkeypatch.setattr(doctor, "CHECKS", (check_first, check_second))
    assert doctor.main([]) == 0
    assert "".join(out for out, _ in said) == "ok    first: found\n"
    assert "doctor: second (2 of 2), 0 s\n" in "".join(err for _, err in said)
    said.clear()
    assert doctor.main(["--json"]) == 0
    assert [line["topic"] for line in json.loads(capsys.readouterr().out)] == ["first", "second"]
    assert "doctor: second (2 of 2), 0 s\n" in "".join(err for _, err in said)


def test_smoke_says_which_stage_it_waits_for(
    impatient: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said: list[str] = []

    def stage(own: smoke.Smoke) -> str:
        deadline = time.monotonic() + 10
        while "train" not in "".join(said) and time.monotonic() < deadline:
            time.sleep(0.05)
            said.append(capsys.readouterr().err)
        return "done"

    monkeypatch.setattr(smoke, "STAGES", {"train": stage})
    assert smoke.main(["--folder", str(tmp_path), "--json"]) == 0
    assert "smoke: train (1 of 1), 0 s\n" in "".join(said)
    assert json.loads(capsys.readouterr().out)[0]["text"] == "done"


def test_on_a_terminal_it_is_one_line_that_goes_away(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with waiting.Waiting("doctor") as shown:
        shown.begin("imports (1 of 2)")
        deadline = time.monotonic() + 10
        while "imports" not in screen.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        shown.print("a finding")
        shown.begin("")
    text = screen.getvalue()
    assert "\r\033[Kdoctor: imports (1 of 2), 0 s" in text
    assert "\n" not in text
    assert text.endswith("\r\033[K")


def test_what_is_over_soon_is_not_spoken_of(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting.Waiting("doctor") as shown:
        shown.begin("imports (1 of 2)")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("setting", "coloured"), [(None, True), ("", True), ("1", False)])
def test_doctor_has_colours_on_a_terminal_unless_no_color_is_set(
    setting: str | None, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def check(asked: Asked) -> Iterator[Line]:
        yield Line("ok", "first", "found")

    monkeypatch.setattr(doctor, "CHECKS", (check,))
    monkeypatch.delenv("NO_COLOR", raising=False)
    if setting is not None:
        monkeypatch.setenv("NO_COLOR", setting)
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    assert doctor.main([]) == 0
    mark = "\033[32mok  \033[0m" if coloured else "ok  "
    assert screen.getvalue().splitlines()[0] == f"{mark}  first: found"
