"""Writes a tiny .bin/.idx pair with numpy alone, for tests of what reads it."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

EOD = 0


def write_pair(prefix: Path, *, num_documents: int = 40, document_tokens: int = 60, vocab_size: int = 64) -> str:
    """A learnable corpus: each document counts upwards from a start, with noise, and ends in EOD."""
    rng = np.random.default_rng(7)
    documents = []
    for _ in range(num_documents):
        length = int(rng.integers(document_tokens // 2, document_tokens * 3 // 2))
        tokens = (rng.integers(1, vocab_size) + np.arange(length)) % (vocab_size - 1) + 1
        documents.append(np.append(tokens, EOD).astype("<u2"))
    lengths = np.array([len(document) for document in documents], dtype="<i4")
    pointers = (np.cumsum(lengths, dtype="<i8") - lengths) * 2
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(documents), len(documents) + 1)
    boundaries = np.arange(len(documents) + 1, dtype="<i8")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{prefix}.bin").write_bytes(b"".join(document.tobytes() for document in documents))
    Path(f"{prefix}.idx").write_bytes(header + lengths.tobytes() + pointers.tobytes() + boundaries.tobytes())
    return str(prefix)
