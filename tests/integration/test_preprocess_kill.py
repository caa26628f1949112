"""A job that is killed leaves nothing under a final name, and the same command goes on to the same bytes."""

from __future__ import annotations

import json
import random
import resource
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
    path.write_text("".join(json.dumps({"text": " ".join(draw.choices(words, k=400))}) + "\n" for _ in range(2500)) * 4)
    return path


def start(corpus: Path, *flags: str) -> subprocess.Popen[str]:
    command = [*COMMAND, str(corpus), *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


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


def results(corpus: Path) -> list[bytes]:
    names = [name for name in final_files(corpus) if not name.endswith(".json")]
    assert len(names) == 2
    return [(corpus.parent / name).read_bytes() for name in names]


def finish(corpus: Path) -> str:
    job = start(corpus)
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    assert not corpus.with_name("in.partial").exists()
    return out


@pytest.fixture(scope="module")
def straight(corpus: Path) -> list[bytes]:
    remove_results(corpus)
    finish(corpus)
    return results(corpus)


def test_sigkill_at_any_time_leaves_no_index_and_the_same_command_goes_on(corpus: Path, straight: list[bytes]) -> None:
    draw = random.Random(1)
    journal = corpus.with_name("in.partial") / "journal.json"
    killed = resumed = 0
    for number in range(8):
        remove_results(corpus)
        for _ in range(1 + number % 3):
            job = start(corpus, "--journal-every", "0")
            wait_for_staging(corpus, job)
            while number % 2 and not journal.exists() and job.poll() is None:
                time.sleep(0.002)
            time.sleep(draw.uniform(0, 0.25))
            job.kill()
            job.communicate()
            if job.returncode == 0:
                break
            killed += 1
            assert not [name for name in final_files(corpus) if name.endswith(".idx")] or results(corpus) == straight
        out = finish(corpus)
        resumed += "documents were done before" in out
        assert results(corpus) == straight
    assert killed >= 6
    assert resumed >= 2


def test_a_full_disk_ends_in_words_and_the_job_goes_on(corpus: Path, straight: list[bytes]) -> None:
    remove_results(corpus)
    limit = len(straight[0]) // 2

    def limit_file_size() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    command = [*COMMAND, str(corpus), "--journal-every", "0"]
    run = subprocess.run(command, preexec_fn=limit_file_size, capture_output=True, text=True, check=False)
    assert run.returncode == 5
    assert "cannot write: File too large" in run.stderr
    assert "the same command goes on from there" in run.stderr
    assert final_files(corpus) == []
    assert "documents were done before" in finish(corpus)
    assert results(corpus) == straight


def test_an_input_that_changed_is_not_gone_on_with(corpus: Path, tmp_path: Path) -> None:
    mine = tmp_path / "in.jsonl"
    shutil.copy(corpus, mine)
    job = start(mine, "--journal-every", "0")
    while not (tmp_path / "in.partial" / "journal.json").exists() and job.poll() is None:
        time.sleep(0.002)
    job.kill()
    job.communicate()
    with mine.open("a") as file:
        file.write('{"text": "one more"}\n')
    _, err = start(mine).communicate(timeout=60)
    assert "in.jsonl has changed since" in err
    assert "--restart" in err
    job = start(mine, "--restart")
    out, _ = job.communicate(timeout=60)
    assert job.returncode == 0
    assert "documents  10,001" in out


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
