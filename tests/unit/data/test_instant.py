"""The order that needs no index, at small sizes against properties and at 10^12 tokens on sparse files."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaflow import GPTDataset, Loader
from megaflow.dataset import FillInMiddle
from megaflow.errors import ConfigError
from unit.data.oracle import write_documents

DOCUMENT_TOKENS = 1000
NUM_DOCUMENTS = 10**9
HEADER_BYTES = 34


@pytest.fixture
def pair(tmp_path: Path) -> str:
    return write_documents(tmp_path / "pair", [list(range(100 * d, 100 * d + d % 17 + 1)) for d in range(60)])


def tokens_of(pair: str) -> Counter[int]:
    return Counter(np.fromfile(f"{pair}.bin", dtype="<u2").tolist())


@pytest.mark.parametrize("shuffle", ["samples", "documents"])
def test_every_token_is_read_once_a_turn(pair: str, shuffle: str) -> None:
    every = tokens_of(pair)
    total = every.total()
    dataset = GPTDataset(pair, seq_len=7, num_samples=total, order="instant", shuffle=shuffle)
    assert dataset.num_epochs == 7
    seen: Counter[int] = Counter()
    for index in range(total):
        seen.update(dataset.tokens(index)[:-1].tolist())
    assert seen == Counter({token: 7 * count for token, count in every.items()})


@pytest.mark.parametrize("kind", [{"shuffle": "samples"}, {"shuffle": "documents"}, {"packing": "best_fit"}])
def test_a_longer_run_begins_with_the_shorter_one(pair: str, kind: dict[str, str]) -> None:
    short, long = (GPTDataset(pair, seq_len=9, num_samples=count, order="instant", **kind) for count in (50, 500))
    for index in range(50):
        np.testing.assert_array_equal(short.tokens(index), long.tokens(index))
    assert long.changes(short.description, 50) == []
    assert GPTDataset(pair, seq_len=9, num_samples=50, order="instant", seed=9).changes(short.description, 50) != []


@pytest.mark.parametrize("kind", [{"shuffle": "documents"}, {"packing": "best_fit"}])
def test_the_loader_reads_the_same_samples_on_any_number_of_threads(pair: str, kind: dict[str, str]) -> None:
    dataset = GPTDataset(pair, seq_len=9, num_samples=64, order="instant", **kind)
    expected = np.stack([np.maximum(dataset.tokens(index)[:-1], 0) for index in range(64)])  # padding reads as 0
    for threads in (0, 1, 4):
        with Loader(dataset, 4, num_threads=threads) as loader:
            np.testing.assert_array_equal(np.concatenate([batch.tokens for batch in loader]), expected)


def test_packed_documents_are_whole_and_their_padding_has_no_loss(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "pair", [[d] * length for d, length in enumerate([5, 9, 3, 4, 8, 2, 25], 1)])
    dataset = GPTDataset(prefix, seq_len=9, order="instant", packing="best_fit", document_masking=True)
    whole: Counter[int] = Counter()
    for index in range(len(dataset)):
        text, sample = dataset.tokens(index), dataset[index]
        whole.update(set(text[text >= 0].tolist()))
        starts = dataset.starts(index)
        assert sample["cu_seqlens"][0] == 0
        assert sample["cu_seqlens"].tolist()[: len(starts)] == [start for start in starts if start < 9] + [9] * (
            len(starts) - sum(start < 9 for start in starts)
        )
        for begin, end in zip(starts, [*starts[1:], 10], strict=True):
            assert len(set(text[begin:end].tolist())) == 1, "one document, or padding"
            np.testing.assert_array_equal(sample["position_ids"][begin:end], np.arange(max(0, min(end, 9) - begin)))
        assert sample["loss_mask"].sum() == (text[1:] >= 0).sum()
    # The long one is cut into samples, all others lie in one.
    assert whole == Counter({1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1, 7: 3})


def test_orders_that_do_not_go_together_are_refused(pair: str) -> None:
    for settings, words in (
        ({"packing": "best_fit"}, "is no order of Megatron's"),
        ({"shuffle": "documents"}, "is no order of Megatron's"),
        ({"order": "instant", "packing": "best_fit", "shuffle": "documents"}, "packs whole documents in any case"),
        ({"order": "random"}, "order = 'random': expected 'megatron' or 'instant'"),
        ({"order": "instant", "shuffle": "tokens"}, "shuffle = 'tokens'"),
    ):
        with pytest.raises(ConfigError, match=words):
            GPTDataset(pair, seq_len=4, **settings)
    with pytest.raises(ConfigError, match="has no document, sample and shuffle index"):
        _ = GPTDataset(pair, seq_len=4, order="instant").document_index


MARKS: dict[str, Any] = {"prefix_id": 60001, "middle_id": 60002, "suffix_id": 60003}


def test_fill_in_the_middle_keeps_every_token_and_depends_on_nothing_read_before(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "pair", [[*range(10 * d, 10 * d + 9), 9] for d in range(1, 40)])
    plain = GPTDataset(prefix, seq_len=19, order="instant", num_samples=30)
    fim = FillInMiddle(rate=1.0, spm_rate=0.5, **MARKS)
    dataset = GPTDataset(prefix, seq_len=19, order="instant", num_samples=30, fim=fim, eod_id=9)
    backwards = [dataset.tokens(index) for index in reversed(range(30))][::-1]
    suffix_first = 0
    for index in range(30):
        np.testing.assert_array_equal(dataset.tokens(index), backwards[index])
        found, source = dataset.tokens(index).tolist(), plain.tokens(index).tolist()
        first = [token for token in found[: found.index(9) + 1] if token < 60000] if 9 in found else []
        document = source[: source.index(9) + 1]
        if first and len(document) > 1:
            assert sorted(first) == sorted(document), "the first document, whole, its end at its end"
            assert found[0] == 60001
            suffix_first += found[1] == 60003 and found[2] != 60002
    assert 0 < suffix_first < 30
    other = GPTDataset(prefix, seq_len=19, order="instant", num_samples=30, fim=fim, eod_id=9, seed=7)
    assert any(not np.array_equal(dataset.tokens(index), other.tokens(index)) for index in range(30))
    none = FillInMiddle(rate=0.0, **MARKS)
    same = GPTDataset(prefix, seq_len=19, order="instant", num_samples=30, fim=none, eod_id=9)
    np.testing.assert_array_equal(same.tokens(3), plain.tokens(3))


def write_sparse(prefix: Path, documents: list[int]) -> None:
    """A pair of 10^9 documents of 1,000 tokens whose files hold only what is needed to read around `documents`.

    Token t of all 10^12 is t modulo 65,521. The index is 20 GB, the data 2 TB; on disk they take some hundred kB.
    """
    lengths_at, offsets_at = HEADER_BYTES, HEADER_BYTES + 4 * NUM_DOCUMENTS
    boundaries_at = offsets_at + 8 * NUM_DOCUMENTS
    with Path(f"{prefix}.idx").open("wb") as index, Path(f"{prefix}.bin").open("wb") as data:
        index.truncate(boundaries_at + 8 * (NUM_DOCUMENTS + 1))
        data.truncate(2 * NUM_DOCUMENTS * DOCUMENT_TOKENS)
        os.pwrite(index.fileno(), b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, NUM_DOCUMENTS, NUM_DOCUMENTS + 1), 0)
        os.pwrite(index.fileno(), struct.pack("<q", NUM_DOCUMENTS), boundaries_at + 8 * NUM_DOCUMENTS)
        for document in {0, NUM_DOCUMENTS - 1, *(near for known in documents for near in range(known - 3, known + 5))}:
            if 0 <= document < NUM_DOCUMENTS:
                os.pwrite(index.fileno(), struct.pack("<i", DOCUMENT_TOKENS), lengths_at + 4 * document)
                os.pwrite(index.fileno(), struct.pack("<q", 2 * DOCUMENT_TOKENS * document), offsets_at + 8 * document)
                tokens = (np.arange(DOCUMENT_TOKENS) + DOCUMENT_TOKENS * document) % 65521
                os.pwrite(data.fileno(), tokens.astype("<u2").tobytes(), 2 * DOCUMENT_TOKENS * document)


def test_a_trillion_tokens_are_read_without_an_index_and_without_memory(tmp_path: Path) -> None:
    # The order does not depend on the content, so a first look tells which documents the samples need.
    prefix, seq_len, num_samples = tmp_path / "pair", 2048, 3 * 10**12 // 2048
    split_ends = [round(0.969 * NUM_DOCUMENTS), round(0.999 * NUM_DOCUMENTS)]
    write_sparse(prefix, split_ends)
    probe = """
