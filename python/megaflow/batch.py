"""One micro-batch: tokens, labels, and what the documents in its samples mean for loss, positions and attention.

Legend: `b` micro-batch, `s` sequence length of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflow import _core, masks


class Batch:
    """One micro-batch, in memory that belongs to whoever holds its arrays.

    Every array takes part in DLPack: `torch.from_dlpack(batch.tokens)` and `jax.dlpack.from_dlpack` copy nothing.
    """

    __slots__ = (
        "_received",
        "attention_mask",
        "cu_seqlens",
        "labels",
        "loss_mask",
        "position_ids",
        "sample_ids",
        "tokens",
    )

    def __init__(
        self,
        tokens: NDArray[Any],
        labels: NDArray[Any],
        sample_ids: NDArray[np.int64],
        received: _core.BatchBuffer,
        loss_mask: NDArray[np.float32] | None = None,
    ) -> None:
        self.tokens = tokens
        """Inputs, `[b, s]` of the loader's dtype; 0 where a sample is short."""
        self.labels = labels
        """The next token of each input, `[b, s]`; 0 where there is none. A view of the same memory as `tokens`, one
        token further, unless the samples have no extra token."""
        self.loss_mask = loss_mask
        """float32 `[b, s]`: 0 where the label is padding or, with `eod_mask_loss`, the input ends a document; else 1.
        None if every label counts."""
        self.position_ids: NDArray[np.int64] | None = None
        """int64 `[b, s]`: positions that start again with every document. None unless the dataset's
        `reset_position_ids` or `document_masking` asks for them."""
        self.cu_seqlens: NDArray[np.int32] | None = None
        """int32 `[documents + 1]`: where documents begin in the batch laid flat, from 0 to `b * s`, as attention
        kernels for packed batches take it. None unless `document_masking` asks for it."""
        self.attention_mask: NDArray[np.bool_] | None = None
        """bool `[b, 1, s, s]`, True where attention is masked. None unless `create_attention_mask` asks for it."""
        self.sample_ids = sample_ids
        """Positions of the samples in the dataset, int64 `[b]`."""
        self._received = received

    def __repr__(self) -> str:
        masks_held = ("loss_mask", "position_ids", "cu_seqlens", "attention_mask")
        more = [name for name in masks_held if getattr(self, name) is not None]
        names = ", ".join(["tokens", "labels", "sample_ids", *more])
        return f"Batch({names}; tokens: {self.tokens.dtype} {list(self.tokens.shape)})"

    @property
    def wait_s(self) -> float:
        """Seconds for which the caller was blocked for this batch."""
        return self._received.wait_s

    @property
    def request_to_ready_s(self) -> float:
        """Seconds from the moment it could be gathered until it was ready."""
        return self._received.request_to_ready_s

    @property
    def queue_depth(self) -> int:
        """Batches that lay ready when this one was asked for."""
        return self._received.queue_depth

    @property
    def cache_misses(self) -> int:
        """Page faults for which its gathering waited for the disk; 0 where the system does not tell."""
        return self._received.cache_misses

    @property
    def disk_bytes(self) -> int:
        """Bytes read from the disk for it; 0 where the system does not tell."""
        return self._received.disk_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskOptions:
    """What batches tell of the documents in their samples; see `GPTDataset`, whose options these are."""

    eod_id: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    create_attention_mask: bool = False
    document_masking: bool = False

    @classmethod
    def of(cls, dataset: Any, *, document_masking: bool | None) -> MaskOptions | None:
        """The options of a dataset; None where nothing is asked for."""
        asked = {name: bool(getattr(dataset, name, False)) for name in _FLAGS}
        if document_masking is not None:
            asked["document_masking"] = document_masking
        return cls(eod_id=getattr(dataset, "eod_id", None), **asked) if any(asked.values()) else None


_FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask", "document_masking")


def make_batch(
    received: _core.BatchBuffer, sample_ids: NDArray[np.int64], options: MaskOptions | None, *, has_extra_token: bool
) -> Batch:
    """The batch that a buffer holds."""
    buffer: NDArray[Any] = np.asarray(received)
    if has_extra_token and received.is_full:
        tokens, labels, loss_mask = buffer[:, :-1], buffer[:, 1:], None
    else:
        tokens, labels, loss_mask = _mask_padding(buffer, received.short_rows, has_extra_token=has_extra_token)
    batch = Batch(tokens, labels, sample_ids, received, loss_mask)
    if options is not None:
        _add_masks(batch, options, received)
    return batch


def _add_masks(batch: Batch, options: MaskOptions, received: _core.BatchBuffer) -> None:
    """What was asked for, row by row as `SampleDataset` gives it for a sample."""
    rows, seq_len = batch.tokens.shape
    whole: list[Sequence[int]] = [[0]] * rows
    by_eod = whole if options.eod_id is None else _eod_starts(batch.tokens, options.eod_id, received.short_rows)
    if options.eod_mask_loss and options.eod_id is not None:
        counts = masks.eod_loss_mask(batch.tokens, options.eod_id)
        batch.loss_mask = counts if batch.loss_mask is None else batch.loss_mask * counts
    if options.create_attention_mask:
        starts = by_eod if options.reset_attention_mask else whole
        batch.attention_mask = np.stack([masks.attention_mask(own, seq_len) for own in starts])
    positions: Sequence[Sequence[int]] | None = by_eod if options.reset_position_ids else None
    if options.document_masking:
        positions = received.starts
        batch.cu_seqlens = masks.batch_cu_seqlens(received.starts, seq_len)
    if positions is not None:
        batch.position_ids = np.stack([masks.position_ids(own, seq_len) for own in positions])


def _eod_starts(tokens: NDArray[Any], eod_id: int, short_rows: Sequence[tuple[int, int]]) -> list[Sequence[int]]:
    """Starts of each row as its tokens tell them. Padding, which reads as 0, ends no document."""
    counts = dict(short_rows)
    return [masks.eod_starts(row, eod_id, counts.get(number)) for number, row in enumerate(tokens)]


def _mask_padding(
    buffer: NDArray[Any], short_rows: list[tuple[int, int]], *, has_extra_token: bool
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.float32]]:
    """Tokens, labels and loss mask of a batch with rows that end in padding, or whose last label there is none."""
    for row, count in short_rows:
        buffer[row, count:] = 0
    if has_extra_token:
        tokens, labels = buffer[:, :-1], buffer[:, 1:]
    else:
        tokens, labels = buffer, np.roll(buffer, -1, axis=1)
        labels[:, -1] = 0
    loss_mask = np.ones(labels.shape, dtype=np.float32)
    for row, count in short_rows:
        loss_mask[row, max(count - 1, 0) :] = 0.0
    if not has_extra_token:
        loss_mask[:, -1] = 0.0
    return tokens, labels, loss_mask
