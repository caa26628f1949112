"""Boxes of runs of shards: together they are the whole tensor, each element once, wherever a run begins and ends."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaflow_trainer.checkpoint.held import cut_run, hold, put_whole
from megaflow_trainer.parallel.shards import Piece, Shard, run, whole


def number(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def read_boxes(local: torch.Tensor, shard: Shard, start: int, out: torch.Tensor) -> None:
    """Write every owned box where it belongs, as a checkpoint does."""
    held = hold(local, shard, start=start)
    for index, box in enumerate(held.boxes):
        if box.is_owned:
            place = tuple(slice(at, at + length) for at, length in zip(box.at, box.shape, strict=True))
            assert out[place].isnan().all(), "each element once"
            out[place] = held.view(index)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_runs_of_a_whole_tensor_are_put_together_again(shape: list[int], data: st.DataObject) -> None:
    full = number(*shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, full.numel()), max_size=4)))
    out = torch.full_like(full, torch.nan)
    for start, stop in zip([0, *cuts], [*cuts, full.numel()], strict=True):
        read_boxes(full.flatten()[start:stop].clone(), whole(shape), start, out)
    assert torch.equal(out, full)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(0, 1), st.integers(1, 3), st.data())
def test_runs_of_shards_are_put_together_again(tp: int, dim: int, width: int, data: st.DataObject) -> None:
    shape = [tp * width, 4] if dim == 0 else [4, tp * width]
    full, out = number(*shape), torch.full(shape, torch.nan)
    for rank in range(tp):
        shard = run(shape, dim, range(rank * width, (rank + 1) * width))
        part = shard.take(full).contiguous().flatten()
        cut = data.draw(st.integers(0, part.numel()))
        read_boxes(part[:cut].clone(), shard, 0, out)
        read_boxes(part[cut:].clone(), shard, cut, out)
    assert torch.equal(out, full)


def test_blocks_of_queries_keys_and_values_lie_apart_and_copies_are_written_by_their_owner() -> None:
    full, out = number(12, 3), torch.full((12, 3), torch.nan)
    for rank in range(2):  # 8 rows of queries are divided, 2 of keys and 2 of values are copied
        pieces = (Piece(4 * rank, 4), Piece(8, 2, is_owned=rank == 0), Piece(10, 2, is_owned=rank == 1))
        shard = Shard((12, 3), 0, pieces)
        part = shard.take(full).flatten()
        for start, stop in ((0, 10), (10, 13), (13, 24)):
            read_boxes(part[start:stop].clone(), shard, start, out)
    assert torch.equal(out, full)


def test_a_run_of_a_matrix_is_at_most_three_boxes() -> None:
    assert list(cut_run((4, 5), 3, 17)) == [((0, 3), (1, 2), 3), ((1, 0), (2, 5), 5), ((3, 0), (1, 2), 15)]
    assert list(cut_run((4, 5), 6, 9)) == [((1, 1), (1, 3), 6)]
    assert list(cut_run((4, 5), 5, 15)) == [((1, 0), (2, 5), 5)]
    assert list(cut_run((4, 5), 7, 7)) == []


def test_a_scalar_is_one_box() -> None:
    held = hold(torch.tensor(3.0))
    assert held.shape == ()
    assert held.view(0).item() == 3.0


@pytest.mark.parametrize("rows", [10, 4, 0])
def test_a_shorter_table_fills_the_first_rows(rows: int) -> None:
    shard = run((10, 2), 0, range(3, 8))
    held = hold(torch.zeros(5, 2), shard)
    put_whole(held, number(10, 2)[:rows] + 1)
    expected = torch.zeros(10, 2)
    expected[:rows] = number(10, 2)[:rows] + 1
    assert torch.equal(held.local, expected[3:8])
