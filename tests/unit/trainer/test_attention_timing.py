"""Which attention kernel `auto` takes, by the clock; what GPUs really say is in test_fused_gpu.py."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.gpu_benches import import_benches
from helpers.runs import one_rank
from megaflow.errors import ConfigError
from megaflow_trainer.config import read_command
from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.model.rope import Rotary, rotate_both
from megaflow_trainer.ops import attention_timing
from megaflow_trainer.ops.attention import ATTENTION, attend_math, attend_sdpa
from megaflow_trainer.ops.attention_packages import PACKAGES
from megaflow_trainer.ops.attention_timing import (
    AttentionShape,
    Choice,
    choose_by_time,
    find_error,
    find_refusal,
    measure_difference,
    time_attention,
)
from megaflow_trainer.ops.registry import Entry, Need
from megaflow_trainer.training import kernels as kernels_module

NEED = Need(device=torch.device("cpu"), dtype=torch.float32, head_dim=8)
GPU = dataclasses.replace(one_rank(), device=torch.device("cuda"))
BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --num-query-groups 2 --seq-length 16 --vocab-size 64 "
    "--train-iters 1 --data-path none --micro-batch-size 3 --attention-dropout 0 --position-embedding-type rope"
)


def make_entries(*names: str) -> list[Entry]:
    return [Entry(name=name, function=attend_sdpa) for name in names]


def pick(times: dict[str, float | None], *, slow: str = "") -> Choice | None:
    entries = [dataclasses.replace(entry, is_timed=entry.name != slow) for entry in make_entries(*times)]
    return choose_by_time(entries, NEED, lambda entry: times[entry.name])


def test_the_fastest_serves_if_it_beats_the_first_by_more_than_noise() -> None:
    assert pick({"one": 2.0, "two": 1.0, "three": 1.5}) == Choice("two", {"one": 2.0, "two": 1.0, "three": 1.5})
    assert pick({"one": 2.0, "two": 1.95}).name == "one"  # type: ignore[union-attr]
    assert pick({"one": 2.0, "two": 1.93}).name == "two"  # type: ignore[union-attr]


def test_what_fails_does_not_serve_and_what_is_not_timed_is_not_run() -> None:
    assert pick({"one": None, "two": 9.0, "three": 9.1}).name == "two"  # type: ignore[union-attr]
    assert pick({"one": None, "two": None}) is None
    assert pick({"one": 2.0, "two": 0.1}, slow="two") is None
    assert pick({"one": 2.0}) is None
    barred = Entry(name="far", function=attend_sdpa, obstacle=lambda need: "not here")
    timed: list[str] = []
    choose_by_time([*make_entries("one", "two"), barred], NEED, lambda entry: timed.append(entry.name) or 1.0)
    assert timed == ["one", "two"]


def test_a_choice_tells_its_times() -> None:
    assert str(Choice("two", {"one": 2.0, "two": 1.004, "three": None})) == "two (one 2.00 ms, two 1.00 ms, three -)"


class DslError(Exception):
    """As that of flash-attn 4's compiler: of no builtin kind."""


REFUSALS = (RuntimeError("No kernel"), ValueError("none"), AssertionError("d <= 256"), DslError("a\nb"), DslError())
SHAPE = AttentionShape(b=1, n=2, g=1, s=4, d=8, e=8)


def make_refusing(error: Exception, *, in_backward: bool = False, **options: Any) -> Entry:
    """An entry that refuses every shape."""

    class Raise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise error

    def refuse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: Any) -> torch.Tensor:
        if in_backward:
            return Raise.apply(attend_sdpa(q, k, v, **rest))
        raise error

    return Entry(name="flash_attn_4", function=refuse, package="flash-attn-4", **options)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of a GPU, by which everything takes 1 ms."""
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda other: 1.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)


def test_a_gpu_has_work_before_a_kernel_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what is timed is the host that launches it."""
    done: list[str] = []
    event = SimpleNamespace(record=lambda: done.append("clock"), synchronize=lambda: None, elapsed_time=lambda _: 1.0)

    def attend(*heads: torch.Tensor, **options: Any) -> torch.Tensor:
        done.append("kernel")
        return attend_sdpa(*heads, **options)

    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(attention_timing, "keep_busy", lambda dtype, device: done.append(f"{dtype} {device}"))
    assert time_attention(Entry(name="good", function=attend), SHAPE, NEED, repeats=1) == 1.0
    assert done == ["torch.float32 cpu", "clock", "kernel", "clock"] * 3


