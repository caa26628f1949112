"""What is wrong with a pair is found and named; what is right is stamped."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from helpers.documents import write_documents
from megaflow import read_sidecar, verify
from megaflow.cli.main import main
from megaflow.errors import ConfigError, MissingFileError
from megaflow.preprocessing import PreprocessOptions, preprocess


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A pair with a sidecar."""
    lines = [json.dumps({"text": f"document {number} " * (number % 5)}) for number in range(40)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    preprocess(tmp_path / "in.jsonl", PreprocessOptions(workers=1))
    return tmp_path / "in_text_document"


def file(pair: Path, suffix: str) -> Path:
    return Path(f"{pair}{suffix}")


def test_a_good_pair_is_stamped_and_its_sidecar_stays_what_it_was(
    pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_sidecar(pair)
    mode = file(pair, ".json").stat().st_mode
    assert main(["verify", str(pair)]) == 0
    after = read_sidecar(pair)
    assert after is not None
    stamp = after.pop("verified")
    assert after == before
    assert next(iter(after)) == "format_version"
    assert stamp["checked"] == ["structure", "sizes", "checksums", "ids"]
    assert file(pair, ".json").stat().st_mode == mode
    out = capsys.readouterr().out
    assert "structure, sizes, checksums, ids are right" in out
    assert sorted(path.name for path in pair.parent.iterdir()) == [
        "in.jsonl",
        *(f"in_text_document{suffix}" for suffix in (".bin", ".idx", ".json")),
    ]


def test_a_changed_byte_is_a_named_fault_and_takes_the_stamp_away(
    pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(pair)]) == 0
    draw = random.Random(3)
    for suffix in (".bin", ".idx"):
        good = file(pair, suffix).read_bytes()
        for place in draw.sample(range(len(good)), 20):
            bad = bytearray(good)
            bad[place] ^= 1 << draw.randrange(8)
            file(pair, suffix).write_bytes(bad)
            report = verify(pair, stamp=False)
            assert any(fault.path.endswith(suffix) for fault in report.faults), place
            assert all(str(fault).startswith(str(pair)) for fault in report.faults)
        capsys.readouterr()
        assert main(["verify", str(pair)]) == 4
        captured = capsys.readouterr()
        assert "checksum" in captured.out
        assert "fault" in captured.err
        assert "verified" not in (read_sidecar(pair) or {})
        file(pair, suffix).write_bytes(good)
        assert main(["verify", str(pair)]) == 0


def test_ids_are_compared_with_the_vocabulary(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(pair), "--vocab-size", "50256", "--no-stamp"]) == 4
    out = capsys.readouterr().out
    assert "is id 50256, outside the vocabulary of 50256 ids" in out
    assert out.count("\n") == 21
    assert "... and 12 more" in out  # 32 documents are not empty


def test_a_pair_without_a_sidecar_is_checked_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = write_documents(tmp_path / "a", [[[1, 2]], [], [[3]]])
    assert main(["verify", pair]) == 0
    captured = capsys.readouterr()
    assert "structure, sizes are right" in captured.out
    assert "ids 1 to 3" in captured.out
    assert "no sidecar" in captured.err
    assert main(["verify", pair, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_faults"], found["empty_documents"], found["stamped"]) == (0, 1, False)


def test_the_sidecar_of_another_pair_is_found(pair: Path, tmp_path: Path) -> None:
    write_documents(tmp_path / "other", [[[1, 2]]])
    (tmp_path / "other.json").write_bytes(file(pair, ".json").read_bytes())
    problems = " ".join(str(fault) for fault in verify(tmp_path / "other").faults)
    assert "num_documents: the sidecar says 40, the pair has 1" in problems
    assert "as the sidecar says, found" in problems


def test_threads_do_not_change_the_report(pair: Path) -> None:
    reports = [verify(pair, threads=threads, vocab_size=100, stamp=False) for threads in (1, 2, 7)]
    assert reports[0] == reports[1] == reports[2]


def test_what_cannot_be_checked_at_all_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MissingFileError):
        verify(tmp_path / "gone")
    with pytest.raises(ConfigError, match="--threads must be at least 1"):
        verify(tmp_path / "gone", threads=0)
    assert main(["verify", str(tmp_path / "gone")]) == 5
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("text", ["[]", "{", '{"format_version": 2}', '{"format_version": 1}', "\x00"])
def test_a_damaged_sidecar_is_a_fault_and_left_alone(pair: Path, text: str) -> None:
    file(pair, ".json").write_text(text)
    report = verify(pair)
    assert report.num_faults == 1
    assert report.faults[0].path.endswith(".json")
    assert file(pair, ".json").read_text() == text
