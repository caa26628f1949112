"""Indices kept on disk: shared by processes, checked against the data, never half written."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaflow import GPTDataset
from megaflow.blend import BlendedDataset
from unit.data.oracle import write_documents

ARRAYS = ("document_index", "sample_index", "shuffle_index")


def documents_of(lengths: list[int]) -> list[list[int]]:
    return [[number % 1000] * length for number, length in enumerate(lengths)]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_documents(tmp_path / "pair", documents_of([7, 3, 9, 12, 1] * 20))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def build(prefix: str, cache: Path, **settings: Any) -> GPTDataset:
    return GPTDataset(prefix, **{"seq_len": 8, "num_samples": 200, "cache_dir": cache} | settings)


def same(one: GPTDataset, other: GPTDataset) -> None:
    for array in ARRAYS:
        np.testing.assert_array_equal(getattr(one, array), getattr(other, array))


def test_second_start_finds_what_the_first_built(prefix: str, cache: Path) -> None:
    first, second = build(prefix, cache), build(prefix, cache)
    assert (first.cached, second.cached) == (("built", None), ("found", None))
    same(first, GPTDataset(prefix, seq_len=8, num_samples=200))
    same(second, first)
    for position in range(len(first)):
        np.testing.assert_array_equal(first.tokens(position), second.tokens(position))


def test_data_that_changed_underneath_are_noticed(prefix: str, cache: Path, tmp_path: Path) -> None:
    build(prefix, cache)
    # The same number of documents and tokens in another order: sizes and counts stay as they were.
    write_documents(tmp_path / "pair", documents_of([3, 7, 9, 12, 1] * 20))
    changed = build(prefix, cache)
    assert changed.cached is not None
    assert changed.cached[0] == "replaced"
    assert "have changed" in (changed.cached[1] or "")
    same(changed, GPTDataset(prefix, seq_len=8, num_samples=200))
    assert build(prefix, cache).cached == ("found", None)


def test_one_changed_length_in_the_middle_is_noticed(tmp_path: Path, cache: Path) -> None:
    # 40,000 sequences: the changed entries lie far from the blocks that a fast look at the file reads.
    lengths = [5] * 40_000
    prefix = write_documents(tmp_path / "pair", documents_of(lengths))
    build(prefix, cache, num_samples=None)
    lengths[23_456], lengths[23_457] = 4, 6
    write_documents(tmp_path / "pair", documents_of(lengths))
    changed = build(prefix, cache, num_samples=None)
    assert changed.cached is not None
    assert changed.cached[0] == "replaced"


def test_settings_that_megatron_leaves_out_of_the_name_are_compared(prefix: str, cache: Path) -> None:
    with_extra = build(prefix, cache, num_samples=None)
    without = build(prefix, cache, num_samples=None, add_extra_token=False)
    assert (without.cached or ("",))[0] == "replaced"
    assert len(without.sample_index) != len(with_extra.sample_index) or not np.array_equal(
        without.sample_index, with_extra.sample_index
    )
    # What was replaced under an open dataset stays readable to it.
    same(with_extra, GPTDataset(prefix, seq_len=8))


@pytest.mark.parametrize("array", ARRAYS)
def test_a_file_that_was_cut_short_is_built_anew(prefix: str, cache: Path, array: str) -> None:
    first = build(prefix, cache)
    (path,) = cache.glob(f"*-{array}.npy")
    os.truncate(path, path.stat().st_size - 4)
    again = build(prefix, cache)
    assert again.cached is not None
    assert again.cached[0] == "replaced"
    assert f"{array}.npy: expected" in (again.cached[1] or "")
    assert build(prefix, cache).cached == ("found", None)
    assert len(again) == len(first)


def test_copies_of_a_pair_do_not_share_a_cache_by_accident(prefix: str, cache: Path, tmp_path: Path) -> None:
    build(prefix, cache)
    for end in ("bin", "idx"):
        shutil.copy(f"{prefix}.{end}", tmp_path / f"copy.{end}")
    assert build(str(tmp_path / "copy"), cache).cached == ("built", None)
    assert len(list(cache.glob("*-description.txt"))) == 2


def test_a_folder_that_cannot_be_written_is_told_and_no_error(prefix: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    dataset = build(prefix, tmp_path / "file" / "cache")
    assert dataset.cached is not None
    assert dataset.cached[0] == "not kept"
    same(dataset, GPTDataset(prefix, seq_len=8, num_samples=200))


BUILDER = """
import sys, time
from pathlib import Path
from megaflow import GPTDataset
from megaflow.blend import BlendedDataset
prefix, cache, start = sys.argv[1], sys.argv[2], Path(sys.argv[3])
print("ready", flush=True)
while not start.exists():
    time.sleep(0.001)
