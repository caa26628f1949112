"""The recorded `.bin/.idx` pairs open, and say what Megatron-LM says of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megaflow import IndexedDataset

pytestmark = pytest.mark.golden


def pairs(shared: Path) -> list[Path]:
    found = sorted(
        file.with_suffix("") for folder in ("bin", "datasets") for file in (shared / "goldens" / folder).glob("*.idx")
    )
    assert len(found) >= 20
    return found


def test_every_recorded_pair_opens_and_reads_to_its_end(shared: Path) -> None:
    for prefix in pairs(shared):
        dataset = IndexedDataset(prefix)
        data = np.fromfile(f"{prefix}.bin", dtype=dataset.dtype)
        assert dataset.num_tokens == len(data)
        for whole in (list(dataset), [dataset.document(i) for i in range(dataset.num_documents)]):
            np.testing.assert_array_equal(np.concatenate([*whole, data[:0]]), data, err_msg=str(prefix))
        np.testing.assert_array_equal(dataset.sequence_lengths, [len(sequence) for sequence in dataset])


@pytest.mark.parametrize(
    ("name", "sequences", "documents", "dtype"),
    [
        ("datasets/A", 300, 300, "uint16"),
        ("datasets/B", 389, 200, "int32"),
        ("datasets/C", 40, 40, "uint16"),
        ("bin/empty_docs_eod_text_document", 4, 8, "uint16"),
        ("bin/fast_empty_docs_eod_text_document", 8, 8, "uint16"),
    ],
)
def test_counts_are_those_recorded(shared: Path, name: str, sequences: int, documents: int, dtype: str) -> None:
    dataset = IndexedDataset(shared / "goldens" / name)
    assert (dataset.num_sequences, dataset.num_documents, str(dataset.dtype)) == (sequences, documents, dtype)


def test_empty_documents_are_boundaries_without_sequence(shared: Path) -> None:
    dataset = IndexedDataset(shared / "goldens" / "bin" / "empty_docs_eod")
    assert dataset.document_boundaries.tolist() == [0, 0, 1, 1, 1, 2, 3, 4, 4]


def test_documents_end_in_eod(shared: Path) -> None:
    dataset = IndexedDataset(shared / "goldens" / "datasets" / "B")
    documents = [dataset.document(i) for i in range(dataset.num_documents)]
    empty = [i for i, document in enumerate(documents) if len(document) == 0]
    assert empty == [i for i in range(200) if i % 17 == 3]
    assert {int(document[-1]) for document in documents if len(document)} == {50256}
