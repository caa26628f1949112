"""Layers on stages: even by rule, as a layout says, never one lost; what a schedule asks of its micro-batches."""

from __future__ import annotations

from typing import Any

import pytest

from megaflow.errors import ConfigError
from megaflow_trainer.config.sections import ModelConfig, ParallelConfig
from megaflow_trainer.config.shares import count_in_flight
from megaflow_trainer.config.stages import check_micro_batches, check_stages, describe_stages, own_chunks, split_layers


def lengths(num_layers: int, **parallel: Any) -> list[int]:
    runs = split_layers(ModelConfig(num_layers=num_layers), ParallelConfig(**parallel))
    assert [layer for run in runs for layer in run] == list(range(num_layers))
    return [len(run) for run in runs]


@pytest.mark.parametrize(
    "num_layers, parallel, expected",
    [
        (8, {"pp": 4}, [2, 2, 2, 2]),
        (10, {"pp": 4}, [2, 3, 3, 2]),
        (11, {"pp": 4}, [3, 3, 3, 2]),
        (9, {"pp": 2}, [5, 4]),
        (8, {"pp": 2, "virtual_stages": 2, "schedule": "interleaved"}, [2, 2, 2, 2]),
        (5, {"pp": 2, "schedule": "zbv"}, [1, 2, 1, 1]),
        (126, {"pp": 8}, [15, 16, 16, 16, 16, 16, 16, 15]),
        (9, {"pp": 4, "stage_layout": "Et*2|t*3|t*3|tL"}, [2, 3, 3, 1]),
        (4, {"pp": 3, "stage_layout": "E|ttt*2|L"}, [0, 4, 0]),
        (4, {"pp": 2, "stage_layout": "Ett, t | t mL"}, [3, 1]),
    ],
)
def test_every_layer_is_on_one_stage(num_layers: int, parallel: dict[str, Any], expected: list[int]) -> None:
    assert lengths(num_layers, **parallel) == expected


FAULTS: dict[str, tuple[int, dict[str, Any]]] = {
    "model.num_layers 3 is less than the 4 chunks of parallel.pp 2 with 2 a rank": (
        3,
        {"pp": 2, "virtual_stages": 2, "schedule": "interleaved"},
    ),
    "parallel.stage_layout 'Et*2|tL' holds 3 layers (2 + 1), and model.num_layers is 4": (
        4,
        {"pp": 2, "stage_layout": "Et*2|tL"},
    ),
    "parallel.stage_layout 'Et*4L' has 1 chunks, and the pipeline 2": (4, {"pp": 2, "stage_layout": "Et*4L"}),
    "'x*2L' is not a chunk": (4, {"pp": 2, "stage_layout": "Et*2|x*2L"}),
    "the embedding E belongs to the first chunk": (4, {"pp": 2, "stage_layout": "tt|EttL"}),
}


@pytest.mark.parametrize("words", FAULTS)
def test_a_lost_layer_is_an_error_with_the_numbers(words: str) -> None:
    num_layers, parallel = FAULTS[words]
    with pytest.raises(ConfigError) as caught:
        lengths(num_layers, **parallel)
    assert words in str(caught.value)
    assert check_stages(ModelConfig(num_layers=num_layers), ParallelConfig(**parallel)) == [str(caught.value)]


def test_the_split_is_said() -> None:
    assert describe_stages(ModelConfig(num_layers=5), ParallelConfig(pp=2)) == "0-2 on 0, 3-4 on 1"
    assert describe_stages(ModelConfig(num_layers=5), ParallelConfig(pp=2, schedule="zbv")) == (
        "0-0 on 0, 1-2 on 1, 3-3 on 1, 4-4 on 0"
    )


def test_ranks_hold_every_pth_chunk_or_both_sides_of_a_v() -> None:
    loop = ParallelConfig(pp=4, virtual_stages=2, schedule="interleaved")
    assert [own_chunks(loop, rank) for rank in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [own_chunks(ParallelConfig(pp=3, schedule="zbv"), rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


def test_a_schedule_that_does_not_suit_is_said() -> None:
    model = ModelConfig(num_layers=8)
    assert "needs several chunks a rank" in check_stages(model, ParallelConfig(pp=2, schedule="interleaved"))[0]
    assert "its own number of chunks" in check_stages(model, ParallelConfig(pp=2, virtual_stages=2))[0]
    assert "are for parallel.pp above 1" in check_stages(model, ParallelConfig(virtual_stages=2))[0]
    odd = ParallelConfig(pp=4, virtual_stages=2, schedule="interleaved")
    assert check_micro_batches(odd, 9) == [
        "parallel.schedule interleaved takes micro-batches in rounds of parallel.pp 4, and there are 9; use 8"
    ]
    assert check_micro_batches(odd, 8) == check_micro_batches(ParallelConfig(pp=4), 9) == []


@pytest.mark.parametrize(
    "schedule, num_micro_batches, held",
    [("1f1b", 8, [4, 3, 2, 1]), ("1f1b", 2, [2, 2, 2, 2]), ("gpipe", 8, [8, 8, 8, 8]), ("zbv", 8, [4, 4, 4, 4])],
)
def test_stages_keep_the_micro_batches_of_their_schedule(
    schedule: str, num_micro_batches: int, held: list[int]
) -> None:
    parallel = ParallelConfig(pp=4, schedule=schedule)
    counted = [count_in_flight(parallel, pp_rank=rank, num_micro_batches=num_micro_batches) for rank in range(4)]
    assert counted == held
