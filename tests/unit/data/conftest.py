"""A small corpus and a dataset over it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megaflow import GPTDataset
from unit.data.batches import SEQ_LEN
from unit.data.oracle import write_documents


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """30 documents of 1 to 16 tokens, all tokens distinct."""
    lengths = np.random.RandomState(5).randint(1, 17, 30)
    ends = np.cumsum(lengths)
    return write_documents(tmp_path / "corpus", [range(end - n, end) for n, end in zip(lengths, ends, strict=True)])


@pytest.fixture
def dataset(corpus: str) -> GPTDataset:
    """Three epochs of the corpus: more samples than one epoch has."""
    dataset = GPTDataset(corpus, seq_len=SEQ_LEN, num_samples=100, seed=3)
    assert dataset.num_epochs == 3
    return dataset
