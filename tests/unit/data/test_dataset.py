"""`GPTDataset` against the restatement in `oracle.py`, and what it refuses."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaflow import GPTDataset, IndexedDataset
from megaflow.errors import ConfigError, DataFormatError, SampleIndexError
from unit.data.oracle import Index, split_ranges, write_documents

EOD = 9
LENGTHS = st.lists(st.one_of(st.just(0), st.integers(0, 4), st.integers(0, 40)), min_size=1, max_size=40)
SPLITS = st.one_of(
    st.sampled_from(["1,0,0", "969,30,1", "900,50,50", "1,1", "98, 1, 1", "0,1,1", "0,0,5", ".5,.25"]),
    st.tuples(*[st.floats(0, 1e6).map(lambda share: f"{share:.4f}")] * 3)
    .filter(lambda s: any(map(float, s)))
    .map(",".join),
)


def documents_of(lengths: list[int]) -> list[list[int]]:
    """Documents of these lengths in which every token is another one."""
    ends = np.cumsum(lengths)
    return [list(range(end - length, end)) for length, end in zip(lengths, ends.tolist(), strict=True)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Ten documents of 20 tokens and an EOD each."""
    rows = np.random.RandomState(0).randint(10, 99, (10, 20))
    write_documents(tmp_path / "corpus", [[*row, EOD] for row in rows.tolist()])
    return tmp_path / "corpus"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=LENGTHS,
    split=SPLITS,
    seed=st.integers(0, 2**32 - 1),
    seq_len=st.integers(1, 30),
    num_samples=st.one_of(st.none(), st.integers(0, 60)),
    extra=st.booleans(),
    keep_partial=st.booleans(),
)
def test_all_splits_equal_the_oracle(
    lengths: list[int], split: str, seed: int, seq_len: int, num_samples: int | None, extra: bool, keep_partial: bool
) -> None:
    documents = documents_of(lengths)
    with tempfile.TemporaryDirectory() as folder:
        data = IndexedDataset(write_documents(Path(folder) / "d", documents))
    ranges = split_ranges(split, len(lengths))
    options: dict[str, Any] = {"seq_len": seq_len, "seed": seed, "num_samples": num_samples}
    for name, sequences in zip(("train", "valid", "test"), ranges, strict=True):
        low, high = sequences or (0, 0)
        arguments = {"split": split, "split_name": name, "add_extra_token": extra, "keep_partial": keep_partial}
        if num_samples and sum(lengths[low:high]) == 0:
            with pytest.raises(ConfigError, match=r"rounds to none of the|sequences are empty"):
                GPTDataset(data, **options, **arguments)
            continue
        if sum(lengths[low:high]) == 0:
            assert len(GPTDataset(data, **options, **arguments)) == 0
            continue
        expected = Index(lengths, low, high, extra=int(extra), keep_partial=keep_partial, **options)
        dataset = GPTDataset(data, **options, **arguments)
        assert (dataset.num_epochs, dataset.separate_last_epoch) == (expected.num_epochs, expected.separate_last_epoch)
        for array in ("document_index", "sample_index", "shuffle_index"):
            found = getattr(dataset, array)
            assert found.dtype == getattr(expected, array).dtype
            np.testing.assert_array_equal(found, getattr(expected, array), err_msg=array)
        for index in range(min(len(dataset), 30)):
            np.testing.assert_array_equal(dataset.tokens(index), expected.tokens(documents, index))


def test_last_epoch_is_separate_below_four_fifths_exactly(tmp_path: Path) -> None:
    lengths = [7, 50, 0, 44]  # 101 tokens: 100 samples of one token an epoch
    data = IndexedDataset(write_documents(tmp_path / "d", documents_of(lengths)))
    for num_samples in range(101, 202):
        dataset = GPTDataset(data, seq_len=1, num_samples=num_samples)
        expected = Index(lengths, 0, 4, seq_len=1, num_samples=num_samples, seed=1234)
        assert (dataset.num_epochs, dataset.separate_last_epoch) == (2, num_samples < 100 + 80)
        assert dataset.separate_last_epoch == expected.separate_last_epoch
        np.testing.assert_array_equal(dataset.shuffle_index, expected.shuffle_index)


def test_halves_of_a_split_round_to_even(tmp_path: Path) -> None:
    for num_sequences in range(1, 30):
        data = IndexedDataset(write_documents(tmp_path / "d", [[1, 2]] * num_sequences))
        for split in ("1,1", "1,1,2", "3,2,3"):
            for name, sequences in zip(("train", "valid", "test"), split_ranges(split, num_sequences), strict=True):
                dataset = GPTDataset(data, seq_len=1, split=split, split_name=name)
                low, high = sequences or (0, 0)
                assert sorted(dataset.document_index.tolist()) == list(range(low, high))


