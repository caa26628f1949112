"""The doctor opens tokenizer and data as the trainer does, and says what is wrong with them before a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import megaflow
from doctor_checks import Asked, Line, check_files
from helpers.pairs import write_pair
from megaflow.preprocessing import PreprocessOptions, preprocess

GPT2 = Path(megaflow.__file__).parent / "data" / "gpt2"
BINARY = b"\x7fELF\x02\x01\x01\x00" + bytes(range(256))


def look(**asked: Path | str) -> Line:
    """The one finding."""
    (line,) = check_files(Asked(**asked))  # type: ignore[arg-type]
    return line


@pytest.fixture
def small(tmp_path: Path) -> dict[str, Path]:
    """A tokenizer of all bytes and one merge."""
    letters = json.loads((GPT2 / "vocab.json").read_text(encoding="utf-8"))
    vocab = {word: number for word, number in letters.items() if number < 256} | {"th": 256}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\n", encoding="utf-8")
    return {"vocab_file": tmp_path / "vocab.json", "merge_file": tmp_path / "merges.txt"}


def test_a_good_tokenizer_is_described(small: dict[str, Path]) -> None:
    line = look(**small)
    assert (line.state, line.topic) == ("ok", "tokenizer")
    assert line.text.endswith("GPT2BPETokenizer, 257 ids, no end of document")
    own = look(vocab_file=GPT2 / "vocab.json", merge_file=GPT2 / "merges.txt")
    assert own.text.endswith("GPT2BPETokenizer, 50,257 ids, end of document 50256")
    assert look(tokenizer_model=GPT2).state == "ok"


@pytest.mark.parametrize(
    ("flag", "content", "text", "remedy"),
    [
        ("vocab_file", None, "no such file", "check the path; without tokenizer flags GPT-2's own is taken"),
        ("merge_file", None, "no such file", "check the path"),
        ("tokenizer_model", None, "no such file", "check the path"),
        ("vocab_file", b"", "the file is empty", "fetch it again"),
        ("merge_file", b"", "the file is empty", "fetch it again"),
        ("tokenizer_model", b"", "the file is empty", "fetch it again"),
        ("vocab_file", BINARY, "the vocabulary is not a JSON object of ids", "fetch it again"),
        ("merge_file", BINARY, "expected a list of merges in UTF-8", "fetch it again"),
        ("tokenizer_model", BINARY, "expected a tokenizer.json", "fetch it again"),
        ("vocab_file", b'{"a": 1, "b"', "the vocabulary is not a JSON object of ids", "fetch it again"),
        ("vocab_file", b"[1, 2]", "the vocabulary is not a JSON object of ids", "fetch it again"),
        ("merge_file", b"#version: 0.2\n\n", "no merges in it, so every byte would be a token", "fetch it again"),
        ("merge_file", b"q q\n", "is not a pair of tokens of the vocabulary", "must be of the same tokenizer"),
    ],
)
def test_a_broken_tokenizer_file_is_told_with_a_remedy(
    flag: str, content: bytes | None, text: str, remedy: str, small: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "broken"
    if content is not None:
        path.write_bytes(content)
    line = look(**({"tokenizer_model": path} if flag == "tokenizer_model" else {**small, flag: path}))
    assert (line.state, line.topic) == ("fail", "tokenizer")
    assert str(path) in line.text
    assert text in line.text
    assert remedy in line.remedy


def test_a_folder_and_a_mistaken_pair_are_told(small: dict[str, Path], tmp_path: Path) -> None:
    line = look(vocab_file=tmp_path, merge_file=small["merge_file"])
    assert (line.state, "expected a file, found a folder" in line.text) == ("fail", True)
    swapped = look(vocab_file=small["merge_file"], merge_file=small["vocab_file"])
    assert (swapped.state, "the two are mistaken for each other" in swapped.text) == ("fail", True)
    assert swapped.remedy == f"--vocab-file {small['vocab_file']} --merge-file {small['merge_file']}"
    twice = look(vocab_file=small["vocab_file"], merge_file=small["vocab_file"])
    assert (twice.state, len(twice.text) < 600) == ("fail", True)
    both = look(**small, tokenizer_model=GPT2)
    assert both.text.endswith(": --tokenizer-model and --vocab-file name two tokenizers")


def test_a_pair_is_opened(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "toy")
    line = look(data_path=prefix)
    assert line.state == "ok"
    assert "40 documents, 2,618 tokens, ids within 50,257" in line.text
    Path(f"{prefix}.bin").write_bytes(b"")
    assert look(data_path=prefix).state == "fail"
    assert (look(data_path=str(tmp_path / "none")).topic, look(data_path=str(tmp_path / "none")).state) == (
        "data",
        "fail",
    )


def test_data_of_another_tokenizer_are_told(tmp_path: Path, small: dict[str, Path]) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "the other three"}) + "\n")
    preprocess(tmp_path / "in.jsonl", PreprocessOptions(workers=1))
    prefix = str(tmp_path / "in_text_document")
    good = list(check_files(Asked(data_path=prefix, vocab_file=GPT2 / "vocab.json", merge_file=GPT2 / "merges.txt")))
    assert [line.state for line in good] == ["ok", "ok"]
    _, line = check_files(Asked(data_path=prefix, **small))  # type: ignore[arg-type]
    assert line.state == "fail"
    assert "the data were made with tokenizer GPT2BPETokenizer" in line.text
    assert "drop the tokenizer flags or use the same" in line.remedy
    Path(f"{prefix}.json").unlink()  # as of Megatron-LM: only the ids can tell
    _, line = check_files(Asked(data_path=prefix, **small))  # type: ignore[arg-type]
    assert (line.state, "and the vocabulary has 257 tokens" in line.text) == ("fail", True)
    assert "name theirs" in line.remedy
    first, line = check_files(Asked(data_path=prefix, vocab_file=tmp_path / "none", merge_file=small["merge_file"]))
    assert (first.state, line.state) == ("fail", "ok")
    assert "not compared with the tokenizer" in line.text


def test_merges_alone_need_their_vocabulary(small: dict[str, Path]) -> None:
    line = look(merge_file=small["merge_file"])
    assert (line.state, line.remedy) == ("fail", "--vocab-file FILE")
    assert line.text == f"--merge-file {small['merge_file']}: the vocabulary of these merges is not named"