parts = [GPTDataset(prefix, seq_len=8, num_samples=4000, cache_dir=cache, seed=seed) for seed in (1, 2)]
blend = BlendedDataset(parts, [1, 2], num_samples=5000, cache_dir=cache)
print([part.cached[0] for part in parts] + [blend.cached[0]], sum(int(blend.tokens(i).sum()) for i in range(0, 5000,
97)))
"""


def start_builders(count: int, prefix: str, cache: Path, signal_file: Path) -> list[subprocess.Popen[str]]:
    command = [sys.executable, "-c", BUILDER, prefix, str(cache), str(signal_file)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(count)]
    for builder in builders:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "ready\n"
    return builders


def test_processes_that_start_at_once_build_each_index_once(prefix: str, tmp_path: Path) -> None:
    for attempt in range(3):
        cache, go = tmp_path / f"cache-{attempt}", tmp_path / f"go-{attempt}"
        builders = start_builders(4, prefix, cache, go)
        go.touch()
        said = [builder.communicate(timeout=60)[0].strip().rpartition(" ") for builder in builders]
        assert all(builder.returncode == 0 for builder in builders)
        assert len({sums for _, _, sums in said}) == 1
        outcomes = [outcome for listed, _, _ in said for outcome in listed.strip("[]").replace("'", "").split(", ")]
        assert sorted(outcomes) == ["built"] * 3 + ["found"] * 9
        assert not [path for path in cache.iterdir() if path.name.endswith((".tmp", "-lock"))]


def test_a_builder_that_was_killed_leaves_nothing_that_misleads(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "pair", documents_of([7, 3, 9, 12, 1] * 4000))
    expected = GPTDataset(prefix, seq_len=8, num_samples=4000, seed=1)
    for attempt, delay in enumerate((0.0, 0.002, 0.005, 0.01, 0.02)):
        cache, go = tmp_path / f"cache-{attempt}", tmp_path / f"go-{attempt}"
        (builder,) = start_builders(1, prefix, cache, go)
        go.touch()
        time.sleep(delay)
        builder.send_signal(signal.SIGKILL)
        builder.communicate(timeout=60)
        again = GPTDataset(prefix, seq_len=8, num_samples=4000, seed=1, cache_dir=cache)
        same(again, expected)
        assert GPTDataset(prefix, seq_len=8, num_samples=4000, seed=1, cache_dir=cache).cached == ("found", None)


def test_a_blend_notices_that_one_of_its_datasets_changed(tmp_path: Path, cache: Path) -> None:
    names = [write_documents(tmp_path / name, documents_of([9, 4, 6] * 10)) for name in "ab"]

    def blend() -> BlendedDataset:
        parts = [build(name, cache, num_samples=None) for name in names]
        return BlendedDataset(parts, num_samples=20, cache_dir=cache)

    assert blend().cached == ("built", None)
    assert blend().cached == ("found", None)
    write_documents(tmp_path / "b", documents_of([4, 9, 6] * 10))
    assert (blend().cached or ("",))[0] == "replaced"
