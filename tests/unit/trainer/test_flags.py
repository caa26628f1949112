"""Every flag of --help changes something that can be seen: the model, the plan, the optimizer's step, or the run."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.flag_cases import (
    DATA_FLAGS,
    EXPERT_FLAGS,
    FP8_FLAGS,
    FUSED_FLAGS,
    KERNEL_FLAGS,
    LAYOUT,
    MODEL,
    OWN_TEST,
    PLAN,
    REFUSED,
    SAVED,
    STEP,
    WATCH,
)
from helpers.pairs import write_pair
from helpers.runs import TINY, one_rank, run_tiny
from megaflow.errors import MegaflowError
from megaflow_trainer.config import TrainConfig, read_command
from megaflow_trainer.config.flags import FLAGS
from megaflow_trainer.config.layout import make_layout
from megaflow_trainer.config.stages import own_chunks, split_layers
from megaflow_trainer.ops.attention import attend_sdpa
from megaflow_trainer.ops.registry import Entry
from megaflow_trainer.optim.schedule import build_planner
from megaflow_trainer.parallel.apply import ParallelModel
from megaflow_trainer.parallel.context import KINDS as CONTEXT_KINDS
from megaflow_trainer.parallel.context import GatheredAttention, RingAttention, UlyssesAttention
from megaflow_trainer.parallel.data import MainGradients
from megaflow_trainer.parallel.saved import SavedActivations
from megaflow_trainer.training import build as build_module
from megaflow_trainer.training import kernels as kernels_module
from megaflow_trainer.training.build import build_model, build_optimizer
from megaflow_trainer.training.preflight import refuse_device

STEPS = 8
BASE = (*TINY, "--train-iters", str(STEPS), "--data-path", "none")


def configure(flags: str) -> TrainConfig:
    return read_command([*BASE, *flags.split()], world_size=1)[0]


def see_model(flags: str) -> Any:
    """Shapes of the weights, losses in training, and gradients' norms."""
    config = configure(flags)
    model = build_model(config, one_rank())
    torch.manual_seed(3)
    tokens = torch.randint(60, (2, 17))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.sum().backward()
    shapes = [(name, tuple(weight.shape), weight.dtype) for name, weight in model.module.named_parameters()]
    return shapes, loss.tolist(), model.gradients.norm().item()


def see_saved(flags: str) -> Any:
    """Bytes kept between forward and backward, as they are and as asked."""
    model = build_model(configure(f"{flags} --num-layers 4 --hidden-size 64 --seq-length 64"), one_rank())
    weights = frozenset(weight.untyped_storage().data_ptr() for weight in model.module.parameters())
    kept = model.saved or SavedActivations(weights=weights)
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    with SavedActivations.hooks(kept):
        model.module(tokens, tokens)
    return kept.report.kept_bytes, kept.is_offloaded


def see_plan(flags: str) -> Any:
    """Rate, weight decay and batch of each step."""
    config = configure(flags)
    planner, consumed, plans = build_planner(config), 0, []
    for _ in range(config.last_step):
        plans.append(planner.plan(consumed))
        consumed += plans[-1].num_samples
    return plans, config.step.sizes


def see_step(flags: str) -> Any:
    """Weights and states after two steps of given gradients."""
    config = configure(flags)
    model = build_model(config, one_rank())
    optimizer = build_optimizer(model, config)
    torch.manual_seed(4)
    for _ in range(2):
        model.gradients.kept[0].normal_()
        optimizer.step(1e-2, config.optim.weight_decay)
    states = {name: (value.dtype, value.float().sum().item()) for name, value in optimizer.list_tensors().items()}
    apart = sum(master.data_ptr() != optimizer.weights[name].data_ptr() for name, master in optimizer.masters.items())
    scaler = optimizer.scaler
    for _ in range(3):
        if scaler is not None:
            scaler.update(is_finite=False)
    scale = None if scaler is None else (scaler.scale, scaler.is_static, scaler.window, scaler.hysteresis)
    weights = {name: weight.float().sum().item() for name, weight in model.module.named_parameters()}
    return states, apart, scale, weights, model.gradients.kept[0].dtype


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(tmp_path_factory.mktemp("data") / "toy_text_document")


def test_every_flag_is_in_one_of_the_tables() -> None:
    tables: list[Any] = [MODEL, SAVED, PLAN, STEP, REFUSED, LAYOUT, SEEN, OWN_TEST]
    tables += [DATA_FLAGS, EXPERT_FLAGS, FUSED_FLAGS, FP8_FLAGS, KERNEL_FLAGS, WATCH]
    assert sorted(name for table in tables for name in table) == sorted(flag.name for flag in FLAGS)


