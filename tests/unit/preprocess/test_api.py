"""`megaflow.preprocess` and `megaflow.Tokenizer` for other programs."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megaflow import PreprocessOptions, Tokenizer, preprocess
from megaflow.errors import ConfigError, FileAccessError, TokenizerError


def test_import_is_cheap_and_brings_no_torch() -> None:
    code = (
        "import sys, megaflow; from megaflow import GPTDataset, Loader, preprocess; "
        "print(sorted({'torch', 'pyarrow', 'tokenizers', 'rich'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_names_are_those_that_are_promised() -> None:
    import megaflow

    assert sorted(megaflow.__all__) == dir(megaflow)
    assert all(getattr(megaflow, name) is not None for name in megaflow.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = megaflow.nonsense  # type: ignore[attr-defined]


def test_gpt2_encodes_decodes_and_pickles() -> None:
    tokenizer = Tokenizer.gpt2()
    ids = tokenizer.encode("Hello world.")
    assert ids.dtype == np.uint32
    assert ids.tolist() == [15496, 995, 13]
    assert tokenizer.decode(ids) == "Hello world."
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (50257, 50256)
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert (copy.fingerprint, copy.type) == (tokenizer.fingerprint, "GPT2BPETokenizer")


def test_special_text_follows_the_policy() -> None:
    tokenizer = Tokenizer.gpt2()
    assert tokenizer.encode("<|endoftext|>", special_tokens_in_text="encode").tolist() == [50256]
    assert 50256 not in tokenizer.encode("<|endoftext|>")
    with pytest.raises(TokenizerError, match="special token"):
        tokenizer.encode("a<|endoftext|>", special_tokens_in_text="error")
    with pytest.raises(ConfigError, match="must be text, encode or error"):
        tokenizer.encode("a", special_tokens_in_text="maybe")


def test_golden_ids_of_the_shared_tokenizers(shared: Path) -> None:
    folder = shared / "data" / "tokenizers"
    seen = 0
    for name in ("gpt2", "bbpe-100k-llama3split", "bbpe-32k-gpt2split", "bert-base-uncased"):
        tokenizer = Tokenizer.from_file(folder / name)
        _, *lines = (folder / "golden" / f"{name}.jsonl").read_text().splitlines()
        for line in lines:
            record = json.loads(line)
            encoded = tokenizer.encode(record["text"], special_tokens_in_text="encode")
            assert encoded.tolist() == record["ids"], (name, record["text"])
            seen += 1
    assert seen > 400


def test_one_tokenizer_in_two_spellings_has_one_fingerprint(shared: Path) -> None:
    folder = shared / "data" / "tokenizers" / "bbpe-32k-gpt2split"
    pairs = Tokenizer.from_file(folder / "tokenizer.json")
    assert Tokenizer.from_file(folder / "tokenizer.legacy-merges.json").fingerprint == pairs.fingerprint
    assert pairs.fingerprint != Tokenizer.gpt2().fingerprint


def test_output_does_not_depend_on_threads_or_blocks(shared: Path, tmp_path: Path) -> None:
    source = tmp_path / "some.jsonl"
    with (shared / "data" / "corpora" / "multilingual" / "multi.jsonl").open() as lines:
        source.write_text("".join(line for line, _ in zip(lines, range(400), strict=False)))
    seen = set()
    for workers, block_bytes in ((1, 1 << 20), (2, 1000), (4, 77_777)):
        prefix = tmp_path / f"w{workers}"
        options = PreprocessOptions(output_prefix=str(prefix), workers=workers, block_bytes=block_bytes)
        report = preprocess(source, options)
        assert (report.records, report.pairs[0].documents) == (400, 400)
        seen.add(b"".join(Path(f"{prefix}_text_document{suffix}").read_bytes() for suffix in (".bin", ".idx")))
    assert len(seen) == 1


def test_an_error_in_progress_stops_the_job_and_comes_out(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"text": "word " * 500}) + "\n")
    source.write_text(source.read_text() * 4000)

    def stop(*_: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        preprocess(source, progress=stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "in.partial"]
    report = preprocess(source)
    assert report.resumed_documents < report.records == report.pairs[0].documents == 4000
    assert not (tmp_path / "in.partial").exists()


def test_two_jobs_on_one_output_do_not_mix(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"text": "word " * 500}) + "\n")
    source.write_text(source.read_text() * 4000)
    seen = []

    def second(*_: int) -> None:
        if not seen:
            with pytest.raises(FileAccessError, match="another job is writing this output"):
                preprocess(source)
            seen.append(1)

    preprocess(source, progress=second)
    assert seen == [1]