def test_the_work_before_it_is_a_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(torch, "ones", lambda *shape, **options: made.append(options) or torch.zeros(1))
    monkeypatch.setattr(torch, "mm", lambda *_, **__: made.append("product"))
    attention_timing.keep_busy(torch.bfloat16, torch.device("cpu"))
    assert not made
    attention_timing.keep_busy(torch.bfloat16, torch.device("cuda"))
    assert made == [{"dtype": torch.bfloat16, "device": torch.device("cuda")}] + ["product"] * 30


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("error", REFUSALS, ids=repr)
def test_a_kernel_that_raises_has_no_time_and_no_results(error: Exception, in_backward: bool) -> None:
    assert time_attention(Entry(name="good", function=attend_sdpa), SHAPE, NEED) == 1.0
    entry = make_refusing(error, in_backward=in_backward)
    assert time_attention(entry, SHAPE, NEED) is None
    assert find_error(entry, ATTENTION[0], SHAPE, NEED) == math.inf
    assert find_error(ATTENTION[0], entry, SHAPE, NEED) is None, "nothing to compare with"
    assert find_refusal(entry, SHAPE, NEED) == (str(error).splitlines() or ["no reason given"])[0]


@pytest.mark.usefixtures("clock")
def test_a_fault_of_our_own_is_no_refusal() -> None:
    own = dataclasses.replace(make_refusing(TypeError("a fault")), package=None)
    for ask in (time_attention, find_refusal, lambda *rest: find_error(rest[0], ATTENTION[0], *rest[1:])):
        with pytest.raises(TypeError, match="a fault"):
            ask(own, SHAPE, NEED)


def test_only_the_reference_and_what_cuts_a_graph_is_left_out_of_the_race() -> None:
    left_out = [entry.name for entry in ATTENTION if not entry.is_timed]
    assert left_out == ["math", "flash_attn_2", "transformer_engine"]


def configure(flags: str, world_size: int = 1) -> TrainConfig:
    return read_command(f"{BASE} {flags}".split(), world_size=world_size)[0]


def race(monkeypatch: pytest.MonkeyPatch, times: dict[str, float | None]) -> list[AttentionShape]:
    """Let the clock say these times; the shapes that it is asked about."""
    entries = (*make_entries("sdpa", "flash"), Entry(name="math", function=attend_math, is_timed=False))
    shapes: list[AttentionShape] = []

    def clock(entry: Entry, shape: AttentionShape, need: Need, *, repeats: int = 5) -> float | None:
        shapes.append(shape)
        return times[entry.name]

    monkeypatch.setattr(kernels_module, "ATTENTION", entries)
    monkeypatch.setattr(kernels_module, "time_attention", clock)
    return shapes


