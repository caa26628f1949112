"""Ranks on the axes: Megatron's order, groups of one and several axes, divisibility said with its numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megaflow.errors import ConfigError
from megaflow_trainer.config import read_command
from megaflow_trainer.config.layout import (
    AXES,
    EXPERT_AXES,
    Layout,
    check_ranks,
    check_sequence,
    check_tensor,
    make_layout,
    split_vocab,
)
from megaflow_trainer.config.sections import ModelConfig, ParallelConfig
from megaflow_trainer.parallel.mesh import Launch, build_mesh

WIDE = Layout(tp=2, cp=2, dp_shard=2, dp_replicate=2, pp=4)


def test_ranks_go_tensor_then_context_then_data_then_pipeline() -> None:
    layout = Layout(tp=2, cp=3, dp_shard=2, dp_replicate=2, pp=2)
    assert layout.size == 48
    places = [layout.place(rank) for rank in range(48)]
    assert [place["tp"] for place in places[:4]] == [0, 1, 0, 1]
    assert [place["cp"] for place in places[:7]] == [0, 0, 1, 1, 2, 2, 0]
    assert [place["dp_shard"] for place in places[0:24:6]] == [0, 1, 0, 1]
    assert [place["dp_replicate"] for place in places[0:24:6]] == [0, 0, 1, 1]
    assert [place["pp"] for place in places[0:48:12]] == [0, 0, 1, 1]


@pytest.mark.parametrize("axes", [AXES, EXPERT_AXES])
def test_peers_divide_the_ranks_on_every_axis(axes: tuple[str, ...]) -> None:
    layout = Layout(tp=2, cp=2, dp_shard=2, dp_replicate=2, pp=2, ep=4, etp=2)
    assert layout.edp == 2
    for axis in axes:
        groups = {tuple(layout.peers(rank, (axis,), axes)) for rank in range(layout.size)}
        assert {len(group) for group in groups} == {getattr(layout, axis)}
        assert sorted(rank for group in groups for rank in group) == list(range(layout.size))


def test_megatrons_groups_of_sixteen_ranks() -> None:
    """The example of Megatron's documentation of its groups: tp 2, pp 4 on 16 GPUs."""
    layout = Layout(tp=2, pp=4, dp_replicate=2)
    assert {tuple(layout.peers(rank, ("dp_replicate",))) for rank in range(16)} == {
        *((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15))
    }
    assert {tuple(layout.peers(rank, ("pp",))) for rank in range(16)} == {
        *((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
    }


def test_experts_fold_into_the_ranks_of_a_stage() -> None:
    layout = Layout(tp=2, dp_replicate=4, ep=4)
    assert layout.edp == 2
    assert layout.peers(0, ("ep",), EXPERT_AXES) == [0, 1, 2, 3]
    assert layout.peers(0, ("edp_replicate", "edp_shard"), EXPERT_AXES) == [0, 4]


@pytest.mark.parametrize(
    "layout, shards, replicas",
    [
        (Layout(ep=2, dp_shard=4, dp_replicate=2), [0, 2], [0, 4]),  # two sets of experts in each replica
        (Layout(ep=2, dp_shard=8), [0, 2, 4, 6], [0]),
        (Layout(ep=4, dp_shard=4, dp_replicate=2), [0], [0, 4]),
        (Layout(tp=2, ep=4, dp_shard=2, dp_replicate=2), [0], [0, 4]),
        (Layout(ep=4, dp_shard=2, dp_replicate=4), [0, 4], [0]),  # experts reach over replicas: no replicas of theirs
    ],
    ids=str,
)
def test_states_of_experts_are_divided_inside_a_replica_that_has_all(
    layout: Layout, shards: list[int], replicas: list[int]
) -> None:
    assert layout.peers(0, ("edp_shard",), EXPERT_AXES) == shards
    assert layout.peers(0, ("edp_replicate",), EXPERT_AXES) == replicas
    assert layout.edp == layout.edp_shard * layout.edp_replicate == len(shards) * len(replicas)


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=37, world_size=64)
    yield
    dist.destroy_process_group()


def test_a_mesh_of_64_ranks_holds_the_groups_of_its_layout(fake_ranks: None) -> None:
    mesh = build_mesh(Launch(rank=37, world_size=64), torch.device("cpu"), "gloo", WIDE)
    place = WIDE.place(37)
    assert (mesh.tp_rank, mesh.cp_rank, mesh.pp_rank, mesh.dp_rank) == (1, 0, 2, 1)
    assert (place["dp_replicate"], place["dp_shard"]) == (0, 1)
    expected = {
        "tp_group": ("tp",),
        "cp_group": ("cp",),
        "pp_group": ("pp",),
        "dp_group": ("dp_replicate", "dp_shard"),
        "gradient_group": ("dp_replicate", "dp_shard", "cp"),
        "shard_group": ("dp_shard", "cp"),
        "loss_group": ("pp", "dp_replicate", "dp_shard", "cp"),
        "model_group": ("pp", "tp"),
        "world_group": AXES,
    }
    for name, along in expected.items():
        assert dist.get_process_group_ranks(getattr(mesh, name)) == WIDE.peers(37, along), name
    assert mesh.device_mesh is not None
    assert mesh.device_mesh.mesh_dim_names == AXES
    assert list(mesh.device_mesh.get_coordinate() or ()) == [place[axis] for axis in AXES]
    assert mesh.embedding_group is None  # a stage in the middle


def test_the_first_and_the_last_stage_share_an_embedding(fake_ranks: None) -> None:
    layout = Layout(tp=8, pp=2, dp_replicate=4, kv_copies=4)
    mesh = build_mesh(Launch(rank=37, world_size=64), torch.device("cpu"), "gloo", layout)
    assert mesh.embedding_group is not None
    assert dist.get_process_group_ranks(mesh.embedding_group) == [5, 37]
    assert mesh.kv_group is not None
    assert dist.get_process_group_ranks(mesh.kv_group) == [36, 37, 38, 39]
    assert mesh.cp_group is None


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=3),
        Layout(pp=5, tp=2),
        Layout(pp=3, dp_replicate=2),
        Layout(tp=4, kv_copies=2, cp=2),
        Layout(pp=2, cp=3),
        Layout(dp_shard=6, dp_replicate=2, ep=2),
        Layout(tp=2, pp=2, cp=2, dp_shard=2, dp_replicate=2, ep=8),
    ],
    ids=str,
)
def test_every_rank_makes_equally_many_groups(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, make = [], dist.new_group
    monkeypatch.setattr(
        dist, "new_group", lambda *args, **options: counts.append(counts.pop() + 1) or make(*args, **options)
    )
    for rank in range(layout.size):
        counts.append(0)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.size)
        build_mesh(Launch(rank=rank, world_size=layout.size), torch.device("cpu"), "gloo", layout)
        dist.destroy_process_group()
    assert len(set(counts)) == 1, counts
    assert counts[0] > 0


