"""Killed while it reads a stream, a run goes on with the samples that an undisturbed one would have had."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from helpers.containers import table_of
from helpers.runs import SHAPE, read_curve
from helpers.streaming import GLOBAL_BATCH, next_global_batch, open_loaders, read_for_ever

ROOT = Path(__file__).resolve().parents[2]
KILLS, WAIT_S = 50, 60.0

pytestmark = pytest.mark.timeout(600)


def write_texts(folder: Path) -> None:
    rng = np.random.default_rng(5)
    for part in range(3):
        words = [" ".join(map(str, rng.integers(0, 999, rng.integers(1, 25)))) for _ in range(120)]
        lines = [json.dumps({"text": f"{part} {number}: {text}"}) for number, text in enumerate(words)]
        (folder / f"part{part}.jsonl").write_text("\n".join(lines) + "\n")


def test_a_stream_killed_fifty_times_and_read_by_one_or_two_ranks_equals_the_straight_run(
    tmp_path: Path,
) -> None:
    write_texts(tmp_path)
    context, rng = mp.get_context("forkserver"), random.Random(3)
    context.set_forkserver_preload(["helpers.streaming"])
    state, stops = tmp_path / "state.json", []
    for kill in range(KILLS):
        process = context.Process(target=read_for_ever, args=(str(tmp_path), 1 + kill % 2), daemon=True)
        before = state.read_text() if state.exists() else ""
        process.start()
        deadline = time.monotonic() + WAIT_S
        while (state.read_text() if state.exists() else "") == before and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.02))
        process.kill()
        process.join()
        stops.append(json.loads(state.read_text())["number"])
    assert all(later > earlier for earlier, later in pairwise(stops)), "a process made nothing"
    straight, ids = open_loaders(tmp_path, 1), []
    for number in range(stops[-1]):
        found, expected = np.load(tmp_path / f"batch-{number}.npy"), next_global_batch(straight)
        assert np.array_equal(found, expected), f"global batch {number}"
        ids += expected[:, 0].tolist()
    assert ids == list(range(stops[-1] * GLOBAL_BATCH))


def test_a_run_from_parquet_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    texts = [f"{number} of two hundred documents, with some words to be learnt" for number in range(200)]
    pq.write_table(table_of(texts), tmp_path / "corpus.parquet", row_group_size=20)
    flags = (
        "--vocab-size 50257 --global-batch-size 4 --micro-batch-size 2 --train-iters 40 --save-interval 1 --keep-last 3"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(ROOT / "trainer" / "pretrain.py"), *SHAPE, *flags.split()]
    command += ["--data-path", str(tmp_path / "corpus.parquet"), "--save"]

    def start(name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, str(tmp_path / name)], env=environment, stdout=subprocess.DEVNULL)

    assert start("straight").wait(WAIT_S * 4) == 0
    pointer = tmp_path / "killed" / "latest_checkpointed_iteration.txt"
    for least in (3, 12):
        process = start("killed")
        deadline = time.monotonic() + WAIT_S * 2
        while (int(pointer.read_text()) if pointer.exists() else 0) < least and time.monotonic() < deadline:
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert int(pointer.read_text()) < 40, "the kills came too late"
    assert start("killed").wait(WAIT_S * 4) == 0
    assert read_curve(tmp_path / "killed") == read_curve(tmp_path / "straight")
    assert len(read_curve(tmp_path / "killed")) == 40
