"""Merging equals one job, or ends in a sentence; and a merged document is still found in its source."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.documents import documents_of, pair_bytes, write_documents
from megaflow import merge, read_sidecar
from megaflow.cli.main import main
from megaflow.cli.preprocess import main as preprocess_main
from megaflow.errors import ConfigError, DataFormatError, TokenizerError
from megaflow.merging import prefixes_in
from megaflow.preprocessing import PreprocessOptions, preprocess
from megaflow.provenance import origin_of

ROOT = Path(__file__).resolve().parents[3]
SMALL = [[[1, 2, 3]], [], [[4], [5, 6]]]


def corpus(path: Path, first: int, count: int) -> Path:
    """Lines that name themselves, with blank ones among them."""
    with path.open("w") as file:
        for number in range(first, first + count):
            file.write(json.dumps({"text": f"{path.name} line {number}"}) + "\n" + "\n" * (number % 3 == 0))
    return path


def test_merged_shards_equal_one_job_and_lead_back_to_their_lines(tmp_path: Path) -> None:
    parts = [corpus(tmp_path / f"{name}.jsonl", 5 * place, 7) for place, name in enumerate("abc")]
    for part in parts:
        preprocess(part, PreprocessOptions(workers=1))
    preprocess(parts, PreprocessOptions(workers=1, output_prefix=str(tmp_path / "whole")))
    report = merge([tmp_path / name for name in "abc"], tmp_path / "merged")
    whole = tmp_path / "whole_text_document"
    assert pair_bytes(tmp_path / "merged") == pair_bytes(whole)
    merged_sidecar, whole_sidecar = read_sidecar(tmp_path / "merged"), read_sidecar(whole)
    assert merged_sidecar is not None
    assert whole_sidecar is not None
    assert report.no_sidecar is None
    same = set(whole_sidecar) - {"command"}
    assert {key: merged_sidecar[key] for key in same} == {key: whole_sidecar[key] for key in same}
    for document in range(report.documents):
        origin = origin_of(merged_sidecar, document)
        assert origin is not None
        assert origin.number is not None
        line = Path(origin.path).read_text().splitlines()[origin.number - 1]
        number = document % 7 + 5 * (document // 7)
        assert json.loads(line)["text"] == f"{Path(origin.path).name} line {number}"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(
        st.lists(st.lists(st.lists(st.integers(0, 999), max_size=4), max_size=3), max_size=4), min_size=1, max_size=4
    )
)
def test_merging_is_concatenation(parts: list[list[list[list[int]]]], tmp_path: Path) -> None:
    for index, part in enumerate(parts):
        write_documents(tmp_path / str(index), part)
    whole = write_documents(tmp_path / "whole", [document for part in parts for document in part])
    merge([tmp_path / str(index) for index in range(len(parts))], tmp_path / "merged")
    assert pair_bytes(tmp_path / "merged") == pair_bytes(whole)


def test_mixed_types_are_refused_or_widened_never_reinterpreted(tmp_path: Path) -> None:
    small = write_documents(tmp_path / "small", [[[65535]]])
    large = write_documents(tmp_path / "large", [[[65536, -1]]], "int32")
    with pytest.raises(DataFormatError, match=r"small holds uint16, .*large holds int32; widen them to int32"):
        merge([small, large], tmp_path / "merged")
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".bin", ".bin", ".idx", ".idx"]
    report = merge([small, large], tmp_path / "merged", widen=True)
    assert (report.dtype, report.num_widened) == ("int32", 1)
    assert documents_of(tmp_path / "merged") == [[[65535]], [[65536, -1]]]


FAULTS = {
    "twice": (["{a}", "{a}.idx"], 2, "are the same pair"),
    "output is an input": (["{a}", "{b}", "--output-prefix", "{b}"], 2, "the output is one of the pairs"),
    "missing": (["{a}", "{folder}/gone"], 5, "gone: no dataset under this prefix"),
    "truncated .bin": (["{a}", "{folder}/short_bin"], 4, "short_bin.bin: expected 12 bytes"),
    "truncated .idx": (["{a}", "{folder}/short_idx"], 4, "short_idx.idx: the header counts 3 sequences"),
    "bad offset": (["{a}", "{folder}/bad_offset"], 4, "offset of sequence 1 (byte 54): expected 6"),
    "bad boundary": (["{a}", "{folder}/bad_boundary"], 4, "document boundary 1 (byte 78): expected from 0 to 3"),
    "not a sidecar": (["{a}", "{folder}/sidecar"], 4, "sidecar.json: expected the JSON sidecar"),
    "mixed types": (["{a}", "{folder}/wide"], 4, "widen them to int32 (--widen)"),
    "no output": (["{a}", "--output-prefix", "{folder}/"], 2, "found a folder"),
    "output in no folder": (["{a}", "--output-prefix", "/proc/x/y"], 5, "cannot make the folder of the output"),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_ends_in_one_sentence_and_leaves_nothing(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b", "short_bin", "short_idx", "bad_offset", "bad_boundary", "sidecar"):
        write_documents(tmp_path / name, SMALL)
    write_documents(tmp_path / "wide", SMALL, "int32")
    Path(f"{tmp_path}/short_bin.bin").write_bytes(pair_bytes(tmp_path / "a")[0][:-1])
    Path(f"{tmp_path}/short_idx.idx").write_bytes(pair_bytes(tmp_path / "a")[1][:-1])
    Path(f"{tmp_path}/sidecar.json").write_text("[]")
    for name, at in (("bad_offset", 54), ("bad_boundary", 78)):
        index = bytearray(pair_bytes(tmp_path / name)[1])
        index[at : at + 8] = (999).to_bytes(8, "little")
        Path(f"{tmp_path}/{name}.idx").write_bytes(index)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    words, code, message = FAULTS[fault]
    filled = [word.format(folder=tmp_path, a=tmp_path / "a", b=tmp_path / "b") for word in words]
    if "--output-prefix" not in filled:
        filled += ["--output-prefix", str(tmp_path / "merged")]
    assert main(["merge", *filled]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("megaflow merge: ")
    assert captured.err.count("\n") == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_pairs_without_documents_merge(tmp_path: Path) -> None:
    empty = write_documents(tmp_path / "empty", [], "int32")
    boundaries = write_documents(tmp_path / "boundaries", [[], []])
    full = write_documents(tmp_path / "full", SMALL)
    merge([empty, boundaries, full], tmp_path / "merged")
    assert documents_of(tmp_path / "merged") == [[], [], *SMALL]
    merge([empty], tmp_path / "alone")
    assert pair_bytes(tmp_path / "alone") == pair_bytes(empty)


def test_tokenizers_that_differ_are_refused_unless_forced(tmp_path: Path) -> None:
    for name, append_eod in (("a", True), ("b", False)):
        corpus(tmp_path / f"{name}.jsonl", 0, 3)
        preprocess(tmp_path / f"{name}.jsonl", PreprocessOptions(workers=1, append_eod=append_eod))
    with pytest.raises(TokenizerError, match="append_eod is true for the one and false for the other"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "merged")
    report = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "merged", force=True)
    assert report.no_sidecar is not None
    assert not (tmp_path / "merged.json").exists()


def test_a_callback_that_raises_stops_the_merge(tmp_path: Path) -> None:
    pair = write_documents(tmp_path / "a", SMALL)

    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge([pair], tmp_path / "merged", progress=stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_shards_named_by_a_pattern_equal_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    corpus(tmp_path / "in.jsonl", 0, 40)
    assert preprocess_main(["in.jsonl", "--workers", "1"]) == 0
    for index in range(3):
        assert preprocess_main(["in.jsonl", "--workers", "1", "--shard", f"{index}/3"]) == 0
    assert main(["merge", "in_shard_*", "--output-prefix", "merged"]) == 0
    assert pair_bytes("merged") == pair_bytes("in_text_document")
    merged, whole = read_sidecar("merged"), read_sidecar("in_text_document")
    assert merged is not None
    assert whole is not None
    [joined] = merged["sources"]
    [source] = whole["sources"]
    names = set(source) - {"content", "hashed"}
    assert {name: joined[name] for name in names} == {name: source[name] for name in names}


def test_json_output_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = write_documents(tmp_path / "a", SMALL)
    assert main(["merge", pair, "--output-prefix", str(tmp_path / "merged"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["documents"], found["tokens"], found["no_sidecar"]) == (3, 6, f"{pair} has none")


def megatron_merge(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "merge_datasets.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_megatrons_script_merges_by_name(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("b", "a10", "a9"):
        write_documents(tmp_path / "in" / name, [[[len(name), ord(name[-1])]]])
    (tmp_path / "in" / "notes.txt").write_text("no pair")
    done = megatron_merge("--input", str(tmp_path / "in"), "--output-prefix", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert documents_of(tmp_path / "out") == [[[3, ord("0")]], [[2, ord("9")]], [[1, ord("b")]]]


def test_megatrons_script_refuses_in_words(tmp_path: Path) -> None:
    pair = write_documents(tmp_path / "a", SMALL)
    base = ["--input", str(tmp_path), "--output-prefix"]
    for arguments, code, words in [
        ([*base, str(tmp_path / "out"), "--multimodal"], 2, "--multimodal is not available"),
        ([*base, pair], 2, "the output is one of the pairs"),
        ([*base, str(tmp_path / "no" / "out")], 5, "the folder of --output-prefix does not exist"),
        (["--input", str(tmp_path / "no"), "--output-prefix", "x"], 5, "no such folder"),
    ]:
        done = megatron_merge(*arguments)
        assert (done.returncode, words in done.stderr) == (code, True), done.stderr
    (tmp_path / "half.bin").write_bytes(b"")
    done = megatron_merge(*base, str(tmp_path / "out"))
    assert "half.bin is there, but half.idx is not" in done.stderr
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match=r"holds no \.bin/\.idx pair"):
        prefixes_in(tmp_path / "none")
