"""`megaflow.torch`: the same samples as tensors, in the shapes that other loops ask for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megaflow import GPTDataset, Loader, StreamingDataset
from megaflow.errors import ConfigError
from unit.data.oracle import write_documents

torch = pytest.importorskip("torch")
adapters = pytest.importorskip("megaflow.torch")
SEQ_LEN = 6


@pytest.fixture
def dataset(tmp_path: Path) -> GPTDataset:
    lengths = np.random.RandomState(5).randint(1, 17, 30)
    ends = np.cumsum(lengths)
    documents = [range(end - n, end) for n, end in zip(lengths, ends, strict=True)]
    prefix = write_documents(tmp_path / "corpus", documents)
    return GPTDataset(prefix, seq_len=SEQ_LEN, keep_partial=True, split="0,1,0", split_name="valid")


def test_tensors_share_the_batch_memory(dataset: GPTDataset) -> None:
    batch = next(Loader(dataset, 2))
    tensors = adapters.to_tensors(batch)
    batch.tokens[0, 0] = 777
    assert tensors["tokens"][0, 0] == 777
    assert tensors["labels"].tolist() == batch.labels.tolist()
    assert tensors["sample_ids"].tolist() == batch.sample_ids.tolist()
    assert "loss_mask" not in tensors


def test_padding_is_left_out_of_every_loss(dataset: GPTDataset) -> None:
    short = next(index for index in range(len(dataset)) if not dataset[index]["loss_mask"].all())
    loader = Loader(dataset, 1, consumed_samples=short)
    batch = next(loader)
    expected = np.where(dataset[short]["loss_mask"] == 0, -100, dataset[short]["labels"])
    assert adapters.masked_labels(batch).tolist() == [expected.tolist()]
    assert adapters.to_tensors(batch)["loss_mask"].tolist() == [dataset[short]["loss_mask"].tolist()]
    by_position = adapters.MapDataset(dataset)[short]
    assert by_position["labels"].tolist() == expected.tolist()
    assert by_position["tokens"].tolist() == dataset[short]["tokens"].tolist()


def test_samples_by_position_are_those_of_the_dataset(dataset: GPTDataset) -> None:
    by_position = adapters.MapDataset(dataset)
    assert len(by_position) == len(dataset)
    for index in range(len(dataset)):
        if not dataset[index]["loss_mask"].all():
            continue
        sample = by_position[index]
        assert sample["tokens"].tolist() == dataset[index]["tokens"].tolist()
        assert sample["labels"].tolist() == dataset[index]["labels"].tolist()
    shifting = adapters.MapDataset(dataset, names=("input_ids", "labels"), shifts_labels=True)
    assert shifting[0]["labels"].tolist() == shifting[0]["input_ids"].tolist() == dataset[0]["tokens"].tolist()
    assert [sample["tokens"].tolist() for sample in by_position.__getitems__([2, 0])] == [
        by_position[index]["tokens"].tolist() for index in (2, 0)
    ]


def test_a_stream_has_no_samples_by_position(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ConfigError, match="use LoaderDataset"):
        adapters.MapDataset(StreamingDataset(tmp_path / "a.jsonl", seq_len=4))


def test_loader_dataset_goes_on_exactly(dataset: GPTDataset) -> None:
    straight = [batch["tokens"].tolist() for batch in adapters.LoaderDataset(dataset, 2)]
    first = adapters.LoaderDataset(dataset, 2)
    batches = iter(torch.utils.data.DataLoader(first, batch_size=None))
    head = [next(batches)["tokens"].tolist() for _ in range(4)]
    state = json.loads(json.dumps(first.state_dict()))
    second = adapters.LoaderDataset(dataset, 2, num_threads=0)
    second.load_state_dict(state)
    assert head + [batch["tokens"].tolist() for batch in second] == straight


def test_number_of_batches_is_known_or_told_as_missing(dataset: GPTDataset, tmp_path: Path) -> None:
    for size, dp_size in ((1, 1), (2, 1), (2, 2)):
        batches = adapters.LoaderDataset(dataset, size, dp_size=dp_size)
        assert len(batches) == len(list(batches)) == len(dataset) // (size * dp_size)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(TypeError, match="no known length"):
        len(adapters.LoaderDataset(StreamingDataset(tmp_path / "a.jsonl", seq_len=4), 2))


def test_megatron_gets_its_keys(dataset: GPTDataset) -> None:
    short = next(index for index in range(len(dataset)) if not dataset[index]["loss_mask"].all())
    eod = int(dataset[0]["tokens"][2])
    for start in (0, short):
        loader = Loader(dataset, 1, consumed_samples=start)
        batch = next(adapters.megatron_iterator(loader, eod_id=eod))
        assert set(batch) == {"tokens", "labels", "loss_mask", "position_ids"}
        assert all(tensor.shape == (1, SEQ_LEN) and tensor.is_contiguous() for tensor in batch.values())
        expected = dataset[start]["loss_mask"] * (dataset[start]["tokens"] != eod)
        assert batch["loss_mask"].tolist() == [expected.tolist()]
        assert batch["position_ids"].tolist() == [list(range(SEQ_LEN))]


def test_pinned_loader_on_a_cpu_widens(dataset: GPTDataset) -> None:
    plain = list(Loader(dataset, 2))
    pinned = list(adapters.PinnedLoader(Loader(dataset, 2, dtype="uint16"), torch.device("cpu")))
    assert [batch["tokens"].tolist() for batch in pinned] == [batch.tokens.tolist() for batch in plain]
    assert {batch["labels"].dtype for batch in pinned} == {torch.int64}


@pytest.mark.gpu
def test_pinned_loader_sends_every_batch_whole(dataset: GPTDataset) -> None:
    expected = [(batch.tokens.tolist(), batch.labels.tolist()) for batch in Loader(dataset, 2)]
    for dtype in ("int64", "uint16"):
        loader = Loader(dataset, 2, dtype=dtype, num_threads=2, prefetch=3)
        pinned = adapters.PinnedLoader(loader, torch.device("cuda"))
        found = [(batch["tokens"].tolist(), batch["labels"].tolist()) for batch in pinned]
        assert found == expected
        assert torch.from_numpy(next(Loader(dataset, 2)).tokens).is_pinned() is False, "control: only ours are locked"
        pinned.close()


def test_masks_of_documents_reach_every_adapter(tmp_path: Path) -> None:
    """End-of-document ids mask the loss, and positions start again, in tensors, map-style samples and for Megatron."""
    prefix = write_documents(tmp_path / "ends", [[5, 6, 0], [7, 8, 9, 0], [4, 0], [3, 2, 1, 0], [6, 0]] * 4)
    options = {"eod_id": 0, "eod_mask_loss": True, "reset_position_ids": True}
    dataset = GPTDataset(prefix, seq_len=6, **options)
    batch = next(Loader(dataset, 2))
    tensors = adapters.to_tensors(batch)
    is_end = tensors["tokens"] == 0
    assert is_end.any()
    assert torch.equal(tensors["loss_mask"] == 0, is_end)
    assert torch.equal(adapters.masked_labels(batch) == -100, is_end)
    for row, ends in zip(tensors["position_ids"], is_end, strict=True):
        expected = [0]
        for at in range(5):
            expected.append(0 if ends[at] else expected[-1] + 1)
        assert row.tolist() == expected
    first = adapters.MapDataset(dataset)[0]
    assert torch.equal(first["labels"] == -100, is_end[0])
    assert torch.equal(first["position_ids"], tensors["position_ids"][0])
    shifted = adapters.MapDataset(dataset, shifts_labels=True)[0]
    assert torch.equal(shifted["labels"][1:] == -100, is_end[0][:-1])
    given = next(adapters.megatron_iterator(Loader(dataset, 2)))
    assert torch.equal(given["loss_mask"], tensors["loss_mask"])
    assert torch.equal(given["position_ids"], tensors["position_ids"])
