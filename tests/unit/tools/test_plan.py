"""The planner: every recommended layout of the guides, its own ranking, and what it says where nothing fits."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import plan
import plan_rows
from megaflow_trainer.config import planner, read_command
from megaflow_trainer.config.activations import GPU
from megaflow_trainer.config.expert_section import read_pattern
from megaflow_trainer.config.hardware import find_gpu
from megaflow_trainer.config.memory import estimate_memory, find_fullest
from megaflow_trainer.config.planner import Cluster, evaluate
from megaflow_trainer.config.planner import plan as rank_layouts
from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.config.step_time import StepTime, predict_step

ROOT = Path(__file__).resolve().parents[3]
H100 = Cluster(gpu=find_gpu("H100"), num_gpus=8, memory_gb=80)


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in plan_rows.judge_rows()}


@pytest.mark.parametrize(
    "name, layout, gpus, named_fits, best_fits",
    [
        ("7B on 8", "tp1.cp1.pp1.dp8", 8, True, True),
        ("13B on 8", "tp2.cp1.pp1.dp4", 8, True, True),
        ("70B on 64", "tp4.cp1.pp4.dp4", 64, True, True),
        ("405B on 128", "tp8.cp2.pp8.dp2", 256, True, True),
        ("1.3B with tp 8", "tp8.cp1.pp1.dp1", 8, True, True),
        ("13B on 128", "tp8.cp1.pp1.dp16", 128, True, True),
        ("0.8B on 4 x 24 GB", None, None, None, True),
        ("1.5B on 4 x 24 GB", None, None, None, True),
        ("175B on 64", None, None, None, True),
        ("Mixtral 8x7B", "tp2.ep4.dp4", 8, False, True),
    ],
)
def test_every_recommended_layout_is_shown_as_fitting_or_not(
    rows: dict[str, Any], name: str, layout: str | None, gpus: int | None, named_fits: bool | None, best_fits: bool
) -> None:
    entry = rows[name]
    named = entry.get("named", {})
    assert (named.get("layout"), named.get("gpus"), named.get("fits")) == (layout, gpus, named_fits)
    assert entry["best"]["fits"] == best_fits
    if layout is not None and "tokens_per_s" in named and gpus == entry["gpus"]:
        assert entry["best"]["tokens_per_s"] >= 0.9 * named["tokens_per_s"]


def test_all_rows_are_shown(rows: dict[str, Any]) -> None:
    assert len(rows) == 10
    text = plan_rows.format_rows(rows.values())
    assert all(name in text for name in rows)


def test_the_table_is_the_one_that_was_recorded(rows: dict[str, Any]) -> None:
    """Recorded by `python tools/plan.py --rows --json`; record it again where a formula is meant to change."""
    recorded = json.loads((ROOT / "tests/golden/planner_rows.json").read_text(encoding="utf-8"))
    assert json.loads(json.dumps(list(rows.values()))) == recorded


def test_a_search_computes_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted: list[TrainConfig] = []

    def count(config: TrainConfig, *rest: Any, **names: Any) -> StepTime:
        predicted.append(config)
        return predict_step(config, *rest, **names)

    monkeypatch.setattr(planner, "predict_step", count)
    read_pattern.cache_clear()
    base = flags("--preset deepseek_v3 --seq-length 4096 --global-batch-size 64")
    calls: list[tuple[int, int]] = []
    found = planner.search(base, H100, progress=lambda done, total: calls.append((done, total)))
    layouts = len(list(planner.list_flags(base, H100)))
    assert found.choices == []  # 671B on eight GPUs
    assert found.nearest is not None
    assert 0 < len(predicted) <= layouts  # one of the nine combinations of ZeRO and recompute of a layout
    assert read_pattern.cache_info().misses == 1
    assert calls == [(number, layouts) for number in range(1, layouts + 1)]


def test_a_long_search_says_how_far_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--gpus", "8", "--preset", "llama2_7b", "--json"]
    monkeypatch.setattr("megaflow.cli.options.PLAIN_LINE_EVERY_S", 1e9)
    assert plan.main(words) == 0
    brief = capsys.readouterr()
    assert brief.err == ""  # nothing for a search that is over at once
    monkeypatch.setattr("megaflow.cli.options.PLAIN_LINE_EVERY_S", 0.0)
    assert plan.main(words) == 0
    said = capsys.readouterr()
    assert said.out == brief.out
    assert re.match(r"planning \d+%: 1 layouts, [\d,]+ layouts/s\n", said.err)
    assert said.err.splitlines()[-1].startswith("planning 100%: ")
    assert plan.main(["--rows", "--json"]) == 0
    assert "planning 10%: 1 rows" in capsys.readouterr().err


def test_what_a_recipe_or_a_flag_says_is_planned_with(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        "model: {preset: llama2_7b}\ndata: {seq_len: 2048}\nstep: {global_batch_size: 64}\nparallel: {tp: 4}\n"
    )
    assert plan.main(["--gpus", "8", "--config", str(tmp_path / "own.yaml"), "--top", "99", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["layouts"]) == len({tuple(row["flags"]) for row in found["layouts"]}) > 1
    for row in found["layouts"]:
        config, _ = read_command(row["flags"], world_size=8)
        assert (config.data.seq_len, config.step.global_batch_size, config.parallel.tp) == (2048, 64, 4)
        assert row["layout"].startswith("tp4.")


@pytest.mark.parametrize("words", ["--seq-length long", "--num-experts few", "--config", "--preset llama"])
def test_a_fault_of_the_flags_ends_a_plan_before_the_search(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planner, "find_remedy", lambda *rest, **names: pytest.fail("it searched"))
    assert plan.main(["--gpus", "2048", *words.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1


def test_slips_of_the_guides_are_named(rows: dict[str, Any]) -> None:
    assert rows["405B on 128"]["notes"] == ["the named layout multiplies to 256 GPUs, not 128"]
    assert "is 8 GPUs where ep 4 folds into dp" in rows["Mixtral 8x7B"]["notes"][0]
    assert "45.1 B parameters, 90.2 GB in bf16, 22.5 GB at ep 4" in rows["Mixtral 8x7B"]["notes"][1]
    assert "21.3 GB too much" in rows["Mixtral 8x7B"]["named"]["fit"]


def test_a_checkpoint_of_70b_takes_a_terabyte(rows: dict[str, Any]) -> None:
    assert rows["70B on 64"]["checkpoint_gb"] == pytest.approx(14 * 68.98, rel=1e-3)  # bf16, fp32 master, two moments


def flags(text: str) -> list[str]:
    return f"--train-iters 1 --data-path x {text}".split() + ([] if "--bf16" in text.split() else ["--bf16"])


def read_measured(name: str) -> list[list[str]]:
    """Runs of a file of docs/measured as command lines, with bytes at the peak and tokens per second at the end."""
    content = json.loads((ROOT / "docs/measured" / name).read_text(encoding="utf-8"))
    return [
        [f"{content['flags']} {run['flags']}", str(run["peak_bytes"]), str(run["tokens_per_s"])]
        for run in content["runs"]
    ]


def compare_with_measured(run: list[str], *, memory: float, speed: float) -> None:
    text, peak_bytes, tokens_per_s = run
    config, _ = read_command(flags(text), world_size=1)
    assert sum(estimate_memory(config)[0].values()) == pytest.approx(int(peak_bytes), rel=memory)
    predicted = predict_step(config, find_gpu("H200")).tokens_per_s
    assert predicted == pytest.approx(float(tokens_per_s), rel=speed)


@pytest.mark.parametrize("run", read_measured("planner_h200.json"), ids=lambda run: run[0])
def test_memory_and_speed_by_formula_are_those_that_were_measured_on_an_h200(run: list[str]) -> None:
    compare_with_measured(run, memory=0.01, speed=0.15)


@pytest.mark.parametrize("run", read_measured("training_h200.json"), ids=lambda run: run[0])
def test_those_of_compiled_blocks_too(run: list[str]) -> None:
    compare_with_measured(run, memory=0.01, speed=0.06)


def test_stages_layers_and_states_divide_the_memory_of_a_70b() -> None:
    text = "--preset llama2_70b --seq-length 4096 --global-batch-size 64 --micro-batch-size 1"
    whole = estimate_memory(read_command(flags(text), world_size=1)[0])[0]
    axes = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --sequence-parallel"
    config = read_command(flags(f"{text} {axes} --use-distributed-optimizer"), world_size=64)[0]
    first = estimate_memory(config, pp_rank=0)[0]
    assert first["weights"] == pytest.approx(whole["weights"] / 16, rel=0.01)
    assert first["gradients"] == pytest.approx(whole["gradients"] / 16, rel=0.01)
    assert first["optimizer"] == pytest.approx(whole["optimizer"] / 64, rel=0.01)
    last = estimate_memory(config, pp_rank=3)[0]
    assert first["activations"] > 3.5 * last["activations"] * 0.9  # four micro-batches in flight against one
    totals = [sum(estimate_memory(config, GPU, pp_rank=rank)[0].values()) for rank in range(4)]
    assert totals.index(max(totals)) == find_fullest(config)


def test_layouts_are_ranked_and_what_does_not_fit_is_left_out() -> None:
    base = flags("--preset llama2_13b --seq-length 4096 --global-batch-size 64")
    choices = rank_layouts(base, H100)
    speeds = [choice.time.tokens_per_s for choice in choices]
    assert speeds == sorted(speeds, reverse=True)
    assert len(speeds) > 3
    assert all(choice.total_bytes <= 76e9 for choice in choices)
    small = rank_layouts(base, Cluster(gpu=find_gpu("H100"), num_gpus=8, memory_gb=34))
    assert 0 < len(small) < len(choices)


def test_a_bubble_shrinks_with_chunks_and_grows_with_stages() -> None:
    base = flags("--preset llama2_7b --seq-length 4096 --global-batch-size 16 --micro-batch-size 1")
    pp4 = evaluate([*base, "--pipeline-model-parallel-size", "4"], H100).time
    interleaved = ["--pipeline-schedule", "interleaved", "--num-virtual-stages-per-pipeline-rank", "2"]
    chunks = evaluate([*base, "--pipeline-model-parallel-size", "4", *interleaved], H100).time
    assert pp4.bubble_s / (pp4.total_s - pp4.optimizer_s - pp4.data_s) == pytest.approx(3 / (8 + 3))
    assert chunks.bubble_s == pytest.approx(pp4.bubble_s / 2, rel=0.02)


def test_the_command_that_is_shown_is_one_that_the_trainer_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--gpus", "64", "--preset", "llama2_70b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    words = shlex.split(found["recommended"]["command"].replace("\\\n", " "))
    assert words[:3] == ["torchrun", "--nnodes", "8"]
    config, _ = read_command(words[words.index("trainer/pretrain.py") + 1 :], world_size=64)
    assert config.model.preset == "llama2_70b"
    assert found["checkpoint_gb"] == pytest.approx(965.7, rel=1e-3)
    assert all(layout["fits"] for layout in found["layouts"])


def test_the_command_starts_as_many_ranks_as_there_are_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--preset", "llama2_7b", "--global-batch-size", "720"]
    assert plan.main([*words, "--gpus", "20"]) == 2
    said = "--gpus 20 is no multiple of --gpus-per-node 8, and all machines start as many ranks; "
    assert said + "give --gpus 16 or 24, or --gpus-per-node 5" in capsys.readouterr().err
    for sizes, launch in (("20 5", "--nnodes 4 --nproc_per_node 5"), ("6 8", "torchrun --nproc_per_node 6")):
        gpus, per_node = sizes.split()
        assert plan.main([*words, "--gpus", gpus, "--gpus-per-node", per_node]) == 0
        command = capsys.readouterr().out.replace(" --rdzv_backend c10d --rdzv_endpoint FIRST_HOST:29500", "")
        assert launch in command.replace("\\\n", " ").replace("  ", " ")


def test_the_page_of_a_plan_names_its_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--preset", "gpt3_1.3b", "--micro-batch-size", "1", "4"]) == 0
    text = capsys.readouterr().out
    for part in ("recommended: dp8", "seven runs", "Accelerate", "DeepSpeed", "a checkpoint takes 18 GB"):
        assert part in text


def test_where_nothing_fits_the_shortage_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpus", "4", "--gpu", "l4", "--preset", "llama2_13b", "--global-batch-size", "64"]
    assert plan.main(words) == 1
    assert "nothing fits on 4 GPUs with 24 GB" in (text := capsys.readouterr().err)
    assert "35.2 too much" in text
    assert plan.main([*words, "--json"]) == 1
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["layouts"] == []
    assert f"error: {found['error']}\n" == said.err == text


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--bogus", "--bogus"),
        ("--preset llama2_7b", "--preset llama2_7b"),
        ("--gpus 64 --top 2 --bogus 1", "--gpus --top --bogus 1"),
    ],
)
def test_rows_take_no_other_flag(words: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--rows", *words.split()]) == 2
    sentence = f"--rows has models and GPUs of its own; drop {named}, or --rows"
    assert capsys.readouterr().err == f"error: {sentence}\n"
    assert plan.main(["--rows", "--json", *words.split()]) == 2
    assert json.loads(capsys.readouterr().out) == {"error": sentence}


def test_faults_of_the_flags_are_the_trainers_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--num-heads", "7"]) == 2
    assert "the nearest known one is --num-attention-heads" in capsys.readouterr().err
    assert plan.main(["--gpu", "H1000"]) == 2
    assert "the nearest is H100" in capsys.readouterr().err
    for flag in ("--gpus", "--gpus-per-node", "--top"):
        assert plan.main([flag, "0"]) == 2
        assert capsys.readouterr().err == f"error: {flag} must be >= 1, got 0\n"
    for words in ("--memory-gb nan", "--memory-gb inf", "--memory-gb 0", "--memory-gb 4", "--reserve-gb -1"):
        assert plan.main(words.split()) == 2, words
        assert "leaves nothing to plan with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--gpus 99999999999999", "--gpus must be <= 1,000,000, got 99,999,999,999,999; no cluster has more"),
        ("--gpus-per-node 9999", "--gpus-per-node must be <= 1,024, got 9,999; give the GPUs of one machine"),
        ("--num-layers 99999999999", "model.num_layers (--num-layers) must be <= 4,096, got 99,999,999,999; lower it"),
        (
            "--num-layers 100000 --gpus 100000",
            "model.num_layers (--num-layers) must be <= 4,096, got 100,000; lower it",
        ),
        (f"--micro-batch-size {'1 ' * 17}", "--micro-batch-size takes up to 16 sizes, got 17; drop some"),
        ("--micro-batch-size 4 0", "--micro-batch-size must be >= 1, got 0"),
        ("--memory-gb 1e300", "leaves nothing to plan with"),
        (
            "--gpus 720720 --gpus-per-node 720 --preset deepseek_v3 --global-batch-size 720720",
            "720720 GPUs give more than 10,000 layouts, which take minutes to compare; fix one of the axes",
        ),
        ("--gpus 1000000", "1024 = 1 x 1000000 x accumulation; choose a multiple of 1000000 for --global-batch-size"),
    ],
    ids=lambda part: str(part)[:30],
)
def test_a_plan_too_large_to_make_is_refused_at_once(
    words: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planner, "find_remedy", lambda *rest, **names: pytest.fail("it searched"))
    assert plan.main(words.split()) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert (said.startswith("error: "), said.count("\n")) == (True, 1)


def test_a_plan_for_a_million_gpus_takes_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpus", "1000000", "--preset", "llama2_7b", "--global-batch-size", "1000000", "--json"]
    assert plan.main(words) == 0
    best = json.loads(capsys.readouterr().out)["layouts"][0]
    assert read_command(best["flags"], world_size=1_000_000)[0].parallel.zero >= 1


def test_layouts_that_do_not_make_the_global_batch_are_not_looked_at() -> None:
    base = flags("--preset llama2_7b --global-batch-size 12")
    found = [read_command(words, world_size=8)[0] for words, _ in planner.list_flags(base, H100)]
    assert {config.parallel.tp * config.parallel.pp * config.parallel.cp for config in found} == {2, 4, 8}
