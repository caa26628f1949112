"""What batches tell of the documents in their samples: the same as the dataset's samples one by one."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaflow import BlendedDataset, GPTDataset, Loader, StreamingDataset, masks
from unit.data.oracle import write_documents

EOD, SEQ_LEN = 0, 12
pytestmark = pytest.mark.filterwarnings("ignore:.*documents looked at end with token 0")
FORMS: dict[str, dict[str, Any]] = {
    "positions": {"reset_position_ids": True},
    "loss": {"eod_mask_loss": True},
    "attention": {"create_attention_mask": True, "reset_attention_mask": True},
    "causal": {"create_attention_mask": True},
    "documents": {"document_masking": True},
    "all": {
        "reset_position_ids": True,
        "eod_mask_loss": True,
        "create_attention_mask": True,
        "reset_attention_mask": True,
        "document_masking": True,
    },
}
ORDERS: dict[str, dict[str, Any]] = {
    "megatron": {},
    "instant": {"order": "instant"},
    "best_fit": {"order": "instant", "packing": "best_fit"},
    "partial": {"keep_partial": True},
    "no_extra_token": {"add_extra_token": False},
}


@pytest.fixture
def documents(tmp_path: Path) -> str:
    """Documents of 1 to 9 tokens; two of three end in EOD, which is also what padding reads as."""
    draw = np.random.RandomState(0)
    rows = [[*draw.randint(1, 99, draw.randint(0, 9)), EOD if n % 3 else 7] for n in range(60)]
    return write_documents(tmp_path / "ends", rows)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("form", FORMS)
def test_batches_tell_what_the_samples_tell(documents: str, form: str, order: str) -> None:
    dataset = GPTDataset(documents, seq_len=SEQ_LEN, eod_id=EOD, **FORMS[form], **ORDERS[order])
    seen = 0
    for batch in Loader(dataset, 3, num_threads=2):
        samples = [dataset[int(sample)] for sample in batch.sample_ids]
        for name in ("tokens", "labels", "loss_mask", "position_ids", "attention_mask"):
            expected = np.stack([sample[name] for sample in samples]) if name in samples[0] else None
            found = getattr(batch, name)
            if found is None and name == "loss_mask":
                found = np.ones_like(expected)
            if found is None and name == "position_ids":
                found = np.tile(np.arange(SEQ_LEN), (3, 1))
            assert (found is None) == (expected is None), name
            assert expected is None or np.array_equal(found, expected), name
        if "document_masking" in FORMS[form]:
            starts = [dataset.starts(int(sample)) for sample in batch.sample_ids]
            assert np.array_equal(batch.cu_seqlens, masks.batch_cu_seqlens(starts, SEQ_LEN))
            assert len(batch.cu_seqlens) > 4
        seen += len(samples)
    assert seen == len(dataset) // 3 * 3 > 0


def test_without_options_batches_tell_nothing(documents: str) -> None:
    batch = next(Loader(GPTDataset(documents, seq_len=SEQ_LEN, eod_id=EOD), 3))
    assert (batch.loss_mask, batch.position_ids, batch.cu_seqlens, batch.attention_mask) == (None,) * 4


def test_a_blend_and_a_cyclic_order_have_the_options_of_their_datasets(documents: str) -> None:
    parts = [GPTDataset(documents, seq_len=SEQ_LEN, num_samples=40, seed=n, document_masking=True) for n in (1, 2)]
    blend = BlendedDataset(parts, [1, 1], num_samples=40)
    for order in ("single", "cyclic"):
        for batch in islice(Loader(blend, 4, order=order, num_threads=0), 8):
            expected = np.stack([blend[int(sample)]["position_ids"] for sample in batch.sample_ids])
            assert np.array_equal(batch.position_ids, expected), order


def test_a_loader_may_be_asked_where_documents_of_a_stream_begin(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(f'{{"text": "{" word" * (n % 7 + 1)}"}}\n' for n in range(50)))
    stream = StreamingDataset(path, seq_len=SEQ_LEN, epochs=1)
    found = 0
    for batch in Loader(stream, 2, document_masking=True):
        for row, positions in zip(batch.tokens, batch.position_ids, strict=True):
            assert positions.tolist() == masks.position_ids(masks.eod_starts(row, 50256), SEQ_LEN).tolist()
            found += int((positions == 0).sum())
    assert found > 50
    assert next(Loader(stream, 2)).position_ids is None


def test_a_dataset_asked_for_documents_can_be_read_without(documents: str) -> None:
    dataset = GPTDataset(documents, seq_len=SEQ_LEN, document_masking=True)
    assert next(Loader(dataset, 2, document_masking=False)).cu_seqlens is None
