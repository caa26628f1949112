"""benches/gpu/merge.py: the table of what train.py has measured, and what stands above and below it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.gpu_benches import start


def make_machine() -> dict[str, Any]:
    versions = {"torch": "2.11.0", "triton": "3.6.0"}
    return {"gpu": "NVIDIA H200", "uuid": "1a2b3c4d-0000-0000-0000-000000000000", "versions": versions, "commit": "abc"}


def make_ceilings(bf16: float, fp8: float) -> dict[str, float]:
    """As machine.py measures them; colder products are faster."""
    warm = {"bf16_warm_flops_per_s": bf16, "fp8_warm_flops_per_s": fp8}
    return {**warm, "bf16_cold_flops_per_s": bf16 + 100e12, "fp8_cold_flops_per_s": fp8 + 100e12}


def make_run(side: str = "megaflow", rate: float = 1000.0, **more: Any) -> dict[str, Any]:
    """A run as train.py writes it; megaflow's phases explain 99 % of its step."""
    run: dict[str, Any] = {
        "row": "gpt-1.3b",
        "side": side,
        "flags": "",
        "recipe": "fp32",
        "ranks": 1,
        "layout": {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "sp": 0, "zero": 0},
        "fp8": "none",
        "attention": "auto",
        "recompute": "none",
        "sizes": "--num-layers 24",
        "flops_per_token": 494.5e9,
        "flops_per_token_causal": 400e9,
        "tokens_per_s": rate,
        "step_time_s": 1.0,
        "memory_peak_bytes": 2**31,
        "machine": make_machine(),
        "ceilings": [make_ceilings(800e12, 1400e12), make_ceilings(780e12, 1300e12)],
        "command": "one",
    }
    if side == "megaflow":
        run |= {"loader_bound_s": 0.01, "forward_s": 0.3, "backward_s": 0.6, "optimizer_s": 0.08, "other_s": 0.01}
    return {**run, **more}


def read_table(tmp_path: Path, runs: list[dict[str, Any]]) -> tuple[str, list[list[str]]]:
    """What merge.py prints, and the cells of its rows."""
    file = tmp_path / "gpu-x.json"
    file.write_text(json.dumps(runs))
    done = start("merge.py", str(file))
    assert done.returncode == 0, done.stderr
    lines = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    return done.stdout, lines[1:]


def test_the_table_names_machine_and_ceiling_and_shares_of_both(tmp_path: Path) -> None:
    text, rows = read_table(tmp_path, [make_run(), make_run("megatron-core", 800.0)])
    assert (
        "- one: NVIDIA H200, uuid 1a2b3c4d; torch 2.11.0, triton 3.6.0; commit abc (clean); 8192^3 product in bf16: "
        "800 then 780 TFLOP/s (-2.5%), cold 900 then 880; in fp8: 1400 then 1300 TFLOP/s (-7.1%), cold 1500 then 1400"
    ) in text
    (row,) = rows
    assert row[5] == "1.250"
    assert row[6] == "50.0% (40.4%) / 40.0% (32.4%)"  # of 989 TFLOP/s
    assert row[7] == "62.6% / 50.1%"  # of 790
    assert row[10] == "1.00%"
    assert row[11] == "10.0/-/300.0/600.0/-/80.0/-/10.0"
    assert row[12] == "99.00% (100.00%)"


def test_a_phase_split_that_does_not_add_up_is_told(tmp_path: Path) -> None:
    _, rows = read_table(tmp_path, [make_run(backward_s=0.5, other_s=0.11)])
    assert rows[0][12] == "89.00% (100.00%), below 97%"


def test_shares_are_of_one_gpu(tmp_path: Path) -> None:
    _, rows = read_table(tmp_path, [make_run(ranks=2, rate=2000.0)])
    assert rows[0][2] == "2.0 k"
    assert rows[0][6] == "50.0% (40.4%)"
    assert rows[0][7] == "62.6%"


def test_fp8_rows_are_measured_by_the_same_peak_and_by_the_ceiling_in_fp8(tmp_path: Path) -> None:
    _, rows = read_table(tmp_path, [make_run(fp8="delayed")])
    assert rows[0][6] == "50.0% (40.4%)"
    assert rows[0][7] == "36.6% of fp8's"  # of 1350
    assert "fp8 delayed" in rows[0][1]


def test_without_a_ceiling_in_fp8_the_share_is_said_to_be_of_the_other(tmp_path: Path) -> None:
    slow = [{"bf16_warm_flops_per_s": 800e12}, {"bf16_warm_flops_per_s": 780e12}]
    text, rows = read_table(tmp_path, [make_run(fp8="delayed", ceilings=slow)])
    assert rows[0][7] == "62.6% of bf16's, fp8's not measured"
    assert "in bf16: 800 then 780 TFLOP/s (-2.5%); in fp8: not measured" in text


