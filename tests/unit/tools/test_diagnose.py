"""Every symptom is recognised in a run that has it, and in no other; each finding names the flag that mends it."""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import diagnose
import run_record
from findings import Finding
from helpers import recorded_runs, troubled_runs
from run_record import Record, read_record
from symptoms import RULES, find_overflow
from symptoms_of_speed import find_communication, find_low_use, find_slowdown, find_stragglers

RUNS = Path(__file__).parents[2] / "golden" / "runs"
EXPECTED = {
    "slow-loader": ["--num-workers 4 ", "--prefetch 16 ", "megaflow preprocess"],
    "slow-communication": ["--global-batch-size 8:", "unset NCCL_IB_DISABLE:"],
    "slowdown": ["top:", "python tools/doctor.py"],
    "straggler": ["python tools/doctor.py", "--pipeline-model-parallel-layout"],
    "pipeline-bubble": ["--global-batch-size 32: 8 micro-batches", "--pipeline-schedule interleaved"],
    "out-of-memory": ["--micro-batch-size 4:", "--recompute-granularity selective", "--use-distributed-optimizer"],
    "divergence": ["--lr 0.2:", "--clip-grad 1.0:"],
    "nan": ["--lr 1:", "--lr-warmup-fraction 0.01:", "--clip-grad 1.0:", "--init-method-std 0.02:"],
    "overflow": ["--initial-loss-scale 65536", "--bf16 instead of --fp16"],
    "loss-spikes": ["megaflow inspect --run", "--lr 0.001:"],
    "flat-loss": ["--lr 3e-4", "megaflow inspect PREFIX"],
    "stopped": ["look at rank 1 on node0"],
    "killed": ["dmesg", "then --micro-batch-size", "else the same command"],
}
"""Recorded runs with what mends them, as tests/helpers/recorded_runs.py made them on a CPU, each in real trouble."""
MADE = {
    "low-gpu-use": [
        "--tensor-model-parallel-size 8:",
        "--sequence-parallel",
        "--use-flash-attn",
        "--micro-batch-size 4,",
    ],
    "fp32": ["--bf16:"],
}
"""Not recorded: these need a GPU, and are the healthy run with the values of one put in by hand."""
ALL = {**EXPECTED, **MADE}
RANKS = {
    "killed": 0,
    "out-of-memory": 0,
    "nan": 0,
    "stopped": 0,
    "overflow": 1,
    "divergence": 1,
    "flat-loss": 1,
    "loss-spikes": 1,
}


def find(name: str) -> list[Finding]:
    return diagnose.diagnose(read_record(RUNS / name))


@pytest.mark.parametrize("name", ALL)
def test_a_run_shows_its_symptom_and_the_flags_that_mend_it(name: str) -> None:
    first = find(name)[0]
    assert (first.symptom, first.rank) == ({"fp32": "low-gpu-use"}.get(name, name), RANKS.get(name, 2))
    for flag in ALL[name]:
        assert any(remedy.startswith(flag) for remedy in first.remedies), (flag, first.remedies)


@pytest.mark.parametrize("name", ALL)
def test_no_other_symptom_is_seen_in_it(name: str) -> None:
    assert [finding.symptom for finding in find(name)[1:]] == []


def test_what_is_told_of_each_recorded_run() -> None:
    seen = {name: find(name)[0].seen + "; " + find(name)[0].cause for name in EXPECTED}
    assert re.search(r"\d+ of 18 lines had to wait; text is read and tokenized", seen["slow-loader"])
    assert "backend gloo; gloo sends through" in seen["slow-communication"]
    assert re.search(r"tokens/s/GPU before, \d+ now; most of a step is (forward|backward)", seen["slowdown"])
    assert re.search(r"rank 2 on node0: \d+ ms of its own work a step", seen["straggler"])
    assert "2 micro-batches on 2 stages; (p - 1) / (m + p - 1) = 33%" in seen["pipeline-bubble"]
    assert "loss 4.19 at first, 4.03 at best, 11.36 at last" in seen["divergence"]
    assert "iteration 13, phase communication; rank 1 on node0 did not even write" in seen["stopped"]


