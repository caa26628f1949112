"""Scripts that end while threads of streams are inside Python: they end as they would without, and say nothing.

Each script is a process of its own. What it loads is a stream over an object of Python's, which threads of Rust call.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import atexit, contextlib, dataclasses, fsspec, json, os, signal, sys, threading, time, warnings
import pyarrow as pa
import megaflow
from megaflow import Loader, StreamBlend, StreamingDataset

SCHEMA = pa.schema([("text", pa.string())])

def batch(rows=50):
    return pa.record_batch([pa.array(["some words of a document " * 20] * rows)], schema=SCHEMA)

def endless(pause_s=0.0):
    while True:
        time.sleep(pause_s)
        yield batch()

def reader(batches):
    return pa.RecordBatchReader.from_batches(SCHEMA, batches)

def stream(source, **options):
    small = {"shuffle_window": 1000, "block_bytes": 4096}
    return StreamingDataset(source, seq_len=64, shuffle=False, **{**small, **options})

def load(dataset, **options):
    loader = Loader(dataset, 4, prefetch=64, **options)
    for _ in range(3):
        next(loader)
    return loader

def remote():
    with fsspec.filesystem("memory").open("/a.jsonl", "wb") as file:
        file.write(b"".join(json.dumps({"text": f"words {n} " * 50}).encode() + b"\\n" for n in range(2000)))
    return "memory://a.jsonl"

def slow_remote():
    read_at = megaflow.inputs.RemoteFile.read_at
    def read_slowly(self, offset, size):
        time.sleep(0.01)
        return read_at(self, offset, min(size, 5000))
    megaflow.inputs.RemoteFile.read_at = read_slowly
    return remote()

def table_of_python_bytes():
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as file:
        for _ in range(50):
            file.write_batch(batch())
    return pa.ipc.open_stream(sink.getvalue().to_pybytes()).read_all()

inside = threading.Event()

def blocks(wait):
    yield batch()
    inside.set()
    wait()
    yield batch()

def load_until_inside(wait):
    loader = Loader(stream(reader(blocks(wait))), 4, prefetch=64)
    next(loader)
    inside.wait()
    return loader
"""