def test_what_is_left_of_the_ranks_is_data_parallel() -> None:
    assert make_layout(ParallelConfig(tp=2), world_size=8) == Layout(tp=2, dp_replicate=4, etp=2)
    assert make_layout(ParallelConfig(tp=2, zero=1), world_size=8) == Layout(tp=2, dp_shard=4, etp=2)
    folded = make_layout(ParallelConfig(tp=2, ep=4, etp=1), world_size=8)
    assert (folded.edp, str(folded)) == (2, "tp2.ep4.etp1.dp4")
    hybrid = ParallelConfig(zero=3, dp_replicate=2)
    assert make_layout(hybrid, world_size=8) == Layout(dp_shard=4, dp_replicate=2)
    assert make_layout(ParallelConfig(tp=8), world_size=8, num_kv_heads=2).kv_copies == 4
    assert str(Layout(tp=2, pp=2, dp_replicate=4)) == "tp2.pp2.dp4"


MODEL = ModelConfig(num_layers=2, hidden_dim=48, num_heads=6, vocab_size=64, vocab_multiple=1)
PLAIN = dataclasses.replace(MODEL, attention_dropout=0.0)


FAULTS = {
    "1 rank cannot be divided into replicas of tp x cp x pp = 2 x 1 x 1 = 2 ranks; start 2": lambda: check_ranks(
        ParallelConfig(tp=2), world_size=1
    ),
    "8 ranks cannot be divided into replicas of tp x cp x pp = 2 x 1 x 3 = 6 ranks; start 6 or 12": lambda: check_ranks(
        ParallelConfig(tp=2, pp=3), world_size=8
    ),
    "4 data-parallel ranks (8 / (tp x cp x pp = 2 x 1 x 1 = 2)) cannot be divided into parallel.dp_replicate 3 "
    "replicas; give a divisor of 4": lambda: check_ranks(ParallelConfig(tp=2, zero=1, dp_replicate=3), world_size=8),
    "parallel.dp_replicate 2 is for ZeRO, which divides states inside each replica; give parallel.zero 1, 2 or 3, or "
    "drop it": lambda: check_ranks(ParallelConfig(dp_replicate=2), world_size=8),
    "model.num_heads 6 is not divisible by parallel.tp 4; choose parallel.tp 3 or 6": lambda: check_tensor(
        MODEL, ParallelConfig(tp=4)
    ),
    "model.ffn_dim 100 is not divisible by parallel.tp 8; choose parallel.tp 5 or 10": lambda: check_tensor(
        ModelConfig(num_heads=8, hidden_dim=64, ffn_dim=100), ParallelConfig(tp=8)
    ),
    "model.num_kv_heads 6 and parallel.tp 4: neither is a multiple of the other, so that key/value heads can be "
    "neither divided nor copied; choose parallel.tp 3 or 6": lambda: check_tensor(
        ModelConfig(num_heads=12, num_kv_heads=6, hidden_dim=48), ParallelConfig(tp=4)
    ),
    "a vocabulary of 3 rows has less than one row for each of parallel.tp 4": lambda: check_tensor(
        ModelConfig(num_heads=4, vocab_size=3, vocab_multiple=1), ParallelConfig(tp=4)
    ),
    "data.seq_len 18 is not divisible by 4 pieces (parallel.tp 4, parallel.cp 1), as parallel.sequence_parallel needs; "
    "use 16 or 20 tokens": lambda: check_sequence(MODEL, ParallelConfig(tp=4, sequence_parallel=True), seq_len=18),
    "data.seq_len 20 is not divisible by 8 pieces (parallel.tp 1, parallel.cp 4), as parallel.cp 4 needs; use 16 or 24 "
    "tokens": lambda: check_sequence(PLAIN, ParallelConfig(cp=4), seq_len=20),
    "parallel.cp_kind a2a gives each of parallel.cp 4 ranks some of the 6 query and 6 key/value heads of a "
    "tensor-parallel rank, which do not divide; use p2p or all_gather": lambda: check_sequence(
        PLAIN, ParallelConfig(cp=4, cp_kind="a2a"), seq_len=16
    ),
    "parallel.cp_kind p2p has no dropout inside attention, and model.attention_dropout is 0.1; set it to 0, or use "
    "all_gather or a2a": lambda: check_sequence(MODEL, ParallelConfig(cp=2), seq_len=16),
}


