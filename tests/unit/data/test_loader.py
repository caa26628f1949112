"""`Loader`: order, resume at every position, waiting, and what it does where threads cannot go."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megaflow import Batch, EvalSets, GPTDataset, Loader, StreamingDataset
from megaflow.errors import CheckpointError, ConfigError, DataFormatError
from unit.data.oracle import write_documents

SEQ_LEN = 6


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


def ids(batches: list[Batch]) -> list[int]:
    """Samples of the batches, one after the other."""
    return [int(sample) for batch in batches for sample in batch.sample_ids]


def global_order(dataset: GPTDataset, micro_batch_size: int, dp_size: int, **options: Any) -> list[int]:
    """Samples in the order in which all ranks together receive them."""
    ranks = [
        list(Loader(dataset, micro_batch_size, dp_rank=rank, dp_size=dp_size, **options)) for rank in range(dp_size)
    ]
    return [sample for step in zip(*ranks, strict=True) for sample in ids(list(step))]


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


def test_cyclic_order_is_that_of_a_torch_sampler(dataset: GPTDataset) -> None:
    torch = pytest.importorskip("torch")
    count, seed = len(dataset), 77
    expected = [
        sample
        for epoch in range(3)
        for sample in torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    ]
    for dp_size, size, num_threads in ((1, 1, 0), (2, 3, 2), (4, 2, 1)):
        loaders = [
            Loader(dataset, size, dp_rank=rank, dp_size=dp_size, num_threads=num_threads, order="cyclic", seed=seed)
            for rank in range(dp_size)
        ]
        steps = 3 * count // (size * dp_size)
        batches = [next(loader) for _ in range(steps) for loader in loaders]
        assert ids(batches) == expected[: steps * size * dp_size]
        for batch in batches[:5]:
            np.testing.assert_array_equal(batch.tokens[0], dataset[batch.sample_ids[0]]["tokens"])
    other = Loader(dataset, 4, order="cyclic", seed=78)
    assert ids([next(other)]) != expected[:4], "the seed counts"
    state = loaders[0].state_dict()
    resumed = Loader(dataset, 1, order="cyclic", seed=seed)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    resumed_at = state["consumed_samples"]
    assert resumed_at > 2 * count, "in the third epoch"
    assert (
        ids([next(resumed) for _ in range(2)])
        == (expected + torch.randperm(count, generator=torch.Generator().manual_seed(seed + 3)).tolist())[
            resumed_at : resumed_at + 2
        ]
    )
    with pytest.raises(CheckpointError, match="the sampler was"):
        other.load_state_dict(state)
    with pytest.raises(CheckpointError, match="the sampler was"):
        Loader(dataset, 1).load_state_dict(state)


def test_micro_batch_size_may_change_while_it_runs(dataset: GPTDataset) -> None:
    ranks = [Loader(dataset, 1, dp_rank=rank, dp_size=2) for rank in range(2)]
    order = []
    for size in (1, 2, 4):
        for loader in ranks:
            loader.set_micro_batch_size(size)
        order += [sample for _ in range(2) for loader in ranks for sample in ids([next(loader)])]
    assert order == list(range(2 * 2 * (1 + 2 + 4)))
    with pytest.raises(ConfigError, match="micro_batch_size = 0"):
        ranks[0].set_micro_batch_size(0)
    assert ids([next(ranks[0])]) == [28, 29, 30, 31], "it goes on as it was"


def test_batches_take_part_in_dlpack(dataset: GPTDataset) -> None:
    torch = pytest.importorskip("torch")
    batch = next(Loader(dataset, 2))
    tokens = torch.from_dlpack(batch.tokens)
    batch.tokens[0, 0] = 12_345
    assert tokens[0, 0] == 12_345, "no copy"
    assert np.from_dlpack(batch.labels).tolist() == batch.labels.tolist()


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_global_order_is_that_of_the_sampler(
    dataset: GPTDataset, micro_batch_size: int, dp_size: int, num_threads: int
) -> None:
    step = micro_batch_size * dp_size
    order = global_order(dataset, micro_batch_size, dp_size, num_threads=num_threads, prefetch=3)
    assert order == list(range(len(dataset) // step * step)), "the part that fills no batch of every rank is dropped"


def test_rank_takes_its_slice(dataset: GPTDataset) -> None:
    # Negative control of the test above: the ranks alone differ.
    first, second = (ids([next(Loader(dataset, 2, dp_rank=rank, dp_size=2))]) for rank in (0, 1))
    assert (first, second) == ([0, 1], [2, 3])


def test_resume_at_every_position_equals_the_straight_run(dataset: GPTDataset) -> None:
    straight = [(batch.sample_ids.tolist(), batch.tokens.tolist()) for batch in Loader(dataset, 3)]
    for position in range(len(straight) + 1):
        loader = Loader(dataset, 3, num_threads=2)
        for _ in range(position):
            next(loader)
        state = json.loads(json.dumps(loader.state_dict()))
        resumed = Loader(dataset, 3, num_threads=position % 3)
        next(resumed)
        resumed.load_state_dict(state)
        assert resumed.consumed_samples == 3 * position
        rest = [(batch.sample_ids.tolist(), batch.tokens.tolist()) for batch in resumed]
        assert rest == straight[position:]


@pytest.mark.parametrize(("before", "after"), [((2, 2), (1, 1)), ((1, 4), (2, 1)), ((4, 1), (1, 2)), ((2, 1), (2, 4))])
def test_resume_under_another_layout_goes_on_exactly(
    dataset: GPTDataset, before: tuple[int, int], after: tuple[int, int]
) -> None:
    steps = 5
    states = []
    for rank in range(before[1]):
        loader = Loader(dataset, before[0], dp_rank=rank, dp_size=before[1])
        for _ in range(steps):
            next(loader)
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states), "every rank saves the same"
    consumed = steps * before[0] * before[1]
    ranks = [Loader(dataset, after[0], dp_rank=rank, dp_size=after[1], num_threads=2) for rank in range(after[1])]
    for loader in ranks:
        loader.load_state_dict(states[0])
    order = [sample for step in zip(*ranks, strict=True) for sample in ids(list(step))]
    assert order == list(range(consumed, consumed + len(order)))
    assert len(dataset) - consumed - len(order) < after[0] * after[1]


def test_what_was_gathered_ahead_does_not_count_as_consumed(dataset: GPTDataset) -> None:
    loader = Loader(dataset, 2, dp_size=2, num_threads=2, prefetch=8, consumed_samples=12)
    assert loader.state_dict()["consumed_samples"] == 12
    next(loader)
    assert loader.state_dict()["consumed_samples"] == 16


def test_state_of_another_dataset_is_refused_in_a_sentence(dataset: GPTDataset, corpus: str) -> None:
    loader = Loader(dataset, 2)
    next(loader)
    state = loader.state_dict()
    other = Loader(GPTDataset(corpus, seq_len=SEQ_LEN, num_samples=100, seed=4), 2)
    with pytest.raises(CheckpointError, match=r"another order of samples: seed was 3 and is 4; going on would repeat"):
        other.load_state_dict(state)
    assert ids([next(other)]) == [0, 1], "a refused state changes nothing"
    tokens = write_documents(Path(corpus).parent / "other", [[1] * 9] * 60)
    other_data = Loader(GPTDataset(tokens, seq_len=SEQ_LEN, num_samples=100, seed=3), 2)
    with pytest.raises(CheckpointError, match="data was"):
        other_data.load_state_dict(state)
    for broken in ({}, {**state, "version": 7}, {"version": 1, "consumed_samples": 0}):
        with pytest.raises(CheckpointError, match="not the state of a loader"):
            loader.load_state_dict(broken)
    for consumed in (-1, len(dataset) + 1):
        with pytest.raises(CheckpointError, match=f"has consumed {consumed} samples, but this dataset has"):
            loader.load_state_dict({**state, "consumed_samples": consumed})


def test_longer_run_of_the_same_order_goes_on(corpus: str) -> None:
    short, long, other = (GPTDataset(corpus, seq_len=SEQ_LEN, num_samples=n, seed=3) for n in (10, 12, 100))
    assert short.num_epochs == long.num_epochs != other.num_epochs
    np.testing.assert_array_equal(short.shuffle_index, long.shuffle_index)
    loader = Loader(short, 2)
    next(loader)
    resumed = Loader(long, 2)
    resumed.load_state_dict(loader.state_dict())
    assert ids([next(resumed)]) == [2, 3]
    with pytest.raises(CheckpointError, match="num_epochs was 1 and is 3"):
        Loader(other, 2).load_state_dict(loader.state_dict())


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


def test_threads_end_with_the_loader(dataset: GPTDataset) -> None:
    def threads(expected: int | None = None) -> int:
        """Threads of this process; the system may take a moment to forget one that has ended."""
        for _ in range(200):
            count = len(list(Path("/proc/self/task").iterdir()))
            if expected is None or count == expected:
                break
            time.sleep(0.01)
        return count

    if not Path("/proc/self/task").is_dir():
        pytest.skip("no /proc to count threads in")
    before = threads()
    loader = Loader(dataset, 2, num_threads=3, prefetch=4)
    assert threads() == before + 3
    loader.close()
    assert threads(before) == before
    abandoned = iter(Loader(dataset, 2, num_threads=2))
    next(abandoned)
    del abandoned
    gc.collect()
    assert threads(before) == before


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


def test_loader_cannot_be_pickled_and_says_what_to_do(dataset: GPTDataset) -> None:
    loader = Loader(dataset, 2)
    for make_copy in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(ConfigError, match=r"cannot be pickled or copied; pass its dataset and state_dict\(\)"):
            make_copy(loader)


def test_waiting_lets_other_python_threads_run(dataset: GPTDataset) -> None:
    loader, ticks = Loader(dataset, 1, num_threads=1), []
    other = threading.Thread(target=lambda: ticks.append(sum(range(1000))))
    other.start()
    assert len(list(loader)) == len(dataset)
    other.join(timeout=30)
    assert ticks


CUT = """
import os, sys
import numpy as np
from megaflow import GPTDataset, Loader
from megaflow.errors import DataFormatError

