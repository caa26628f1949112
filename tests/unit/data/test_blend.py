"""Blends: Megatron's against a literal restatement, exact shares, tables, weights that mean nothing."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaflow import GPTDataset, Loader
from megaflow.blend import BlendedDataset, format_table
from megaflow.blend_arguments import BlendSpec, DataSpec
from megaflow.building import Builder, table_rows
from megaflow.errors import ConfigError
from unit.data.blend_oracle import exhaustive, shares_of, sizes_of_weighted, weighted
from unit.data.oracle import Index, split_ranges, write_documents

SPLIT_NAMES = ("train", "valid", "test")


def documents_of(lengths: list[int], start: int = 0) -> list[list[int]]:
    """Documents whose tokens count on from one to the next."""
    starts = start + np.cumsum([0, *lengths])
    return [list(range(first, first + length)) for first, length in zip(starts, lengths, strict=False)]


@pytest.fixture
def pairs(tmp_path: Path) -> list[str]:
    """Three corpora of different sizes with no token in common."""
    shapes = ([7, 3, 9, 12] * 10, [20, 1, 5] * 6, [50] * 8)
    return [
        write_documents(tmp_path / name, documents_of(list(lengths), 5000 * number))
        for number, (name, lengths) in enumerate(zip("abc", shapes, strict=True))
    ]


WEIGHTS = st.lists(st.floats(0.001, 10, allow_nan=False), min_size=1, max_size=5)
LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=15).filter(any)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), weights=WEIGHTS, seed=st.integers(0, 2**32 - 1), seq_len=st.integers(1, 20))
def test_weighted_blends_equal_the_oracle(data: st.DataObject, weights: list[float], seed: int, seq_len: int) -> None:
    num_samples = data.draw(st.integers(1, 200))
    corpora = [documents_of(data.draw(LENGTHS), 1000 * number) for number in range(len(weights))]
    with tempfile.TemporaryDirectory() as folder:
        names = [write_documents(Path(folder) / str(number), own) for number, own in enumerate(corpora)]
        spec = DataSpec(BlendSpec(tuple(names), tuple(weights)))
        split = data.draw(st.sampled_from(["1,0,0", "100,0,0", "1"]))
        train = Builder(seq_len=seq_len, seed=seed, split=split).build(spec, (num_samples, 0, 0)).train
        assert isinstance(train, BlendedDataset)
        size, built_for = sizes_of_weighted(weights, num_samples)
        datasets, samples = weighted(shares_of(weights), size)
        np.testing.assert_array_equal(train.dataset_index, datasets)
        np.testing.assert_array_equal(train.dataset_sample_index, samples)
        oracles = []
        for documents, count, part in zip(corpora, built_for, train.datasets, strict=True):
            lengths = [len(document) for document in documents]
            oracle = Index(lengths, 0, len(lengths), seq_len=seq_len, num_samples=count, seed=seed)
            for array in ("document_index", "sample_index", "shuffle_index"):
                np.testing.assert_array_equal(getattr(part, array), getattr(oracle, array))
            oracles.append(oracle)
        for position in range(0, size, 7):
            number, sample = int(datasets[position]), int(samples[position])
            expected = oracles[number].tokens(corpora[number], sample)
            np.testing.assert_array_equal(train.tokens(position), expected)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), seq_len=st.integers(1, 12))
def test_blends_without_weights_equal_the_oracle(data: st.DataObject, seed: int, seq_len: int) -> None:
    corpora = [
        documents_of(own, 500 * number)
        for number, own in enumerate(data.draw(st.lists(LENGTHS, min_size=2, max_size=4)))
    ]
    split = data.draw(st.sampled_from(["1,0,0", "5,3,2", "2,1,1"]))
    num_samples = data.draw(st.none() | st.integers(1, 60))
    with tempfile.TemporaryDirectory() as folder:
        names = [write_documents(Path(folder) / str(number), own) for number, own in enumerate(corpora)]
        builder = Builder(seq_len=seq_len, seed=seed, split=split)
        built = builder.build(DataSpec(BlendSpec(tuple(names))), (num_samples,) * 3).datasets
        ranges = [split_ranges(split, len(documents)) for documents in corpora]
        for number, name in enumerate(SPLIT_NAMES):
            own = [(part[number], corpus) for part, corpus in zip(ranges, corpora, strict=True)]
            filled = [(part, corpus) for part, corpus in own if part is not None and part[0] < part[1]]
            sizes = [
                len(
                    Index(
                        [len(document) for document in corpus], *part, seq_len=seq_len, num_samples=None, seed=seed
                    ).shuffle_index
                )
                for part, corpus in filled
            ]
            if not filled:
                assert name not in built
                continue
            blend = built[name]
            assert isinstance(blend, BlendedDataset)
            assert [len(part) for part in blend.datasets] == sizes
            if sum(sizes) == 0:
                assert len(blend) == 0
            elif num_samples is None:
                same(blend, exhaustive(sizes))
            else:
                same(blend, weighted(sizes, min(num_samples, sum(sizes))))


def test_a_tie_of_sizes_falls_as_in_megatron(tmp_path: Path) -> None:
    lengths = ([11, 30, 30], [11, 30, 30, 30], [21])
    names = [write_documents(tmp_path / str(n), documents_of(own, 500 * n)) for n, own in enumerate(lengths)]
    spec = DataSpec(BlendSpec(tuple(names)))
    blend = Builder(seq_len=1, seed=0, split="1,0,0").build(spec, (20, 0, 0)).train
    assert isinstance(blend, BlendedDataset)
    same(blend, weighted([len(part) for part in blend.datasets], 20))
    assert blend.dataset_index[-1] == 0  # dividing by the sum twice would give 1


def test_a_blend_of_one_sample_has_all_that_it_draws(tmp_path: Path) -> None:
    names = [write_documents(tmp_path / str(n), documents_of([1], n)) for n in range(4)]
    spec = DataSpec(BlendSpec(tuple(names), (1.0, 5.0, 0.5, 0.25)))
    blend = Builder(seq_len=1, split="1,0,0").build(spec, (1, 0, 0)).train
    assert isinstance(blend, BlendedDataset)
    assert [len(part) for part in blend.datasets][1] >= 3  # its share of 1 rounded up, with surplus, is 2
    assert len(blend.tokens(len(blend) - 1)) == 2


def same(blend: BlendedDataset, expected: tuple[Any, Any]) -> None:
    np.testing.assert_array_equal(blend.dataset_index, expected[0])
    np.testing.assert_array_equal(blend.dataset_sample_index, expected[1])


def test_two_copies_of_a_tiny_dataset_at_extreme_weights_read_to_the_end(tmp_path: Path) -> None:
    name = write_documents(tmp_path / "tiny", documents_of([11, 9, 6]))
    for order in ("megatron", "instant"):
        spec = DataSpec(BlendSpec((name, name), (0.001, 0.999)))
        train = Builder(seq_len=5, split="1,0,0", order=order).build(spec, (10_000, 0, 0)).train
        assert train is not None
        with Loader(train, 100) as loader:
            assert sum(len(batch.tokens) for batch in loader) == 10_000
        assert sum(row.num_samples for row in table_rows(train)) == len(train) >= 10_000


@pytest.mark.parametrize("weight_kind", ["shares", "epochs"])
def test_shares_are_exact_at_every_prefix(pairs: list[str], weight_kind: str) -> None:
    builder = Builder(seq_len=6, split="1,0,0", order="instant", weight_kind=weight_kind)
    train = builder.build(DataSpec(BlendSpec(tuple(pairs), (3.0, 1.0, 2.0))), (600, 0, 0)).train
    assert isinstance(train, BlendedDataset)
    requested = np.array([row.requested for row in train.table()])
    if weight_kind == "epochs":
        epochs = [row.epochs for row in train.table()]
        assert epochs[0] / epochs[1] == pytest.approx(3, rel=0.02)
    counts = np.zeros(3)
    for position in range(600):
        number, sample = train.locate(position)
        assert sample == counts[number]
        counts[number] += 1
        assert abs(counts - requested * (position + 1)).max() < 2
        np.testing.assert_array_equal(train.tokens(position), train.datasets[number].tokens(sample))
    assert train.counts() == counts.tolist()


def test_epochs_without_a_number_of_samples_read_each_dataset_so_often(pairs: list[str]) -> None:
    builder = Builder(seq_len=5, split="1,0,0", order="instant", weight_kind="epochs")
    train = builder.build(DataSpec(BlendSpec(tuple(pairs), (1.0, 2.0, 0.5))), (None, 0, 0)).train
    assert isinstance(train, BlendedDataset)
    assert [row.epochs for row in train.table()] == pytest.approx([1, 2, 0.5], abs=0.03)


def test_one_pass_over_an_instant_blend_reads_every_sample_once(pairs: list[str]) -> None:
    train = (
        Builder(seq_len=5, split="1,0,0", order="instant").build(DataSpec(BlendSpec(tuple(pairs))), (None, 0, 0)).train
    )
    assert isinstance(train, BlendedDataset)
    seen = {train.locate(position) for position in range(len(train))}
    assert seen == {(number, sample) for number, part in enumerate(train.datasets) for sample in range(len(part))}


def test_a_later_phase_leaves_the_past_and_every_dataset_goes_on(pairs: list[str]) -> None:
    spec = DataSpec(BlendSpec(tuple(pairs)))
    phases = [(0, [1.0, 1.0, 0.0]), (100, [0.0, 0.0, 1.0]), (150, [1.0, 0.0, 1.0])]

    def build(count: int, phases: Any) -> BlendedDataset:
        builder = Builder(seq_len=6, split="1,0,0", order="instant", phases=phases)
        train = builder.build(spec, (count, 0, 0)).train
        assert isinstance(train, BlendedDataset)
        return train

    before, after = build(100, phases[:1]), build(300, phases)
    for position in range(100):
        np.testing.assert_array_equal(before.tokens(position), after.tokens(position))
    assert after.counts(100) == [50, 50, 0]
    assert after.counts(150) == [50, 50, 50]
    assert after.counts() == [125, 50, 125]
    assert [row.requested for row in after.table()] == pytest.approx([125 / 300, 50 / 300, 125 / 300])
    saved = before.description
    assert after.changes(saved, 100) == []
    assert after.changes(saved, 99) == []
    assert after.changes(saved, 101) != []
    assert "the phase at sample 0 drew 0.5 of" in after.changes({**saved, "datasets": saved["datasets"][::-1]}, 50)[0]


def test_weights_that_change_are_refused_where_they_would_reorder_the_past(pairs: list[str]) -> None:
    with pytest.raises(ConfigError, match="a change would reorder the past"):
        Builder(seq_len=6, split="1,0,0", phases=[(0, [1, 1, 1])]).build(DataSpec(BlendSpec(tuple(pairs))), (9, 0, 0))


def test_weight_zero_is_named_and_never_read(pairs: list[str], tmp_path: Path) -> None:
    gone = str(tmp_path / "not-there")
    for order in ("megatron", "instant"):
        spec = DataSpec(BlendSpec((pairs[0], gone, pairs[1]), (1.0, 0.0, 2.0)))
        built = Builder(seq_len=6, split="1,0,0", order=order).build(spec, (100, 0, 0))
        assert built.notes == (f"train: {gone} has weight 0 and is not read",)
        assert [row.name for row in table_rows(built.train)] == [pairs[0], pairs[1]]  # type: ignore[arg-type]


def test_a_split_that_rounds_to_nothing_is_told_or_refused(pairs: list[str]) -> None:
    # 40, 18 and 8 documents: a share of 3 % of the third is none.
    builder = Builder(seq_len=4, split="969,30,1")
    built = builder.build(DataSpec(BlendSpec(tuple(pairs), (1.0, 1.0, 1.0))), (50, 10, 0))
    assert [part.indexed.prefix for part in built.valid.datasets] == pairs[:2]  # type: ignore[union-attr]
    assert built.notes == (f"valid: the share of 969,30,1 rounds to none of the 8 documents of {pairs[2]}",)
    builder.split = "1,30,969"
    with pytest.raises(ConfigError, match="train split rounds to none of the 40 sequences"):
        builder.build(DataSpec(BlendSpec(tuple(pairs), (1.0, 1.0, 1.0))), (50, 0, 0))


def test_the_table_has_a_line_a_dataset(pairs: list[str]) -> None:
    train = Builder(seq_len=6, split="1,0,0").build(DataSpec(BlendSpec(tuple(pairs), (1, 1, 2))), (400, 0, 0)).train
    assert train is not None
    rows = table_rows(train)
    lines = format_table(rows).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [line.split()[1:6] for line in lines[1:]] == [
        ["40", "310", "25.000%", "25.000%", "100"],
        ["18", "156", "25.000%", "25.000%", "100"],
        ["8", "400", "50.000%", "50.000%", "200"],
    ]
    assert rows[2].epochs == pytest.approx(200 * 6 / 400)


@pytest.mark.parametrize("order", ["megatron", "instant"])
@pytest.mark.parametrize(
    "weights, words",
    [
        ((-1.0, 1.0, 1.0), "weight 1 of .* is -1.0"),
        ((1.0, float("nan"), 1.0), "weight 2 of .* is nan"),
        ((1.0, 1.0, float("inf")), "weight 3 of .* is inf"),
        ((0.0, 0.0, 0.0), "all weights of the blend are 0"),
        ((1.0, 1.0), "2 weights for 3 datasets"),
    ],
)
def test_weights_without_meaning_are_refused(pairs: list[str], order: str, weights: Any, words: str) -> None:
    parts = [GPTDataset(pair, seq_len=4, num_samples=20, order=order) for pair in pairs]
    with pytest.raises(ConfigError, match=words):
        BlendedDataset(parts, weights, num_samples=20, order=order)


def test_a_dataset_with_too_few_samples_is_refused(pairs: list[str]) -> None:
    parts = [GPTDataset(pair, seq_len=4, num_samples=20, order="instant") for pair in pairs]
    with pytest.raises(ConfigError, match="draws 30 samples of it, and it has 20"):
        BlendedDataset(parts, [1, 1, 1], num_samples=90, order="instant")


@pytest.mark.parametrize("order", ["megatron", "instant"])
def test_pickle_gives_the_same_blend(pairs: list[str], order: str) -> None:
    spec = DataSpec(BlendSpec(tuple(pairs), (1, 2, 3)))
    train = Builder(seq_len=4, split="1,0,0", order=order).build(spec, (60, 0, 0)).train
    assert train is not None
    copy = pickle.loads(pickle.dumps(train))
    assert copy.fingerprint == train.fingerprint
    for position in range(60):
        np.testing.assert_array_equal(copy.tokens(position), train.tokens(position))
