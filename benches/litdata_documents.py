"""What litdata's optimizer calls in a process of its own: the documents of a pair as tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np


def split_documents(prefix: str) -> Iterator[Any]:
    """The documents, one tensor of tokens each."""
    import torch

    header = np.fromfile(f"{prefix}.idx", dtype="<u8", offset=18, count=1)
    lengths = np.fromfile(f"{prefix}.idx", dtype="<i4", offset=34, count=int(header[0]))
    tokens = np.memmap(f"{prefix}.bin", dtype=np.uint16, mode="r")
    begin = 0
    for length in lengths.tolist():
        yield torch.from_numpy(tokens[begin : begin + length].copy())
        begin += length