@pytest.mark.parametrize("words", FAULTS)
def test_a_size_that_does_not_divide_is_said_with_the_numbers(words: str) -> None:
    assert FAULTS[words]() == [words]


PP2, ZERO3 = "--pipeline-model-parallel-size 2", "--zero-stage 3"
BASE = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --train-iters 2 --mock-data "
    "--vocab-size 64 --micro-batch-size 1 --global-batch-size 4"
)


@pytest.mark.parametrize(
    "flags, said",
    [
        (f"{PP2} {ZERO3} --pipeline-schedule zbv", "takes backward apart, and parallel.zero"),
        (f"{PP2} {ZERO3} --pipeline-schedule zero_bubble", "use 1f1b or interleaved, or give zero 1 or 2"),
        (
            f"{PP2} --pipeline-schedule zero_bubble --compile",
            "takes backward apart, which compiled blocks do not allow",
        ),
        (f"{ZERO3} --compile", "this version does not compile those"),
        (f"{ZERO3} --compress-activations fp8", "would take for activations"),
        (f"{ZERO3} --recompute-granularity full --recompute-num-layers 2", "computes blocks together"),
    ],
)
def test_what_does_not_go_together_is_said(flags: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_command(f"{BASE} {flags}".split(), world_size=4)


@pytest.mark.parametrize(
    "flags",
    [
        f"{PP2} {ZERO3}",
        "--context-parallel-size 2 --mtp-num-layers 1 --attention-dropout 0",
        f"{ZERO3} --optimizer muon",
        f"{ZERO3} --num-experts 4 --expert-model-parallel-size 4",
        f"{ZERO3} {PP2} --num-experts 4 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1",
    ],
)
def test_what_goes_together_is_taken(flags: str) -> None:
    config, _ = read_command(f"{BASE} {flags}".split(), world_size=4)
    assert config.parallel.zero == 3 or config.parallel.cp == 2


def test_sizes_that_divide_have_no_faults() -> None:
    assert check_tensor(ModelConfig(), ParallelConfig(tp=4)) == []  # 768 / 4 = 192, 12 / 4 = 3
    assert check_tensor(MODEL, ParallelConfig()) == []
    assert check_sequence(MODEL, ParallelConfig(tp=4), seq_len=18) == []
    assert check_ranks(ParallelConfig(tp=2, pp=2), world_size=8) == []


@pytest.mark.parametrize(
    "num_rows, size, multiple, lengths",
    [
        (50304, 2, 128, [25216, 25088]),
        (640, 4, 128, [256, 128, 128, 128]),
        (384, 4, 128, [96, 96, 96, 96]),
        (257, 2, 1, [129, 128]),
        (3, 3, 2, [1, 1, 1]),
    ],
)
def test_the_vocabulary_is_cut_at_its_multiple_and_no_rank_is_without_rows(
    num_rows: int, size: int, multiple: int, lengths: list[int]
) -> None:
    runs = split_vocab(num_rows, size, multiple=multiple)
    assert [len(run) for run in runs] == lengths
    assert [row for run in runs for row in run] == list(range(num_rows))
