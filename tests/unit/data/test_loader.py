"""`Loader`: what its batches hold, what it says of its waiting, and what it refuses."""

from __future__ import annotations

import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megaflow import GPTDataset, Loader, StreamingDataset
from megaflow.errors import ConfigError, DataFormatError
from unit.data.batches import SEQ_LEN, ids
from unit.data.oracle import write_documents


@pytest.mark.parametrize("num_threads", [0, 1, 2, 4])
def test_batches_hold_the_dataset_samples(dataset: GPTDataset, num_threads: int) -> None:
    batches = list(Loader(dataset, 4, num_threads=num_threads))
    assert ids(batches) == list(range(len(dataset) // 4 * 4))
    for batch in batches:
        assert (batch.tokens.shape, batch.labels.shape, batch.sample_ids.shape) == ((4, SEQ_LEN), (4, SEQ_LEN), (4,))
        assert batch.tokens.dtype == batch.labels.dtype == batch.sample_ids.dtype == np.int64
        for row, sample in enumerate(batch.sample_ids):
            expected = dataset[sample]
            np.testing.assert_array_equal(batch.tokens[row], expected["tokens"])
            np.testing.assert_array_equal(batch.labels[row], expected["labels"])


def test_labels_are_a_view_of_the_tokens_memory(dataset: GPTDataset) -> None:
    batch = next(Loader(dataset, 2))
    assert np.shares_memory(batch.tokens, batch.labels)
    np.testing.assert_array_equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    assert batch.tokens.flags.writeable, "torch.from_numpy warns about memory that it may not write"


def test_labels_without_extra_token_end_masked(corpus: str) -> None:
    dataset = GPTDataset(corpus, seq_len=SEQ_LEN, add_extra_token=False, pad_id=-5)
    batch = next(Loader(dataset, 3))
    np.testing.assert_array_equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    assert batch.labels[:, -1].tolist() == [0] * 3
    assert batch.loss_mask is not None
    assert batch.loss_mask.tolist() == [[1.0] * (SEQ_LEN - 1) + [0.0]] * 3


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint16"])
def test_padding_is_masked_and_never_seen(corpus: str, dtype: Any) -> None:
    dataset = GPTDataset(corpus, seq_len=SEQ_LEN, keep_partial=True, split="0,1,0", split_name="valid")
    whole = [dataset[index] for index in range(len(dataset))]
    short = [index for index, sample in enumerate(whole) if not sample["loss_mask"].all()]
    assert len(short) == 1
    for batch in Loader(dataset, 1, dtype=dtype):
        (index,) = batch.sample_ids.tolist()
        assert batch.tokens.dtype == batch.labels.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(batch.tokens[0], whole[index]["tokens"])
        np.testing.assert_array_equal(batch.labels[0], whole[index]["labels"])
        if index in short:
            assert batch.loss_mask is not None
            np.testing.assert_array_equal(batch.loss_mask[0], whole[index]["loss_mask"])
        else:
            assert batch.loss_mask is None


def test_token_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    data = np.array([1, 70_000, 3, 4], dtype="<i4")
    header = (
        b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + b"\x04" + (1).to_bytes(8, "little") + (2).to_bytes(8, "little")
    )
    (tmp_path / "wide.bin").write_bytes(data.tobytes())
    index = header + (4).to_bytes(4, "little") + bytes(8) + bytes(8) + (1).to_bytes(8, "little")
    (tmp_path / "wide.idx").write_bytes(index)
    dataset = GPTDataset(tmp_path / "wide", seq_len=3)
    assert next(Loader(dataset, 1, dtype="int32")).tokens.tolist() == [[1, 70_000, 3]]
    with pytest.raises(DataFormatError, match="token 70000, which uint16 cannot hold"):
        next(Loader(dataset, 1, dtype="uint16"))
    with pytest.raises(ConfigError, match="dtype = 'int8'"):
        Loader(dataset, 1, dtype="int8")  # type: ignore[arg-type]


def test_batches_take_part_in_dlpack(dataset: GPTDataset) -> None:
    torch = pytest.importorskip("torch")
    batch = next(Loader(dataset, 2))
    tokens = torch.from_dlpack(batch.tokens)
    batch.tokens[0, 0] = 12_345
    assert tokens[0, 0] == 12_345, "no copy"
    assert np.from_dlpack(batch.labels).tolist() == batch.labels.tolist()


def test_end_stays_the_end(dataset: GPTDataset) -> None:
    loader = Loader(dataset, len(dataset), num_threads=3, prefetch=9)
    assert len(ids([next(loader)])) == len(dataset)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(loader)
    assert loader.consumed_samples == len(dataset)
    assert list(Loader(dataset, len(dataset) + 1)) == []


def test_stats_add_up(dataset: GPTDataset) -> None:
    loader = Loader(dataset, 5, num_threads=2)
    batches = list(loader)
    stats = loader.stats()
    assert (stats["batches"], stats["samples"]) == (len(batches), 5 * len(batches))
    assert stats["host_wait_s"] == pytest.approx(sum(batch.wait_s for batch in batches), abs=1e-6)
    assert 0 <= stats["ready_when_asked"] <= len(batches)
    assert 0 <= stats["mean_queue_depth"] <= 4
    assert stats["gather_s"] > 0
    assert stats["request_to_ready_s"] > 0
    inline = Loader(dataset, 5, num_threads=0)
    next(inline)
    assert inline.stats()["ready_when_asked"] == 0, "nothing is ready where nothing is gathered ahead"
    assert inline.stats()["host_wait_s"] >= inline.stats()["gather_s"]


def test_batches_outlive_loader_and_dataset(corpus: str) -> None:
    loader = Loader(GPTDataset(corpus, seq_len=SEQ_LEN), 2, num_threads=2)
    kept = list(loader)
    expected = [batch.tokens.copy() for batch in kept]
    loader.close()
    del loader
    gc.collect()
    for batch, tokens in zip(kept, expected, strict=True):
        np.testing.assert_array_equal(batch.tokens, tokens)


def test_memory_is_reused_only_when_nobody_holds_it(dataset: GPTDataset) -> None:
    loader = Loader(dataset, 1, num_threads=2, prefetch=2)
    held: list[tuple[NDArray[np.int64], list[int]]] = []
    addresses = set()
    for number, batch in enumerate(loader):
        addresses.add(batch.labels.__array_interface__["data"][0])
        if number % 7 == 0:
            held.append((batch.labels[0], batch.labels[0].tolist()))
        for view, values in held:
            assert view.tolist() == values
    assert len(addresses) < loader.stats()["batches"], "buffers go around"


def test_closed_loader_says_so(dataset: GPTDataset) -> None:
    with Loader(dataset, 2) as loader:
        next(loader)
        state, stats = loader.state_dict(), loader.stats()
    loader.close()
    for use in (loader.__next__, lambda: loader.load_state_dict(state)):
        with pytest.raises(ConfigError, match="this loader is closed"):
            use()
    assert (loader.state_dict(), loader.stats()) == (state, stats), "where it stood is still known"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size = 0: expected 1 or more"),
        ({"micro_batch_size": -2}, "micro_batch_size = -2: expected 0 or more"),
        ({"dp_size": 0}, "dp_size = 0"),
        ({"dp_rank": 2, "dp_size": 2}, "dp_rank = 2: expected below dp_size = 2"),
        ({"prefetch": 0}, "prefetch = 0: expected 1 to"),
        ({"consumed_samples": 10**6}, "consumed_samples = 1000000: expected at most"),
        ({"num_threads": -1}, "num_threads = -1"),
    ],
)
def test_wrong_settings_are_refused_in_words(dataset: GPTDataset, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Loader(dataset, **{"micro_batch_size": 2, **change})


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_damaged_sample_is_an_error_at_its_batch(tmp_path: Path, num_threads: int) -> None:
    prefix = write_documents(tmp_path / "d", [range(4)] * 20)
    index = bytearray(Path(f"{prefix}.idx").read_bytes())
    offset_of_9 = 34 + 4 * 20 + 8 * 9
    index[offset_of_9 : offset_of_9 + 8] = (-8).to_bytes(8, "little", signed=True)
    Path(f"{prefix}.idx").write_bytes(index)
    dataset = GPTDataset(prefix, seq_len=3)
    bad = next(i for i in range(len(dataset)) if any(piece[0] == 9 for piece in dataset.pieces(i)))
    loader = Loader(dataset, 1, num_threads=num_threads)
    assert ids([next(loader) for _ in range(bad)]) == list(range(bad))
    for _ in range(2):
        with pytest.raises(DataFormatError, match=f"batch {bad} of this rank: sample {bad} cannot be read.*sequence 9"):
            next(loader)
    assert loader.consumed_samples == bad


class SlowFile:
    """A remote object that answers late."""

    def __init__(self, data: bytes, delay_s: float) -> None:
        self.data, self.delay_s, self.size_bytes = data, delay_s, len(data)

    def read_at(self, offset: int, size: int) -> bytes:
        time.sleep(self.delay_s)
        return self.data[offset : offset + size]


@pytest.mark.parametrize("num_threads", [0, 1])
def test_a_slow_source_shows_in_stats(num_threads: int) -> None:
    lines = [json.dumps({"text": f"{n} " + "some words " * 30}) for n in range(400)]
    data = "\n".join(lines).encode()
    shown = []
    for delay_s in (0.0, 0.15):
        dataset = StreamingDataset([], seq_len=64, shuffle=False, epochs=1, block_bytes=1 << 13, shuffle_window=500)
        dataset.inputs = [("remote", "slow.jsonl", SlowFile(data, delay_s), None)]
        loader = Loader(dataset, 8, num_threads=num_threads)
        begin = time.perf_counter()
        count = len(list(loader))
        stats = loader.stats()
        shown.append((stats["host_wait_s"], stats["max_wait_s"], count))
        assert stats["host_wait_s"] <= time.perf_counter() - begin
    assert shown[0][2] == shown[1][2] > 3
    assert shown[1][0] > shown[0][0] + 0.2, "the caller waited for the source"
    assert shown[1][1] >= 0.1


def test_batches_tell_what_they_waited_for(dataset: GPTDataset) -> None:
    loader = Loader(dataset, 4, num_threads=1, prefetch=2)
    batches = list(loader)
    stats = loader.stats()
    assert stats["token_bytes"] == len(batches) * 4 * (SEQ_LEN + 1) * 8
    assert stats["cache_misses"] == sum(batch.cache_misses for batch in batches)
    assert stats["disk_bytes"] == sum(batch.disk_bytes for batch in batches)
    assert stats["request_to_ready_s"] == pytest.approx(sum(batch.request_to_ready_s for batch in batches), abs=1e-6)
    assert stats["mean_queue_depth"] == pytest.approx(np.mean([batch.queue_depth for batch in batches]))
    assert stats["max_wait_s"] == max(batch.wait_s for batch in batches)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system drops no pages by request")
@pytest.mark.parametrize("num_threads", [0, 2])
def test_of_a_cold_file_samples_are_read_and_not_what_lies_around_them(tmp_path: Path, num_threads: int) -> None:
    """A fault alone fetches up to megabytes around a page; 400 samples of 8 KiB would then read all of this file."""
    prefix = write_documents(tmp_path / "cold", [np.arange(4096) % 999] * 8192)
    with Path(f"{prefix}.bin").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dataset = GPTDataset(prefix, seq_len=4095, num_samples=8000, order="instant")
    with Loader(dataset, 4, num_threads=num_threads) as loader:
        for _ in range(100):
            next(loader)
        stats = loader.stats()
    if stats["disk_bytes"] == 0:
        pytest.skip("this file system does not tell reads, or keeps files in memory")
    needed = 3 * 4096 * (stats["samples"] + 4 * 8)  # pages of a sample, and of the batches ahead
    assert stats["disk_bytes"] <= 2 * needed < Path(f"{prefix}.bin").stat().st_size / 2
