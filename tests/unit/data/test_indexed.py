"""`IndexedDataset`: what opens, what is refused and how, and views that outlive everything."""

from __future__ import annotations

import gc
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megaflow import IndexedDataset, resolve_prefix
from megaflow.errors import DataFormatError, FileAccessError, MissingFileError, SampleIndexError
from unit.data.oracle import DTYPE_CODES, index_bytes, write_documents

TOKENS = np.array([10, 11, 12, 20, 21], dtype="<u2")


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Three sequences of 3, 0 and 2 tokens in three documents, the second without a sequence."""
    prefix = tmp_path / "small"
    Path(f"{prefix}.bin").write_bytes(TOKENS.tobytes())
    Path(f"{prefix}.idx").write_bytes(index_bytes([3, 0, 2], [0, 2, 2, 3]))
    return prefix


def test_counts_and_arrays_are_those_of_the_files(prefix: Path) -> None:
    dataset = IndexedDataset(prefix)
    assert (dataset.num_sequences, dataset.num_documents, dataset.num_tokens, len(dataset)) == (3, 3, 5, 3)
    assert (dataset.prefix, dataset.path, dataset.dtype) == (str(prefix), Path(f"{prefix}.bin"), np.dtype("<u2"))
    assert dataset.sequence_lengths.tolist() == [3, 0, 2]
    assert dataset.sequence_lengths.dtype == np.int32
    assert dataset.document_boundaries.tolist() == [0, 2, 2, 3]
    assert dataset.document_boundaries.dtype == np.int64
    assert [tokens.tolist() for tokens in dataset] == [[10, 11, 12], [], [20, 21]]
    assert [dataset.document(i).tolist() for i in range(3)] == [[10, 11, 12], [], [20, 21]]
    assert dataset[-1].tolist() == [20, 21]
    assert "3 documents, 3 sequences, 5 tokens, uint16" in repr(dataset)


@pytest.mark.parametrize("dtype", DTYPE_CODES)
def test_every_token_type_reads_back(tmp_path: Path, dtype: str) -> None:
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    dataset = IndexedDataset(write_documents(tmp_path / "typed", [[low, high], [1]], dtype))
    assert dataset.dtype == np.dtype(dtype)
    assert dataset[0].tolist() == [low, high]


def test_views_are_read_only_and_no_copies(prefix: Path) -> None:
    dataset = IndexedDataset(prefix)
    for view in (dataset[0], dataset.document(0), dataset.sequence_lengths, dataset.document_boundaries):
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
    assert np.shares_memory(dataset[0], dataset.document(0))


def test_views_outlive_the_dataset(tmp_path: Path) -> None:
    # Megatron's views outlive their buffer here and crash the process.
    documents = [list(range(1000 * i, 1000 * i + 900)) for i in range(50)]
    dataset = IndexedDataset(write_documents(tmp_path / "large", documents))
    view, lengths = dataset[49], dataset.sequence_lengths
    (tmp_path / "large.bin").unlink()
    del dataset
    gc.collect()
    churn = [bytearray(1 << 20) for _ in range(20)]
    assert view.tolist() == documents[49]
    assert lengths.tolist() == [900] * 50
    del churn


def test_positions_outside_are_index_errors(prefix: Path) -> None:
    dataset = IndexedDataset(prefix)
    for read in (dataset.__getitem__, dataset.document):
        for index in (3, -4, 10**30):
            with pytest.raises(SampleIndexError, match="does not exist: the dataset has 3"):
                read(index)
    with pytest.raises(IndexError):
        dataset[3]
    with pytest.raises(TypeError):
        dataset["0"]  # type: ignore[index]


def test_empty_pair_opens(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_documents(tmp_path / "empty", []))
    assert (len(dataset), dataset.num_documents, dataset.num_tokens) == (0, 0, 0)
    assert dataset.document_boundaries.tolist() == [0]
    assert dataset.sequence_lengths.size == 0
    assert (Path(f"{dataset.prefix}.idx").stat().st_size, Path(f"{dataset.prefix}.bin").stat().st_size) == (42, 0)


def test_offsets_beyond_32_bits_are_exact(tmp_path: Path) -> None:
    # A file with a hole: 4 GB long, a few kB on disk.
    long = 2**31 - 1
    (tmp_path / "long.idx").write_bytes(index_bytes([long, 3], [0, 1, 2]))
    with (tmp_path / "long.bin").open("wb") as file:
        file.seek(2 * long)
        file.write(TOKENS[:3].tobytes())
    dataset = IndexedDataset(tmp_path / "long")
    assert dataset.num_tokens == long + 3
    assert dataset[1].tolist() == [10, 11, 12]
    assert (len(dataset[0]), int(dataset[0][-1])) == (long, 0)


def test_prefix_with_text_document_is_found(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "corpus_text_document", [[1]])
    for spelling in ("corpus", "corpus_text_document", "corpus_text_document.idx", "corpus_text_document.bin"):
        assert resolve_prefix(tmp_path / spelling) == prefix
    assert IndexedDataset(tmp_path / "corpus").prefix == prefix


def test_missing_pair_names_what_is_there(tmp_path: Path) -> None:
    write_documents(tmp_path / "corpus", [[1]])
    with pytest.raises(
        MissingFileError, match=r"corpse_text_document\.idx exists.*prefixes in that folder are: .*corpus"
    ):
        IndexedDataset(tmp_path / "corpse")
    with pytest.raises(FileNotFoundError, match="does not exist or cannot be read"):
        IndexedDataset(tmp_path / "nowhere" / "corpus")
    text = tmp_path / "corpse.jsonl"
    text.write_text("{}")
    with pytest.raises(MissingFileError, match=f"a corpus, `megaflow-preprocess {re.escape(str(text))}` makes"):
        IndexedDataset(text)
    (tmp_path / "corpus.bin").unlink()
    with pytest.raises(MissingFileError, match=r"corpus\.bin is not"):
        IndexedDataset(tmp_path / "corpus")


def replace(at: int, value: bytes) -> Callable[[bytearray, bytearray], None]:
    def damage(index: bytearray, data: bytearray) -> None:
        index[at : at + len(value)] = value

    return damage


DAMAGES: dict[str, tuple[str, Callable[[bytearray, bytearray], object]]] = {
    "wrong magic": (r"small\.idx: not an index", replace(0, b"PK")),
    "empty index": (r"small\.idx: truncated at byte 0", lambda index, data: index.clear()),
    "cut header": (r"small\.idx: truncated at byte 33", lambda index, data: index.__delitem__(slice(33, None))),
    "version 2": (r"expected version 1 at byte 9, found 2", replace(9, b"\x02")),
    "dtype float64": (r"dtype code at byte 17 .*found 6 \(float64\)", replace(17, b"\x06")),
    "dtype 0": (r"found 0;", replace(17, b"\x00")),
    "trailing bytes": (r"102 bytes, but the file has 152", lambda index, data: index.extend(bytes(50))),
    "cut index": (r"102 bytes, but the file has 94", lambda index, data: index.__delitem__(slice(94, None))),
    "count too large": (r"counts 18446744073709551615 sequences", replace(18, b"\xff" * 8)),
    "modes": (r"open it with modes", lambda index, data: index.extend(bytes(3))),
    "cut data": (r"small\.bin: expected 10 bytes .*found 8", lambda index, data: data.__delitem__(slice(8, None))),
    "longer data": (r"small\.bin: expected 10 bytes .*found 11", lambda index, data: data.append(0)),
    "first boundary": (r"first document boundary \(byte 70\): expected 0, found 1", replace(70, b"\x01")),
    "last boundary": (r"last document boundary \(byte 94\): expected 3, .*found 2", replace(94, b"\x02")),
    "last length": (r"small\.bin: expected 12 bytes", replace(42, b"\x03")),
    "last offset": (r"offset of sequence 2 \(byte 62\)", replace(62, b"\xff" * 8)),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_pair_is_refused_in_words(prefix: Path, name: str) -> None:
    message, damage = DAMAGES[name]
    files = [Path(f"{prefix}.idx"), Path(f"{prefix}.bin")]
    contents = [bytearray(file.read_bytes()) for file in files]
    damage(*contents)
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    with pytest.raises(DataFormatError, match=message):
        IndexedDataset(prefix)


def test_damage_in_the_middle_is_refused_when_read(prefix: Path) -> None:
    index = bytearray(Path(f"{prefix}.idx").read_bytes())
    index[54:62] = (7).to_bytes(8, "little")
    Path(f"{prefix}.idx").write_bytes(index)
    dataset = IndexedDataset(prefix)
    assert dataset[0].tolist() == [10, 11, 12]
    with pytest.raises(DataFormatError, match=r"offset of sequence 1 \(byte 54\).*found 7"):
        dataset[1]


def test_modes_are_read_when_asked_for(prefix: Path) -> None:
    with Path(f"{prefix}.idx").open("ab") as file:
        file.write(bytes([0, 1, 2]))
    dataset = IndexedDataset(prefix, with_modes=True)
    assert dataset.sequence_modes.tolist() == [0, 1, 2]
    assert pickle.loads(pickle.dumps(dataset)).sequence_modes.tolist() == [0, 1, 2]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="permissions do not bind root")
def test_unreadable_file_is_named(prefix: Path) -> None:
    Path(f"{prefix}.bin").chmod(0)
    with pytest.raises(FileAccessError, match=r"small\.bin: cannot open it"):
        IndexedDataset(prefix)


def test_pickle_opens_the_same_pair(prefix: Path) -> None:
    copy = pickle.loads(pickle.dumps(IndexedDataset(prefix)))
    assert (copy.prefix, copy[0].tolist()) == (str(prefix), [10, 11, 12])


def test_content_key_follows_content_not_name(prefix: Path, tmp_path: Path) -> None:
    key = IndexedDataset(prefix).content_key
    for suffix in (".idx", ".bin"):
        Path(f"{tmp_path}/copy{suffix}").write_bytes(Path(f"{prefix}{suffix}").read_bytes())
    assert IndexedDataset(tmp_path / "copy").content_key == key
    (tmp_path / "copy.bin").write_bytes((TOKENS + 1).tobytes())
    assert IndexedDataset(tmp_path / "copy").content_key != key
