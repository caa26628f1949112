"""Which attention kernel `auto` takes, by the clock; what GPUs really say is in test_fused_gpu.py."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from helpers.runs import one_rank
from megaflow.errors import ConfigError
from megaflow_trainer.config import read_command
from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.ops.attention import ATTENTION, attend_math, attend_sdpa
from megaflow_trainer.ops.attention_timing import AttentionShape, Choice, choose_by_time, find_error, time_attention
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


def test_a_kernel_that_raises_has_no_time() -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("No available kernel")

    shape = AttentionShape(b=1, n=2, g=1, s=4, d=8, e=8)
    assert time_attention(Entry(name="bad", function=refuse), shape, NEED) is None


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


def attend_nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: object) -> torch.Tensor:
    """What a window without tokens leaves: something of the right shape, quickly."""
    return (0 * (q + k.mean(2, keepdim=True)) + v).contiguous()


def test_a_kernel_of_a_package_whose_results_are_wrong_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(kernels_module, "ATTENTION", own[:-1])
    assert kernels_module.choose_attention(plain, GPU, NEED).name == "flash"
    asked = configure("--num-query-groups 8 --attention-backend flash_attn_4")
    with pytest.raises(
        ConfigError, match=r"'flash_attn_4' gives other results than torch's.*-attn-4 and.*backend auto"
    ):
        kernels_module.choose_attention(asked, GPU, NEED)


def test_a_kernel_that_refuses_a_shape_has_no_error() -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("heads too wide")

    shape = AttentionShape(b=1, n=2, g=1, s=4, d=8, e=8)
    assert find_error(Entry(name="bad", function=refuse), ATTENTION[0], shape, NEED) is None


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


def test_a_kernel_asked_for_that_refuses_the_shape_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    race(monkeypatch, {"sdpa": 2.0, "flash": None})
    assert kernels_module.choose_attention(configure(""), GPU, NEED).name == "sdpa"
    with pytest.raises(ConfigError, match=r"'flash' refuses b 3, heads 8/2, s 16, d 8 on this GPU.*use --attention"):
        kernels_module.choose_attention(configure("--attention-backend flash"), GPU, NEED)
