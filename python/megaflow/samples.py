"""What all sets of training samples have in common: reading one, its masks, its place in the documents.

Legend: `T` sequence length of the model (`seq_len`).
"""

from __future__ import annotations

import hashlib
import json
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from megaflow import _core, masks
from megaflow.errors import ConfigError
from megaflow.indexed import to_position

# Entries of a description that may change between save and load: a longer run walks the same order as long as its
# epochs are the same, and the description says what they are.
FREE_ENTRIES = frozenset({"num_samples"})
# Options that go by the end-of-document token.
BY_EOD = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
MASK_OPTIONS = (
    "eod_id",
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
    "create_attention_mask",
    "document_masking",
)


def describe_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """In what a saved `description` differs from the one of today, in sentences, but for entries that may differ."""
    changes = []
    for name in sorted((saved.keys() | current.keys()) - FREE_ENTRIES):
        old, new = saved.get(name), current.get(name)
        if old == new:
            continue
        if name == "data" and isinstance(old, str) and isinstance(new, str):
            changes.append(f"the tokens or their documents are others (content {old[:12]}, now {new[:12]})")
        else:
            changes.append(f"{name} was {old!r} and is {new!r}")
    return changes


class SampleDataset(ABC):
    """A set of samples of `seq_len` tokens and, by default, one more, whose shift makes the labels.

    `source` is what a loader's threads read: `[T + 1]` tokens a sample (`[T]` without the extra token).
    """

    source: _core.SampleSource
    seq_len: int
    add_extra_token: bool
    pad_id: int
    eod_id: int | None
    reset_position_ids: bool
    reset_attention_mask: bool
    eod_mask_loss: bool
    create_attention_mask: bool
    document_masking: bool

    def _set_masks(self, options: Mapping[str, Any]) -> None:
        for name in MASK_OPTIONS:
            setattr(self, name, options[name])
        if self.eod_id is None and (self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss):
            raise ConfigError(
                "reset_position_ids, reset_attention_mask and eod_mask_loss need eod_id, the id that ends a document"
            )

    @property
    @abstractmethod
    def description(self) -> dict[str, Any]:
        """Everything that determines the samples and their order, in plain types."""

    @property
    def fingerprint(self) -> str:
        """A key of the samples and their order: another one for other data, split, seed, `seq_len` or `num_samples`."""
        return hashlib.sha256(json.dumps(self.description, sort_keys=True).encode()).hexdigest()

    def changes(self, saved: Mapping[str, Any], consumed_samples: int) -> list[str]:
        """In what the order that a saved `description` tells differs from this one, before and behind a position.

        Args:
            saved: the `description` when the position was saved.
            consumed_samples: the position.

        Returns:
            Sentences; none where this dataset goes on from there as the saved one would have.
        """
        return describe_changes(saved, self.description)

    def __len__(self) -> int:
        return self.source.num_samples

    def tokens(self, index: SupportsIndex) -> NDArray[np.int64]:
        """Tokens of one sample with the extra one, int64 `[T + 1]` (`[T]` without it), padded with `pad_id`.

        An array of its own.

        Raises:
            SampleIndexError: if there is no such sample.
            DataFormatError: if the data is damaged.
        """
        return self.source.read(to_position(index, len(self), "sample"))

    def pieces(self, index: SupportsIndex) -> list[tuple[int, int, int]]:
        """Where the tokens of one sample come from: (sequence, first token in it, tokens), in their order."""
        pieces, _ = self.source.layout(to_position(index, len(self), "sample"))
        return [piece[1:] for piece in pieces]

    def starts(self, index: SupportsIndex) -> list[int]:
        """Positions in one sample where a document, or a part of one, begins; also where the padding begins."""
        return self.source.layout(to_position(index, len(self), "sample"))[1]

    def __getitem__(self, index: SupportsIndex | None) -> dict[str, NDArray[Any]]:
        """One sample as Megatron gives it, in arrays of its own.

        Args:
            index: position, counted from the end if negative; None gives the first sample with no loss at all, a
                stand-in where a rank has no data.

        Returns:
            `tokens`, `labels`, `position_ids` int64 `[T]`; `loss_mask` float32 `[T]`; and, where it was asked for,
            `attention_mask` bool `[1, T, T]`, True where attention is masked, and `cu_seqlens` int32 `[T + 1]`, the
            begins of documents and then `T`. Padding is 0 in tokens and labels.

        Raises:
            SampleIndexError: if there is no such sample.
            DataFormatError: if the data is damaged.
        """
        position = 0 if index is None else index
        text = self.tokens(position)
        if self.add_extra_token:
            tokens, labels = text[:-1], text[1:].copy()
        else:
            tokens, labels = text, np.append(text[1:], self.pad_id)
        sample = {"tokens": tokens, "labels": labels, **self._masks(tokens, position)}
        sample["loss_mask"][labels == self.pad_id] = 0.0
        tokens[tokens == self.pad_id] = 0
        labels[labels == self.pad_id] = 0
        if index is None:
            sample["loss_mask"][:] = 0.0
        return sample

    def _masks(self, tokens: NDArray[np.int64], index: SupportsIndex) -> dict[str, NDArray[Any]]:
        """Loss mask, position ids and what else was asked for."""
        seq_len, start = self.seq_len, [0]
        found: dict[str, NDArray[Any]] = {"loss_mask": np.ones(seq_len, dtype=np.float32)}
        by_eod = start if self.eod_id is None else masks.eod_starts(tokens, self.eod_id)
        if self.eod_mask_loss and self.eod_id is not None:
            found["loss_mask"] = masks.eod_loss_mask(tokens, self.eod_id)
        if self.create_attention_mask:
            found["attention_mask"] = masks.attention_mask(by_eod if self.reset_attention_mask else start, seq_len)
        positions = by_eod if self.reset_position_ids else start
        if self.document_masking:
            positions = self.starts(index)
            found["cu_seqlens"] = masks.padded_cu_seqlens(positions, seq_len)
        found["position_ids"] = masks.position_ids(positions, seq_len)
        return found


def check_integer(name: str, value: SupportsIndex, low: int, high: int) -> int:
    """`value` as a number from `low` to `high`.

    Raises:
        ConfigError: if it is outside.
    """
    number = operator.index(value)
    if not low <= number <= high:
        raise ConfigError(f"{name} = {number}: expected {low} to {high}")
    return number