@pytest.mark.parametrize("fp8, share", [("none", "62.6%"), ("delayed", "62.6% of bf16's, fp8's not measured")])
def test_results_of_an_older_file_are_read(tmp_path: Path, fp8: str, share: str) -> None:
    run = make_run(fp8=fp8, ceilings_flops_per_s=[800e12, 780e12])
    del run["ceilings"], run["machine"]["uuid"]
    text, rows = read_table(tmp_path, [run])
    assert rows[0][7] == share
    assert "uuid unknown" in text
    assert "in bf16: 800 then 780 TFLOP/s (-2.5%); in fp8: not measured" in text


def test_a_ceiling_that_was_not_measured_is_no_share(tmp_path: Path) -> None:
    text, rows = read_table(tmp_path, [make_run(ceilings=[{}, {}])])
    assert rows[0][7] == "-"
    assert "in bf16: not measured; in fp8: not measured" in text


@pytest.mark.parametrize(
    "commit, told", [("abc", "commit abc (clean)"), ("abc+", "commit abc (files changed)"), (None, "commit unknown")]
)
def test_it_is_told_whether_the_commit_was_clean(tmp_path: Path, commit: str | None, told: str) -> None:
    text, _ = read_table(tmp_path, [make_run(machine={**make_machine(), "commit": commit})])
    assert f"{told}; 8192^3" in text


def test_two_machines_are_told_apart(tmp_path: Path) -> None:
    other = {**make_machine(), "uuid": "GPU-5e6f7a8b-0000-0000-0000-000000000000"}
    text, _ = read_table(tmp_path, [make_run(), make_run("torch", command="two", machine=other)])
    assert "one: NVIDIA H200, uuid 1a2b3c4d" in text
    assert "two: NVIDIA H200, uuid 5e6f7a8b" in text


@pytest.mark.parametrize(
    "unlike",
    [
        {"ranks": 2},
        {"layout": {"tp": 2, "pp": 1, "cp": 1, "ep": 1, "sp": 1, "zero": 0}},
        {"recipe": "bf16"},
        {"fp8": "tensorwise"},
        {"recompute": "mlp"},
        {"sizes": "--num-layers 12"},
        {"row": "gpt-1.3b-mbs8"},
    ],
    ids=str,
)
def test_runs_that_differ_stand_alone(tmp_path: Path, unlike: dict[str, Any]) -> None:
    _, rows = read_table(tmp_path, [make_run(), make_run("megatron-core", 800.0, **unlike)])
    assert [row[5] for row in rows] == ["-", "-"]
    assert sorted((row[2] == "-", row[4] == "-") for row in rows) == [(False, True), (True, False)]


def test_attention_and_flags_are_each_sides_own_choice(tmp_path: Path) -> None:
    runs = [make_run(flags="--a"), make_run("megatron-core", 800.0, flags="--b", attention="flash")]
    runs.append(make_run("megatron-core", 700.0, flags="--b", attention="fused"))
    _, rows = read_table(tmp_path, runs)
    assert rows[0][3] == "Megatron-Core `--b` (attention flash, best of 2)"
    assert rows[0][5] == "1.250"


def test_rounds_are_shown_by_median_and_spread(tmp_path: Path) -> None:
    runs = [make_run(rate=rate) for rate in (1000.0, 3000.0, 2000.0)]
    _, rows = read_table(tmp_path, [*runs, make_run("torch", 1000.0, command="two")])
    assert rows[0][2] == "2.0 k (1.0 to 3.0, 3 runs)"
    assert rows[0][5] == "2.000 *"  # of another command


def test_a_failed_run_and_a_note_are_told_below(tmp_path: Path) -> None:
    lost = {"row": "tiny", "side": "torch", "flags": "", "recipe": "bf16", "error": "error: out of memory"}
    text, rows = read_table(tmp_path, [make_run(notes=["added apart"]), lost])
    assert len(rows) == 1
    assert "failed: tiny torch bf16 '': error: out of memory" in text
    assert "note: gpt-1.3b megaflow '': added apart" in text


def drop(name: str) -> list[dict[str, Any]]:
    run = make_run()
    del run[name]
    return [run]


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "cannot be read: No such file"),
        ("{", "not JSON"),
        ('{"rows": []}', "expected a list of runs, found dict"),
        (json.dumps(drop("layout")), "run 0: no 'layout'; was it measured by an older train.py?"),
        (json.dumps(drop("tokens_per_s")), "run 0: no 'tokens_per_s'"),
        (json.dumps([make_run(), make_run(rate=0)]), "run 1: tokens_per_s must be a number above 0, got 0"),
        (json.dumps([make_run(layout={"tp": 1})]), "run 0: no 'pp'"),
    ],
)
def test_a_file_that_cannot_be_merged_ends_in_a_sentence(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "gpu-x.json"
    if content is not None:
        file.write_text(content)
    done = start("merge.py", str(file))
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
