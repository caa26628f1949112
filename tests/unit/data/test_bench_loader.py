"""`megaflow bench-loader`: what it counts, and its verdict."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megaflow.cli.main import main
from unit.data.oracle import write_documents

SHORT = ["--seconds", "0.1", "--seq-length", "64", "--micro-batch-size", "4"]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    rng = np.random.default_rng(2)
    return write_documents(tmp_path / "pair", [rng.integers(0, 100, rng.integers(10, 200)) for _ in range(400)])


@pytest.mark.parametrize(("needed", "word"), [("1", "enough"), ("1e15", "NOT enough")])
def test_verdict_follows_from_the_measured_rate(
    prefix: str, capsys: pytest.CaptureFixture[str], needed: str, word: str
) -> None:
    flags = [*SHORT, "--tokens-per-s-per-gpu", needed, "--gpus", "2"]
    assert main(["bench-loader", prefix, *flags, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["is_enough"] == (word == "enough")
    assert content["needed_tokens_per_s"] == 2 * float(needed)
    assert content["margin"] == pytest.approx(content["tokens_per_s"] / content["needed_tokens_per_s"])
    assert content["tokens_per_s"] == pytest.approx(64 * content["samples"] / content["wall_s"])
    assert content["samples"] % 4 == 0
    assert content["samples"] > 0
    assert main(["bench-loader", prefix, *flags]) == 0
    assert f"tokens/s: {word}," in capsys.readouterr().out


def test_text_is_streamed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} " + "words " * 50}) + "\n" for n in range(300)))
    assert main(["bench-loader", str(path), *SHORT, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["kind"] == "StreamingDataset"
    assert content["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--seconds", "0"], "--seconds 0.0: expected more than 0"),
        (["--gpus", "0"], "--gpus 0: expected 1 or more"),
        (["--tokens-per-s-per-gpu", "-1"], "expected more than 0"),
        (["--micro-batch-size", "100000"], "has fewer samples than one batch"),
    ],
)
def test_faults_are_told_in_words(
    prefix: str, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert main(["bench-loader", prefix, *SHORT, *flags]) != 0
    assert words in capsys.readouterr().err


def test_missing_pair_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench-loader", str(tmp_path / "none")]) != 0
    assert "no dataset under this prefix" in capsys.readouterr().err
