"""Benchmarks for GPUs, as far as a machine without one can tell: commands, records, pairs of sides."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.run import get_args_parser

from helpers.gpu_benches import import_benches, start
from helpers.pairs import write_pair

SCRIPTS = ("facts", "keys", "rows", "train")


@pytest.fixture(scope="module")
def benches() -> Iterator[dict[str, ModuleType]]:
    with import_benches(*SCRIPTS) as modules:
        yield modules


def test_every_row_has_runs_that_its_rivals_can_follow(benches: dict[str, ModuleType]) -> None:
    options = argparse.Namespace(flags=[], recipe=[], ranks=1, rival=["usual"], torch=None)
    kinds = {}
    for row in benches["rows"].ROWS:
        runs = benches["train"].list_runs(row, options)
        kinds[row] = {(run["recipe"], run["fp8"], run["recompute"]) for run in runs}
        assert all(benches["train"].list_rivals(run, options) for run in runs)
    both = {("fp32", "none", "none"), ("bf16", "none", "none")}
    assert kinds["gpt2-124m"] == kinds["gpt-1.3b"] == kinds["gpt-1.3b-mbs8"] == kinds["moe-8x1b"] == both
    assert kinds["gpt-1.3b-fp8"] == {
        (recipe, kind, "none") for recipe, *_ in both for kind in ("tensorwise", "delayed")
    }
    assert kinds["llama-6.7b-fp8"] == {("bf16", "tensorwise", "none")}
    assert kinds["gpt-6.7b"] == {("bf16", "none", "none"), ("fp32", "none", "mlp")}


@pytest.mark.parametrize(
    "row", ["gpt-1.3b", "gpt-1.3b-mbs8", "gpt-1.3b-fp8", "llama-1.3b", "gpt-6.7b", "llama-6.7b-fp8"]
)
def test_a_dense_row_tries_both_attentions_of_the_rival(benches: dict[str, ModuleType], row: str) -> None:
    options = argparse.Namespace(flags=[], recipe=[], ranks=1, rival=["usual"], torch=[])
    for run in benches["train"].list_runs(row, options):
        derived = benches["facts"].derive_megatron(run)
        tried = [flags for _, flags in benches["train"].list_rivals(run, options)]
        assert tried == [derived, f"{derived} --attention fused"]


def test_the_smallest_row_tries_both_attentions_of_the_rival_in_its_graphs(benches: dict[str, ModuleType]) -> None:
    assert benches["rows"].ROWS["gpt2-124m"].megatron == ("--graphs local", "--graphs local --attention fused")


def test_torchrun_hands_every_usual_flag_of_a_rival_on(benches: dict[str, ModuleType]) -> None:
    """It reads flags behind the script too, as its own if they begin like several of them: --local did."""
    options = argparse.Namespace(flags=[], recipe=[], ranks=1, rival=["usual"], torch=None)
    for row in benches["rows"].ROWS:
        for run in benches["train"].list_runs(row, options):
            for _, flags in benches["train"].list_rivals(run, options):
                words = [row, f"--sizes={run['sizes']}", *flags.split()]
                assert get_args_parser().parse_args(["rival.py", *words]).training_script_args == words


def test_a_rival_gets_sizes_recipe_layout_and_fp8_of_the_run(benches: dict[str, ModuleType]) -> None:
    words = "--seq-length 64 --tensor-model-parallel-size 2 --sequence-parallel --fp8-hybrid --fp8-recipe delayed"
    facts = benches["facts"].describe_run("tiny", words, 2)
    benches["facts"].check_rival(facts)
    assert benches["facts"].derive_megatron(facts) == "--recipe fp32 --tp 2 --fp8 delayed"
    assert benches["rows"].read_sizes(facts["sizes"]).seq_length == 64
    own = argparse.Namespace(tp=2, ep=1, fp8="delayed", recompute=None, recipe="fp32", attention="auto")
    theirs = benches["keys"].record_rival(own, benches["rows"].read_sizes(facts["sizes"]), 2)
    assert benches["keys"].make_key({"row": "tiny", **theirs}) == benches["keys"].make_key(facts)


def test_fp8_none_is_no_fp8(benches: dict[str, ModuleType]) -> None:
    assert benches["facts"].describe_run("tiny", "--fp8-format none", 1)["fp8"] == "none"
    assert benches["facts"].describe_run("tiny", "--fp8-format e4m3 --fp8-recipe rowwise", 1)["fp8"] == "rowwise e4m3"


@pytest.mark.parametrize(
    "flags, ranks, words",
    [
        ("--num-query-groups 1", 1, "model.num_kv_heads is 1, there None"),
        ("--optimizer muon", 1, "optim.kind is 'muon', there 'adamw'"),
        ("--pipeline-model-parallel-size 2", 2, "no pipeline stages"),
        ("", 2, "no data parallelism without ZeRO 1 in recipe fp32"),
        ("--all-bf16 --use-distributed-optimizer", 2, "no ZeRO 1 in recipe bf16"),
        ("--fp8-format e4m3", 1, "no fp8 tensorwise e4m3"),
        ("--exp-avg-dtype bf16", 1, "no states in fp32/fp32/bf16/fp32"),
        ("--no-such-flag", 1, "--no-such-flag is not a flag of this trainer"),
    ],
)
def test_what_a_rival_cannot_follow_is_refused(
    benches: dict[str, ModuleType], flags: str, ranks: int, words: str
) -> None:
    options = argparse.Namespace(flags=[flags], recipe=[], ranks=ranks, rival=["usual"], torch=None)
    train = benches["train"]
    with pytest.raises(benches["facts"].RefusedError, match=words):
        [train.list_rivals(facts, options) for facts in train.list_runs("gpt-1.3b", options)]


def test_a_value_of_rival_overrides_the_usual_flags(benches: dict[str, ModuleType]) -> None:
    options = argparse.Namespace(flags=[], recipe=["bf16"], ranks=1, rival=["--no-fusion"], torch=[""])
    (facts,) = benches["train"].list_runs("gpt-1.3b", options)
    assert benches["train"].list_rivals(facts, options) == [
        ("rival_megatron.py", "--recipe bf16 --no-fusion"),
        ("rival_torch.py", "--recipe bf16"),
    ]


def test_plain_torch_is_left_out_on_two_gpus_unless_it_is_asked_for(benches: dict[str, ModuleType]) -> None:
    options = argparse.Namespace(flags=["--use-distributed-optimizer"], recipe=[], ranks=2, rival=["usual"], torch=None)
    (facts,) = benches["train"].list_runs("gpt-1.3b", options)
    assert facts["layout"]["zero"] == 1
    scripts = [script for script, _ in benches["train"].list_rivals(facts, options)]
    assert scripts == ["rival_megatron.py", "rival_megatron.py"]
    options.torch = ["usual"]
    with pytest.raises(benches["facts"].RefusedError, match="no several ranks"):
        benches["train"].list_rivals(facts, options)


def test_commands_that_differ_write_to_different_files(benches: dict[str, ModuleType]) -> None:
    def name(**more: Any) -> str:
        given = {"rows": ["tiny"], "flags": [], "out": None, "ranks": 1, **more}
        return str(benches["train"].name_file(argparse.Namespace(**given)).name)

    names = {name(), name(ranks=2), name(flags=["--no-compile"]), name(rows=["gpt-1.3b"])}
    assert len(names) == 4
    assert all(found.startswith("gpu-") and found.endswith(".json") for found in names)
    assert name() == name(out=None) in names


@pytest.mark.parametrize(
    "words, told",
    [
        (["nope"], "no row nope; there are tiny, gpt2-124m"),
        (["--rival", "tiny"], "name rows before --rival"),
        (["tiny", "--window", "99"], "--window must be from 1 to --steps (16), got 99"),
        (["tiny", "--window", "0"], "--window must be >= 1, got 0"),
        (["tiny", "--steps", "0"], "--steps must be >= 1, got 0"),
        (["tiny", "--rounds", "0"], "--rounds must be >= 1, got 0"),
        (["tiny", "--ranks", "-1"], "--ranks must be >= 1, got -1"),
        (["tiny", "--kernels", "-3"], "--kernels must be >= 0, got -3"),
        (["tiny", "--flags=--no-such-flag"], "--no-such-flag is not a flag of this trainer"),
        (["tiny"], "there is no nowhere.bin"),
    ],
)
def test_a_wrong_command_ends_in_a_sentence(words: list[str], told: str) -> None:
    done = start("train.py", "--data", "nowhere", *words)
    assert done.returncode == 2
    assert told in " ".join(done.stderr.split())


@pytest.mark.parametrize("script", ["rival_torch.py", "rival_megatron.py"])
@pytest.mark.parametrize("flag, least", [("--steps", 1), ("--kernels", 0)])
def test_a_rival_refuses_a_number_below_the_least(script: str, flag: str, least: int) -> None:
    done = start(script, "tiny", flag, str(least - 1))
    assert done.returncode == 2
    assert f"{flag} must be >= {least}, got {least - 1}" in " ".join(done.stderr.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
@pytest.mark.parametrize("script", ["optimizer.py", "scores.py", "fp8_cast.py", "extras.py"])
def test_without_a_gpu_a_bench_says_so(script: str) -> None:
    done = start(script)
    assert done.returncode != 0
    assert "error: there is no GPU here" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_torchrun_the_rival_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    done = start("rival_megatron.py", "gpt-1.3b")
    assert done.returncode == 1
    assert "torchrun --standalone --nproc_per_node=1 benches/gpu/rival_megatron.py gpt-1.3b" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be used")
def test_one_command_runs_both_sides_in_turn_and_is_merged(tmp_path: Path) -> None:
    prefix, out = write_pair(tmp_path / "toy", num_documents=100, document_tokens=200), tmp_path / "gpu-tiny.json"
    short = ("--steps", "2", "--window", "2", "--rounds", "2", "--out", str(out))
    done = start("train.py", "--data", prefix, "tiny", "--torch", "--flags=--no-compile --seq-length 16", *short)
    assert done.returncode == 0, done.stderr
    assert f"written: {out}" in done.stdout
    runs = json.loads(out.read_text())
    assert [run["side"] for run in runs] == ["megaflow", "torch", "megaflow", "torch"]
    for run in runs:
        assert "error" not in run
        assert "--seq-length 16" in run["sizes"]
        assert run["machine"]["versions"]["torch"] == torch.__version__
        assert run["ceilings"] == [{}, {}]
    merged = start("merge.py", str(out))
    assert merged.returncode == 0, merged.stderr
    (row,) = [line for line in merged.stdout.splitlines() if line.startswith("| tiny")]
    assert "2 runs" in row
    assert "plain torch" in row


@pytest.mark.parametrize(
    "sizes", ["", "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"]
)
@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_plain_torch_learns(recipe: str, sizes: str, benches: dict[str, ModuleType]) -> None:
    rival = importlib.import_module("rival_torch")
    torch.manual_seed(3)
    read = benches["rows"].read_sizes(f"{benches['rows'].ROWS['tiny'].shape} {sizes}")
    model = rival.Model(read)
    model = model.bfloat16() if recipe == "bf16" else model
    tokens, labels = (torch.randint(50000, (2, read.seq_length)) for _ in range(2))
    assert abs(model(tokens, labels).item() - 10.83) < 0.2  # log of the rows of the embedding
    step = rival.make_step(model, read, argparse.Namespace(recipe=recipe, compile=False))
    first = [weight.detach().clone() for weight in model.parameters()]
    step()
    assert any((old != new).any() for old, new in zip(first, model.parameters(), strict=True))
    assert all(weight.dtype == (torch.bfloat16 if recipe == "bf16" else torch.float32) for weight in model.parameters())
