"""Every tokenizer of the shared data gives its reference ids, one by one and in batches."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megaflow import Tokenizer
from megaflow.errors import ConfigError, MegaflowError, TokenizerError

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


def test_ids_are_written_over_only_when_no_array_shows_them_any_more() -> None:
    tokenizer = Tokenizer.gpt2()
    texts = ["One word and 12 numbers. " * 20_000, "Other words, other ids? " * 20_000]
    expected = [tokenizer.encode(text) for text in texts]
    first, _ = tokenizer.encode_batch(texts[:1], threads=1)
    second, _ = tokenizer.encode_batch(texts[1:], threads=1)
    part = first[1000:2000]
    address = first.__array_interface__["data"][0]
    assert second.__array_interface__["data"][0] != address
    del first
    third, _ = tokenizer.encode_batch(texts[1:], threads=1)
    assert np.array_equal(part, expected[0][1000:2000])
    assert np.array_equal(second, expected[1])
    assert np.array_equal(third, expected[1])
    del part
    third[:] = 0  # an array of its own, writable
    again, _ = tokenizer.encode_batch(texts[:1], threads=1)
    assert again.__array_interface__["data"][0] == address
    assert np.array_equal(again, expected[0])
    del again
    none_kept, _ = tokenizer.encode_batch(texts[:1], threads=1, cache_bytes=0)
    del none_kept
    assert np.array_equal(tokenizer.encode_batch(texts[:1], threads=1)[0], expected[0])


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


def test_a_lone_surrogate_is_named_with_its_text_and_place() -> None:
    tokenizer = Tokenizer.gpt2()
    with pytest.raises(TokenizerError, match=r"^the text has half of a surrogate pair, '\\ud800', at character 1,"):
        tokenizer.encode("a\ud800b")
    with pytest.raises(TokenizerError, match=r"^text 2 has half of a surrogate pair"):
        tokenizer.encode_batch(["a", "b", "\udfff"])
    assert tokenizer.encode("a\ud800b".encode("utf-8", "replace").decode()).tolist() == [64, 30, 65]


def test_threads_and_cache_may_be_of_any_size_but_negative() -> None:
    tokenizer = Tokenizer.gpt2()
    expected = tokenizer.encode_batch(["a b"])[0].tolist()
    assert expected == [64, 275]
    for settings in ({"threads": 2**70}, {"threads": 0}, {"cache_bytes": 0}, {"cache_bytes": 2**70}):
        assert tokenizer.encode_batch(["a b"], **settings)[0].tolist() == expected
    for name in ("threads", "cache_bytes"):
        with pytest.raises(ConfigError, match=f"{name} must be 0 or more, got -1"):
            tokenizer.encode_batch(["a b"], **{name: -1})


@pytest.mark.parametrize("number", [-1, 50257, 2**32 + 64, 2**63 + 64])
def test_an_id_outside_the_vocabulary_is_named(number: int) -> None:
    with pytest.raises(TokenizerError, match=f"token id {number} is outside the vocabulary of 50257 ids"):
        Tokenizer.gpt2().decode(np.array([64, number], dtype=np.uint64 if number > 2**32 else np.int64))


def test_what_is_no_row_of_whole_numbers_is_not_decoded() -> None:
    tokenizer = Tokenizer.gpt2()
    for wrong in ([1.5], [[1, 2]], 64, ["64"], [-1, 2**63 + 64]):
        with pytest.raises(TokenizerError, match="expected one row of whole numbers as token ids, found "):
            tokenizer.decode(wrong)
    assert tokenizer.decode([]) == ""
    assert tokenizer.decode(np.array([64, 275], dtype=np.uint16)) == "a b"
