"""Tokens go out and come back the same; hostile files end in a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.documents import documents_of, pair_bytes, write_documents
from megaflow import Tokenizer, read_sidecar, verify
from megaflow import importing as importing_module
from megaflow.cli.main import main
from megaflow.preprocessing import PreprocessOptions, preprocess

EOD = 50256
TEXTS = ["Hello world.", "", "Zürich \U0001f642\n\u2028 \u0000", "a" * 300]


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    preprocess(tmp_path / "in.jsonl", PreprocessOptions(workers=1))
    return tmp_path / "in_text_document"


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_exported_text_is_the_text_that_went_in_and_makes_the_same_pair(pair: Path, tmp_path: Path) -> None:
    assert main(["export", str(pair)]) == 0
    out = tmp_path / "in_text_document.jsonl"
    assert [row["text"] for row in rows(out)] == TEXTS
    preprocess(out, PreprocessOptions(workers=1))
    assert pair_bytes(tmp_path / "in_text_document_text_document") == pair_bytes(pair)


def test_ids_are_all_ids(pair: Path, tmp_path: Path) -> None:
    assert main(["export", str(pair), "--ids", "--output", str(tmp_path / "ids.jsonl")]) == 0
    assert [[row["ids"]] if row["ids"] else [] for row in rows(tmp_path / "ids.jsonl")] == documents_of(pair)


@pytest.mark.parametrize("content", ["text", "ids"])
@pytest.mark.parametrize("documents", [[[[1, 2]], [], [[3]]], [[[1], [2, 3]], [], [[4]]], [[], []], []], ids=repr)
def test_parquet_holds_what_jsonl_holds(documents: list[list[list[int]]], content: str, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pair = write_documents(tmp_path / "a", documents)
    flags = [f"--{content}", "--tokenizer", str(Path(Tokenizer.gpt2()._core.files[0]).parent)]
    for to in ("jsonl", "parquet"):
        assert main(["export", pair, "--to", to, *flags]) == 0
    assert parquet.read_table(tmp_path / "a.parquet").to_pylist() == rows(tmp_path / "a.jsonl")
    assert len(rows(tmp_path / "a.jsonl")) == len(documents)


def test_lists_of_sequences_come_back_as_lists(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": ["one", "two"]}\n{"text": "three"}\n{"text": []}\n')
    preprocess(tmp_path / "in.jsonl", PreprocessOptions(workers=1))
    assert main(["export", str(tmp_path / "in")]) == 0
    out = tmp_path / "in_text_document.jsonl"
    assert [row["text"] for row in rows(out)] == [["one", "two"], ["three"], []]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, 9), max_size=30))
def test_pieces_of_any_size_give_the_same_rows(
    sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaflow.exporting._PIECE_TOKENS", 7)
    documents = [[list(range(size))] if size else [] for size in sizes]
    pair = write_documents(tmp_path / "a", documents)
    (tmp_path / "a.jsonl").unlink(missing_ok=True)
    assert main(["export", pair, "--ids"]) == 0
    assert [row["ids"] for row in rows(tmp_path / "a.jsonl")] == [list(range(size)) for size in sizes]


def test_export_refuses_in_words(pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = write_documents(tmp_path / "plain", [[[60000]]])
    for arguments, code, words in [
        (["export", str(pair), "--output", str(tmp_path / "in.jsonl")], 2, "in.jsonl exists"),
        (["export", plain], 2, "name it with --tokenizer"),
        (["export", plain, "--tokenizer", str(Path(Tokenizer.gpt2()._core.files[0]).parent)], 4, "vocabulary of 50257"),
        (["export", str(pair), "--to", "parquet", "--output", "-"], 2, "Parquet cannot go to standard output"),
        (["export", str(pair), "--output", str(tmp_path / "no" / "x")], 5, "cannot write it"),
    ]:
        before = sorted(tmp_path.iterdir())
        assert main(arguments) == code, arguments
        err = capsys.readouterr().err
        assert words in err
        assert err.count("\n") == 1
        assert sorted(tmp_path.iterdir()) == before


def test_parquet_without_pyarrow_is_one_sentence(pair: Path) -> None:
    code = (
        "import sys; sys.modules['pyarrow'] = None; from megaflow.cli.main import main; "
        f"sys.exit(main(['export', {str(pair)!r}, '--to', 'parquet']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "megaflow export: --to parquet needs pyarrow: pip install pyarrow, or take --to jsonl\n"


def test_standard_output_is_rows_alone(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(pair), "--output", "-"]) == 0
    captured = capsys.readouterr()
    assert [json.loads(line)["text"] for line in captured.out.split("\n")[:-1]] == TEXTS
    assert "4 documents" in captured.err


def shard(path: Path, tokens: list[int], *, magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> Path:
    """An llm.c file."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + np.array(tokens, dtype=dtype).tobytes())
    return path