def test_what_makes_steps_faster_is_handed_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """What both do is in test_accumulate.py."""
    plans: list[Any] = []
    made = ParallelModel(torch.nn.Module(), None, None)  # type: ignore[arg-type]
    monkeypatch.setattr(build_module, "parallelize", lambda model, mesh, plan, fill: plans.append(plan) or made)
    gpu = dataclasses.replace(one_rank(), device=torch.device("cuda"))
    monkeypatch.setattr(build_module, "choose_attention", lambda *_: Entry(name="sdpa", function=attend_sdpa))
    obstacles = [None, None, None, None, None, "no triton"]
    monkeypatch.setattr(kernels_module, "find_compiler_obstacle", lambda device: obstacles[len(plans)])
    pp2 = "--pipeline-model-parallel-size 2"
    zbv = f"{pp2} --num-layers 4 --pipeline-schedule zbv"
    for flags in ("--no-compile", "--compile", "--no-gradient-accumulation-fusion", pp2, zbv, ""):
        config = read_command([*BASE, *flags.split()], world_size=1 + ("2" in flags))[0]
        build_model(config, gpu)
    assert [plan.is_compiled for plan in plans] == [False, True, True, True, False, False]
    assert [plan.accumulates for plan in plans] == [True, True, False, True, False, True]
    assert kernels_module.choose_compile(configure(""), torch.device("cpu")) == (False, None)
    assert kernels_module.choose_compile(configure("--compile"), torch.device("cpu")) == (True, None)


@pytest.mark.parametrize("flag", OWN_TEST)
def test_a_flag_with_a_test_of_its_own_is_named_in_it(flag: str) -> None:
    words = inspect.getsource(globals()[OWN_TEST[flag]]).replace('"', " ").replace("'", " ").split()
    assert flag in words


def compare(name: str, given: str | tuple[str, ...], see: Callable[[str], Any]) -> None:
    before, after = ("", given) if isinstance(given, str) else given
    assert name in after
    assert see(before) != see(after)


@pytest.mark.parametrize("name", [name for name in MODEL if name not in ("--preset", "--attention-backend")])
def test_a_flag_that_changes_the_model(name: str) -> None:
    compare(name, MODEL[name], see_model)


def test_a_preset_changes_the_model_and_a_backend_the_kernel() -> None:
    shape = configure("--preset llama3_8b --num-attention-heads 16").model
    assert (shape.activation, shape.norm, shape.num_kv_heads, shape.rotary_base) == ("swiglu", "RMSNorm", 8, 500000.0)
    assert (shape.num_layers, shape.hidden_dim) == (2, 32)  # those that other flags give
    kernel = build_model(configure("--attention-backend math"), one_rank()).module.blocks[0].attention.core  # type: ignore[index,union-attr]
    assert kernel.__name__ == "attend_math"


@pytest.mark.parametrize("name", WATCH)
def test_a_flag_of_what_watches_over_the_run(name: str) -> None:
    compare(name, WATCH[name], configure)


@pytest.mark.parametrize("name", SAVED)
def test_a_flag_that_changes_what_is_kept_for_backward(name: str) -> None:
    compare(name, SAVED[name], see_saved)


@pytest.mark.parametrize("name", PLAN)
def test_a_flag_that_changes_the_plan(name: str) -> None:
    compare(name, PLAN[name], see_plan)


@pytest.mark.parametrize("name", STEP)
def test_a_flag_that_changes_a_step(name: str) -> None:
    compare(name, STEP[name], see_step)


def see_layout(flags: str) -> Any:
    """The layout of four ranks, and the buffers of one."""
    words = [*TINY, "--train-iters", "1", "--data-path", "x", *flags.split()]
    config = read_command(words, world_size=4)[0]
    parallel = config.parallel
    one = dataclasses.replace(parallel, tp=1, pp=1, cp=1, ep=1, etp=None, dp_replicate=1)
    gradients = build_model(dataclasses.replace(configure(""), parallel=one), one_rank()).gradients
    assert isinstance(gradients, MainGradients)
    stages = split_layers(config.model, parallel), own_chunks(parallel, 0)
    return make_layout(parallel, world_size=4), stages, len(gradients.buckets), gradients.options