def make_bent(place: str, bend: float) -> Entry:
    """An entry of a package whose result or one gradient alone is so much too large, or not a number."""

    class Bend(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * (1 + bend)

    def attend(*inputs: torch.Tensor, **options: Any) -> torch.Tensor:
        bent = [Bend.apply(x) if name == place else x for name, x in zip(("dq", "dk", "dv"), inputs, strict=True)]
        y = attend_math(*bent, **options)
        return y + (y * bend).detach() if place == "result" else y

    return Entry(name="flash_attn_4", function=attend, package="flash-attn-4")


@pytest.mark.parametrize("way", ["auto", "flash_attn_4", "flash_attn_4 --no-attention-timing"])
@pytest.mark.parametrize("place", ["result", "dq", "dk", "dv"])
@pytest.mark.parametrize("bend", [0.045, 0.055, 0.28, math.nan, math.inf])
def test_the_result_and_each_gradient_must_be_torchs(
    monkeypatch: pytest.MonkeyPatch, place: str, bend: float, way: str
) -> None:
    """Whichever is wrong alone, within the tolerance of 0.05 and not beyond."""
    race(monkeypatch, {"sdpa": 2.0, "flash": 1.9, "flash_attn_4": 0.1})
    monkeypatch.setattr(kernels_module, "ATTENTION", (*kernels_module.ATTENTION, make_bent(place, bend)))
    config = configure(f"--num-query-groups 8 --attention-backend {way}")
    if bend < 0.05:
        assert kernels_module.choose_attention(config, GPU, NEED).name == "flash_attn_4"
    elif way == "auto":
        assert kernels_module.choose_attention(config, GPU, NEED).name == "flash"
    else:
        with pytest.raises(ConfigError, match="gives other results than torch's on this GPU"):
            kernels_module.choose_attention(config, GPU, NEED)


@pytest.mark.parametrize("flags", ["", "--position-embedding-type learned_absolute"])
@pytest.mark.parametrize("place", ["result", "dq", "dk", "dv"])
@pytest.mark.parametrize("bend", [0.045, 0.055, math.nan, None])
def test_heads_side_by_side_must_give_what_three_tensors_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str, bend: float | None, flags: str
) -> None:
    """Otherwise, or where they are refused, the kernel serves without it."""
    bent = make_bent(place, bend or 0.0).function

    def joined(heads: torch.Tensor, groups: int, tables: Any, **options: Any) -> torch.Tensor:
        assert bend is not None, "a stride"
        q, k, v = heads.transpose(1, 2).split([heads.shape[2] - 2 * groups, groups, groups], dim=1)
        assert (tables is None) == (flags != "")
        if tables is not None:
            q, k = rotate_both(q, k, Rotary(*tables))
        return bent(q, k, v, **options)

    race(monkeypatch, {"sdpa": 2.0, "flash": 1.9, "flash_attn_4": 0.1})
    entry = dataclasses.replace(make_bent("result", 0.0), joined=joined)
    monkeypatch.setattr(kernels_module, "ATTENTION", (*kernels_module.ATTENTION, entry))
    found = kernels_module.choose_attention(configure(f"--num-query-groups 8 {flags}"), GPU, NEED)
    assert found.name == "flash_attn_4"
    assert (found.joined is not None) == (bend == 0.045)
    told = "they differ from those of three by" in capsys.readouterr().out
    assert told == (bend != 0.045)


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("--qk-layernorm", 1),
        ("--position-embedding-type rope --rotary-kernel liger", 1),
        ("--context-parallel-size 2 --cp-comm-type a2a", 2),
        ("--reset-attention-mask", 1),
        ("--recompute-granularity selective --recompute-modules attention_core", 1),
    ],
)
def test_where_something_comes_between_heads_are_not_handed_over_side_by_side(
    flags: str, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(f"--num-query-groups 8 {flags}", world_size)
    assert not kernels_module.can_join(config)
    entry = dataclasses.replace(make_bent("result", 0.0), joined=lambda *_, **__: pytest.fail("not to be asked"))
    monkeypatch.setattr(kernels_module, "choose_core", lambda *_: entry)
    assert kernels_module.choose_attention(config, GPU, NEED).joined is None


def test_flash_attn_4_takes_heads_side_by_side() -> None:
    assert [entry.name for entry in PACKAGES if entry.joined is not None] == ["flash_attn_4"]


def test_what_is_not_finite_differs_without_bound_and_nothing_does_not() -> None:
    one, nothing = torch.ones(3), torch.zeros(3)
    for bad in (math.nan, math.inf, -math.inf):
        spoilt = torch.tensor([1.0, bad, 1.0])
        for pair in (([one, spoilt], [one, one]), ([spoilt, one], [one, one]), ([one, one], [spoilt, one])):
            assert measure_difference(*pair) == math.inf
    assert measure_difference([nothing, one], [nothing, 2 * one]) == 0.5
    assert measure_difference([spoilt], [spoilt]) == math.inf


@pytest.mark.parametrize("place", [0, 1, 2])
def test_benches_see_what_is_not_a_number(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """Neither passes over it, wherever it is."""
    found, wanted = [torch.ones(3) for _ in range(3)], [torch.ones(3) for _ in range(3)]
    with import_benches("extras_ways", "rival_megatron") as benches:
        ways, rival = benches["extras_ways"], benches["rival_megatron"]
        monkeypatch.setattr(ways.Way, "run", lambda way: list(way.forward()))

        def compare() -> tuple[float, float]:
            one, other = (ways.Way(lambda own=own: tuple(own), []) for own in (found, wanted))
            return ways.compare(one, other), rival.find_largest(list(zip(found, wanted, strict=True)))

        assert compare() == (0, 0)
        found[place][1] = 1.5
        assert compare() == (0.5, 0.5)
        found[place][1] = math.nan
        assert not any(error <= 1 for error in compare())


def attend_nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: object) -> torch.Tensor:
    """What a window without tokens leaves: something of the right shape, quickly."""
    return (0 * (q + k.mean(2, keepdim=True)) + v).contiguous()


def test_a_kernel_of_a_package_whose_results_are_wrong_does_not_serve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Entry(name="flash_attn_4", function=attend_nothing, package="flash-attn-4")
    right = dataclasses.replace(wrong, name="right", function=attend_math)
    need, shape = NEED, AttentionShape(b=3, n=4, g=4, s=16, d=8, e=8, options={"window": 5})
    one, other = (find_error(entry, ATTENTION[0], shape, need) for entry in (right, wrong))
    assert one is not None
    assert other is not None
    assert one < 1e-5
    assert other > 0.3
    race(monkeypatch, {"sdpa": 2.0, "flash": 1.9, "flash_attn_4": 0.1, "right": 0.2})
    own = (*kernels_module.ATTENTION, wrong, right)
    monkeypatch.setattr(kernels_module, "ATTENTION", own)
    plain = configure("--num-query-groups 8")
    assert kernels_module.choose_attention(plain, GPU, NEED).name == "right"
    assert "note: attention 'flash_attn_4' is left out: it gives other results than torch's" in capsys.readouterr().out
    monkeypatch.setattr(kernels_module, "ATTENTION", own[:-1])
    assert kernels_module.choose_attention(plain, GPU, NEED).name == "flash"
    asked = configure("--num-query-groups 8 --attention-backend flash_attn_4")
    with pytest.raises(
        ConfigError, match=r"'flash_attn_4' gives other results than torch's.*-attn-4 and.*backend auto$"
    ):
        kernels_module.choose_attention(asked, GPU, NEED)


def test_a_run_on_a_gpu_takes_and_tells_the_fastest_at_its_shape(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = race(monkeypatch, {"sdpa": 2.0, "flash": 1.0})
    assert kernels_module.choose_attention(configure("--window-size 5"), GPU, NEED).name == "flash"
    assert shapes == [AttentionShape(b=3, n=8, g=2, s=16, d=8, e=8, options={"window": 5})] * 2
    assert capsys.readouterr().out == " attention at b 3, heads 8/2, s 16, d 8: flash (sdpa 2.00 ms, flash 1.00 ms)\n"


def test_ranks_that_share_layers_time_their_part_of_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = race(monkeypatch, {"sdpa": 2.0, "flash": 1.0})
    kernels_module.choose_attention(configure("--tensor-model-parallel-size 4", 4), GPU, NEED)
    assert (shapes[0].n, shapes[0].g) == (2, 1)
    latent = "--multi-latent-attention --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 5"
    words = f"{BASE} {latent}".replace("--num-query-groups 2 ", "").split()
    kernels_module.choose_attention(read_command(words, world_size=1)[0], GPU, NEED)
    assert (shapes[-1].n, shapes[-1].g, shapes[-1].d, shapes[-1].e) == (8, 8, 10, 5)


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("--no-attention-timing", 1),
        ("--context-parallel-size 2", 2),
        ("--reset-attention-mask", 1),
        ("--attention-backend math", 1),
    ],
)
def test_where_nothing_is_timed_the_order_decides(monkeypatch: pytest.MonkeyPatch, flags: str, world_size: int) -> None:
    """--no-attention-timing"""
    shapes = race(monkeypatch, {"sdpa": 2.0, "flash": 1.0})
    chosen = kernels_module.choose_attention(configure(flags, world_size), GPU, NEED)
    assert chosen.name == ("math" if "math" in flags else "sdpa")
    assert kernels_module.choose_attention(configure(""), one_rank(), NEED).name == "sdpa"  # on the CPU
    assert not shapes


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("is_timed", [True, False])
@pytest.mark.parametrize("error", REFUSALS, ids=repr)
def test_a_kernel_that_refuses_the_shape_is_left_out_or_refused_in_words(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    is_timed: bool,
    in_backward: bool,
) -> None:
    race(monkeypatch, {"sdpa": 2.0, "flash": 2.1})
    entry = make_refusing(error, in_backward=in_backward, is_timed=is_timed)
    monkeypatch.setattr(kernels_module, "ATTENTION", (*kernels_module.ATTENTION, entry))
    assert kernels_module.choose_attention(configure(""), GPU, NEED).name == "sdpa"
    said, told = (str(error).splitlines() or ["no reason given"])[0], capsys.readouterr().out
    assert ("flash_attn_4 -)" in told) == is_timed
    assert ("'flash_attn_4' is left out: it refuses b 3, heads 8/2, s 16, d 8 on this GPU" in told) == is_timed
    assert (f"memory for it: {said}\n" in told) == is_timed
    for flag in ("", "--no-attention-timing"):
        with pytest.raises(
            ConfigError,
            match=rf"^attention 'flash_attn_4' refuses b 3, heads 8/2, s 16, d 8 on this GPU.*: {said}; use --at",
        ):
            kernels_module.choose_attention(configure(f"--attention-backend flash_attn_4 {flag}"), GPU, NEED)


