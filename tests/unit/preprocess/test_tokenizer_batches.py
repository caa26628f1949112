"""What every tokenizer promises beside its ids: batches, special tokens, decoding, pickling, forks, and memory."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from itertools import cycle, pairwise
from pathlib import Path

import numpy as np
import pytest

from helpers.families import FETCHED, SHARED, Family, corpora, path_of, reference
from megaflow import Tokenizer
from megaflow.errors import TokenizerError

FAMILIES = [pytest.param(family, id=family.name) for family in (*SHARED, *FETCHED)]
OF_HUGGING_FACE = [param for param in FAMILIES if param.values[0].reference == "huggingface"]
WITH_SPECIAL_TOKENS = [param for param in FAMILIES if param.values[0].reference in ("huggingface", "tiktoken")]


@pytest.fixture(scope="module")
def sample(shared: Path) -> list[str]:
    return [text[:1500] for text in corpora(shared)["sample"]]


@pytest.fixture
def tokenizer(family: Family, shared: Path, fetched_tokenizers: Path) -> Tokenizer:
    return Tokenizer.from_file(path_of(family, shared, fetched_tokenizers))


def with_special_tokens(tokenizer: Tokenizer, documents: list[str]) -> list[str]:
    """The documents, and special tokens in, before, after and between them."""
    spelt = [tokenizer.decode([number]) for number in tokenizer.special_ids[:4]]
    assert spelt
    made = list(spelt)
    for text, token in zip(documents[:40], cycle(spelt), strict=False):
        middle = len(text) // 2
        made += [f"{token}{text}", f"{text[:middle]} {token} {text[middle:]}", f"{text}{token}{token}"]
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_do_not_depend_on_batches_threads_or_the_cache(tokenizer: Tokenizer, sample: list[str]) -> None:
    documents = sample[::4]
    ids, offsets = tokenizer.encode_batch(documents, threads=1)
    for threads, cache_bytes in ((2, 64 << 20), (5, 0), (1, 4096)):
        other, other_offsets = tokenizer.encode_batch(documents, threads=threads, cache_bytes=cache_bytes)
        assert np.array_equal(ids, other)
        assert np.array_equal(offsets, other_offsets)
    for size in (1, 7):
        parts = [tokenizer.encode_batch(documents[at : at + size])[0] for at in range(0, len(documents), size)]
        assert np.array_equal(ids, np.concatenate(parts))
    single = [tokenizer.encode(text) for text in documents]
    assert np.array_equal(ids, np.concatenate(single))
    reverse, ends = tokenizer.encode_batch(documents[::-1], threads=2)
    rows = [reverse[begin:end] for begin, end in pairwise(ends)]
    assert np.array_equal(ids, np.concatenate(rows[::-1]))


@pytest.mark.parametrize("family", WITH_SPECIAL_TOKENS)
def test_special_tokens_in_text_are_text_by_default_and_as_the_reference_has_them_if_asked(
    family: Family, tokenizer: Tokenizer, sample: list[str], shared: Path, fetched_tokenizers: Path
) -> None:
    expected = reference(family, path_of(family, shared, fetched_tokenizers), fetched_tokenizers)
    documents = with_special_tokens(tokenizer, sample)
    modes = {"text": expected(documents, "text"), "encode": expected(documents, "encode")}
    for mode, rows in modes.items():
        ids, offsets = tokenizer.encode_batch(documents, special_tokens_in_text=mode)
        assert [ids[begin:end].tolist() for begin, end in pairwise(offsets)] == rows
    ids, _ = tokenizer.encode_batch(documents)
    assert ids.tolist() == [number for row in modes["text"] for number in row]
    assert modes["text"] != modes["encode"]
    with pytest.raises(TokenizerError):
        tokenizer.encode(documents[0], special_tokens_in_text="error")


@pytest.mark.parametrize("family", OF_HUGGING_FACE)
def test_added_special_tokens_are_those_of_hugging_face(
    family: Family, tokenizer: Tokenizer, sample: list[str], shared: Path, fetched_tokenizers: Path
) -> None:
    from tokenizers import Tokenizer as HuggingFace

    other = HuggingFace.from_file(str(path_of(family, shared, fetched_tokenizers)))
    assert tokenizer.added_special_tokens == other.encode("", add_special_tokens=True).ids
    for text in sample[:20]:
        if tokenizer.added_special_tokens:
            added = tokenizer.encode(text, add_special_tokens=True, special_tokens_in_text="encode").tolist()
            assert added == other.encode(text, add_special_tokens=True).ids
        else:
            with pytest.raises(TokenizerError, match="no rule that adds any"):
                tokenizer.encode(text, add_special_tokens=True)
        plain = tokenizer.encode(text, special_tokens_in_text="encode").tolist()
        assert plain == other.encode(text, add_special_tokens=False).ids, "nothing is added unless asked for"


def test_a_tokenizer_that_adds_tokens_adds_them_only_if_asked(shared: Path) -> None:
    bert = Tokenizer.from_file(shared / "data" / "tokenizers" / "bert-base-uncased" / "tokenizer.json")
    plain, surrounded = bert.encode("hello world"), bert.encode("hello world", add_special_tokens=True)
    assert surrounded.tolist() == [101, *plain.tolist(), 102]


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_gives_the_text_back(
    family: Family, tokenizer: Tokenizer, sample: list[str], shared: Path, fetched_tokenizers: Path
) -> None:
    ids = [tokenizer.encode(text).tolist() for text in sample[::3]]
    decoded = [tokenizer.decode(row) for row in ids]
    if family.reference == "huggingface":
        from tokenizers import Tokenizer as HuggingFace

        other = HuggingFace.from_file(str(path_of(family, shared, fetched_tokenizers)))
        assert decoded == [other.decode(row, skip_special_tokens=False) for row in ids]
    lossy = ("bert-base-uncased", "spm-unigram-16k", "t5-small-test", "anthropic")  # they normalise
    if family.name not in lossy:
        assert decoded == sample[::3]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pickled_tokenizer_is_the_same(tokenizer: Tokenizer, sample: list[str]) -> None:
    twin = pickle.loads(pickle.dumps(tokenizer))
    assert (twin.fingerprint, twin.vocab_size, twin.engine) == (
        tokenizer.fingerprint,
        tokenizer.vocab_size,
        tokenizer.engine,
    )
    assert np.array_equal(twin.encode_batch(sample[:30])[0], tokenizer.encode_batch(sample[:30])[0])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
@pytest.mark.parametrize("family", FAMILIES[: len(SHARED)])
def test_a_fork_after_use_encodes_alike(tokenizer: Tokenizer, sample: list[str]) -> None:
    expected = tokenizer.encode_batch(sample[:50], threads=2)[0]
    child = os.fork()
    if child == 0:
        same = False
        try:
            same = np.array_equal(tokenizer.encode_batch(sample[:50], threads=2)[0], expected)
        finally:
            os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


GROWTH = """
import random, sys
from megaflow import Tokenizer
def peak():
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024
generator = random.Random(1)
letters = "abcdefghijklmnopqrstuvwxyz"
words = ["".join(generator.choices(letters, k=7)) for _ in range(200_000)]
texts = [" ".join(words[at : at + 2000]) for at in range(0, len(words), 2000)] * 4  # a table that is hit grows
tokenizer = Tokenizer.gpt2()
tokenizer.encode_batch(["warm"] * 2, threads=1)
with open("/proc/self/clear_refs", "w") as reset:
    reset.write("5")  # the peak is now what there is
before = peak()
ids, offsets = tokenizer.encode_batch(texts, threads=1, cache_bytes=int(sys.argv[1]))
print(peak() - before, ids.nbytes + offsets.nbytes, len(ids))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_cache_keeps_to_its_budget() -> None:
    """200,000 different words, four times: some ten megabytes of cache if there is room."""
    grown, counts = {}, set()
    for budget in (1 << 20, 16 << 20, 256 << 20):
        command = [sys.executable, "-c", GROWTH, str(budget)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        growth, output, count = map(int, done.stdout.split())
        grown[budget] = growth - output
        counts.add(count)
    assert len(counts) == 1
    scratch = output + (8 << 20)  # the ids of chunks before they are joined
    assert grown[1 << 20] < (1 << 20) + scratch
    assert grown[16 << 20] < (16 << 20) + scratch
    assert grown[256 << 20] > grown[1 << 20] + (4 << 20), "a large budget is used: the measure sees the cache"
