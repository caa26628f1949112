"""`Loader`: which samples come in which order, and how it goes on from any position."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megaflow import EvalSets, GPTDataset, Loader
from megaflow.errors import CheckpointError, ConfigError
from unit.data.batches import SEQ_LEN, global_order, ids
from unit.data.oracle import write_documents


def test_cyclic_order_is_that_of_a_torch_sampler(dataset: GPTDataset) -> None:
    torch = pytest.importorskip("torch")
    count, seed = len(dataset), 77
    expected = [
        sample
        for epoch in range(3)
        for sample in torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    ]
    for dp_size, size, num_threads in ((1, 1, 0), (2, 3, 2), (4, 2, 1)):
        loaders = [
            Loader(dataset, size, dp_rank=rank, dp_size=dp_size, num_threads=num_threads, order="cyclic", seed=seed)
            for rank in range(dp_size)
        ]
        steps = 3 * count // (size * dp_size)
        batches = [next(loader) for _ in range(steps) for loader in loaders]
        assert ids(batches) == expected[: steps * size * dp_size]
        for batch in batches[:5]:
            np.testing.assert_array_equal(batch.tokens[0], dataset[batch.sample_ids[0]]["tokens"])
    other = Loader(dataset, 4, order="cyclic", seed=78)
    assert ids([next(other)]) != expected[:4], "the seed counts"
    state = loaders[0].state_dict()
    resumed = Loader(dataset, 1, order="cyclic", seed=seed)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    resumed_at = state["consumed_samples"]
    assert resumed_at > 2 * count, "in the third epoch"
    assert (
        ids([next(resumed) for _ in range(2)])
        == (expected + torch.randperm(count, generator=torch.Generator().manual_seed(seed + 3)).tolist())[
            resumed_at : resumed_at + 2
        ]
    )
    with pytest.raises(CheckpointError, match="the sampler was"):
        other.load_state_dict(state)
    with pytest.raises(CheckpointError, match="the sampler was"):
        Loader(dataset, 1).load_state_dict(state)
    short, long = (GPTDataset(dataset.indexed, seq_len=SEQ_LEN, num_samples=n, order="instant") for n in (40, 41))
    state = Loader(short, 1, order="cyclic").state_dict()
    Loader(short, 1, order="cyclic").load_state_dict(state)
    with pytest.raises(CheckpointError, match="cyclic order of 40 samples is not that of 41"):
        Loader(long, 1, order="cyclic").load_state_dict(state)


def test_micro_batch_size_may_change_while_it_runs(dataset: GPTDataset) -> None:
    ranks = [Loader(dataset, 1, dp_rank=rank, dp_size=2) for rank in range(2)]
    order = []
    for size in (1, 2, 4):
        for loader in ranks:
            loader.set_micro_batch_size(size)
        order += [sample for _ in range(2) for loader in ranks for sample in ids([next(loader)])]
    assert order == list(range(2 * 2 * (1 + 2 + 4)))
    with pytest.raises(ConfigError, match="micro_batch_size = 0"):
        ranks[0].set_micro_batch_size(0)
    assert ids([next(ranks[0])]) == [28, 29, 30, 31], "it goes on as it was"


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_global_order_is_that_of_the_sampler(
    dataset: GPTDataset, micro_batch_size: int, dp_size: int, num_threads: int
) -> None:
    step = micro_batch_size * dp_size
    order = global_order(dataset, micro_batch_size, dp_size, num_threads=num_threads, prefetch=3)
    assert order == list(range(len(dataset) // step * step)), "the part that fills no batch of every rank is dropped"


def test_rank_takes_its_slice(dataset: GPTDataset) -> None:
    # Negative control of the test above: the ranks alone differ.
    first, second = (ids([next(Loader(dataset, 2, dp_rank=rank, dp_size=2))]) for rank in (0, 1))
    assert (first, second) == ([0, 1], [2, 3])


def test_resume_at_every_position_equals_the_straight_run(dataset: GPTDataset) -> None:
    straight = [(batch.sample_ids.tolist(), batch.tokens.tolist()) for batch in Loader(dataset, 3)]
    for position in range(len(straight) + 1):
        loader = Loader(dataset, 3, num_threads=2)
        for _ in range(position):
            next(loader)
        state = json.loads(json.dumps(loader.state_dict()))
        resumed = Loader(dataset, 3, num_threads=position % 3)
        next(resumed)
        resumed.load_state_dict(state)
        assert resumed.consumed_samples == 3 * position
        rest = [(batch.sample_ids.tolist(), batch.tokens.tolist()) for batch in resumed]
        assert rest == straight[position:]


@pytest.mark.parametrize(("before", "after"), [((2, 2), (1, 1)), ((1, 4), (2, 1)), ((4, 1), (1, 2)), ((2, 1), (2, 4))])
def test_resume_under_another_layout_goes_on_exactly(
    dataset: GPTDataset, before: tuple[int, int], after: tuple[int, int]
) -> None:
    steps = 5
    states = []
    for rank in range(before[1]):
        loader = Loader(dataset, before[0], dp_rank=rank, dp_size=before[1])
        for _ in range(steps):
            next(loader)
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states), "every rank saves the same"
    consumed = steps * before[0] * before[1]
    ranks = [Loader(dataset, after[0], dp_rank=rank, dp_size=after[1], num_threads=2) for rank in range(after[1])]
    for loader in ranks:
        loader.load_state_dict(states[0])
    order = [sample for step in zip(*ranks, strict=True) for sample in ids(list(step))]
    assert order == list(range(consumed, consumed + len(order)))
    assert len(dataset) - consumed - len(order) < after[0] * after[1]


def test_what_was_gathered_ahead_does_not_count_as_consumed(dataset: GPTDataset) -> None:
    loader = Loader(dataset, 2, dp_size=2, num_threads=2, prefetch=8, consumed_samples=12)
    assert loader.state_dict()["consumed_samples"] == 12
    next(loader)
    assert loader.state_dict()["consumed_samples"] == 16


def test_state_of_another_dataset_is_refused_in_a_sentence(dataset: GPTDataset, corpus: str) -> None:
    loader = Loader(dataset, 2)
    next(loader)
    state = loader.state_dict()
    other = Loader(GPTDataset(corpus, seq_len=SEQ_LEN, num_samples=100, seed=4), 2)
    with pytest.raises(CheckpointError, match=r"another order of samples: seed was 3 and is 4; going on would repeat"):
        other.load_state_dict(state)
    assert ids([next(other)]) == [0, 1], "a refused state changes nothing"
    tokens = write_documents(Path(corpus).parent / "other", [[1] * 9] * 60)
    other_data = Loader(GPTDataset(tokens, seq_len=SEQ_LEN, num_samples=100, seed=3), 2)
    with pytest.raises(CheckpointError, match="tokens or their documents are others"):
        other_data.load_state_dict(state)
    for broken in ({}, {**state, "version": 7}, {"version": 1, "consumed_samples": 0}):
        with pytest.raises(CheckpointError, match="not the state of a loader"):
            loader.load_state_dict(broken)
    for consumed in (-1, len(dataset) + 1):
        with pytest.raises(CheckpointError, match=f"has consumed {consumed} samples, but this dataset has"):
            loader.load_state_dict({**state, "consumed_samples": consumed})


def test_longer_run_of_the_same_order_goes_on(corpus: str) -> None:
    short, long, other = (GPTDataset(corpus, seq_len=SEQ_LEN, num_samples=n, seed=3) for n in (10, 12, 100))
    assert short.num_epochs == long.num_epochs != other.num_epochs
    np.testing.assert_array_equal(short.shuffle_index, long.shuffle_index)
    loader = Loader(short, 2)
    next(loader)
    resumed = Loader(long, 2)
    resumed.load_state_dict(loader.state_dict())
    assert ids([next(resumed)]) == [2, 3]
    with pytest.raises(CheckpointError, match="num_epochs was 1 and is 3"):
        Loader(other, 2).load_state_dict(loader.state_dict())


def test_evaluation_is_the_same_every_time_and_leaves_training_alone(dataset: GPTDataset, corpus: str) -> None:
    training = Loader(dataset, 2, num_threads=1)
    expected = ids(list(Loader(dataset, 2)))
    other = GPTDataset(corpus, seq_len=SEQ_LEN, seed=9)
    sets = EvalSets({"one": dataset, "two": other}, 2, num_batches=3)
    seen, trained = [], []
    for _ in range(4):
        trained.append(next(training))
        state = training.state_dict()
        seen.append({name: [batch.tokens.tolist() for batch in batches] for name, batches in sets})
        assert training.state_dict() == state
    assert seen == [seen[0]] * 4
    assert [len(batches) for batches in seen[0].values()] == [3, 3]
    assert seen[0]["one"] != seen[0]["two"]
    assert ids([*trained, *training]) == expected
    with pytest.raises(ConfigError, match="evaluation set 'two' ends after"):
        list(EvalSets({"two": other}, 2, num_batches=10**6).batches("two"))
    with pytest.raises(ConfigError, match="drop consumed_samples"):
        EvalSets({}, 1, consumed_samples=4)
    ranks = [EvalSets({"one": dataset}, 1, num_batches=3, dp_rank=rank, dp_size=2) for rank in range(2)]
    both = [[batch.tokens.tolist()[0] for batch in part.batches("one")] for part in ranks]
    assert [row for pair in zip(*both, strict=True) for row in pair] == [row for b in seen[0]["one"] for row in b]


def test_a_loader_and_a_batch_say_what_they_are(dataset: GPTDataset) -> None:
    loader = Loader(dataset, 3, dp_rank=1, dp_size=2)
    batch = next(loader)
    assert repr(batch) == f"Batch(tokens, labels, sample_ids; tokens: int64 [3, {SEQ_LEN}])"
    said = f"Loader({dataset!r}, micro_batch_size 3, rank 1 of 2, 6 samples consumed)"
    assert repr(loader) == said
    loader.close()
    assert repr(loader) == said
