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
from collections.abc import Iterator
from pathlib import Path

import pytest

WORDS = [f"word{number}" for number in range(5000)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 10 MB, with a tokenizer whose model runs on the slow path, so that a job lasts long enough to be killed."""
    path = tmp_path_factory.mktemp("kill") / "in.jsonl"
    draw = random.Random(5)
    lines = [json.dumps({"text": " ".join(draw.choices(WORDS, k=400))}) + "\n" for _ in range(2500)]
    path.write_text("".join(lines))
    vocab = {word: index for index, word in enumerate([*WORDS, "[UNK]", "</s>"])}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}
    tokenizer = {"model": model, "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": []}
    path.with_name("tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def command_for(corpus: Path, *flags: str) -> list[str]:
    tokenizer = str(corpus.with_name("tokenizer.json"))
    command = [sys.executable, "-m", "megaflow.cli.preprocess", str(corpus), "--tokenizer", tokenizer]
    return [*command, "--workers", "2", *flags]


def start(corpus: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command_for(corpus, *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


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


def interrupt(
    corpus: Path, sent: signal.Signals, delay_s: float, *flags: str, journal: bool = False
) -> tuple[int, str]:
    """Starts a job and sends it a signal while it works; a job that was quicker is started again, with less delay."""
    staging = corpus.with_name("in.partial")
    awaited = staging / "journal.json" if journal else staging
    for _ in range(40):
        job = start(corpus, *flags)
        while not awaited.exists() and job.poll() is None:
            time.sleep(0.001)
        time.sleep(delay_s)
        job.send_signal(sent)
        _, err = job.communicate(timeout=120)
        if job.returncode != 0:
            return job.returncode, err
        for name in final_files(corpus):
            (corpus.parent / name).unlink()
        delay_s /= 2
    raise AssertionError("every job ended before the signal")


def test_sigkill_at_any_time_leaves_no_index_and_the_same_command_goes_on(corpus: Path, straight: list[bytes]) -> None:
    draw = random.Random(1)
    resumed = 0
    for number in range(8):
        remove_results(corpus)
        for _ in range(1 + number % 3):
            delay_s = draw.uniform(0, 0.2)
            code, _ = interrupt(corpus, signal.SIGKILL, delay_s, "--journal-every", "0", journal=number % 2 == 1)
            assert code == -signal.SIGKILL
            assert not [name for name in final_files(corpus) if name.endswith(".idx")] or results(corpus) == straight
        out = finish(corpus)
        resumed += "documents were done before" in out
        assert results(corpus) == straight
    assert resumed >= 3


def test_a_full_disk_ends_in_words_and_the_job_goes_on(corpus: Path, straight: list[bytes]) -> None:
    remove_results(corpus)
    limit = len(straight[0]) // 2

    def limit_file_size() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    run = subprocess.run(
        command_for(corpus, "--journal-every", "0"),
        preexec_fn=limit_file_size,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 5
    assert "cannot write: File too large" in run.stderr
    assert "the same command goes on from there" in run.stderr
    assert final_files(corpus) == []
    assert "documents were done before" in finish(corpus)
    assert results(corpus) == straight


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that is soon full; needs the right to mount."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_file_system_ends_in_words_and_the_job_goes_on(
    corpus: Path, straight: list[bytes], small_disk: Path
) -> None:
    flags = ("--output-prefix", str(small_disk / "out"), "--journal-every", "0")
    assert len(straight[0]) > 1 << 20
    run = subprocess.run(command_for(corpus, *flags), capture_output=True, text=True, check=False)
    assert run.returncode == 5
    assert "No space left on device" in run.stderr
    assert "the same command goes on from there" in run.stderr
    assert [path.name for path in small_disk.iterdir()] == ["out.partial"]
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    run = subprocess.run(command_for(corpus, *flags), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "documents were done before" in run.stdout
    found = [(small_disk / f"out_text_document{suffix}").read_bytes() for suffix in (".bin", ".idx")]
    assert found == straight


def test_an_input_that_changed_is_not_gone_on_with(corpus: Path, tmp_path: Path) -> None:
    mine = tmp_path / "in.jsonl"
    shutil.copy(corpus, mine)
    shutil.copy(corpus.with_name("tokenizer.json"), tmp_path)
    interrupt(mine, signal.SIGKILL, 0, "--journal-every", "0", journal=True)
    with mine.open("a") as file:
        file.write('{"text": "one more"}\n')
    _, err = start(mine).communicate(timeout=60)
    assert "in.jsonl has changed since" in err
    assert "--restart" in err
    job = start(mine, "--restart")
    out, _ = job.communicate(timeout=60)
    assert job.returncode == 0
    assert "documents  2,501" in out


@pytest.mark.parametrize(
    ("sent", "code", "words"),
    [(signal.SIGINT, 130, "stopped by Ctrl-C"), (signal.SIGTERM, 143, "stopped by SIGTERM")],
)
def test_a_polite_signal_stops_with_a_sentence_and_cleans_up(
    sent: signal.Signals, code: int, words: str, corpus: Path
) -> None:
    remove_results(corpus)
    found, err = interrupt(corpus, sent, 0.02)
    assert found == code
    kept = corpus.with_name("in.partial")
    end = f"; what is done is kept in {kept}, and the same command goes on from there" if kept.exists() else ""
    assert err == f"megaflow-preprocess: {words}{end}\n"
    assert final_files(corpus) == []
