"""What an interrupted or failed job leaves, and who may go on with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaflow import PreprocessOptions, Tokenizer, merge, preprocess
from megaflow.errors import CheckpointError, DataFormatError, FileAccessError, OutputBusyError
from megaflow.shards import done_note, preprocess_shard

LINES = [json.dumps({"text": f"document {number} of this corpus"}) for number in range(400)]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def options(folder: Path, **more: object) -> PreprocessOptions:
    settings = {"output_prefix": str(folder / "out"), "workers": 2, "block_bytes": 2000, "journal_every_s": 0.0, **more}
    return PreprocessOptions(**settings)  # type: ignore[arg-type]


def pair(folder: Path) -> list[bytes]:
    return [(folder / f"out_text_document{suffix}").read_bytes() for suffix in (".bin", ".idx")]


def test_a_job_that_met_a_bad_record_late_goes_on_when_it_may_skip_it(tmp_path: Path) -> None:
    corpus = write(tmp_path / "in.jsonl", [*LINES[:300], "{broken", *LINES[300:]])
    with pytest.raises(DataFormatError, match="line 301"):
        preprocess(corpus, options(tmp_path))
    assert not (tmp_path / "out_text_document.idx").exists()
    with pytest.raises(DataFormatError, match="line 301"):
        preprocess(corpus, options(tmp_path))
    report = preprocess(corpus, options(tmp_path, on_bad_record="skip"))
    assert report.resumed_documents > 250
    assert (report.records, report.rejected) == (401, {"invalid-json": 1})
    apart = tmp_path / "apart"
    apart.mkdir()
    preprocess(write(apart / "in.jsonl", LINES), options(apart))
    assert pair(tmp_path) == pair(apart)


def test_a_job_that_skipped_does_not_go_on_as_one_that_stops(tmp_path: Path) -> None:
    # Long enough that it cannot end between two reports of progress.
    corpus = write(tmp_path / "in.jsonl", [*LINES[:200], "{broken", *LINES * 40])

    def stop(*_: int) -> None:
        if (tmp_path / "out.partial" / "journal.json").exists():
            raise KeyboardInterrupt

    slow = options(tmp_path, on_bad_record="skip", block_bytes=500)
    with pytest.raises(KeyboardInterrupt):
        preprocess(corpus, slow, progress=stop)
    with pytest.raises(CheckpointError, match="policy for bad records was skip and is stop"):
        preprocess(corpus, options(tmp_path))


def test_merge_leaves_the_work_of_an_unfinished_job_alone(tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.jsonl", [*LINES, "{broken"])
    with pytest.raises(DataFormatError):
        preprocess(bad, options(tmp_path, output_prefix=str(tmp_path / "all")))
    journal = tmp_path / "all.partial" / "journal.json"
    before = journal.read_bytes()
    preprocess(write(tmp_path / "in.jsonl", LINES), options(tmp_path))
    with pytest.raises(FileAccessError, match=r"all.partial: holds what an interrupted preprocessing job has done"):
        merge([tmp_path / "out_text_document"], tmp_path / "all")
    assert journal.read_bytes() == before


def test_two_jobs_on_one_output_are_kept_apart(tmp_path: Path) -> None:
    corpus = write(tmp_path / "in.jsonl", LINES)

    def second(*_: int) -> None:
        with pytest.raises(OutputBusyError, match="another job is writing this output"):
            preprocess(corpus, options(tmp_path))

    preprocess(corpus, options(tmp_path), progress=second)


def test_a_complete_shard_is_not_done_again_until_its_input_changes(tmp_path: Path) -> None:
    corpus, tokenizer = write(tmp_path / "in.jsonl", LINES), Tokenizer.gpt2()

    def run(**more: object) -> int:
        return preprocess_shard(corpus, options(tmp_path, **more), 0, 2, tokenizer=tokenizer).resumed_documents

    assert run() == 0
    prefix = str(tmp_path / "out_shard_00000-of-00002")
    index = Path(f"{prefix}_text_document.idx")
    made = index.stat().st_mtime_ns
    documents = run()
    assert documents > 150
    assert index.stat().st_mtime_ns == made
    assert run(workers=1) == documents  # what does not decide the bytes does not count
    assert run(append_eod=False) == 0
    assert run() == 0
    index.unlink()
    assert run() == 0
    assert index.exists()
    done_note(prefix).write_text("no JSON")
    assert run() == 0
    write(corpus, [*LINES, LINES[0]])
    assert run() == 0
    assert run(restart=True) == 0
