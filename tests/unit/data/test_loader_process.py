"""`Loader` among threads, processes, signals and files that change under it."""

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

import pytest

from megaflow import GPTDataset, Loader
from megaflow.errors import ConfigError
from unit.data.batches import ids
from unit.data.oracle import write_documents


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
for ask in (loader.state_dict, loader.close, lambda: list(Loader(dataset, 2))):
    try:
        ask()
        print("no error")
    except DataFormatError as error:
        print(error)
loader = Loader(dataset, 2, num_threads=num_threads, prefetch=2)
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
    lines = done.stdout.splitlines()
    assert len(lines) == 4, "each of four ways to read is an error of its own"
    assert all(f"cut{suffix}: was cut short" in line for line in lines), lines
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