def end_of(script: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and complaints of a script."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", BEGIN + script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    return done.returncode, done.stdout, done.stderr


JOB = """
path = sys.argv[1] + "/a.jsonl"
open(path, "w").writelines(json.dumps({"text": f"words {n}. " * 50}) + "\\n" for n in range(20000))
options = megaflow.PreprocessOptions(output_prefix=sys.argv[1] + "/out")
"""

UNCLOSED = {
    "batches that Python makes": "loader = load(stream(reader(endless())))",
    "batches that Python makes slowly": "loader = load(stream(reader(endless(0.05))))",
    "without threads of the loader": "loader = load(stream(reader(endless())), num_threads=0)",
    "threads of the stream": "loader = load(stream(reader(endless()), num_threads=3), num_threads=3)",
    "a table of Python's bytes": "loader = load(stream(table_of_python_bytes(), shuffle_window=1 << 22))",
    "a remote file": "loader = load(stream(remote(), shuffle_window=1 << 22))",
    "a slow remote file": "loader = load(stream(slow_remote()))",
    "a blend": """
loader = load(StreamBlend([stream(reader(endless())), stream(remote())], [1, 1], num_samples=10**6))
""",
    "no loader": "opened = stream(reader(endless())).open_at(); opened.pieces_at(3)",
    "a loader in a cycle": "loader = load(stream(reader(endless()))); loader.itself = loader; del loader",
    "in a forked child too": """
loader = load(stream(reader(endless(0.001))))
warnings.simplefilter("ignore")  # from 3.12 on Python warns of forks beside threads
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
else:
    mine = load(stream(reader(endless(0.001))))
""",
    "a daemon that loads": """
loaded = threading.Event()
def work():
    for _ in load(stream(reader(endless()))):
        loaded.set()
threading.Thread(target=work, daemon=True).start()
loaded.wait()
""",
    "a daemon that preprocesses": """
options = megaflow.PreprocessOptions(output_prefix=sys.argv[1] + "/out")
def work():
    megaflow.preprocess(reader(blocks(endless().__next__)), options, tokenizer=megaflow.Tokenizer.gpt2())
    megaflow.preprocess(reader(endless()), options, tokenizer=megaflow.Tokenizer.gpt2())
threading.Thread(target=work, daemon=True).start()
inside.wait()
""",
    "a daemon that is told of its job": JOB
    + """
def tell(*_):
    inside.set()
    end_s = time.perf_counter() + 0.5
    while time.perf_counter() < end_s:
        pass
threading.Thread(target=lambda: megaflow.preprocess(path, options, progress=tell), daemon=True).start()
inside.wait()
""",
    "a daemon whose sentences Python splits": JOB
    + """
class Splitter:
    name = "points"
    def split(self, text):
        inside.set()
        return [part for _ in range(50) for part in text.split(".")][:9]
megaflow.preprocessing.splitter_for = lambda _: contextlib.nullcontext(Splitter())
options = dataclasses.replace(options, split_sentences=True, workers=2)
threading.Thread(target=lambda: megaflow.preprocess(path, options), daemon=True).start()
inside.wait()
""",
}


@pytest.mark.parametrize("script", UNCLOSED.values(), ids=UNCLOSED.keys())
def test_a_script_that_closes_nothing_ends_in_peace(script: str, tmp_path: Path) -> None:
    assert end_of(script, str(tmp_path)) == (0, "", "")


ENDS = {
    "sys.exit(3)": (3, ""),
    "raise ValueError('told')": (1, "ValueError: told"),
    "signal.raise_signal(signal.SIGINT)": (-2, "KeyboardInterrupt"),
}


@pytest.mark.parametrize(("end", "expected"), ENDS.items(), ids=ENDS.keys())
def test_the_exit_code_stays_the_scripts(end: str, expected: tuple[int, str]) -> None:
    code, _, complaints = end_of(f"loader = load(stream(reader(endless())))\n{end}")
    assert (code, (complaints.splitlines() or [""])[-1]) == expected


BLOCKED = {
    "in Python for an hour": "loader = load_until_inside(lambda: time.sleep(3600))",
    "in a pipe that nobody writes to": """
pipe = sys.argv[1] + "/pipe"
os.mkfifo(pipe)
end = os.open(pipe, os.O_RDWR)
loader = Loader(stream(pipe), 4)
time.sleep(0.1)
""",
    "until Python is half gone": """
# The last that Python lets go of is what hangs on `sys`: the source comes back when no thread but the ender may run.
ends = os.pipe()
class Last:
    def __del__(self, write=os.write, end=ends[1], sleep=time.sleep):
        write(end, b"x")
        sleep(0.1)
sys.last_of_all = Last()
loader = load_until_inside(lambda: os.read(ends[0], 1))
""",
}


@pytest.mark.parametrize("script", BLOCKED.values(), ids=BLOCKED.keys())
def test_a_source_that_blocks_neither_holds_up_the_end_nor_aborts_it(script: str, tmp_path: Path) -> None:
    assert end_of(script, str(tmp_path)) == (0, "", "")


def test_closing_does_not_wait_for_a_source_that_blocks() -> None:
    script = "with load_until_inside(lambda: time.sleep(3600)): pass\nprint('closed')"
    assert end_of(script) == (0, "closed\n", "")


def test_a_stream_is_stopped_by_the_end_and_none_opens_behind_it() -> None:
    script = """
def late():
    for ask in (lambda: load(stream(reader(endless()))), lambda: list(loader)):
        try:
            ask()
        except megaflow.errors.MegaflowError as error:
            print(error)
atexit.register(late)
loader = load(stream(reader(endless())))
"""
    code, output, complaints = end_of(script)
    assert (code, complaints) == (0, "")
    refused, stopped = output.splitlines()
    assert refused == "Python is ending, so that its objects can be read no more"
    assert stopped.endswith("the stream was closed while it was read")


def test_sources_of_files_leave_nothing_to_the_end_of_python(tmp_path: Path) -> None:
    script = """
path = sys.argv[1] + "/a.jsonl"
open(path, "w").writelines(json.dumps({"text": f"words {n} " * 50}) + "\\n" for n in range(500))
before = atexit._ncallbacks()
loader = load(stream(path))
print(atexit._ncallbacks() - before)
loader = load(stream(remote()))
again = load(stream(remote()))
print(atexit._ncallbacks() - before)
"""
    assert end_of(script, str(tmp_path)) == (0, "0\n1\n", "")
