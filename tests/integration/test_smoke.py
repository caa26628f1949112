"""The smoke run passes here, and names the stage and the reason where something is broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import smoke
from smoke import Smoke


def states(verdicts: list[smoke.Verdict]) -> dict[str, str]:
    return {verdict.stage: verdict.state for verdict in verdicts}


def test_every_stage_passes_on_this_machine(tmp_path: Path) -> None:
    verdicts = smoke.run_stages(Smoke(tmp_path))
    assert states(verdicts) == dict.fromkeys(smoke.STAGES, "pass"), verdicts
    by_name = {verdict.stage: verdict for verdict in verdicts}
    assert by_name["resume"].text == "to the bit like the uninterrupted run"
    assert 1 < float(by_name["evaluate"].text.split()[2].rstrip(",")) < 9


def test_a_missing_vocabulary_fails_the_first_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "vocab.json")
    words = ["--folder", str(tmp_path), "--vocab-file", missing, "--merge-file", missing, "--json"]
    assert smoke.main(words) == 1
    first, *others = json.loads(capsys.readouterr().out)
    assert (first["stage"], first["state"]) == ("preprocess", "fail")
    assert "vocab.json" in first["text"]
    assert {other["state"] for other in others} == {"not run"}


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert smoke.main(["--folder", str(tmp_path / "file" / "below")]) == 1
    text = capsys.readouterr().out
    assert "Not a directory" in text
    assert "doctor.py" in text


def test_a_broken_torch_fails_training_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "torch.py").write_text("raise OSError('libtorch_cpu.so: cannot open shared object file')\n")
    run = smoke.subprocess.run

    def first(command: list[str], **options: object) -> object:
        variables = dict(options.pop("env"))  # type: ignore[call-overload]
        variables["PYTHONPATH"] = f"{broken}:{variables['PYTHONPATH']}"
        return run(command, env=variables, **options)

    monkeypatch.setattr(smoke.subprocess, "run", first)
    verdicts = smoke.run_stages(Smoke(tmp_path / "smoke"))
    assert states(verdicts)["preprocess"] == "pass"  # the data engine needs no torch
    assert states(verdicts)["train"] == "fail"
    assert "libtorch_cpu.so" in verdicts[1].text


def test_a_flag_that_the_trainer_refuses_is_told_in_its_words(tmp_path: Path) -> None:
    verdicts = smoke.run_stages(Smoke(tmp_path, flags=["--num-heads", "4"]))
    assert states(verdicts)["train"] == "fail"
    assert "the nearest known one is --num-attention-heads" in verdicts[1].text


@pytest.mark.parametrize("words", [("--ranks", "0"), ("--flags", "'half a quotation")])
def test_own_flags_that_mean_nothing_are_refused_before_anything_runs(
    words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        smoke.main([*words, "--json"])
    assert words[0] in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_pass_too(tmp_path: Path) -> None:
    verdicts = smoke.run_stages(Smoke(tmp_path, ranks=2))
    assert states(verdicts) == dict.fromkeys(smoke.STAGES, "pass"), verdicts
