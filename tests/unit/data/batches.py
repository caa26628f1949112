"""What tests of loaders say of batches."""

from __future__ import annotations

from typing import Any

from megaflow import Batch, GPTDataset, Loader

SEQ_LEN = 6


def ids(batches: list[Batch]) -> list[int]:
    """Samples of the batches, one after the other."""
    return [int(sample) for batch in batches for sample in batch.sample_ids]


def global_order(dataset: GPTDataset, micro_batch_size: int, dp_size: int, **options: Any) -> list[int]:
    """Samples in the order in which all ranks together receive them."""
    ranks = [
        list(Loader(dataset, micro_batch_size, dp_rank=rank, dp_size=dp_size, **options)) for rank in range(dp_size)
    ]
    return [sample for step in zip(*ranks, strict=True) for sample in ids(list(step))]
