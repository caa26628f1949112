"""Writes .bin/.idx pairs of given documents with numpy alone, as Megatron-LM lays them out."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_documents(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "uint16") -> str:
    """A pair of these documents, each a list of sequences of ids; without a sidecar."""
    sequences = [np.array(sequence, dtype=dtype) for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], dtype="<i4")
    offsets = (np.cumsum(lengths, dtype="<i8") - lengths) * np.dtype(dtype).itemsize
    boundaries = np.cumsum([0, *(len(document) for document in documents)], dtype="<i8")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(lengths), len(boundaries))
    Path(f"{prefix}.bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    Path(f"{prefix}.idx").write_bytes(header + lengths.tobytes() + offsets.tobytes() + boundaries.tobytes())
    return str(prefix)


def pair_bytes(prefix: Path | str) -> tuple[bytes, bytes]:
    """Both files."""
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def documents_of(prefix: Path | str) -> list[list[list[int]]]:
    """Documents of a pair, read by megaflow."""
    from megaflow import IndexedDataset

    dataset = IndexedDataset(prefix)
    bounds = dataset.document_boundaries.tolist()
    return [[dataset[index].tolist() for index in range(begin, end)] for begin, end in pairwise(bounds)]