def datatrove(path: Path, documents: list[list[int]], dtype: str = "<u2") -> Path:
    """A datatrove file and its index."""
    tokens = [number for document in documents for number in document]
    path.write_bytes(np.array(tokens, dtype=dtype).tobytes())
    ends = np.cumsum([len(document) for document in documents], dtype="<u8")
    path.with_name(f"{path.name}.index").write_bytes(ends.tobytes())
    return path


def nanogpt(path: Path, tokens: list[int]) -> Path:
    path.write_bytes(np.array(tokens, dtype="<u2").tobytes())
    return path


def bring_in(kind: str, files: list[Path], output: Path, *flags: str) -> list[list[list[int]]]:
    assert main(["import", "--from", kind, *map(str, files), "--output-prefix", str(output), *flags]) == 0
    report = verify(output)
    assert report.num_faults == 0, report.faults
    assert report.stamped
    return documents_of(output)


small_pieces = pytest.mark.parametrize("piece", [1, 3, 1 << 20])


@small_pieces
def test_nanogpt_documents_end_in_eod(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importing_module, "_PIECE_TOKENS", piece)
    first = nanogpt(tmp_path / "train.bin", [5, 6, EOD, EOD, 7, EOD])
    second = nanogpt(tmp_path / "val.bin", [8, EOD, 9])
    found = bring_in("nanogpt", [first, second], tmp_path / "out", "--eod-id", str(EOD))
    assert found == [[[5, 6, EOD]], [[EOD]], [[7, EOD]], [[8, EOD]], [[9]]]
    assert "the last document does not end in id 50256" in capsys.readouterr().err
    sidecar = read_sidecar(tmp_path / "out")
    assert sidecar is not None
    assert [(source["first_document"], source["num_documents"]) for source in sidecar["sources"]] == [(0, 3), (3, 2)]
    assert Path(f"{tmp_path}/out.bin").read_bytes() == first.read_bytes() + second.read_bytes()


@small_pieces
def test_llmc_documents_begin_with_eod_and_go_on_in_the_next_shard(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing_module, "_PIECE_TOKENS", piece)
    files = [
        shard(tmp_path / "0.bin", [EOD, 5, 6, EOD, 7]),
        shard(tmp_path / "1.bin", [8, 9]),
        shard(tmp_path / "2.bin", [10, EOD, 11]),
        shard(tmp_path / "3.bin", [EOD, 12]),
    ]
    found = bring_in("llmc", files, tmp_path / "out")
    assert found == [[[EOD, 5, 6]], [[EOD, 7, 8, 9, 10]], [[EOD, 11]], [[EOD, 12]]]
    sidecar = read_sidecar(tmp_path / "out")
    assert sidecar is not None
    counts = [(source["first_document"], source["num_documents"]) for source in sidecar["sources"]]
    assert counts == [(0, 2), (2, 0), (2, 1), (3, 1)]


@small_pieces
def test_datatrove_documents_end_where_the_index_says(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing_module, "_PIECE_TOKENS", piece)
    documents = [[[], [1, 2, 3], [], [], [4]], [[5, EOD], []], [[], []]]
    files = [datatrove(tmp_path / f"{index}.ds", part) for index, part in enumerate(documents)]
    found = bring_in("datatrove", files, tmp_path / "out")
    assert found == [[document] if document else [] for part in documents for document in part]
    sidecar = read_sidecar(tmp_path / "out")
    assert sidecar is not None
    assert [source["num_documents"] for source in sidecar["sources"]] == [5, 2, 2]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40), piece=st.integers(1, 9))