def test_nothing_is_found_in_a_healthy_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnose.main([str(RUNS / "healthy")]) == 0
    assert "nothing found" in capsys.readouterr().out


def test_every_recorded_run_is_tested() -> None:
    assert {path.name for path in RUNS.iterdir()} == {"healthy", *ALL}
    assert {rule.symptom for rule in RULES} == {*ALL} - {"fp32"}


@pytest.mark.parametrize("name", MADE)
def test_those_that_are_not_recorded_are_the_healthy_run_with_other_values(name: str) -> None:
    lines, manifest = recorded_runs.read(RUNS / "healthy")
    recorded_runs.MADE[name](lines, manifest["starts"][-1])
    assert recorded_runs.read(RUNS / name) == (lines, manifest | {"name": name})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loss-spikes", "out-of-memory", "stopped"])
def test_a_new_recording_shows_the_same(name: str, tmp_path: Path) -> None:
    recorded_runs.keep(troubled_runs.record(name, tmp_path), tmp_path / "kept" / name, tmp_path / name)
    (found,) = diagnose.diagnose(read_record(tmp_path / "kept" / name))
    assert (found.symptom, found.rank) == (name, RANKS[name])
    assert str(tmp_path / name) not in (tmp_path / "kept" / name / "run.json").read_text()


def test_every_flag_of_a_remedy_is_one_of_the_trainer() -> None:
    page = (Path(__file__).parents[3] / "docs" / "flags.md").read_text(encoding="utf-8")
    named = {flag for name in ALL for text in find(name)[0].remedies for flag in re.findall(r"--[a-z0-9-]+", text)}
    assert len(named) > 20
    assert {flag for flag in named if f"`{flag}`" not in page} == {"--run", "--iteration"}  # of megaflow inspect


def test_remedies_in_order_of_price_after_running_out_of_memory() -> None:
    remedies = find("out-of-memory")[0].remedies
    order = ["--micro-batch-size", "--recompute", "--use-distributed-optimizer", "offload", "--tensor-model-parallel"]
    places = [next(number for number, text in enumerate(remedies) if word in text) for word in order]
    assert places == sorted(places)
    assert (
        "by formula (GiB): weights 0.38, gradients 0.38, optimizer 0.76, activations 2.04"
        in find("out-of-memory")[0].seen
    )


def test_of_a_spike_the_junk_is_named() -> None:
    named = find("loss-spikes")[0].seen.partition("the samples above that hold ")[2].split(", ")
    assert {*named[::2]} == {"corpus.jsonl"}
    assert int(named[1].removeprefix("line ")) - 1 in troubled_runs.JUNK


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnose.main([str(RUNS / "nan"), "--json"]) == diagnose.FOUND
    (found,) = json.loads(capsys.readouterr().out)
    assert found["symptom"] == "nan"
    assert "5 iterations from" in found["seen"]


def with_start(name: str, **changes: Any) -> Record:
    record = read_record(RUNS / name)
    return replace(record, start=record.start | changes)


def test_links_that_are_turned_off_are_the_cause_where_nccl_would_use_them() -> None:
    (found,) = find_communication(with_start("slow-communication", backend="nccl", device="NVIDIA H100"))
    assert found.cause == "fast links are turned off: NCCL_IB_DISABLE is 1"
    assert found.remedies[0] == "unset NCCL_IB_DISABLE"
    (found,) = find_communication(with_start("slow-communication", backend="nccl", environment={}))
    assert "slow links" in found.cause
    (found,) = find_communication(with_start("slow-communication", device="NVIDIA H100", environment={}))
    assert found.remedies[0] == "--distributed-backend nccl"