def test_torchs_kernels_refuse_in_words_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("No available kernel. Aborting execution.")

    race(monkeypatch, {})
    monkeypatch.setattr(kernels_module, "ATTENTION", (Entry(name="flash", function=refuse),))
    with pytest.raises(ConfigError, match=r"'flash' refuses b 3, heads 8/2, s 16, d 8 on .*: No available kernel"):
        kernels_module.choose_attention(configure("--attention-backend flash"), GPU, NEED)


def test_heads_that_ranks_exchange_are_compared_at_their_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """--cp-comm-type a2a: a rank computes all tokens of some heads; the core of the other ways is our own."""
    shapes: list[tuple[int, ...]] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        shapes.append((*q.shape[:3], k.shape[1]))
        return attend_nothing(q, *(part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v)))

    race(monkeypatch, {})
    wrong = Entry(name="flash_attn_4", function=attend, package="flash-attn-4", is_timed=False)
    monkeypatch.setattr(kernels_module, "ATTENTION", (*kernels_module.ATTENTION, wrong))
    flags = "--attention-backend flash_attn_4 --context-parallel-size 2 --cp-comm-type"
    with pytest.raises(ConfigError, match=r"gives other results than torch's on this GPU, by .* at b 3, heads 4/1"):
        kernels_module.choose_attention(configure(f"{flags} a2a", 2), GPU, NEED)
    assert shapes == [(3, 4, 16, 1), (1, 4, 16, 1)]
    assert kernels_module.choose_attention(configure(f"{flags} p2p", 2), GPU, NEED).name == "flash_attn_4"
    assert kernels_module.choose_attention(configure("--context-parallel-size 2 --cp-comm-type a2a", 2), GPU, NEED)
    assert len(shapes) == 2