def test_oracle_would_notice_another_seed(corpus: Path) -> None:
    # Negative control of the comparison above.
    expected = Index([21] * 10, 0, 10, seq_len=8, num_samples=None, seed=1)
    same, other = (GPTDataset(corpus, seq_len=8, seed=seed) for seed in (1, 2))
    np.testing.assert_array_equal(same.shuffle_index, expected.shuffle_index)
    assert not np.array_equal(other.shuffle_index, expected.shuffle_index)
    assert not np.array_equal(other.document_index, expected.document_index)


def test_build_splits_leaves_out_what_is_empty(corpus: Path) -> None:
    train, valid, test = GPTDataset.build_splits(corpus, seq_len=8, split="100,0,0", num_samples=(4, 4, 4))
    assert train is not None
    assert (valid, test) == (None, None)
    # One of ten documents rounds to none: fine while nothing is asked of it.
    train, valid, test = GPTDataset.build_splits(corpus, seq_len=8, split="969,30,1", num_samples=(4, 0, None))
    assert (valid, test) == (None, None)
    with pytest.raises(ConfigError, match=r"the test split rounds to none of the 10 sequences.*3 samples"):
        GPTDataset.build_splits(corpus, seq_len=8, split="969,30,1", num_samples=(4, 0, 3))


def test_keep_partial_is_for_the_valid_split(corpus: Path) -> None:
    splits = GPTDataset.build_splits(corpus, seq_len=8, split="1,1,1", keep_partial=True)
    assert [dataset is not None and dataset.keep_partial for dataset in splits] == [False, True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 0}, "seq_len = 0: expected 1 to"),
        ({"seq_len": 2**31}, "seq_len = 2147483648"),
        ({"num_samples": -1}, "num_samples = -1"),
        ({"num_samples": 2**62}, "ask for fewer samples"),
        ({"seed": -1}, "seed = -1: expected 0 to 4294967295"),
        ({"seed": 2**32}, "seed = 4294967296"),
        ({"split": "a,b"}, 'split "a,b": it has no number'),
        ({"split": "1,2,3,4"}, "more than three numbers"),
        ({"split": "0,0,0"}, "add up to 0"),
        ({"split_name": "dev"}, 'split_name = "dev": expected "train", "valid" or "test"'),
        ({"eod_mask_loss": True}, "need eod_id"),
    ],
)
def test_wrong_settings_are_refused_in_words(corpus: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GPTDataset(corpus, **{"seq_len": 8, **change})


def test_sample_holds_shifted_tokens(corpus: Path) -> None:
    dataset = GPTDataset(corpus, seq_len=8)
    sample = dataset[0]
    assert sorted(sample) == ["labels", "loss_mask", "position_ids", "tokens"]
    np.testing.assert_array_equal(sample["tokens"], dataset.tokens(0)[:-1])
    np.testing.assert_array_equal(sample["labels"], dataset.tokens(0)[1:])
    assert [sample[name].dtype for name in ("tokens", "labels", "loss_mask", "position_ids")] == [
        np.int64,
        np.int64,
        np.float32,
        np.int64,
    ]
    np.testing.assert_array_equal(dataset[-1]["tokens"], dataset[len(dataset) - 1]["tokens"])
    assert dataset[None]["loss_mask"].sum() == 0
    with pytest.raises(
        SampleIndexError, match=f"sample {len(dataset)} does not exist: the dataset has {len(dataset)} samples"
    ):
        dataset[len(dataset)]


def test_labels_without_extra_token_roll_and_end_in_padding(corpus: Path) -> None:
    dataset = GPTDataset(corpus, seq_len=8, add_extra_token=False)
    sample, text = dataset[0], dataset.tokens(0)
    np.testing.assert_array_equal(sample["tokens"], text)
    np.testing.assert_array_equal(sample["labels"], [*text[1:], 0])
    assert sample["loss_mask"].tolist() == [1] * 7 + [0]


def test_padding_has_no_loss_and_reads_as_zero(tmp_path: Path) -> None:
    dataset = GPTDataset(write_documents(tmp_path / "d", [[5, 6, 7, 8]]), seq_len=2, keep_partial=True)
    sample = next(sample for sample in dataset if 0 in sample["labels"])
    assert {name: array.tolist() for name, array in sample.items()} == {
        "tokens": [7, 8],
        "labels": [8, 0],
        "loss_mask": [1, 0],
        "position_ids": [0, 1],
    }


def test_document_ends_reset_positions_mask_and_loss(corpus: Path) -> None:
    flags = {
        "reset_position_ids": True,
        "reset_attention_mask": True,
        "eod_mask_loss": True,
        "create_attention_mask": True,
    }
    dataset = GPTDataset(corpus, seq_len=50, eod_id=EOD, **flags)
    tokens, sample = dataset.tokens(0)[:-1], dataset[0]
    segment = position = 0
    segments = []
    for place, token in enumerate(tokens):
        assert sample["position_ids"][place] == position
        assert sample["loss_mask"][place] == (token != EOD)
        segments.append(segment)
        segment, position = (segment + 1, 0) if token == EOD else (segment, position + 1)
    assert segment >= 2, "the sample must cross document ends to show anything"
    for row in range(50):
        masked = [column > row or segments[column] != segments[row] for column in range(50)]
        assert sample["attention_mask"][0, row].tolist() == masked
    plain = GPTDataset(corpus, seq_len=50, create_attention_mask=True)[0]["attention_mask"]
    np.testing.assert_array_equal(plain, ~np.tri(50, dtype=bool)[None])


@pytest.mark.parametrize("option", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_options_that_go_by_document_ends_warn_where_the_data_have_none(option: str, tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "without", [[n + 1, n + 2, n + 3] for n in range(100)])
    words = rf"without: none of 32 documents looked at ends with token 0, and {option} goes by that token.*--append-eod"
    with pytest.warns(UserWarning, match=words):
        GPTDataset(prefix, seq_len=8, eod_id=0, **{option: True})
    GPTDataset(prefix, seq_len=8, eod_id=0, document_masking=True)
    assert GPTDataset(prefix, seq_len=8).indexed.count_ends(5, limit=1000) == (1, 100)
    empty = write_documents(tmp_path / "empty", [[], [4, 0], []])
    assert IndexedDataset(empty).count_ends(0) == (1, 1)


def test_pieces_tell_where_a_sample_comes_from(corpus: Path) -> None:
    dataset = GPTDataset(corpus, seq_len=50, num_samples=7)
    for index in range(len(dataset)):
        parts = [dataset.indexed[sequence][begin : begin + count] for sequence, begin, count in dataset.pieces(index)]
        np.testing.assert_array_equal(np.concatenate(parts), dataset.tokens(index))


def test_fingerprint_changes_with_all_that_changes_the_order(corpus: Path, tmp_path: Path) -> None:
    base: dict[str, Any] = {"seq_len": 8, "seed": 1, "split": "8,1,1", "num_samples": 10}
    fingerprint = GPTDataset(corpus, **base).fingerprint
    assert GPTDataset(str(corpus), **base).fingerprint == fingerprint
    changes: list[dict[str, Any]] = [{"seq_len": 9}, {"seed": 2}, {"split": "7,2,1"}, {"num_samples": 11}]
    changes += [{"split_name": "valid"}, {"add_extra_token": False}, {"keep_partial": True}]
    prints = [GPTDataset(corpus, **{**base, **change}).fingerprint for change in changes]
    other_data = write_documents(tmp_path / "other", [[1] * 21] * 10)
    prints.append(GPTDataset(other_data, **base).fingerprint)
    assert len({fingerprint, *prints}) == len(prints) + 1


def test_numpy_integers_are_settings_too(corpus: Path) -> None:
    dataset = GPTDataset(corpus, seq_len=np.int64(8), num_samples=np.int32(5), seed=np.uint32(7))
    assert dataset.fingerprint == GPTDataset(corpus, seq_len=8, num_samples=5, seed=7).fingerprint
    assert len(dataset[np.int64(0)]["tokens"]) == 8


def test_pickle_gives_the_same_samples(corpus: Path) -> None:
    dataset = GPTDataset(
        corpus, seq_len=8, seed=3, split="5,5", split_name="valid", eod_id=EOD, reset_position_ids=True
    )
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.fingerprint == dataset.fingerprint
    np.testing.assert_array_equal(copy[1]["position_ids"], dataset[1]["position_ids"])


def test_damaged_data_is_an_error_at_the_sample(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "d", [[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    index = bytearray(Path(f"{prefix}.idx").read_bytes())
    index[46 + 8 : 46 + 16] = (1 << 40).to_bytes(8, "little")
    Path(f"{prefix}.idx").write_bytes(index)
    dataset = GPTDataset(prefix, seq_len=8)
    with pytest.raises(DataFormatError, match=r"sample 0 cannot be read: .*d\.idx: offset of sequence 1 \(byte 54\)"):
        dataset.tokens(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_datasets_work_in_a_forked_child(corpus: Path) -> None:
    code = (
        "import os, sys, warnings\nwarnings.simplefilter('ignore')\nfrom megaflow import GPTDataset\n"
        f"dataset = GPTDataset({str(corpus)!r}, seq_len=8)\nexpected = dataset.tokens(1).tolist()\npid = os.fork()\n"
        "if pid == 0:\n    same = dataset.tokens(1).tolist() == expected and len(dataset.indexed[0]) == 21\n"
        "    os._exit(0 if same else 9)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