prefix, suffix, num_threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
dataset = GPTDataset(prefix, seq_len=512, num_samples=2000)
loader = Loader(dataset, 2, num_threads=num_threads, prefetch=2)
next(loader)
os.truncate(prefix + suffix, os.path.getsize(prefix + suffix) // 3)
try:
    for batch in loader:
        pass
except DataFormatError as error:
    print(error)
    try:
        next(Loader(dataset, 2))
    except DataFormatError:
        sys.exit(3)
"""


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_file_cut_short_under_a_loader_is_an_error_and_no_signal(tmp_path: Path, suffix: str, num_threads: int) -> None:
    prefix = write_documents(tmp_path / "cut", [range(700)] * 900)
    size = Path(prefix + suffix).stat().st_size
    command = [sys.executable, "-c", CUT, prefix, suffix, str(num_threads)]
    done = subprocess.run(command, timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 3, (done.returncode, done.stderr)
    assert f"cut{suffix}: was cut short" in done.stdout
    assert f"expected {size} bytes" in done.stdout
    assert f"found {size // 3}" in done.stdout


def test_removed_or_replaced_files_live_on(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "old", [range(n, n + 50) for n in range(400)])
    dataset = GPTDataset(prefix, seq_len=30)
    expected = ids(list(Loader(dataset, 4)))
    loader = Loader(dataset, 4)
    first = next(loader)
    other = write_documents(tmp_path / "new", [[7] * 50] * 400)
    Path(f"{other}.bin").replace(f"{prefix}.bin")
    Path(f"{prefix}.idx").unlink()
    batches = [first, *loader]
    assert ids(batches) == expected
    assert not any((batch.tokens == 7).all() for batch in batches)


INTERRUPT = """
import os, signal, sys, threading
from megaflow import Loader, StreamingDataset

class Gate:
    data = b'{"text": "one two three four five six seven eight nine"}\\n' * 3
    size_bytes, opened = len(data), threading.Event()

    def read_at(self, offset, size):
        if size > 16:  # more than the look at what kind of file it is
            self.opened.wait()
        return self.data[offset : offset + size]

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
dataset = StreamingDataset([], seq_len=8, shuffle=False, epochs=1)
dataset.inputs = [("remote", "gate.jsonl", Gate(), None)]
loader = Loader(dataset, 1, num_threads=int(sys.argv[1]))
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    next(loader)
except KeyboardInterrupt:
    print("interrupted", flush=True)
Gate.opened.set()
print([batch.sample_ids.tolist() for batch in loader], flush=True)
"""


@pytest.mark.parametrize("num_threads", [0, 1])
def test_ctrl_c_ends_a_wait_and_no_batch_is_lost(num_threads: int) -> None:
    command = [sys.executable, "-c", INTERRUPT, str(num_threads)]
    done = subprocess.run(command, timeout=120, capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:2] == ["interrupted", "[[0], [1], [2]]"], (done.stdout, done.stderr)


WORKERS = """
import sys
import torch
from megaflow import GPTDataset, StreamingDataset, Tokenizer
from megaflow.torch import LoaderDataset


def main():
    dataset = GPTDataset(sys.argv[1], seq_len=6, num_samples=100)
    Tokenizer.gpt2().encode("used in the parent")
    sets = [LoaderDataset(dataset, 2), LoaderDataset(StreamingDataset(sys.argv[3], seq_len=8, epochs=1), 2)]
    for samples in sets:
        own = [batch["tokens"].tolist() for batch in samples]
        options = {"batch_size": None, "num_workers": 2, "multiprocessing_context": sys.argv[2]}
        loader = torch.utils.data.DataLoader(samples, **options)
        found = [batch["tokens"].tolist() for batch in loader]
        assert len(found) >= len(own) - 1 > 3 and found == own[: len(found)], (len(found), len(own))


if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_torch_workers_make_their_own_loaders(corpus: str, tmp_path: Path, context: str) -> None:
    pytest.importorskip("torch")
    script, text = tmp_path / "workers.py", tmp_path / "text.jsonl"
    script.write_text(WORKERS)
    lines = [json.dumps({"text": f"{n} some words to be cut into samples"}) for n in range(60)]
    text.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-W", "ignore", str(script), corpus, context, str(text)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, timeout=200, capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


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


def test_evaluation_is_the_same_every_time_and_leaves_training_alone(dataset: GPTDataset, corpus: str) -> None:
    training = Loader(dataset, 2, num_threads=1)
    expected = ids(list(Loader(dataset, 2)))
    other = GPTDataset(corpus, seq_len=SEQ_LEN, seed=9)
    sets = EvalSets({"one": dataset, "two": other}, 2, num_batches=3)
    seen, trained = [], []
    for _ in range(4):
        trained.append(next(training))
        state = training.state_dict()
        seen.append({name: [batch.tokens.tolist() for batch in batches] for name, batches in sets})
        assert training.state_dict() == state
    assert seen == [seen[0]] * 4
    assert [len(batches) for batches in seen[0].values()] == [3, 3]
    assert seen[0]["one"] != seen[0]["two"]
    assert ids([*trained, *training]) == expected
    with pytest.raises(ConfigError, match="evaluation set 'two' ends after"):
        list(EvalSets({"two": other}, 2, num_batches=10**6).batches("two"))
    with pytest.raises(ConfigError, match="drop consumed_samples"):
        EvalSets({}, 1, consumed_samples=4)
    ranks = [EvalSets({"one": dataset}, 1, num_batches=3, dp_rank=rank, dp_size=2) for rank in range(2)]
    both = [[batch.tokens.tolist()[0] for batch in part.batches("one")] for part in ranks]
    assert [row for pair in zip(*both, strict=True) for row in pair] == [row for b in seen[0]["one"] for row in b]


FORK = """
import os, sys, warnings
warnings.simplefilter("ignore")
from megaflow import GPTDataset, Loader
from megaflow.errors import ForkError

def in_child(check):
    pid = os.fork()
    if pid == 0:
        try:
            code = check()
        except BaseException as error:
            print(error, file=sys.stderr)
            code = 9
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

dataset = GPTDataset(sys.argv[1], seq_len=6, num_samples=100)
loader = Loader(dataset, 2, num_threads=int(sys.argv[2]))
first = next(loader)
state = loader.state_dict()

def asks():
    try:
        next(loader)
    except ForkError as error:
        assert f"made in process {os.getppid()}" in str(error) and f"process {os.getpid()}" in str(error), error
        return 0
    return 1

def drops():
    global loader, first
    del loader, first
    return 0

def makes_its_own():
    own = Loader(dataset, 2, num_threads=2)
    own.load_state_dict(state)
    return 0 if next(own).sample_ids.tolist() == [2, 3] else 1

for check in (asks, drops, makes_its_own):
    code = in_child(check)
    assert code == 0, (check.__name__, code)
assert next(loader).sample_ids.tolist() == [2, 3], "the parent goes on"
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.parametrize("num_threads", [0, 2])
def test_forked_child_gets_an_error_and_may_make_its_own(corpus: str, num_threads: int) -> None:
    command = [sys.executable, "-c", FORK, corpus, str(num_threads)]
    done = subprocess.run(command, timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_import_is_cheap() -> None:
    code = (
        "import sys, megaflow\nfrom megaflow import GPTDataset, Loader\n"
        "sys.exit(' '.join(m for m in ('torch', 'pyarrow', 'tokenizers') if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
