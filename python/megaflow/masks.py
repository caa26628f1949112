"""Positions, attention boundaries and loss masks of samples that hold several documents.

Legend: `T` sequence length of the model, `b` samples. A sample's *starts* are the positions in it where a document (or
a part of one) begins, ascending; `SampleSource.layout` tells them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def position_ids(starts: Sequence[int], seq_len: int) -> NDArray[np.int64]:
    """Positions that begin again at 0 with every document, int64 `[T]`."""
    own = _inside(starts, seq_len)
    lengths = np.diff(np.append(own, seq_len))
    return np.arange(seq_len, dtype=np.int64) - np.repeat(own, lengths)


def cu_seqlens(starts: Sequence[int], seq_len: int) -> NDArray[np.int32]:
    """Where documents begin, and the end of the sample: what variable-length attention kernels take.

    int32 `[documents + 1]`, from 0 to `T`. Start `T` itself (a document of which only the last label is in the sample)
    is left out.
    """
    return np.append(_inside(starts, seq_len), seq_len).astype(np.int32)


def batch_cu_seqlens(starts: Sequence[Sequence[int]], seq_len: int) -> NDArray[np.int32]:
    """The same for `b` samples laid one behind the other, as kernels for packed batches take them.

    int32 `[documents + 1]`, from 0 to `b * T`.
    """
    rows = [row * seq_len + _inside(own, seq_len) for row, own in enumerate(starts)]
    return np.append(np.concatenate(rows), len(rows) * seq_len).astype(np.int32)


def padded_cu_seqlens(starts: Sequence[int], seq_len: int) -> NDArray[np.int32]:
    """`cu_seqlens` filled up with `T` to `T + 1` entries, so that samples stack: Megatron's form."""
    bounds = cu_seqlens(starts, seq_len)
    padded = np.full(seq_len + 1, seq_len, dtype=np.int32)
    padded[: len(bounds)] = bounds
    return padded


def eod_starts(tokens: NDArray[np.integer], eod_id: int, num_tokens: int | None = None) -> list[int]:
    """Starts as the tokens `[T]` tell them: 0, and every position behind an `eod_id` among the first `num_tokens`."""
    behind = np.flatnonzero(tokens[:num_tokens] == eod_id) + 1
    return [0, *(int(start) for start in behind if start < len(tokens))]


def eod_loss_mask(tokens: NDArray[np.integer], eod_id: int) -> NDArray[np.float32]:
    """Loss mask that is 0 where the input is `eod_id`, whose successor belongs to another document. float32, as
    `tokens`.
    """
    return np.asarray(tokens != eod_id, dtype=np.float32)


def attention_mask(starts: Sequence[int], seq_len: int) -> NDArray[np.bool_]:
    """Causal mask that does not cross documents, bool `[1, T, T]`, True where attention is masked."""
    own = _inside(starts, seq_len)
    document = np.repeat(np.arange(len(own)), np.diff(np.append(own, seq_len)))
    visible = np.tri(seq_len, dtype=bool) & (document[:, None] == document[None, :])
    masked: NDArray[np.bool_] = ~visible[None]
    return masked


def _inside(starts: Sequence[int], seq_len: int) -> NDArray[np.int64]:
    """The starts inside the inputs, 0 among them."""
    own = np.unique(np.asarray([0, *starts], dtype=np.int64))
    return own[own < seq_len]
