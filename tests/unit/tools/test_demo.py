"""The demo's text and its closing report; the demo itself is `make demo`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import demo
import demo_corpus


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small standard library in the place of the real one."""
    root = tmp_path / "lib"
    for name in ("b.py", "a.py", "test/t.py", "site-packages/p.py", "pack/c.py", "encodings/cp1.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f'"""{name}: {"words " * 60}"""\n\n\ndef f():\n    """A function."""\n')
    (root / "latin.py").write_bytes(b"# \xe9t\xe9\n")
    (root / "future.py").write_text("this is no Python\n")
    monkeypatch.setattr(demo_corpus, "standard_library", lambda: root)
    monkeypatch.setattr(demo_corpus, "reference_topics", dict)
    monkeypatch.setattr(demo_corpus, "LARGEST_CORPUS", 20_000)
    return root


def test_the_corpus_is_docstrings_and_sources_in_a_fixed_order_without_tests(library: Path, tmp_path: Path):
    documents, size = demo_corpus.write_corpus(tmp_path / "corpus.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    assert [row["source"] for row in rows] == [
        "a.py (docstrings)",
        "a.py",
        "b.py (docstrings)",
        "b.py",
        "future.py",
        "pack/c.py (docstrings)",
        "pack/c.py",
    ]
    assert documents == len(rows)
    assert size == (tmp_path / "corpus.jsonl").stat().st_size
    assert rows[0]["text"].endswith("f\n\nA function.")
    assert rows[1]["text"] == (library / "a.py").read_text()


def test_the_corpus_stops_at_its_size(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo_corpus, "LARGEST_CORPUS", 500)
    documents, _ = demo_corpus.write_corpus(tmp_path / "corpus.jsonl")
    assert documents == 2


def test_a_python_without_sources_is_told_so_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo_corpus, "standard_library", lambda: tmp_path / "nothing")
    monkeypatch.setattr(demo_corpus, "reference_topics", dict)
    with pytest.raises(SystemExit, match="use a Python with sources"):
        demo_corpus.write_corpus(tmp_path / "corpus.jsonl")
    assert list(tmp_path.iterdir()) == []


def steps(losses: list[float]) -> list[dict[str, float]]:
    """Rows of a run's metrics with these losses."""
    parts = {
        "loader_bound_s": 0.01,
        "forward_s": 0.3,
        "backward_s": 0.5,
        "communication_s": 0.0,
        "optimizer_s": 0.15,
        "log_s": 0.01,
        "other_s": 0.03,
    }
    return [{"lm_loss": loss, "step_time_s": 1.0, "tokens_per_s_per_gpu": 2048.0, **parts} for loss in losses]


def test_the_report_shows_losses_and_where_the_time_went(capsys: pytest.CaptureFixture[str]):
    assert demo.report(steps([10.8, *[9.0] * 20, *[7.0] * 10]), seconds=90)
    shown = capsys.readouterr().out
    assert "10.8000 at the first step" in shown
    assert "7.0000 as the mean of the last 10 of 31 steps: 3.8000 nats lower" in shown
    assert "1000.0 ms a step" in shown
    assert "1.00%      10.00 ms  loader-bound: waiting for data" in shown
    assert "what to try next" in shown


def test_a_model_that_does_not_learn_is_a_failure(capsys: pytest.CaptureFixture[str]):
    assert not demo.report(steps([10.8, *[10.0] * 20]), seconds=90)
    assert "the loss fell by 0.80 nats, less than 2.0" in capsys.readouterr().err


def test_validation_rows_are_left_out(tmp_path: Path):
    rows = [{"iteration": 1, "lm_loss": 2.0}, {"iteration": 1, "valid_loss": 3.0}, {"iteration": 2, "lm_loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["lm_loss"] for row in demo.read_steps(tmp_path / "metrics.jsonl")] == [2.0, 1.0]
