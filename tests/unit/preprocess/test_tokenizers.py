"""Every tokenizer of the shared data gives its reference ids, one by one and in batches."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megaflow import Tokenizer
from megaflow.errors import ConfigError, MegaflowError

FILES = {
    "gpt2": "tokenizer.json",
    "bbpe-100k-llama3split": "tokenizer.json",
    "bbpe-32k-gpt2split": "tokenizer.json",
    "bert-base-uncased": "tokenizer.json",
    "spm-bpe-16k-bytefallback": "spm.model",
    "spm-unigram-16k": "spm.model",
}


def golden(shared: Path, name: str) -> tuple[list[str], list[list[int]]]:
    _, *lines = (shared / "data" / "tokenizers" / "golden" / f"{name}.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record["text"] for record in records], [record["ids"] for record in records]


@pytest.mark.parametrize("name", sorted(FILES))
def test_ids_equal_the_reference(name: str, shared: Path) -> None:
    tokenizer = Tokenizer.from_file(shared / "data" / "tokenizers" / name / FILES[name])
    texts, expected = golden(shared, name)
    assert len(texts) > 100
    for threads in (1, 3):
        ids, offsets = tokenizer.encode_batch(texts, special_tokens_in_text="encode", threads=threads)
        assert (ids.dtype, offsets.dtype, len(offsets)) == (np.uint32, np.int64, len(texts) + 1)
        got = [ids[begin:end].tolist() for begin, end in pairwise(offsets)]
        wrong = [text for text, mine, theirs in zip(texts, got, expected, strict=True) if mine != theirs]
        assert wrong == []


def test_which_engine_runs_is_told(shared: Path) -> None:
    folder = shared / "data" / "tokenizers"
    engines = {name: Tokenizer.from_file(folder / name / file).engine for name, file in FILES.items()}
    assert engines["gpt2"] == engines["bbpe-100k-llama3split"] == "megaflow-byte-level-bpe"
    assert engines["spm-bpe-16k-bytefallback"] == "megaflow-sentencepiece-bpe"
    assert engines["bert-base-uncased"] == "huggingface-tokenizers"


def test_tiktoken_ranks_give_the_ids_of_their_tokenizer_json(shared: Path) -> None:
    folder = shared / "data" / "tokenizers" / "bbpe-100k-llama3split"
    texts, _ = golden(shared, "bbpe-100k-llama3split")
    ranks, twin = (Tokenizer.from_file(folder / name) for name in ("ranks.tiktoken", "tokenizer.json"))
    for text in texts:
        assert ranks.encode(text).tolist() == twin.encode(text).tolist(), text


def test_a_batch_of_long_documents_equals_its_parts() -> None:
    tokenizer = Tokenizer.gpt2()
    text = "All of it is one document, with 12 numbers and words that go on and on. " * 20_000
    one = tokenizer.encode(text)
    ids, offsets = tokenizer.encode_batch([text, "", text], threads=4)
    assert offsets.tolist() == [0, len(one), len(one), 2 * len(one)]
    assert np.array_equal(ids, np.concatenate([one, one]))
    ids, offsets = tokenizer.encode_batch([])
    assert (ids.size, offsets.tolist()) == (0, [0])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_a_tokenizer_used_before_a_fork_works_in_the_child() -> None:
    tokenizer = Tokenizer.gpt2()
    expected = tokenizer.encode_batch(["some text"] * 100, threads=4)[0]
    child = os.fork()
    if child == 0:
        same = np.array_equal(tokenizer.encode_batch(["some text"] * 100, threads=4)[0], expected)
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_name_that_cannot_be_fetched_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MegaflowError, match=r"no-such/tokenizer: (not in the local cache|tokenizers are fetched)"):
        Tokenizer.from_name("no-such/tokenizer")


def test_gpt2_type_with_another_tokenizer_is_refused(shared: Path) -> None:
    model = shared / "data" / "tokenizers" / "bert-base-uncased" / "tokenizer.json"
    with pytest.raises(ConfigError, match="needs a JSON vocabulary and its merges"):
        Tokenizer.from_files(tokenizer_type="GPT2BPETokenizer", tokenizer_model=model)
