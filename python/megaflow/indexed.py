"""A tokenized corpus on disk: Megatron's `.bin/.idx` pair."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from megaflow import _core
from megaflow.errors import SampleIndexError


def resolve_prefix(path: str | PathLike[str]) -> str:
    """The prefix of the pair that `path` names.

    Args:
        path: a prefix `P`, a prefix whose pair is `P_text_document`, or the name of either file of a pair.

    Raises:
        MissingFileError: if there is no such pair; names what lies in that folder.
    """
    return str(_core.resolve_prefix(path))


class IndexedDataset:
    """A `.bin/.idx` pair, memory-mapped: opening takes the same time at any size, and nothing is loaded.

    Every array is a read-only view of the mapped files. It stays valid for as long as it is held, also after the
    dataset itself is gone, and in forked children.

    Args:
        prefix: as `resolve_prefix` takes it.
        with_modes: the `.idx` ends with one mode a sequence, as multimodal sets do; nothing in the file says so.

    Raises:
        MissingFileError: if there is no such pair.
        FileAccessError: if a file cannot be read.
        DataFormatError: if the files are damaged or do not belong together. Checked are magic, version, token type, the
            exact sizes of both files and the ends of each array.
    """

    def __init__(self, prefix: str | PathLike[str], *, with_modes: bool = False) -> None:
        self._core = _core.IndexedDataset(prefix, with_modes=with_modes)
        self._tokens: NDArray[Any] = np.asarray(self._core.tokens())
        self._with_modes = with_modes

    @property
    def prefix(self) -> str:
        """The pair's path without `.bin` or `.idx`."""
        return str(self._core.prefix)

    @property
    def path(self) -> Path:
        """The file of tokens, `.bin`."""
        return Path(f"{self.prefix}.bin")

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the stored tokens."""
        return self._tokens.dtype

    @property
    def num_sequences(self) -> int:
        """Stored runs of tokens. A document may have several, or none."""
        return self._core.num_sequences

    @property
    def num_documents(self) -> int:
        """Documents, empty ones included."""
        return self._core.num_documents

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return self._core.num_tokens

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """Tokens in each sequence, int32 `[num_sequences]`. A view, not aligned."""
        return np.asarray(self._core.sequence_lengths())

    @property
    def document_boundaries(self) -> NDArray[np.int64]:
        """First sequence of each document, then the number of sequences, int64 `[num_documents + 1]`.

        A view, not aligned.
        """
        return np.asarray(self._core.document_boundaries())

    @property
    def sequence_modes(self) -> NDArray[np.int8]:
        """Mode of each sequence, int8; empty unless opened with `with_modes`. A view."""
        return np.asarray(self._core.sequence_modes())

    @property
    def content_key(self) -> str:
        """A key of the content, equal for copies of the pair.

        SHA-256 over the sizes and 16 evenly spaced blocks of 4 KiB of each file: a change of equal size between them
        goes unseen.
        """
        return self._core.content_key()

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, index: SupportsIndex) -> NDArray[Any]:
        """Tokens of one sequence, counted from the end if negative. A read-only view.

        Raises:
            SampleIndexError: if there is no such sequence.
            DataFormatError: if the index is damaged at this place.
        """
        begin, end = self._core.sequence_tokens(to_position(index, self.num_sequences, "sequence"))
        return self._tokens[begin:end]

    def document(self, index: SupportsIndex) -> NDArray[Any]:
        """Tokens of one document: its sequences one after the other. A read-only view.

        Raises:
            SampleIndexError: if there is no such document.
            DataFormatError: if the index is damaged at this place.
        """
        begin, end = self._core.document_tokens(to_position(index, self.num_documents, "document"))
        return self._tokens[begin:end]

    def count_ends(self, token: int, limit: int = 32) -> tuple[int, int]:
        """How many documents end with a token, of up to `limit` evenly spread over the pair that are not empty.

        Returns:
            Documents that end with it, and documents looked at.
        """
        documents = np.unique(np.linspace(0, max(self.num_documents - 1, 0), limit).astype(np.int64))
        found = [self.document(int(number)) for number in documents] if self.num_documents else []
        last = [int(tokens[-1]) for tokens in found if len(tokens)]
        return last.count(token), len(last)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(IndexedDataset, with_modes=self._with_modes), (self.prefix,)

    def __repr__(self) -> str:
        counts = f"{self.num_documents} documents, {self.num_sequences} sequences, {self.num_tokens} tokens"
        return f"IndexedDataset({self.prefix!r}: {counts}, {self.dtype})"


def describe_missing_ends(indexed: IndexedDataset, eod_id: int, options: Sequence[str]) -> str | None:
    """What is wrong with options that go by the end-of-document token, where documents do not end with it.

    Args:
        indexed: the pair; a bounded number of its documents is looked at.
        eod_id: the token.
        options: names of the options, as the user gives them.

    Returns:
        A sentence with file and remedy; None where every document looked at ends with the token.
    """
    found, seen = indexed.count_ends(eod_id)
    if found == seen:
        return None
    does, goes = ("does", "goes") if len(options) == 1 else ("do", "go")
    effect = f"{does} nothing here" if found == 0 else f"{does} nothing at the ends of the others"
    return (
        f"{indexed.prefix}: {found or 'none'} of {seen} documents looked at {'end' if found > 1 else 'ends'} with "
        f"token {eod_id}, and {' and '.join(options)} {goes} by that token, so {effect}; preprocess the text again "
        "with --append-eod, or name the tokenizer of the data"
    )


def to_position(index: SupportsIndex, size: int, word: str) -> int:
    """`index` as a position from 0, where negative ones count from the end.

    Raises:
        SampleIndexError: if it lies outside `size`.
    """
    position = operator.index(index)
    if not -size <= position < size:
        raise SampleIndexError(f"{word} {position} does not exist: the dataset has {size} {word}s")
    return position + size if position < 0 else position
