"""The report: what it reads of a run, that its page needs nothing from outside, and what a browser makes of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import report


def write_run(folder: Path, *, name: str = "one", loss: float = 4.0, steps: int = 5, lr: float = 1e-3) -> Path:
    """A run folder as the trainer leaves it; the third step was not finite."""
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        rows.append(
            {
                "iteration": step,
                "consumed_samples": 8 * step,
                "lm_loss": None if step == 3 else loss / step,
                "grad_norm": 1.0,
                "lr": lr,
                "num_steps": 1,
                "step_time_s": 0.1,
                "loader_bound_s": 0.02,
                "forward_s": 0.03,
                "backward_s": 0.04,
                "optimizer_s": 0.01,
                "communication_s": 0.0,
                "other_s": 0.0,
                "tokens_per_s_per_gpu": 1000.0,
                "memory_peak_bytes": 2**30,
                "skipped_steps": int(step == 3),
            }
        )
    sample = {"sample": 17, "rank": 1, "loss": None, "documents": [{"document": 3, "origin": "c.jsonl, line 4"}]}
    rows.append({"iteration": 3, "event": "nonfinite", "kind": "loss", "in_a_row": 1, "samples": [sample]})
    rows.append({"iteration": 4, "event": "checkpoint", "write_s": 0.5})
    rows.append({"iteration": steps, "valid_loss": loss / steps})
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"iteration": 9, "lm_lo'
    (folder / "metrics.jsonl").write_text(text)
    end = {"iteration": steps, "exit_code": 0, "reason": "finished"}
    start = {"command": ["python", "x.py"], "config": {"optim": {"lr": lr}}, "world_size": 2, "end": end}
    (folder / "run.json").write_text(json.dumps({"name": name, "starts": [start]}))
    return folder


def test_a_run_is_read_with_its_gaps_events_and_shares(tmp_path: Path) -> None:
    run = report.read_run(write_run(tmp_path / "run"))
    assert run["curves"]["lm_loss"] == [(1, 4.0), (2, 2.0), (4, 1.0), (5, 0.8)]
    assert run["curves"]["valid_loss"] == [(5, 0.8)]
    assert run["curves"]["loader_bound_share"] == [(step, pytest.approx(0.2)) for step in range(1, 6)]
    assert run["curves"]["memory_peak_bytes"][0] == (1, 1.0)
    assert "mfu" not in run["curves"]
    assert run["phases"]["backward"] == pytest.approx(0.04)
    assert run["summary"]["last loss"] == 0.8
    assert run["summary"]["loader-bound"] == pytest.approx(0.2)
    assert run["summary"]["tokens/s/GPU"] == pytest.approx(1000.0)
    assert (run["summary"]["skipped steps"], run["summary"]["iterations"]) == (1, 5)
    assert [event["iteration"] for event in run["events"]] == [3]
    assert run["checkpoints"] == [4]
    assert run["manifest"]["config.optim.lr"] == "0.001"
    assert run["starts"][0]["how it ended"] == "finished"


def test_a_long_curve_keeps_its_highest_and_lowest_points(tmp_path: Path) -> None:
    points = [(float(x), 100.0 if x == 33_333 else -5.0 if x == 70_001 else float(x % 7)) for x in range(100_000)]
    kept = report.thin(points)
    assert len(kept) <= report.MOST_POINTS + 2
    assert {(33_333.0, 100.0), (70_001.0, -5.0), points[-1]} <= set(kept)
    assert kept == sorted(kept)
    assert report.thin(points[:50]) == points[:50]


def test_the_page_of_two_runs_holds_everything_and_asks_for_nothing(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name, name=f"{name} </script><b>", lr=1e-3 if name == "one" else 5e-4)
    assert report.main([str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    page = (tmp_path / "one" / "report.html").read_text()
    assert not re.findall(r"(?:src|href)\s*=|@import|url\(|fetch\(|https?://(?!www\.w3\.org/2000/svg)", page)
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    assert [run["name"] for run in data["runs"]] == ["one </script><b>", "two </script><b>"]
    assert data["runs"][1]["manifest"]["config.optim.lr"] == "0.0005"


def test_what_is_no_run_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path}: not a run folder: there is no metrics.jsonl in it\n"


def test_a_run_without_manifest_or_steps_is_shown(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "run.json").write_text("[1")
    assert report.main([str(tmp_path), "--output", str(tmp_path / "x.html")]) == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium")
def test_a_browser_draws_both_runs(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name, name=name)
    page = tmp_path / "report.html"
    assert report.main([str(tmp_path / "one"), str(tmp_path / "two"), "--output", str(page)]) == 0
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    done = subprocess.run(["chromium", *flags, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    loss = done.stdout.partition('aria-label="training loss"')[2].partition("</svg>")[0]
    assert loss.count("<path") == 2
    assert loss.count("stroke-dasharray") == 2  # the events
    assert "c.jsonl, line 4" in done.stdout
