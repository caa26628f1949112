"""A job on a Ray cluster of two nodes gives the bytes of one machine, also if a node is lost half-way."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaflow import PreprocessOptions, Tokenizer, preprocess
from megaflow.errors import ConfigError, DataFormatError
from megaflow.ray_executor import preprocess_on_ray

ray = pytest.importorskip("ray", reason="the package ray is not installed (pip install 'megaflow[ray]')")

pytestmark = [
    pytest.mark.dist,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # of ray and what it imports
]

NUM_SHARDS = 12
LINES = 6000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without processors, so that the work lies on nodes that can be lost, and two nodes with one each."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.add_node(num_cpus=1)
    made.lost = made.add_node(num_cpus=1)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ray") / "in.jsonl"
    lines = [json.dumps({"text": f"line {number} " + "some words of it " * (number % 90)}) for number in range(LINES)]
    path.write_text("\n".join(lines) + "\n")
    return path


def options(folder: Path, **more: Any) -> PreprocessOptions:
    return PreprocessOptions(output_prefix=str(folder / "out"), **more)


def pair(folder: Path) -> list[bytes]:
    return [(folder / f"out_text_document{suffix}").read_bytes() for suffix in (".bin", ".idx")]


@pytest.fixture(scope="module")
def expected(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("one")
    preprocess(corpus, options(folder, workers=1))
    return pair(folder)


def test_two_nodes_give_the_bytes_of_one_machine(
    cluster: Any, corpus: Path, expected: list[bytes], tmp_path: Path
) -> None:
    told: list[tuple[int, int, int]] = []
    report = preprocess_on_ray(
        corpus, options(tmp_path), tokenizer=Tokenizer.gpt2(), notify=lambda *state: told.append(state)
    )
    assert pair(tmp_path) == expected
    assert report.pairs[0].documents == LINES
    assert told[-1] == (8, 8, LINES)  # two processors, four shards for each
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"out_text_document{suffix}" for suffix in (".bin", ".idx", ".json")
    ]
    sidecar = json.loads((tmp_path / "out_text_document.json").read_text())
    assert [(source["path"], source["num_lines"]) for source in sidecar["sources"]] == [(str(corpus), LINES)]


def test_a_bad_record_stops_the_job_with_its_own_sentence(cluster: Any, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n' * 500 + "{broken\n" + '{"text": "a"}\n' * 500)
    with pytest.raises(DataFormatError, match=r"bad.jsonl: .*byte 7000 .*invalid JSON"):
        preprocess_on_ray(bad, options(tmp_path), tokenizer=Tokenizer.gpt2(), num_shards=4)
    assert not (tmp_path / "out_text_document.idx").exists()


def test_what_cannot_run_anywhere_is_refused(cluster: Any, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--workers 5: no node has as many processors; the largest has 1"):
        preprocess_on_ray(corpus, options(tmp_path), tokenizer=Tokenizer.gpt2(), threads=5)
    with pytest.raises(ConfigError, match="standard input and tables"):
        preprocess_on_ray("-", options(tmp_path), tokenizer=Tokenizer.gpt2())


def test_a_node_lost_half_way_changes_nothing(
    cluster: Any, corpus: Path, expected: list[bytes], tmp_path: Path
) -> None:
    """Every shard is slowed down by a journal entry for each of many blocks, so that the loss hits one at work."""
    slow = replace(options(tmp_path), block_bytes=8192, journal_every_s=0.0)
    lost_at: list[int] = []

    def notify(done: int, total: int, documents: int) -> None:
        if done == total // 2 and not lost_at:
            lost_at.append(done)
            threading.Thread(target=lose_a_node, args=(cluster,)).start()

    report = preprocess_on_ray(corpus, slow, tokenizer=Tokenizer.gpt2(), num_shards=NUM_SHARDS, notify=notify)
    assert lost_at == [NUM_SHARDS // 2]
    assert pair(tmp_path) == expected
    assert report.pairs[0].documents == LINES
    deadline = time.monotonic() + 60
    while sum(node["Alive"] for node in ray.nodes()) > 2:
        assert time.monotonic() < deadline, "the node was never lost"
        time.sleep(0.5)
    assert list(tmp_path.glob("*shard*")) == []


def lose_a_node(cluster: Any) -> None:
    cluster.remove_node(cluster.lost, allow_graceful=False)
