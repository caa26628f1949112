"""What inspect and stats say is what the pair holds."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.documents import write_documents
from helpers.pairs import write_pair
from megaflow import GPTDataset, Tokenizer
from megaflow.cli.main import main
from megaflow.counting import histogram, percentiles
from megaflow.preprocessing import PreprocessOptions, preprocess
from megaflow.provenance import origin_of

EOD = 50256


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Forty documents that name their line; lines 1, 8, 15 ... are blank, and some documents empty."""
    lines = []
    for number in range(40):
        if number % 6 == 0:
            lines.append("")
        text = "" if number % 10 == 9 else f"line {len(lines) + 1} " + "and on " * number
        lines.append(json.dumps({"text": text}))
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    preprocess(tmp_path / "in.jsonl", PreprocessOptions(workers=1))
    return tmp_path / "in_text_document"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_every_document_shows_its_line(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (pair.parent / "in.jsonl").read_text().splitlines()
    for document in range(40):
        found = json.loads(run(capsys, "inspect", pair, "--document", document, "--json"))
        text = json.loads(lines[found["origin"]["number"] - 1])["text"]
        assert found["text"] == (text + "<|endoftext|>" if text else "")
        assert found["document"] == document


def test_a_sample_shows_the_pieces_of_training(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = ["--seq-length", 64, "--split", "90,10,0", "--seed", 7, "--num-samples", 50]
    dataset = GPTDataset(pair, seq_len=64, split="90,10,0", seed=7, num_samples=50)
    for sample in (0, 11, 49):
        found = json.loads(run(capsys, "inspect", pair, "--sample", sample, *order, "--json"))
        ids = [number for piece in found["pieces"] for number in piece["ids"]]
        assert ids == dataset.tokens(sample).tolist()
        assert "".join(piece["text"] for piece in found["pieces"]) == Tokenizer.gpt2().decode(ids)
        for piece in found["pieces"]:
            assert piece["first_token"] > 0 or piece["text"].startswith(f"line {piece['origin']['number']} ")
    words = run(capsys, "inspect", pair, "--sample", 11, *order)
    assert f"sample 11 of {len(dataset)}" in words
    assert "in.jsonl, line " in words


def test_long_counts_say_how_far_they_are(
    pair: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    brief = {name: run(capsys, name, pair, "--json") for name in ("stats", "inspect")}
    monkeypatch.setattr("megaflow.counting._TOKENS", 400)
    monkeypatch.setattr("megaflow.counting._DOCUMENTS", 16)
    monkeypatch.setattr("megaflow.cli.options.PLAIN_LINE_EVERY_S", 0.0)
    for name, out in brief.items():
        assert main([name, str(pair), "--json"]) == 0
        said = capsys.readouterr()
        assert said.out == out
        shares = [int(line.split()[1].rstrip("%:")) for line in said.err.splitlines()]
        assert all(line.startswith("counting ") for line in said.err.splitlines())
        assert len(shares) >= 3
        assert shares == sorted(shares)
        assert shares[-1] in (99, 100)  # boundaries of 16 of 40 documents are rounded down


def test_the_summary_counts_and_plots(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = run(capsys, "inspect", pair)
    assert "documents  40 (4 empty)" in words
    assert "GPT2BPETokenizer, 50,257 ids, end of document 50256 appended" in words
    assert "verified   no (megaflow verify)" in words
    found = json.loads(run(capsys, "inspect", pair, "--json"))
    assert sum(row["documents"] for row in found["histogram"]) == 40
    assert found["histogram"][0] == {"from": 0, "to": 0, "documents": 4}
    run(capsys, "verify", pair)
    assert "structure, sizes, checksums, ids" in run(capsys, "inspect", pair)


def test_a_pair_of_megatrons_says_what_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = write_documents(tmp_path / "a", [[[15496, 995]], [], [[13], [13, EOD]]])
    assert "where the tokens came from is not known" in run(capsys, "inspect", pair)
    words = run(capsys, "inspect", pair, "--document", 2)
    assert "sequences 1 to 3, 3 tokens" in words
    assert "text    not shown: no sidecar names the tokenizer" in words
    vocabulary = Path(Tokenizer.gpt2()._core.files[0]).parent
    words = run(capsys, "inspect", pair, "--sequence", 0, "--tokenizer", vocabulary)
    assert "Hello world" in words
    assert "source  not known" in words
    assert "document 1 (no sequence, 0 tokens)" in run(capsys, "inspect", pair, "--document", 1)


def test_an_empty_pair_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = write_documents(tmp_path / "empty", [])
    assert "documents  0" in run(capsys, "inspect", pair)
    assert "documents" in run(capsys, "stats", pair)


FAULTS = {
    "no such document": (["--document", "40"], 2, "document 40 does not exist"),
    "no such sequence": (["--sequence", "-99"], 2, "sequence -99 does not exist"),
    "no such sample": (["--sample", "9999", "--seq-length", "8"], 2, "sample 9999 does not exist"),
    "two at once": (["--document", "1", "--sequence", "1"], 2, "exclude each other"),
    "sample without length": (["--sample", "1"], 2, "--sample needs --seq-length"),
    "length without sample": (["--seq-length", "8"], 2, "for --sample only"),
    "another tokenizer": (["--document", "0", "--tokenizer", "{other}"], 2, "the one named has fingerprint"),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_ends_in_one_sentence(fault: str, pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = pair.parent / "other"
    other.mkdir()
    files = [Path(path) for path in Tokenizer.gpt2()._core.files]
    merges = files[1].read_text().splitlines()
    (other / "vocab.json").write_bytes(files[0].read_bytes())
    (other / "merges.txt").write_text("\n".join(merges[:-5]) + "\n")
    arguments, code, words = FAULTS[fault]
    assert main(["inspect", str(pair), *(word.format(other=other) for word in arguments)]) == code
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["inspect", "stats", "export"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1 << 40, "expected from 9 to 40, the number of sequences, found 1099511627776"),
        (-1, "expected from 9 to 40, the number of sequences, found -1"),
        (3, "expected from 9 to 40, the number of sequences, found 3"),
    ],
)
def test_a_damaged_boundary_ends_in_one_sentence(
    value: int, words: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = Path(write_pair(tmp_path / "damaged"))
    index = bytearray(Path(f"{prefix}.idx").read_bytes())
    place = len(index) - 8 * (41 - 10)  # of boundary 10 of 41
    index[place : place + 8] = value.to_bytes(8, "little", signed=True)
    Path(f"{prefix}.idx").write_bytes(index)
    more = ["--ids", "--output", str(tmp_path / "rows.jsonl")] if command == "export" else []
    assert main([command, str(prefix), *more]) == 4
    err = capsys.readouterr().err
    assert f"document boundary 10: {words}" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "rows.jsonl").exists()


def test_statistics_equal_counting_by_hand(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "stats", pair, pair, "--top", 3, "--json"))
    tokens = np.fromfile(f"{pair}.bin", dtype="<u2").tolist()
    counts = Counter(tokens)
    [first, second] = found["pairs"]
    assert first == second
    expected = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:3]
    assert [(row["id"], row["count"]) for row in first["frequent_ids"]] == expected
    assert first["special_tokens"] == counts[EOD] == 36
    assert first["distinct_ids"] == len(counts)
    assert found["tokens"] == 2 * len(tokens)
    words = run(capsys, "stats", pair, pair)
    assert "empty documents" in words
    assert words.splitlines()[0].split()[-1] == "all"


def test_pieces_of_any_size_count_the_same(
    pair: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [run(capsys, command, pair, "--json") for command in ("stats", "inspect")]
    for documents, tokens in ((1, 1), (3, 5), (39, 1000)):
        monkeypatch.setattr("megaflow.counting._DOCUMENTS", documents)
        monkeypatch.setattr("megaflow.counting._TOKENS", tokens)
        assert [run(capsys, command, pair, "--json") for command in ("stats", "inspect")] == whole


def test_ids_that_cannot_be_are_counted_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = write_documents(tmp_path / "a", [[[-1, 5, 5, 2**31 - 1]]], "int32")
    found = json.loads(run(capsys, "stats", pair, "--json"))["pairs"][0]
    assert found["impossible_ids"] == 2
    assert found["frequent_ids"][0]["id"] == 5
    assert "impossible ids" in run(capsys, "stats", pair)


@given(lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=50))
def test_percentiles_are_the_nearest_rank(lengths: list[int]) -> None:
    shares = (0.0, 5.0, 50.0, 99.0, 100.0)
    ordered = sorted(lengths)
    expected = [ordered[max(0, int(np.ceil(share / 100 * len(ordered))) - 1)] for share in shares]
    assert percentiles(Counter(lengths), shares) == expected


@given(lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=50))
def test_every_document_is_in_the_class_of_its_length(lengths: list[int]) -> None:
    rows = histogram(Counter(lengths))
    for row in rows:
        assert row["documents"] == sum(row["from"] <= length <= row["to"] for length in lengths)
    assert sum(row["documents"] for row in rows) == len(lengths)


@given(
    lines=st.lists(st.booleans(), min_size=1, max_size=40),
)
def test_lines_are_found_among_those_without_a_document(lines: list[bool]) -> None:
    runs: list[list[int]] = []
    for number, is_document in enumerate(lines, 1):
        if not is_document:
            if runs and sum(runs[-1]) == number:
                runs[-1][1] += 1
            else:
                runs.append([number, 1])
    expected = [number for number, is_document in enumerate(lines, 1) if is_document]
    source = {
        "path": "x",
        "format": "jsonl",
        "range": None,
        "first_document": 0,
        "num_documents": len(expected),
        "lines_without_document": runs,
    }
    found = [origin_of({"sources": [source]}, document) for document in range(len(expected) + 1)]
    assert [None if origin is None else origin.number for origin in found] == [*expected, None]
