"""Counts over all tokens and documents of a pair, in constant memory."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflow.errors import DataFormatError
from megaflow.indexed import IndexedDataset

Advance = Callable[[int], None]
_DOCUMENTS, _TOKENS = 1 << 20, 1 << 22
ID_LIMIT = 1 << 24
"""Ids from here on, and negative ones, are counted together: no vocabulary is so large."""


def boundaries_between(dataset: IndexedDataset, begin: int, end: int) -> NDArray[np.int64]:
    """First sequence of documents `begin` to `end`, and where the last of them ends, int64 `[end - begin + 1]`.

    Raises:
        DataFormatError: if they do not rise from 0 to the number of sequences: opening a pair does not look at them.
    """
    boundaries = dataset.document_boundaries[begin : end + 1].astype(np.int64)
    before = np.concatenate(([0], boundaries[:-1]))
    wrong = np.flatnonzero((boundaries < before) | (boundaries > dataset.num_sequences))
    if len(wrong):
        place = int(wrong[0])
        raise DataFormatError(
            f"{dataset.prefix}.idx: document boundary {begin + place}: expected from {before[place]} to "
            f"{dataset.num_sequences}, the number of sequences, found {boundaries[place]}; the file is damaged: write "
            "or copy it again"
        )
    return boundaries


def tokens_before(dataset: IndexedDataset, boundaries: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens from the first sequence of `boundaries` up to each of them.

    Raises:
        DataFormatError: if a sequence has a negative length.
    """
    lengths = dataset.sequence_lengths[boundaries[0] : boundaries[-1]]
    negative = np.flatnonzero(lengths < 0)
    if len(negative):
        place = int(negative[0])
        raise DataFormatError(
            f"{dataset.prefix}.idx: length of sequence {boundaries[0] + place}: expected 0 or more tokens, found "
            f"{lengths[place]}; the file is damaged: write or copy it again"
        )
    totals = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, dtype=np.int64, out=totals[1:])
    at_boundaries: NDArray[np.int64] = totals[boundaries - boundaries[0]]
    return at_boundaries


def document_lengths(dataset: IndexedDataset) -> Iterator[NDArray[np.int64]]:
    """Tokens of each document, in pieces of about a million documents.

    Raises:
        DataFormatError: if the index is damaged.
    """
    for begin in range(0, dataset.num_documents, _DOCUMENTS):
        boundaries = boundaries_between(dataset, begin, min(begin + _DOCUMENTS, dataset.num_documents))
        yield np.diff(tokens_before(dataset, boundaries))


def length_counts(dataset: IndexedDataset, advance: Advance | None = None) -> Counter[int]:
    """How many documents have how many tokens; `advance` is called with the bytes of the index that were read."""
    counts: Counter[int] = Counter()
    for lengths in document_lengths(dataset):
        values, numbers = np.unique(lengths, return_counts=True)
        counts.update(dict(zip(values.tolist(), numbers.tolist(), strict=True)))
        if advance is not None:
            advance(len(lengths) * index_bytes(dataset) // dataset.num_documents)
    return counts


def index_bytes(dataset: IndexedDataset) -> int:
    """Bytes that `length_counts` reads: a length a sequence, a boundary a document."""
    return dataset.sequence_lengths.nbytes + dataset.document_boundaries.nbytes


def percentiles(counts: Counter[int], shares: tuple[float, ...]) -> list[int]:
    """The smallest length such that this share (0 to 100) of all documents is at most as long; 0 without documents."""
    if not counts:
        return [0] * len(shares)
    values = np.array(sorted(counts), dtype=np.int64)
    reached = np.cumsum([counts[int(value)] for value in values])
    ranks = np.ceil(np.array(shares) / 100 * reached[-1]).clip(1)
    return [int(value) for value in values[np.searchsorted(reached, ranks)]]


def histogram(counts: Counter[int]) -> list[dict[str, Any]]:
    """Documents by length, in classes that double: 0, 1, 2-3, 4-7 and so on, without gaps."""
    classes: Counter[int] = Counter()
    for length, number in counts.items():
        classes[length.bit_length()] += number
    if not classes:
        return []
    span = range(min(classes), max(classes) + 1)
    return [
        {"from": 0 if bits == 0 else 1 << (bits - 1), "to": (1 << bits) - 1, "documents": classes[bits]}
        for bits in span
    ]


def id_counts(dataset: IndexedDataset, advance: Advance | None = None) -> tuple[NDArray[np.int64], int]:
    """How often each id occurs, int64 `[largest id + 1]`, and the number of tokens that are no possible id; `advance`
    is called with the bytes that were read.
    """
    counts = np.zeros(0, dtype=np.int64)
    outside = 0
    tokens = dataset._tokens
    for begin in range(0, dataset.num_tokens, _TOKENS):
        piece = tokens[begin : begin + _TOKENS]
        size = piece.nbytes
        if piece.dtype.itemsize > 2 or piece.dtype.kind == "i":
            possible = (piece >= 0) & (piece < ID_LIMIT)
            outside += len(piece) - int(np.count_nonzero(possible))
            piece = piece[possible]
        found = np.bincount(piece, minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
        if advance is not None:
            advance(size)
    return counts, outside