def test_no_token_is_lost_or_moved(
    tokens: list[int], piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing_module, "_PIECE_TOKENS", piece)
    ends = bring_in("nanogpt", [nanogpt(tmp_path / "n.bin", tokens)], tmp_path / "n", "--eod-id", "0")
    begins = bring_in("llmc", [shard(tmp_path / "l.bin", tokens)], tmp_path / "l", "--eod-id", "0")
    for found in (ends, begins):
        assert [number for document in found for sequence in document for number in sequence] == tokens
    assert all(0 not in document[0][:-1] for document in ends)
    assert all(0 not in document[0][1:] for document in begins)


def test_wide_tokens_are_stored_wide_and_a_tokenizer_decides(tmp_path: Path) -> None:
    wide = datatrove(tmp_path / "w.ds", [[70000, 1]], "<u4")
    assert bring_in("datatrove", [wide], tmp_path / "wide") == [[[70000, 1]]]
    llama = shard(tmp_path / "l.bin", [128000, 5], magic=20240801, version=7, dtype="<u4")
    assert bring_in("llmc", [llama], tmp_path / "llama") == [[[128000, 5]]]
    narrow = datatrove(tmp_path / "n.ds", [[50000, EOD]], "<u4")
    gpt2 = str(Path(Tokenizer.gpt2()._core.files[0]).parent)
    bring_in("datatrove", [narrow], tmp_path / "narrow", "--tokenizer", gpt2)
    sidecar = read_sidecar(tmp_path / "narrow")
    assert sidecar is not None
    assert (sidecar["dtype"], sidecar["tokenizer"]["fingerprint"]) == ("uint16", Tokenizer.gpt2().fingerprint)


def test_an_imported_document_is_shown_with_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpt2 = str(Path(Tokenizer.gpt2()._core.files[0]).parent)
    path = nanogpt(tmp_path / "train.bin", [15496, EOD, 995, EOD])
    bring_in("nanogpt", [path], tmp_path / "out", "--eod-id", str(EOD), "--tokenizer", gpt2)
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out"), "--document", "1"]) == 0
    out = capsys.readouterr().out
    assert "train.bin, document 2" in out
    assert " world<|endoftext|>" in out


FAULTS = {
    "odd size": ("nanogpt", b"abc", ["--eod-id", "0"], 4, "no whole number of 16-bit tokens"),
    "no eod": ("nanogpt", b"ab", [], 2, "give --eod-id"),
    "no tokens": ("nanogpt", b"", ["--eod-id", "0"], 3, "hold no token"),
    "short header": ("llmc", b"abcd" * 8, [], 4, "truncated: the header of an llm.c shard has 1024 bytes"),
    "wrong magic": ("llmc", bytes(1024), [], 4, "expected the header of an llm.c shard"),
    "no index": ("datatrove", b"ab", [], 5, "needs its index"),
    "eod for datatrove": ("datatrove", b"ab", ["--eod-id", "0"], 2, "means nothing for datatrove"),
    "id too large": (
        "nanogpt",
        b"\xff\xff",
        ["--eod-id", "0", "--tokenizer", "{gpt2}"],
        4,
        "is id 65535; expected ids",
    ),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_bad_file_ends_in_one_sentence(fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind, content, flags, code, words = FAULTS[fault]
    (tmp_path / "x").write_bytes(content)
    filled = [flag.format(gpt2=Path(Tokenizer.gpt2()._core.files[0]).parent) for flag in flags]
    output = ["--output-prefix", str(tmp_path / "out")]
    assert main(["import", "--from", kind, str(tmp_path / "x"), *output, *filled]) == code
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("damage", ["cut", "grown", "falling", "ragged"])
def test_a_damaged_datatrove_pair_is_refused(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = datatrove(tmp_path / "x.ds", [[1, 2, 3], [4, 5, 6, 7], [8]])
    index = tmp_path / "x.ds.index"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-2])
    elif damage == "grown":
        path.write_bytes(path.read_bytes() + b"ab")
    elif damage == "falling":
        index.write_bytes(np.array([3, 1, 8], dtype="<u8").tobytes())
    else:
        index.write_bytes(index.read_bytes()[:-1])
    assert main(["import", "--from", "datatrove", str(path), "--output-prefix", str(tmp_path / "out")]) == 4
    assert "x.ds" in capsys.readouterr().err
    assert not (tmp_path / "out.idx").exists()


def test_a_truncated_shard_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = shard(tmp_path / "x.bin", [EOD, 5, 6])
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["import", "--from", "llmc", str(path)]) == 4
    assert "the header counts 3 tokens, which end at byte 1030, but the file has 1029" in capsys.readouterr().err
