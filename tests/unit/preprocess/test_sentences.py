"""`--split-sentences`: each sentence a sequence, as splitting by hand gives them, with a Punkt model of the test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from megaflow import IndexedDataset, PreprocessOptions, Tokenizer, preprocess
from megaflow.errors import ConfigError, DataFormatError
from megaflow.sentences import SLICE_CHARACTERS, load_punkt, split_slices

punkt = pytest.importorskip("nltk.tokenize.punkt", reason="the package nltk is not installed (megaflow[sentences])")

TEXT = 'Dr. Watson paid 3.14 pounds.  He left!\n\nWhy? "Because," said J. Smith, etc. and so on. The end.'
SENTENCES = [
    "Dr. Watson paid 3.14 pounds.",
    "He left!",
    "Why?",
    '"Because," said J. Smith, etc. and so on.',
    "The end.",
]
KEPT = [
    "Dr. Watson paid 3.14 pounds.  ",
    "He left!\n\n",
    "Why? ",
    '"Because," said J. Smith, etc. and so on. ',
    "The end.",
]


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Punkt model that knows two abbreviations and no more, where NLTK looks for its data."""
    folder = tmp_path / "nltk_data" / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    files = {"abbrev_types.txt": "dr\netc\n", "collocations.tab": "", "sent_starters.txt": "", "ortho_context.tab": ""}
    for name, content in files.items():
        (folder / name).write_text(content)
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk_data"))
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk_data")])


def write(folder: Path, *values: object) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    return path


def documents(prefix: Path) -> list[list[list[int]]]:
    pair = IndexedDataset(prefix)
    bounds = pair.document_boundaries.tolist()
    return [[pair[sequence].tolist() for sequence in range(*ends)] for ends in pairwise(bounds)]


@pytest.mark.parametrize(("keep_newlines", "sentences"), [(False, SENTENCES), (True, KEPT)])
def test_ids_are_those_of_splitting_by_hand(keep_newlines: bool, sentences: list[str], tmp_path: Path) -> None:
    tokenizer = Tokenizer.gpt2()
    corpus = write(tmp_path, TEXT, "", ["taken as. It is", "", "too"], "One.")
    by_hand = [sentences, [], ["taken as. It is", "too"], ["One."]]
    expected = [[tokenizer.encode(text).tolist() for text in texts] for texts in by_hand]
    for texts in expected:
        if texts:
            texts[-1].append(50256)
    found = []
    for workers in (1, 3):
        options = PreprocessOptions(
            output_prefix=str(tmp_path / f"out{workers}"),
            split_sentences=True,
            keep_newlines=keep_newlines,
            workers=workers,
            block_bytes=64,
        )
        report = preprocess(corpus, options)
        assert report.pairs[0].prefix == f"{options.output_prefix}_text_sentence"
        found.append(documents(tmp_path / f"out{workers}_text_sentence"))
    assert found == [expected, expected]
    if keep_newlines:
        assert "".join(sentences) == TEXT
    sidecar = json.loads((tmp_path / "out1_text_sentence.json").read_text())
    assert sidecar["sentences"] == f"nltk punkt english, white space {'kept' if keep_newlines else 'dropped'}"


def test_texts_are_cut_into_slices_first_as_in_megatron() -> None:
    split = load_punkt("english", keep_newlines=False)
    text = "a " * (SLICE_CHARACTERS // 2 - 1) + "b. And more."
    assert [len(part) for part in split_slices(split, text)] == [SLICE_CHARACTERS, 10]
    assert split_slices(split, "Never cut. Here.") == ["Never cut.", "Here."]


def test_bad_records_and_rejects_are_what_they_are_without_splitting(tmp_path: Path) -> None:
    corpus = write(tmp_path, "A. B.", None, "C.")
    options = PreprocessOptions(output_prefix=str(tmp_path / "out"), split_sentences=True, workers=2)
    with pytest.raises(DataFormatError, match="line 2"):
        preprocess(corpus, options)


def test_a_missing_model_is_told_before_any_work(tmp_path: Path) -> None:
    options = PreprocessOptions(output_prefix=str(tmp_path / "out"), split_sentences=True, language="klingon")
    with pytest.raises(ConfigError, match=r"--lang klingon: .*python -m nltk.downloader punkt_tab"):
        preprocess(write(tmp_path, "A. B."), options)
    assert not list(tmp_path.glob("out*"))


def test_megatrons_command_line(tmp_path: Path) -> None:
    """`tools/preprocess_data.py --split-sentences`, in one run."""
    corpus = write(tmp_path, TEXT)
    tool = Path(__file__).parents[3] / "tools" / "preprocess_data.py"
    flags = ["--split-sentences", "--keep-newlines", "--workers", "2", "--output-prefix", str(tmp_path / "out")]
    command = [sys.executable, str(tool), "--input", str(corpus), *flags]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert run.returncode == 0, run.stderr
    tokenizer = Tokenizer.gpt2()
    assert documents(tmp_path / "out_text_sentence") == [[tokenizer.encode(text).tolist() for text in KEPT]]
