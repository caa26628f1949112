"""What the programs of benches/gpu read from a run, count and hand on; sides and packages that need a GPU are faked."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.fake_packages import install
from helpers.gpu_benches import import_benches

RIVALS = ("rival_megatron", "rival_parts", "rival_torch")
SCRIPTS = (*RIVALS, "facts", "keys", "launch", "machine", "merge", "rows", "train")
PROFILE = """kernel, by its time                                             ms/step  calls/step
gemm                                                             40.000         8.0

NCCL kernel                                     ms/step  exposed ms
AllGather                                        12.000       1.500
ReduceScatter                                    20.000       2.250"""
EVENTS = [
    {"cat": "kernel", "name": "short", "dur": 1000.0},
    {"cat": "kernel", "name": "long", "dur": 4000.0},
    {"cat": "cpu_op", "name": "of the host", "dur": 9000.0},
    {"cat": "kernel", "name": "twice", "dur": 1500.0},
    {"cat": "kernel", "name": "twice", "dur": 1500.0},
]


@pytest.fixture(scope="module")
def benches() -> Iterator[dict[str, ModuleType]]:
    with import_benches(*SCRIPTS) as modules:
        yield modules


def make_options(**more: Any) -> argparse.Namespace:
    given = {"flags": [], "recipe": [], "ranks": 1, "rival": [], "torch": [], "kernels": 0, "data": "toy"}
    return argparse.Namespace(**{**given, "steps": 4, "window": 2, **more})


def finish(text: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
    """A process that has ended."""
    return subprocess.CompletedProcess([], code, stdout=text if not code else "", stderr=text if code else "")


@pytest.fixture
def trained(benches: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """In place of pretrain.py something that leaves what it would leave; the list says how it was started."""
    started: list[list[str]] = []

    def start(script: Path, words: list[str], *, ranks: int = 0) -> subprocess.CompletedProcess[str]:
        started.append(words)
        folder = Path(words[words.index("--run-dir") + 1])
        last = int(words[words.index("--train-iters") + 1])
        rates = {2: 90.0, 4: 100.0, 5: 7.0}
        lines = [{"iteration": n, "lm_loss": 9.0, "tokens_per_s_per_gpu": rates[n]} for n in rates if n <= last]
        (folder / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
        if "--profile" in words:
            (folder / "profile").mkdir()
            (folder / "profile" / f"rank_0_to_{last}.txt").write_text(PROFILE)
            (folder / "profile" / f"rank_0_to_{last}.json").write_text(json.dumps({"traceEvents": EVENTS}))
        return finish()

    monkeypatch.setattr(benches["launch"], "start", start)
    return started


def test_tokens_of_a_run_are_those_of_all_ranks_and_the_profiled_step_does_not_count(
    benches: dict[str, ModuleType], trained: list[list[str]]
) -> None:
    options = make_options(ranks=2, flags=["--use-distributed-optimizer"])
    (facts,) = benches["train"].list_runs("tiny", options)
    found = benches["launch"].run_row(facts, options)
    assert trained[0][trained[0].index("--profile-step-start") + 1] == "5"
    assert found["iteration"] == 4
    assert found["tokens_per_s"] == 200.0
    assert found["first"]["iteration"] == 2
    assert found["exposed_communication_s"] == pytest.approx(3.75e-3)
    assert "kernels" not in found


def test_the_kernels_of_a_run_are_listed_from_the_longest(
    benches: dict[str, ModuleType], trained: list[list[str]]
) -> None:
    options = make_options(kernels=2)
    (facts,) = benches["train"].list_runs("tiny", options)
    found = benches["launch"].run_row(facts, options)
    assert found["tokens_per_s"] == 100.0
    assert found["kernels"] == [("long", 4.0, 1), ("twice", 3.0, 2)]


def test_a_rival_lists_its_kernels_from_the_longest(benches: dict[str, ModuleType]) -> None:
    kernels = [("short", 0.0, 1000.0), ("long", 0.0, 4000.0), ("twice", 0.0, 1500.0), ("twice", 2000.0, 3500.0)]
    assert benches["rival_parts"].list_longest(kernels, 2) == [("long", 4.0, 1), ("twice", 3.0, 2)]


def test_a_profile_without_nccl_has_no_exposed_communication(benches: dict[str, ModuleType]) -> None:
    assert benches["launch"].read_exposed(PROFILE.partition("NCCL")[0]) == 0.0


@pytest.mark.parametrize("ranks, zero", [(1, 0), (2, 1)])
def test_zero_among_one_rank_is_none(benches: dict[str, ModuleType], ranks: int, zero: int) -> None:
    facts = benches["facts"].describe_run("tiny", "--use-distributed-optimizer", ranks)
    assert facts["layout"]["zero"] == zero


def test_every_run_is_followed_by_its_rivals_and_a_shared_one_runs_once(
    benches: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    train = benches["train"]
    monkeypatch.setattr(train, "run_row", lambda facts, options: f"own {facts['recipe']} {facts['flags']}".strip())
    monkeypatch.setattr(train, "run_rival", lambda script, flags, facts, options: f"{script} {flags}")
    options = make_options(rival=["usual"], recipe=["fp32", "bf16"], flags=["", "--no-compile"])
    runs = train.list_runs("gpt-1.3b-mbs8", options)
    rivals = {
        recipe: [f"rival_megatron.py --recipe {recipe}", f"rival_megatron.py --recipe {recipe} --attention fused"]
        for recipe in ("fp32", "bf16")
    }
    assert list(train.run_round(runs, options)) == [
        *("own fp32", *rivals["fp32"], "own fp32 --no-compile"),
        *("own bf16 --all-bf16", *rivals["bf16"], "own bf16 --no-compile --all-bf16"),
    ]


@pytest.mark.parametrize("failing", ["auto", "fused"])
def test_an_attention_of_the_rival_that_fails_does_not_hide_the_other(
    benches: dict[str, ModuleType], trained: list[list[str]], monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """cuDNN's may not load where flash-attn does, and the other way round."""
    own = benches["launch"].start

    def start(script: Path, words: list[str], *, ranks: int = 0) -> subprocess.CompletedProcess[str]:
        if script.name != "rival_megatron.py":
            return own(script, words, ranks=ranks)
        attention = "fused" if "fused" in words else "auto"
        if attention == failing:
            return finish("RuntimeError: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED", code=1)
        given = argparse.Namespace(recipe="fp32", tp=1, ep=1, fp8=None, recompute=None, attention=attention)
        sizes = benches["rows"].read_sizes(next(word for word in words if word.startswith("--sizes="))[8:])
        facts = benches["keys"].record_rival(given, sizes, 1)
        return finish(json.dumps({**facts, "tokens_per_s": 50.0, "step_time_s": 1.0, "memory_peak_bytes": 1}))

    monkeypatch.setattr(benches["launch"], "start", start)
    options = make_options(rival=["usual"], recipe=["fp32"])
    runs = benches["train"].list_runs("gpt-1.3b", options)
    found = list(benches["train"].run_round(runs, options))
    assert [run["side"] for run in found] == ["megaflow", "megatron-core", "megatron-core"]
    assert ["error" in run for run in found] == [False, failing == "auto", failing == "fused"]
    (sides,) = benches["merge"].group([{"step_time_s": 1.0, "memory_peak_bytes": 1, **run} for run in found]).values()
    assert sides["megatron-core"].run["attention"] == ("auto" if failing == "fused" else "fused")
    (remark,) = benches["merge"].list_remarks(found)
    assert "CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED" in remark


