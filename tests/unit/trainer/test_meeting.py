"""Ranks that meet in a store which an earlier start has used."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from megaflow_trainer.training import meeting
from megaflow_trainer.training.meeting import Meeting, meet
from megaflow_trainer.training.processes import Process

PATIENCE = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def poll_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "POLL_S", 0.001)


def meet_all(store: dist.Store, ranks: Sequence[int], size: int) -> list[dist.Store]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        meetings = list(pool.map(lambda rank: meet(store, rank, size, patience=PATIENCE), ranks))
    assert {meeting.ranks for meeting in meetings} == {(Process.find(os.getpid()),) * size}
    return [meeting.store for meeting in meetings]


def test_all_ranks_of_a_start_share_what_an_earlier_start_did_not_write() -> None:
    store, found = dist.HashStore(), []
    for number in range(3):
        parts = meet_all(store, range(4), 4)
        assert [part.check(["fault"]) for part in parts] == [False] * 4
        parts[2].set("fault", str(number))
        assert [part.get("fault") for part in parts] == [str(number).encode()] * 4
        found.append(parts[0])
    assert [part.get("fault") for part in found] == [b"0", b"1", b"2"]


@pytest.mark.parametrize("survivors", [[0], [1, 2], [0, 1, 2]])
def test_ranks_that_died_while_they_met_are_not_waited_for(survivors: list[int]) -> None:
    store = dist.HashStore()
    for rank in survivors:  # they left their names, and the last rank of four never came
        with pytest.raises(RuntimeError, match="waited for the other 3 ranks in vain"):
            meet(store, rank, 4, patience=timedelta(0))
    late = threading.Event()

    def come(rank: int) -> Meeting:
        if rank == 3:
            late.wait(60)  # until then the list may hold names of the dead
        return meet(store, rank, 4, patience=PATIENCE)

    with ThreadPoolExecutor(4) as pool:
        parts = [pool.submit(come, rank) for rank in range(4)]
        late.set()
        found = [part.result().store for part in parts]
    found[0].set("key", "value")
    assert [part.get("key") for part in found] == [b"value"] * 4


def test_a_list_with_a_dead_name_is_made_anew() -> None:
    store = dist.HashStore()
    board = dist.PrefixStore("meeting", store)
    board.set("here/1", "dead")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, store, 0, 2, patience=PATIENCE)
        while not board.check(["list"]):
            pass
        assert b"dead" in board.get(f"names/{board.get('list').decode()}")
        assert not first.done()
        second = pool.submit(meet, store, 1, 2, patience=PATIENCE)
        first.result().store.set("key", "value")
        assert second.result().store.get("key") == b"value"


def test_the_first_rank_says_for_whom_it_waits(capsys: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match=r"in vain \(2 of 3 have not come: 0, 2\)"):
        meet(store, 1, 3, patience=timedelta(0), news_s=0.0)
    with pytest.raises(RuntimeError, match=r"in vain \(1 of 3 have not come: 2\)"):
        meet(store, 0, 3, patience=timedelta(seconds=0.05), news_s=0.01)
    assert capsys.readouterr().err.splitlines()[0] == "waiting for the ranks: 1 of 3 have not come: 2 after 0 s"
