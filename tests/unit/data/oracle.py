"""Megatron's files and sample order restated in plain Python and numpy, to compare with. Slow and literal."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DTYPE_CODES = {"<u1": 1, "<i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8}


def index_bytes(lengths: Sequence[int], boundaries: Sequence[int], dtype: str = "<u2") -> bytes:
    """An `.idx` of sequences with these lengths."""
    sizes = np.array(lengths, dtype="<i4")
    offsets = (np.cumsum(sizes, dtype="<i8") - sizes) * np.dtype(dtype).itemsize
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, DTYPE_CODES[dtype], len(sizes), len(boundaries))
    return header + sizes.tobytes() + offsets.astype("<i8").tobytes() + np.array(boundaries, dtype="<i8").tobytes()


def write_documents(prefix: Path, documents: Sequence[Sequence[Any]], dtype: str = "<u2") -> str:
    """A pair with one sequence a document."""
    arrays = [np.array(document, dtype=dtype) for document in documents]
    Path(f"{prefix}.bin").write_bytes(b"".join(array.tobytes() for array in arrays))
    Path(f"{prefix}.idx").write_bytes(index_bytes([len(array) for array in arrays], range(len(arrays) + 1), dtype))
    return str(prefix)


def split_ranges(split: str, num_sequences: int) -> list[tuple[int, int] | None]:
    """Sequences of train, valid and test."""
    shares = [float(word) for word in re.findall(r"[.0-9]+", split)]
    shares += [0.0] * (3 - len(shares))
    shares = (np.array(shares) / np.array(shares).sum()).tolist()
    bounds: list[float] = [0]
    for share in shares:
        bounds.append(bounds[-1] + share)
    return [
        (round(low * num_sequences), round(high * num_sequences)) if high > low else None
        for low, high in pairwise(bounds)
    ]


class Index:
    """Document, sample and shuffle index of the sequences `low` to `high`."""

    def __init__(
        self,
        lengths: Sequence[int],
        low: int,
        high: int,
        *,
        seq_len: int,
        num_samples: int | None,
        seed: int,
        extra: int = 1,
        keep_partial: bool = False,
    ) -> None:
        self.lengths, self.seq_len, self.extra = lengths, seq_len, extra
        per_epoch = sum(lengths[low:high])
        epochs = 1
        while num_samples is not None and epochs * per_epoch < num_samples * seq_len + extra:
            epochs += 1
        before = ((epochs - 1) * per_epoch - extra) // seq_len
        is_apart = False
        if epochs > 1:
            assert num_samples is not None
            in_last, in_epoch = num_samples - before, (per_epoch - extra) // seq_len
            assert 0 <= in_last <= in_epoch + 1
            is_apart = in_last < int(0.80 * in_epoch)
        self.num_epochs, self.separate_last_epoch = epochs, is_apart
        random = np.random.RandomState(seed)
        ids = np.arange(low, high, dtype=np.int32)
        mixed = np.tile(ids, epochs - 1 if is_apart else epochs)
        random.shuffle(mixed)
        last = ids if is_apart else ids[:0]
        random.shuffle(last)
        self.document_index = np.concatenate([mixed, last])
        tokens = epochs * per_epoch - extra
        count = math.ceil(np.float32(tokens) / np.float32(seq_len)) if keep_partial else tokens // seq_len
        count = max(count, 0)  # sequences without a token
        self.sample_index = self._walk(count)
        first = before if is_apart else count
        parts = [np.arange(first, dtype=np.uint32), np.arange(first, count, dtype=np.uint32)]
        for part in parts:
            random.shuffle(part)
        self.shuffle_index = np.concatenate(parts)

    def _walk(self, count: int) -> NDArray[np.int32]:
        rows = [(0, 0)]
        position = offset = 0
        for _ in range(count):
            need = self.seq_len + self.extra
            while need > 0:
                length = int(self.lengths[self.document_index[position]])
                have = length - offset
                if need <= have:
                    offset += need - self.extra
                    need = 0
                elif position == len(self.document_index) - 1:
                    offset = length - self.extra
                    need = 0
                else:
                    need -= have
                    position += 1
                    offset = 0
            rows.append((position, offset))
        return np.array(rows, dtype=np.int32)

    def tokens(self, documents: Sequence[Sequence[int]], index: int, pad_id: int = -1) -> NDArray[np.int64]:
        """Tokens of the sample at `index`, with the extra token."""
        row = int(self.shuffle_index[index])
        (first, begin), (last, end) = self.sample_index[row : row + 2].tolist()
        taken: list[int] = []
        for position in range(first, last + 1):
            document = documents[int(self.document_index[position])]
            start = max(begin, 0) if position == first else 0
            taken += document[start : end + self.extra if position == last else len(document)]
        taken += [pad_id] * (self.seq_len + self.extra - len(taken))
        return np.array(taken, dtype=np.int64)