def test_plain_torch_runs_all_micro_batches_of_a_step(benches: dict[str, ModuleType]) -> None:
    """Tokens a second are counted over the global batch."""
    rival, sizes = benches["rival_torch"], benches["rows"].read_sizes(f"{benches['rows'].ROWS['tiny'].shape}")
    sizes.global_batch_size = 3 * sizes.micro_batch_size
    model, seen = rival.Model(sizes), []
    model.register_forward_pre_hook(lambda _, given: seen.append(tuple(given[0].shape)))
    rival.make_step(model, sizes, argparse.Namespace(recipe="fp32", compile=False))()
    assert seen == 3 * [(sizes.micro_batch_size, sizes.seq_length)]


def test_a_rival_is_timed_behind_four_steps(benches: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first, which compile and try kernels, take long."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    clock, calls = [0.0], []

    def step() -> None:
        calls.append(1)
        clock[0] += 100.0 if len(calls) <= 4 else 1.0

    monkeypatch.setattr(benches["rival_parts"].time, "perf_counter", lambda: clock[0])
    assert benches["rival_parts"].time_steps(step, 3) == 1.0
    assert len(calls) == 7


class AttnBackend(Enum):
    """Megatron-Core's."""

    auto = 1
    flash = 2
    fused = 3
    local = 4


@pytest.fixture
def megatron(benches: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The rival, with what it takes from Megatron-Core kept as it was given."""

    def keep(**given: Any) -> SimpleNamespace:
        return SimpleNamespace(**given)

    def wrap(config: Any, ddp: Any, model: Any) -> SimpleNamespace:
        return SimpleNamespace(ddp_config=ddp, no_sync=None, start_param_sync="send weights")

    install(
        monkeypatch,
        megatron__core__transformer__enums__AttnBackend=AttnBackend,
        megatron__core__transformer__transformer_config__TransformerConfig=keep,
        megatron__core__distributed__DistributedDataParallel=wrap,
        megatron__core__distributed__DistributedDataParallelConfig=keep,
        megatron__core__distributed__finalize_model_grads=lambda: None,
    )
    return benches["rival_megatron"]


def configure(megatron: ModuleType, benches: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, words: str) -> Any:
    monkeypatch.setattr("sys.argv", ["rival_megatron.py", "gpt-1.3b", *words.split()])
    options = megatron.parse_options()
    options.adds = True
    return megatron.configure(benches["rows"].read_sizes(benches["rows"].ROWS["gpt-1.3b"].shape), options)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_the_rival_multiplies_in_fp8_if_it_is_asked_to(
    megatron: ModuleType, benches: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    found = configure(megatron, benches, monkeypatch, f"--fp8 {recipe}")
    assert (found.fp8, found.fp8_recipe) == ("hybrid", recipe)
    assert not hasattr(configure(megatron, benches, monkeypatch, ""), "fp8")


@pytest.mark.parametrize("words, backend", [("", "auto"), ("--attention fused", "fused")])
def test_the_rival_takes_the_attention_that_is_asked_for(
    megatron: ModuleType, benches: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, words: str, backend: str
) -> None:
    assert configure(megatron, benches, monkeypatch, words).attention_backend is AttnBackend[backend]


@pytest.mark.parametrize("recipe, is_wide", [("fp32", True), ("bf16", False)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_rival_keeps_and_sends_gradients_in_fp32_in_that_recipe(
    megatron: ModuleType, monkeypatch: pytest.MonkeyPatch, recipe: str, is_wide: bool, ranks: int
) -> None:
    monkeypatch.setattr(megatron.dist, "get_world_size", lambda: ranks)
    config = SimpleNamespace(tensor_model_parallel_size=1)
    ddp = megatron.wrap(config, None, recipe).ddp_config
    assert ddp.grad_reduce_in_fp32 is is_wide
    assert ddp.use_distributed_optimizer is is_wide
    assert (ddp.overlap_grad_reduce, ddp.overlap_param_gather) == (ranks > 1, ranks > 1 and is_wide)


def test_ceilings_are_measured_cold_before_they_are_warm(
    benches: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, did = benches["machine"], []
    products = {"bf16": lambda: None, "fp8": lambda: None}
    clock = iter(range(1000))

    def time_ms(product: Any, *, launches: int, repeats: int, warm: int = 1) -> float:
        name = next(name for name in products if products[name] is product)
        did.append((name, launches, repeats, warm))
        return (1.0 if launches == 1 else 2.0) * (2.0 if name == "bf16" else 1.0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "make_products", lambda device: products)
    monkeypatch.setattr(machine, "time_ms", time_ms)
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: did.append(("pause", seconds)))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock) / 2)
    flops = 2e3 * 8192**3
    assert machine.measure_ceilings() == {
        "bf16_cold_flops_per_s": flops / 2,
        "bf16_warm_flops_per_s": flops / 4,
        "fp8_cold_flops_per_s": flops,
        "fp8_warm_flops_per_s": flops / 2,
    }
    assert did[:3] == [("bf16", 1, 1, 0), ("pause", 5.0), ("bf16", 1, 5, 0)]


def test_without_a_gpu_there_is_no_ceiling(benches: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benches["machine"].measure_ceilings() == {}
    assert benches["machine"].describe_machine()["uuid"] is None