def test_data_that_come_late_in_bursts_are_seen_although_a_usual_step_waits_for_nothing() -> None:
    record, settled = read_record(RUNS / "healthy"), 6

    def late_in(lines: set[int]) -> list[str]:
        late = {"loader_bound_s": 0.2, "step_time_s": 0.25, "tokens_per_s_per_gpu": 500.0}
        steps = [row | late if number - settled in lines else row for number, row in enumerate(record.steps)]
        return [found.symptom for found in diagnose.diagnose(replace(record, steps=steps))]

    assert late_in({0, 5, 10, 15, 16, 17}) == ["slow-loader"]
    assert late_in({3, 11}) == []


def test_of_a_spike_no_document_of_a_sample_that_is_as_usual_is_named() -> None:
    record = read_record(RUNS / "loss-spikes")
    worst = max(record.events("spike"), key=lambda event: event["deviations"])
    usual = [
        document["origin"] for sample in worst["samples"] if sample["loss"] < 4 for document in sample["documents"]
    ]
    assert usual
    assert not any(origin in find("loss-spikes")[0].seen for origin in usual)


def test_a_spike_that_the_run_came_down_from_is_told_beside_a_divergence() -> None:
    record = read_record(RUNS / "divergence")
    (event,) = record.events("spike")
    assert event["iteration"] == 23
    early = [event | {"iteration": 3, "loss": 30.0}, *record.rows]
    assert [found.symptom for found in diagnose.diagnose(record)] == ["divergence"]
    assert [found.symptom for found in diagnose.diagnose(replace(record, rows=early))] == ["divergence", "loss-spikes"]


def test_waiting_for_a_slow_rank_is_no_fault_of_the_links() -> None:
    record = read_record(RUNS / "straggler")
    assert record.usual("communication_s") / record.usual("step_time_s") > 0.3
    even = [row | {"work_by_rank_s": [0.02, 0.02, 0.02]} for row in record.steps]
    assert [found.symptom for found in find_communication(replace(record, steps=even))] == ["slow-communication"]
    assert [*find_communication(record)] == []


def test_of_two_ranks_one_is_compared_with_the_other() -> None:
    record = read_record(RUNS / "straggler")

    def of_two(slow_s: float) -> list[Finding]:
        steps = [row | {"work_by_rank_s": [0.1, slow_s]} for row in record.steps]
        return [*find_stragglers(replace(record, steps=steps))]

    assert "rank 1 on node0: 140 ms" in of_two(0.14)[0].seen
    assert of_two(0.12) == []


def test_lines_of_before_a_change_of_ranks_are_not_compared() -> None:
    record = read_record(RUNS / "straggler")
    steps = [row | {"work_by_rank_s": [0.1] * 8} if number < 12 else row for number, row in enumerate(record.steps)]
    (found,) = find_stragglers(replace(record, steps=steps))
    assert "rank 2 on node0" in found.seen


def test_a_slow_device_is_looked_at_with_its_own_tool() -> None:
    (found,) = find_slowdown(with_start("slowdown", device="NVIDIA H100"))
    assert found.remedies[0].startswith("nvidia-smi:")


def test_fp32_is_no_fault_on_a_cpu() -> None:
    assert [*find_low_use(with_start("fp32", device="cpu x86_64"))] == []


def stand(run: Path, rank: int, phase: str) -> None:
    (run / "stacks" / f"rank_{rank}.txt").write_text(
        f"rank {rank} made no progress for 4 s: iteration 9, phase {phase}\n"
    )


def test_a_rank_that_hangs_elsewhere_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(RUNS / "stopped", run)
    stand(run, 1, "loader_bound")
    (found,) = diagnose.diagnose(read_record(run))
    assert found.cause == "rank 1 made no progress for 4 s: iteration 9, phase loader_bound, and others wait for it"
    assert found.remedies[0].startswith("look into stacks/rank_1.txt")
    stand(run, 1, "communication")
    (found,) = diagnose.diagnose(read_record(run))
    assert found.remedies[0].startswith("look into stacks/rank_N.txt")
    os.utime(run / "stacks" / "rank_1.txt", (1e9, 1e9))  # of a start long ago
    (found,) = diagnose.diagnose(read_record(run))
    assert found.remedies[0].startswith("look at rank 1 on node0")


