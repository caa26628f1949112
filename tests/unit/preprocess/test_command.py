"""The command: its defaults, its words, its exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megaflow import IndexedDataset, Tokenizer, __version__, read_sidecar
from megaflow.cli import main as megaflow_main
from megaflow.cli.preprocess import main

EOD = 50256


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    texts = ["Hello world.", "", "A <|endoftext|> in text", "Zürich \U0001f642"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def tokens(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset.document(index).tolist() for index in range(dataset.num_documents)]


def test_defaults_append_eod_and_keep_special_text(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(corpus)]) == 0
    documents = tokens(corpus.with_name("corpus_text_document"))
    assert documents[0] == [15496, 995, 13, EOD]
    assert documents[1] == []
    assert documents[2].count(EOD) == 1
    assert Tokenizer.gpt2().decode(documents[2][:-1]) == "A <|endoftext|> in text"
    out = capsys.readouterr().out
    assert "documents  4 (1 empty)" in out
    assert "1 places spell a special token, kept as text" in out
    assert re.search(r"time +\d+\.\d\d s, \d+\.\d\d CPU s on \d+ threads?: \d+\.\d MB/s of text, [\d,]+ tokens/s", out)


def test_megatron_defaults_are_megatrons(corpus: Path) -> None:
    output = str(corpus.with_name("m"))
    assert main(["--input", str(corpus), "--output-prefix", output], prog="p", megatron_defaults=True) == 0
    documents = tokens(corpus.with_name("m_text_document"))
    assert documents[0] == [15496, 995, 13]
    assert documents[2].count(EOD) == 1
    empty = corpus.with_name("empty.jsonl")
    empty.write_text("")
    assert main(["--input", str(empty)], prog="p", megatron_defaults=True) == 0
    assert empty.with_name("empty_text_document.idx").stat().st_size == 42


def test_sidecar_tells_where_the_tokens_came_from(corpus: Path) -> None:
    corpus.write_text(corpus.read_text().replace('{"text": ""}', "\n\n"))
    assert main([str(corpus), "--workers", "1"]) == 0
    sidecar = read_sidecar(corpus.with_name("corpus_text_document"))
    assert sidecar is not None
    assert (sidecar["num_documents"], sidecar["dtype"], sidecar["megaflow_version"]) == (3, "uint16", __version__)
    tokenizer = sidecar["tokenizer"]
    assert (tokenizer["eod_id"], tokenizer["vocab_size"], tokenizer["special_tokens_in_text_hits"]) == (EOD, 50257, 1)
    assert tokenizer["fingerprint"] == Tokenizer.gpt2().fingerprint
    assert [file["name"] for file in tokenizer["files"]] == ["vocab.json", "merges.txt"]
    [source] = sidecar["sources"]
    assert (source["content"]["bytes"], source["num_records"]) == (corpus.stat().st_size, 3)
    assert (source["lines_without_document"], source["num_lines"]) == ([[2, 3]], 6)
    assert sidecar["bin"]["bytes"] == corpus.with_name("corpus_text_document.bin").stat().st_size


FAULTS = {
    "missing file": (["{folder}/gone.jsonl"], 5, "gone.jsonl: no such input file"),
    "no input": ([], 2, "no input: name a file"),
    "no text key": (["{corpus}", "--json-keys", "body"], 4, 'line 1 (byte 0): the record has no key "body"'),
    "unknown flag": (["{corpus}", "--worker", "2"], 2, "the nearest known one is --workers"),
    "no threads": (["{corpus}", "--workers", "0"], 2, "--workers must be from 1 to 1024, got 0"),
    "not a number": (["{corpus}", "--workers", "x"], 2, "argument --workers: invalid int value: 'x'"),
    "missing vocabulary": (["{corpus}", "--vocab-file", "{folder}/v.json"], 5, "v.json: no such tokenizer file"),
    "merges alone": (["{corpus}", "--merge-file", "{folder}/m.txt"], 2, "--merge-file needs the vocabulary"),
    "not a tokenizer": (["{corpus}", "--tokenizer", "{corpus}"], 2, "corpus.jsonl: expected a tokenizer.json"),
    "unknown type": (["{corpus}", "--tokenizer-type", "BertTokenizer"], 2, "--tokenizer-type BertTokenizer is not"),
    "type without file": (["{corpus}", "--tokenizer-type", "TikTokenizer"], 2, "TikTokenizer needs --tokenizer-model"),
    "too many threads": (["{corpus}", "--workers", "9" * 23], 2, "--workers must be from 1 to 1024"),
    "negative limit": (["{corpus}", "--on-bad-record", "skip", "--max-bad-records", "-1"], 2, "must be from 0 to"),
    "key with a slash": (["{corpus}", "--json-keys", "text", "a/b"], 2, "must not be empty nor hold '/'"),
    "empty key": (["{corpus}", "--json-keys", ""], 2, "must not be empty"),
    "shard out of range": (["{corpus}", "--shard", "3/3"], 2, "--shard must be I/N"),
    "more shards than names": (["{corpus}", "--shard", "0/100001"], 2, "N at most 100000"),
    "shards beyond all numbers": (["{corpus}", "--shard", "0/" + "9" * 30], 2, "N at most 100000"),
    "unknown eod": (["{corpus}", "--eod-token", "<nope>"], 2, 'no token "<nope>"'),
    "two inputs, no prefix": (["{corpus}", "{corpus}"], 2, "2 inputs need a name for their output"),
    "a folder of other files": (["/proc/self/fd"], 5, "no input files; looked for .jsonl"),
    "output under a file": (["{corpus}", "--output-prefix", "{corpus}/x"], 5, "cannot make the folder of the output"),
    "output in no folder": (["{corpus}", "--output-prefix", "/proc/x"], 5, "cannot write the output's folder"),
    "limit without skip": (["{corpus}", "--max-bad-records", "1"], 2, "needs --on-bad-record skip"),
    "partitions": (["{corpus}", "--partitions", "0"], 2, "--partitions must be at least 1, got 0"),
    "special text refused": (["{corpus}", "--special-tokens-in-text", "error"], 4, 'special token "<|endoftext|>"'),
    "key twice": (["{corpus}", "--json-keys", "text", "text"], 2, "names a key twice"),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_ends_in_one_sentence_and_its_code(
    fault: str, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, code, words = FAULTS[fault]
    filled = [argument.format(folder=corpus.parent, corpus=corpus) for argument in arguments]
    assert main(filled) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.startswith("megaflow-preprocess: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert [path.name for path in corpus.parent.iterdir()] == ["corpus.jsonl"]


def test_names_of_any_bytes_are_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff name.jsonl")
    Path(name).write_text('{"text": "a"}\n')
    assert main([name, "--output-prefix", str(tmp_path / "out")]) == 0
    assert IndexedDataset(tmp_path / "out_text_document").num_documents == 1
    assert main([name + ".gone"]) == 5
    assert "no such input file" in capsys.readouterr().err


def test_a_folder_in_the_way_is_told_before_the_work(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus.with_name("corpus_text_document.idx").mkdir()
    assert main([str(corpus)]) == 2
    assert "corpus_text_document.idx: is a folder where a file is to be written" in capsys.readouterr().err


def test_no_documents_is_exit_code_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('\n{"body": 1}\n')
    assert main([str(path), "--on-bad-record", "skip"]) == 3
    assert "the input has 1 records, 1 of them bad (missing-key: 1); nothing was written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_one_sentence(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus.parent.chmod(0o500)
    assert main([str(corpus)]) == 5
    assert "cannot write the output's folder" in capsys.readouterr().err


def test_flags_without_effect_say_so(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(corpus), "--dataset-impl", "mmap", "--use-gigatoken"]) == 0
    err = capsys.readouterr().err
    assert "no effect: --dataset-impl" in err
    assert "no effect: --use-gigatoken" in err


def test_vocabulary_is_recognised_by_content_and_said_once(
    corpus: Path, shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = shared / "data" / "tokenizers" / "gpt2"
    vocab = corpus.with_name("vocab.txt")
    vocab.write_bytes((files / "vocab.json").read_bytes())
    assert main([str(corpus), "--vocab", str(vocab), "--merge-file", str(files / "merges.txt")]) == 0
    err = capsys.readouterr().err
    assert err.count("vocabulary and merges without --tokenizer-type: GPT2BPETokenizer") == 1


def test_log_interval_counts_documents(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"text": "word " * 200}) + "\n")
    path.write_text(path.read_text() * 4000)
    command = [sys.executable, "-m", "megaflow.cli.preprocess", str(path), "--log-interval", "100"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = run.stderr.splitlines()
    assert lines, "a job of several ticks shows progress"
    assert all(re.fullmatch(r"\d+%: [\d,]+ documents, [\d,]+ tokens, 0 rejected, \d+\.\d MB/s", line) for line in lines)


def test_help_and_version_end_well(capsys: pytest.CaptureFixture[str]) -> None:
    for command, name in ((main, "megaflow-preprocess"), (megaflow_main.main, "megaflow")):
        with pytest.raises(SystemExit) as ended:
            command(["--help"])
        assert ended.value.code == 0
        assert f"usage: {name}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"megaflow {__version__}\n"


def test_megaflow_names_its_commands(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert megaflow_main.main(["preprocess", str(corpus)]) == 0
    assert megaflow_main.main(["prepare"]) == 2
    assert "invalid choice: 'prepare'" in capsys.readouterr().err