def test_ranks_that_share_sequences_attend_as_the_flag_says() -> None:
    flags = "--context-parallel-size 2 --cp-comm-type"
    words = [[*TINY, "--train-iters", "1", "--data-path", "x", *f"{flags} {kind}".split()] for kind in CONTEXT_KINDS]
    found = [CONTEXT_KINDS[read_command(line, world_size=2)[0].parallel.cp_kind] for line in words]
    assert found == [RingAttention, GatheredAttention, UlyssesAttention]


@pytest.mark.parametrize("name", LAYOUT)
def test_a_flag_that_changes_the_layout(name: str) -> None:
    compare(name, LAYOUT[name], see_layout)


@pytest.mark.parametrize("name", REFUSED)
def test_a_flag_that_is_refused_here_and_what_is_not_is_accepted(name: str) -> None:
    value, words = REFUSED[name]
    if value == "model":
        with pytest.raises(MegaflowError, match=words):
            build_model(configure(name), one_rank())
    else:
        config = configure(f"--bf16 {name} {value}")
        assert config.step.fp8 == (value or name.removeprefix("--fp8-"))
        with pytest.raises(MegaflowError, match=words):
            refuse_device(config, torch.device("cpu"))


def observe(prefix: str, folder: Path, flags: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What a run leaves: its values line by line, what it said, its files."""
    capsys.readouterr()
    words = flags.replace("DIR", str(folder)).split()
    data = [] if "--data-path" in words else ["--data-path", prefix]
    length = [] if "--train-samples" in words else ["--train-iters", "4"]
    config, notes = read_command([*TINY, *length, "--run-dir", str(folder / "run"), *data, *words], world_size=1)
    from megaflow_trainer.training.run import train

    assert train(config, one_rank(), notes) == 0
    lines = [json.loads(line) for line in (Path(str(config.log.run_dir)) / "metrics.jsonl").read_text().splitlines()]
    exact = [[line.get(key) for key in ("iteration", "lm_loss", "grad_norm", "valid_loss")] for line in lines]
    said = [line.strip() for line in capsys.readouterr().out.splitlines() if "note:" in line or "resumed" in line]
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_dir())
    name = json.loads((Path(str(config.log.run_dir)) / "run.json").read_text())["name"]
    return {"curve": exact, "said": said, "folders": files, "name": name, "tf32": torch.get_float32_matmul_precision()}


EVAL = "--eval-interval 2 --eval-iters 1 --split 80,20,0"
SEEN = {
    "--split": ("", "--split 50,50,0", "curve"),
    "--seq-length": ("", "--seq-length 8", "curve"),
    "--clip-grad": ("--optimizer sgd", "--optimizer sgd --clip-grad 0.01", "curve"),
    "--tf32": ("", "--tf32", "tf32"),
    "--train-samples": ("", "--train-samples 5", "curve"),
    "--eval-interval": ("--split 80,20,0 --eval-iters 1", EVAL, "curve"),
    "--eval-iters": (EVAL, EVAL.replace("iters 1", "iters 3"), "curve"),
    "--save": ("", "--save DIR/ckpt", "folders"),
    "--save-interval": ("--save DIR/ckpt", "--save DIR/ckpt --save-interval 1", "folders"),
    "--log-interval": ("", "--log-interval 2", "curve"),
    "--run-dir": ("", "--run-dir DIR/other", "folders"),
    "--run-name": ("", "--run-name mine", "name"),
}


@pytest.mark.parametrize("name", SEEN)
def test_a_flag_that_changes_the_run(
    name: str, prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after, aspect = SEEN[name]
    assert name in after
    one, two = (
        observe(prefix, tmp_path / kind, flags, capsys) for kind, flags in (("before", before), ("after", after))
    )
    assert one[aspect] != two[aspect]


def test_data_flags_that_name_other_data_or_load_weights(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = observe(prefix, tmp_path / "plain", f"--save {tmp_path}/ckpt", capsys)
    other = write_pair(tmp_path / "other_text_document", document_tokens=30)
    assert observe(prefix, tmp_path / "a", f"--data-path {other}", capsys)["curve"] != plain["curve"]
    begun = observe(prefix, tmp_path / "b", f"--init-from {tmp_path}/ckpt", capsys)
    assert begun["curve"][0][1] != plain["curve"][0][1]
    longer = "--train-iters 6 --override-opt_param-scheduler"
    resumed = observe(prefix, tmp_path / "c", f"--load {tmp_path}/ckpt {longer}", capsys)
    assert [line[0] for line in resumed["curve"]] == [5, 6]
    with pytest.raises(MegaflowError, match="--grow keeps"):
        observe(prefix, tmp_path / "d", f"--num-layers 3 --init-from {tmp_path}/ckpt", capsys)
    grown = observe(prefix, tmp_path / "e", f"--num-layers 3 --init-from {tmp_path}/ckpt --grow", capsys)
    assert "note: layers 2 to 2 keep their initial weights" in grown["said"]


def test_predictions_made_at_the_end_of_a_document_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = write_pair(tmp_path / "own_text_document")
    tokenizer = {"type": "test", "vocab_size": 64, "eod_id": 0, "fingerprint": "f" * 16}
    Path(f"{made}.json").write_text(json.dumps({"format_version": 1, "tokenizer": tokenizer}))
    one, two = (observe(made, tmp_path / str(len(flags)), flags, capsys) for flags in ("", "--eod-mask-loss"))
    assert one["curve"] != two["curve"]


@pytest.mark.parametrize(
    "flags, said", [("--sequence-parallel", "--sequence-parallel has no effect at tensor-parallel size 1")]
)
def test_a_flag_without_effect_here_says_so_and_changes_no_loss(
    flags: str, said: str, prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = observe(prefix, tmp_path / "a", "", capsys), observe(prefix, tmp_path / "b", flags, capsys)
    assert next(line for line in two["said"] if line not in one["said"]).startswith(f"note: {said}")
    assert one["curve"] == two["curve"]


@pytest.mark.parametrize("name", ["--tokenizer-model", "--vocab-file", "--vocab", "--merge-file"])
def test_a_tokenizer_that_is_not_there_is_named(name: str, prefix: str, tmp_path: Path) -> None:
    words = "merge-file needs the vocabulary" if name == "--merge-file" else r"none\.json"
    with pytest.raises(MegaflowError, match=words):
        run_tiny(prefix, ["--train-iters", "1", name, str(tmp_path / "none.json")])


def test_an_unknown_tokenizer_type_is_named(prefix: str) -> None:
    with pytest.raises(MegaflowError, match="NoSuchTokenizer"):
        run_tiny(prefix, ["--train-iters", "1", "--tokenizer-type", "NoSuchTokenizer"])


@pytest.mark.parametrize("flags", ["--num-workers 0", "--prefetch 1"])
def test_threads_and_prefetch_change_the_loader_and_not_the_samples(
    flags: str, prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megaflow_trainer.training import data

    seen: list[dict[str, Any]] = []
    loader = data.Loader
    monkeypatch.setattr(data, "Loader", lambda *args, **kwargs: seen.append(kwargs) or loader(*args, **kwargs))
    one, two = observe(prefix, tmp_path / "a", "", capsys), observe(prefix, tmp_path / "b", flags, capsys)
    assert seen[0] != seen[1]
    assert one["curve"] == two["curve"]


@pytest.mark.parametrize(
    "given, flags, kept",
    [
        (None, {"tp": 2}, "1"),
        ("8", {"tp": 2}, "8"),
        (None, {"tp": 1}, None),
        (None, {"tp": 2, "overlaps": False}, None),
        (None, {"tp": 2, "zero": 3}, None),
    ],
)
def test_kernels_begin_as_launched_where_products_have_collectives_beside_them(
    given: str | None, flags: dict[str, Any], kept: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megaflow_trainer.config.sections import ParallelConfig
    from megaflow_trainer.parallel.mesh import LAUNCH_QUEUES, keep_launch_order

    environment = {} if given is None else {LAUNCH_QUEUES: given}
    monkeypatch.setattr(os, "environ", environment)
    notes = keep_launch_order(ParallelConfig(**flags))
    assert environment.get(LAUNCH_QUEUES) == kept
    assert len(notes) == (kept == "1")


def test_the_backend_is_the_one_asked_for_where_a_gpu_is_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    from megaflow_trainer.parallel.mesh import Launch, choose_device

    def choose(flags: str) -> tuple[str, str, list[str]]:
        device, backend, notes = choose_device(Launch(), configure(flags).parallel.backend)
        return device.type, backend, notes

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose("") == choose("--distributed-backend nccl") == ("cuda", "nccl", [])
    assert choose("--distributed-backend gloo") == ("cpu", "gloo", [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose("--distributed-backend nccl") == (
        *("cpu", "gloo"),
        ["--distributed-backend nccl: no GPU on this machine, gloo on the CPU is used"],
    )