def test_a_run_that_ended_with_an_error_is_no_healthy_one() -> None:
    end = {"exit_code": 1, "iteration": 24, "reason": "FileAccessError: /full: no space left"}
    (found,) = diagnose.diagnose(with_start("healthy", end=end))
    assert (found.symptom, found.rank, found.seen) == ("stopped", 0, "FileAccessError: /full: no space left")


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
        ("run.json", '{"starts": []}'),
        ("run.json", '{"starts": [7]}'),
        ("run.json", "[" * 100_000),
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


HALVES = {
    "run.json": ["killed", "out-of-memory", "low-gpu-use", "stopped"],
    "metrics.jsonl": [rule.symptom for rule in RULES if rule.symptom not in ("killed", "out-of-memory", "stopped")],
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_half_that_is_missing_is_told_with_what_cannot_be_judged(
    half: str, as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(RUNS / "healthy", tmp_path / "run")
    (tmp_path / "run" / half).unlink()
    assert diagnose.main([str(tmp_path / "run"), *["--json"] * as_json]) == diagnose.UNREADABLE
    said = capsys.readouterr()
    assert (json.loads(said.out) == []) if as_json else ("nothing found" in said.out)
    (note,) = [line for line in (said.err if as_json else said.out).splitlines() if line.startswith("note: ")]
    assert note.startswith(f"note: {tmp_path / 'run' / half}: there is none")
    assert note.partition("not judged: ")[2].partition(";")[0].split(", ") == HALVES[half]


@pytest.mark.parametrize(
    ("name", "half", "symptom"),
    [
        ("out-of-memory", "metrics.jsonl", "out-of-memory"),
        ("nan", "run.json", "nan"),
        ("nan", "metrics.jsonl", "stopped"),  # its end says that losses were not finite
    ],
)
def test_what_is_left_of_a_run_is_judged(
    name: str, half: str, symptom: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(RUNS / name, tmp_path / "run")
    (tmp_path / "run" / half).unlink()
    assert diagnose.main([str(tmp_path / "run"), "--json"]) == diagnose.FOUND
    said = capsys.readouterr()
    assert [found["symptom"] for found in json.loads(said.out)] == [symptom]
    assert f"{half}: there is none" in said.err


def test_commands_of_remedies_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a run"
    shutil.copytree(RUNS / "nan", folder)
    assert diagnose.main([str(folder)]) == diagnose.FOUND
    assert f"megaflow inspect --run '{folder}' --iteration " in capsys.readouterr().out


def test_a_run_that_died_before_its_first_line_is_no_clean_bill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(RUNS / "healthy", tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert diagnose.main([str(tmp_path / "run")]) == diagnose.UNREADABLE
    assert "metrics.jsonl: no training step is in it" in capsys.readouterr().out


def test_few_lines_are_told_to_be_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(RUNS / "healthy", tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:5]))
    assert diagnose.main([str(tmp_path / "run")]) == 0
    note = capsys.readouterr().out.splitlines()[-1]
    assert "5 lines of training steps are too few; not judged: divergence, flat-loss, slow-loader" in note


def change_lines(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    metrics = run / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row in rows:
        change(row)
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("lm_loss", "NaN", "lm_loss is 'NaN'"),
        ("step_time_s", [1.0], "step_time_s is [1.0]"),
        ("work_by_rank_s", [1, "a"], "work_by_rank_s is [1, 'a']"),
        ("loader_bound_s", -1.0, "loader_bound_s is -1.0"),
        ("tokens_per_s_per_gpu", 10**400, "tokens_per_s_per_gpu is 1000000"),
        ("lr", {"a": 1}, "lr is {'a': 1}"),
        ("iteration", "seven", "it is no line of a run"),
    ],
)
def test_a_value_of_a_wrong_type_is_left_out_and_told(
    name: str, value: Any, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(RUNS / "healthy", tmp_path / "run")
    change_lines(tmp_path / "run", lambda row: row.update({name: value}) if row["iteration"] % 2 else None)
    assert diagnose.main([str(tmp_path / "run")]) == 0
    assert f"12 entries cannot be used, the first in line 1: {shown}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("section", "value"),
    [("model", {"num_layers": "two"}), ("step", {"dtype": 7}), ("step", {}), ("model", {"num_layers": 10**9})],
)
def test_flags_of_a_wrong_type_are_told_and_the_rest_is_judged(
    section: str, value: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(RUNS / "out-of-memory", tmp_path / "run")
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    own = manifest["starts"][-1]["config"]
    own[section] = {**own[section], **value} if value else {}
    (tmp_path / "run" / "run.json").write_text(json.dumps(manifest))
    assert diagnose.main([str(tmp_path / "run")]) == diagnose.FOUND
    said = capsys.readouterr().out
    assert "1. out of memory" in said
    assert "the configuration of the last start cannot be used" in said


def test_a_line_without_an_end_is_read_in_parts_and_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(RUNS / "healthy", tmp_path / "run")
    monkeypatch.setattr(run_record, "MOST_LINE_BYTES", 4096)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write("x" * 10_000)
    assert diagnose.main([str(tmp_path / "run")]) == 0
    assert "1 entry cannot be used, the first in line 25: it is no line of a run" in capsys.readouterr().out
    monkeypatch.setattr(run_record, "MOST_MANIFEST_BYTES", 1000)
    assert diagnose.main([str(tmp_path / "run")]) == diagnose.UNREADABLE
    assert "run.json: larger than" in capsys.readouterr().err


JUNK = ("NaN", float("nan"), float("inf"), -1, 0, None, [], [1, "a"], {}, True, 10**400, 10**299, 1e308, "", [[]])


def list_places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from list_places(item, (*place, name))


def put_junk(whole: Any, chance: random.Random) -> None:
    *way, last = chance.choice([*list_places(whole)])
    for name in way:
        whole = whole[name]
    whole[last] = chance.choice(JUNK)


@pytest.mark.parametrize("name", ALL)
def test_junk_in_any_place_ends_in_no_traceback(name: str, tmp_path: Path) -> None:
    chance = random.Random(name)
    lines = [json.loads(line) for line in (RUNS / name / "metrics.jsonl").read_text().splitlines()]
    for _ in range(20):
        whole = {"rows": json.loads(json.dumps(lines)), "run": json.loads((RUNS / name / "run.json").read_text())}
        for part in (whole["run"], whole["rows"]) * 3:
            if part:
                put_junk(part, chance)
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in whole["rows"]))
        (tmp_path / "run.json").write_text(json.dumps(whole["run"]))
        assert diagnose.main([str(tmp_path)]) in (0, diagnose.FOUND, diagnose.UNREADABLE)


def test_deep_nesting_and_escapes_of_a_terminal_do_no_harm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(RUNS / "stopped", tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n")
    manifest = (tmp_path / "run" / "run.json").read_text()
    (tmp_path / "run" / "run.json").write_text(manifest.replace("no progress", "\\u001b[2Jno progress"))
    assert diagnose.main([str(tmp_path / "run")]) == diagnose.FOUND
    said = capsys.readouterr().out
    assert "?[2Jno progress" in said
    assert "\x1b" not in said
    assert "1 entry cannot be used, the first in line 13: it is no line of a run" in said


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
    for name in ALL:
        flags = [remedy.split(":")[0].split(" instead")[0] for remedy in find(name)[0].remedies]
        assert len(set(flags)) == len(flags), name
    dropped = read_record(RUNS / "overflow")
    (found,) = find_overflow(replace(dropped, steps=[row | {"loss_scale": 8.0} for row in dropped.steps]))
    assert sum("--bf16" in remedy for remedy in found.remedies) == 1
