"""Every symptom is recognised in a run that has it, and in no other; each finding names the flag that mends it."""

from __future__ import annotations

import fcntl
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import diagnose
from symptoms import Finding, find_overflow, read_record

RUNS = Path(__file__).parents[2] / "golden" / "runs"
EXPECTED = {
    "low-gpu-use": [
        "--tensor-model-parallel-size 8",
        "--sequence-parallel",
        "--use-flash-attn",
        "--micro-batch-size 4",
    ],
    "fp32": ["--bf16"],
    "slow-loader": ["--num-workers 4", "--prefetch 16"],
    "slow-communication": ["unset NCCL_IB_DISABLE"],
    "slowdown": ["nvidia-smi"],
    "straggler": ["doctor.py"],
    "pipeline-bubble": ["--global-batch-size", "--pipeline-schedule interleaved"],
    "out-of-memory": ["--micro-batch-size 2", "--recompute-granularity", "--use-distributed-optimizer"],
    "divergence": ["--lr 0.2", "--clip-grad 1.0"],
    "nan": ["--lr 1", "--lr-warmup-fraction", "--clip-grad 1.0", "--init-method-std 0.02"],
    "overflow": ["--initial-loss-scale 65536", "--bf16"],
    "loss-spikes": ["megaflow inspect --run", "--lr 0.001"],
    "flat-loss": ["--lr 3e-4", "megaflow inspect"],
    "stopped": ["stacks/rank_N.txt"],
}


def find(name: str) -> list[Finding]:
    return diagnose.diagnose(read_record(RUNS / name))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recorded_run_shows_its_symptom_and_the_flags_that_mend_it(name: str) -> None:
    first = find(name)[0]
    assert first.symptom == {"fp32": "low-gpu-use"}.get(name, name)
    for flag in EXPECTED[name]:
        assert any(flag in remedy for remedy in first.remedies), flag


@pytest.mark.parametrize("name", EXPECTED)
def test_no_other_symptom_is_seen_in_it(name: str) -> None:
    assert len(find(name)) == 1


def test_nothing_is_found_in_a_healthy_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnose.main([str(RUNS / "healthy")]) == 0
    assert "nothing found" in capsys.readouterr().out


def test_every_recorded_run_is_tested() -> None:
    assert {path.name for path in RUNS.iterdir()} == {"healthy", *EXPECTED}


def test_remedies_in_order_of_price_after_running_out_of_memory() -> None:
    remedies = find("out-of-memory")[0].remedies
    order = ["--micro-batch-size", "--recompute", "--use-distributed-optimizer", "offload", "--tensor-model-parallel"]
    places = [next(number for number, text in enumerate(remedies) if word in text) for word in order]
    assert places == sorted(places)
    assert "by formula (GiB): weights 2.25, gradients 4.50, optimizer 13.51" in find("out-of-memory")[0].seen


def test_the_documents_of_a_spike_are_named() -> None:
    assert "corpus.jsonl:8" in find("loss-spikes")[0].seen


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnose.main([str(RUNS / "nan"), "--json"]) == diagnose.FOUND
    (found,) = json.loads(capsys.readouterr().out)
    assert found["symptom"] == "nan"
    assert "5 iterations from" in found["seen"]


def test_a_run_that_was_killed_in_the_middle_of_a_line_is_read(tmp_path: Path) -> None:
    shutil.copytree(RUNS / "healthy", tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-40])
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    del manifest["starts"][0]["end"]
    (tmp_path / "run" / "run.json").write_text(json.dumps(manifest))
    record = read_record(tmp_path / "run")
    assert len(record.steps) == 23
    assert record.describe_end() == "no end written: running, or killed"
    assert diagnose.diagnose(record) == []


def test_a_folder_without_a_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnose.main([str(tmp_path)]) == diagnose.UNREADABLE
    assert "not a run folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", '{"starts": [{"na'),
        ("run.json", "[]"),
        ("run.json", '{"starts": 3}'),
        ("metrics.jsonl", "\0" * 99 + "\n"),
    ],
)
def test_a_record_that_cannot_be_read_is_no_clean_bill(
    name: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(RUNS / "healthy", tmp_path / "run")
    (tmp_path / "run" / name).write_text(content)
    assert diagnose.main([str(tmp_path / "run")]) == diagnose.UNREADABLE
    said = capsys.readouterr()
    assert said.out == ""
    assert f"{name}: no" in said.err
    assert "is the file whole?" in said.err


@pytest.mark.parametrize(("is_running", "symptoms"), [(False, ["killed"]), (True, [])])
def test_a_run_without_an_end_was_killed_unless_its_folder_is_locked(
    tmp_path: Path, is_running: bool, symptoms: list[str]
) -> None:
    shutil.copytree(RUNS / "healthy", tmp_path / "run")
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    del manifest["starts"][0]["end"]
    (tmp_path / "run" / "run.json").write_text(json.dumps(manifest))
    with (tmp_path / "run" / "run.lock").open("w") as lock:
        if is_running:
            fcntl.flock(lock, fcntl.LOCK_EX)
        found = diagnose.diagnose(read_record(tmp_path / "run"))
    assert [finding.symptom for finding in found] == symptoms


def test_a_remedy_is_named_once() -> None:
    for name in EXPECTED:
        flags = [remedy.split(":")[0].split(" instead")[0] for remedy in find(name)[0].remedies]
        assert len(set(flags)) == len(flags), name
    dropped = read_record(RUNS / "overflow")
    (found,) = find_overflow(replace(dropped, steps=[row | {"loss_scale": 8.0} for row in dropped.steps]))
    assert sum("--bf16" in remedy for remedy in found.remedies) == 1
