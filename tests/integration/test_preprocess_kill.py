"""A job that is killed leaves nothing under a final name, and the next one starts clean."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "megaflow.cli.preprocess", "--workers", "2"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kill") / "in.jsonl"
    words = [f"word{number}" for number in range(5000)]
    draw = random.Random(5)
    path.write_text("".join(json.dumps({"text": " ".join(draw.choices(words, k=400))}) + "\n" for _ in range(2500)))
    return path


def start(corpus: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, str(corpus)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_staging(corpus: Path, job: subprocess.Popen[str]) -> None:
    staging = corpus.with_name("in.partial")
    while not staging.is_dir() and job.poll() is None:
        time.sleep(0.002)


def final_files(corpus: Path) -> list[str]:
    return sorted(path.name for path in corpus.parent.iterdir() if path.name.startswith("in_text_document"))


def remove_results(corpus: Path) -> None:
    for name in final_files(corpus):
        (corpus.parent / name).unlink()
    shutil.rmtree(corpus.with_name("in.partial"), ignore_errors=True)


def test_sigkill_at_any_time_leaves_no_index_and_the_next_run_is_whole(corpus: Path) -> None:
    draw = random.Random(1)
    killed = 0
    for _ in range(8):
        remove_results(corpus)
        job = start(corpus)
        wait_for_staging(corpus, job)
        time.sleep(draw.uniform(0, 0.8))
        job.kill()
        if job.wait() == 0:
            continue
        job.communicate()
        killed += 1
        assert final_files(corpus) == [], "nothing is published before the end"
    assert killed >= 3
    job = start(corpus)
    assert job.wait() == 0
    job.communicate()
    whole = [corpus.with_name(name).read_bytes() for name in final_files(corpus) if not name.endswith(".json")]
    remove_results(corpus)
    job = start(corpus)
    job.communicate()
    again = [corpus.with_name(name).read_bytes() for name in final_files(corpus) if not name.endswith(".json")]
    assert len(whole) == 2
    assert again == whole
    assert not corpus.with_name("in.partial").exists()


@pytest.mark.parametrize(
    ("sent", "code", "words"),
    [(signal.SIGINT, 130, "stopped by Ctrl-C"), (signal.SIGTERM, 143, "stopped by SIGTERM")],
)
def test_a_polite_signal_stops_with_a_sentence_and_cleans_up(
    sent: signal.Signals, code: int, words: str, corpus: Path
) -> None:
    remove_results(corpus)
    job = start(corpus)
    wait_for_staging(corpus, job)
    job.send_signal(sent)
    _, err = job.communicate(timeout=60)
    assert job.returncode == code
    kept = corpus.with_name("in.partial")
    end = f"; what is done is kept in {kept}, and the same command goes on from there" if kept.exists() else ""
    assert err == f"megaflow-preprocess: {words}{end}\n"
    assert final_files(corpus) == []