import sys
from megaflow import GPTDataset
def anonymous():
    return sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Anonymous"))
prefix, num_samples = sys.argv[1], int(sys.argv[2])
before = anonymous()
dataset = GPTDataset(prefix, seq_len=2048, num_samples=num_samples, order="instant", split="969,30,1")
tokens = [dataset.tokens(index) for index in (0, 1, num_samples // 2, num_samples - 1)]
print(anonymous() - before)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", probe, str(prefix), str(num_samples)], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 4096, "kB of heap for 10^9 documents"
    dataset = GPTDataset(prefix, seq_len=seq_len, num_samples=num_samples, order="instant", split="969,30,1")
    assert dataset.tokens_per_epoch == split_ends[0] * DOCUMENT_TOKENS
    assert len(dataset) == num_samples
    assert dataset.num_epochs == 4
    # Which tokens a sample holds, by arithmetic in whole numbers of any size: epoch, first sample, a permutation.
    for index in (0, 12_345, num_samples // 2, num_samples - 1):
        found = locate(dataset, prefix, index)
        text = dataset.tokens(index)
        np.testing.assert_array_equal(text, (np.arange(seq_len + 1) + found) % 65521)
        pieces = dataset.pieces(index)
        assert pieces[0][0] * DOCUMENT_TOKENS + pieces[0][1] == found
        assert sum(length for _, _, length in pieces) == seq_len + 1


def locate(dataset: GPTDataset, prefix: Path, index: int) -> int:
    """The first token of a sample, found in the holes of the file: the tokens are written where they are looked for.

    Samples of an epoch are the multiples of `seq_len` in it; the one at `index` is found by its place in the map of the
    file, which the first read makes resident.
    """
    seq_len, turn = dataset.seq_len, dataset.tokens_per_epoch
    epoch = index * seq_len // turn
    # The permutation is the implementation's; that it is one is tested elsewhere. Here it tells a number of the cut.
    first, behind = -(-epoch * turn // seq_len), -(-(epoch + 1) * turn // seq_len)
    number = first + permute(dataset.seed, epoch, behind - first, index - first)
    begin = number * seq_len % turn
    write_near(prefix, begin // DOCUMENT_TOKENS)
    return begin


def write_near(prefix: Path, document: int) -> None:
    offsets_at = HEADER_BYTES + 4 * NUM_DOCUMENTS
    with Path(f"{prefix}.idx").open("r+b") as index, Path(f"{prefix}.bin").open("r+b") as data:
        for near in range(max(document - 3, 0), min(document + 6, NUM_DOCUMENTS)):
            os.pwrite(index.fileno(), struct.pack("<i", DOCUMENT_TOKENS), HEADER_BYTES + 4 * near)
            os.pwrite(index.fileno(), struct.pack("<q", 2 * DOCUMENT_TOKENS * near), offsets_at + 8 * near)
            tokens = (np.arange(DOCUMENT_TOKENS) + DOCUMENT_TOKENS * near) % 65521
            os.pwrite(data.fileno(), tokens.astype("<u2").tobytes(), 2 * DOCUMENT_TOKENS * near)


MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def permute(seed: int, stream: int, length: int, position: int) -> int:
    """The keyed permutation restated: a Feistel network of eight half rounds, walked until it lands inside."""
    bits = max((length - 1).bit_length(), 2)
    high_bits, low_bits = bits // 2, bits - bits // 2
    state, keys = mix(seed ^ mix((stream + GOLDEN) & MASK)), []
    for _ in range(8):
        state = (state + GOLDEN) & MASK
        keys.append(mix(state))
    while True:
        high, low = position >> low_bits, position & (1 << low_bits) - 1
        for one, other in zip(keys[::2], keys[1::2], strict=True):
            high ^= mix(low ^ one) >> 64 - high_bits
            low ^= mix(high ^ other) >> 64 - low_bits
        position = high << low_bits | low
        if position < length:
            return position
