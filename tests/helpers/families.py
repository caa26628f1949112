"""The tokenizers that are compared with their references: where each lies, whose ids count, and over which texts."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from fetch_tokenizers import references_folder

Reference = Callable[[list[str], str], list[list[int]]]
"""Ids of texts; the second argument is what text that spells a special token becomes: `text` or `encode`."""


class Family(NamedTuple):
    """One tokenizer."""

    name: str
    file: str
    reference: str
    """`huggingface`, `tiktoken`, `tekken` or `sentencepiece`."""
    is_fetched: bool = False
    """Whether it comes by tools/fetch_tokenizers.py; otherwise it is part of the shared test data."""


SHARED = (
    Family("gpt2", "tokenizer.json", "huggingface"),
    Family("bbpe-100k-llama3split", "tokenizer.json", "huggingface"),
    Family("bbpe-32k-gpt2split", "tokenizer.json", "huggingface"),
    Family("bert-base-uncased", "tokenizer.json", "huggingface"),
    Family("spm-bpe-16k-bytefallback", "spm.model", "sentencepiece"),
    Family("spm-unigram-16k", "spm.model", "sentencepiece"),
)
FETCHED = (
    *(Family(n, "ranks.tiktoken", "tiktoken", True) for n in ("cl100k", "o200k", "p50k", "qwen", "llama3", "llama4")),
    Family("tekken", "tekken.json", "tekken", True),
    *(Family(name, "tokenizer.json", "huggingface", True) for name in ("deepseek-v3", "anthropic")),
    *(Family(f"mistral-v{n}", "tokenizer.model", "sentencepiece", True) for n in (1, 2, 3, 7)),
    Family("t5-small-test", "spm.model", "sentencepiece", True),
)
CORPORA = ("prose/prose", "code/code", "multilingual/multi")
SAMPLE_STEP = 40
"""Of the small sample, every which document of all corpora is part."""


def path_of(family: Family, shared: Path, fetched: Path) -> Path:
    """The file of a family; the test is skipped, with the family's name, where it is not at hand."""
    path = (fetched if family.is_fetched else shared / "data" / "tokenizers") / family.name / family.file
    if not path.is_file():
        pytest.skip(f"{family.name}: not at {path}; fetch it with tools/fetch_tokenizers.py")
    return path


def corpora(shared: Path) -> dict[str, list[str]]:
    """Every document of the three corpora, and `sample`, a small part of all."""
    texts = {}
    for name in CORPORA:
        with (shared / "data" / "corpora" / f"{name}.jsonl").open(encoding="utf-8") as file:
            texts[name.split("/")[1]] = [json.loads(line)["text"] for line in file]
    texts["sample"] = [text for documents in texts.values() for text in documents][::SAMPLE_STEP]
    return texts


def digest(ids: Sequence[int] | np.ndarray, lengths: Sequence[int]) -> str:
    """SHA-256 of the ids of many documents and of how many each has."""
    sha = hashlib.sha256(np.asarray(lengths, dtype="<u8").tobytes())
    sha.update(np.asarray(ids, dtype="<u4").tobytes())
    return sha.hexdigest()


def library(name: str, fetched: Path) -> Any:
    """A reference library: the fetched one, else one that is installed; the test is skipped where there is neither."""
    folder = str(references_folder(fetched))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the library's making
            return import_module(name)
    except ImportError:
        pytest.skip(f"the reference library {name} is not there; fetch it with tools/fetch_tokenizers.py")


def reference(family: Family, path: Path, fetched: Path) -> Reference:
    """The library whose ids count, with a family loaded."""
    makers = {
        "huggingface": lambda: _huggingface(path),
        "sentencepiece": lambda: _sentencepiece(library("sentencepiece", fetched), path),
        "tiktoken": lambda: _tiktoken(library("tiktoken", fetched), *read_ranks(path)),
        "tekken": lambda: _tekken(library("tiktoken", fetched), path),
    }
    return makers[family.reference]()


def read_ranks(path: Path) -> tuple[dict[bytes, int], dict[str, Any]]:
    """Ranks of a file in tiktoken's form, and the split rule and special tokens beside it."""
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    return ranks, json.loads(path.with_name("tiktoken_config.json").read_text())


def _huggingface(path: Path) -> Reference:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))

    def encode(texts: list[str], special: str) -> list[list[int]]:
        tokenizer.encode_special_tokens = special == "text"
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    return encode


def _sentencepiece(module: Any, path: Path) -> Reference:
    processor = module.SentencePieceProcessor(model_file=str(path))

    def encode(texts: list[str], special: str) -> list[list[int]]:
        assert special == "text", "SentencePiece has no other way"
        return [processor.encode(text) for text in texts]

    return encode


def _tiktoken(module: Any, ranks: dict[bytes, int], config: dict[str, Any]) -> Reference:
    encoding = module.Encoding(
        "x", pat_str=config["pat_str"], mergeable_ranks=ranks, special_tokens=config["special_tokens"]
    )

    def encode(texts: list[str], special: str) -> list[list[int]]:
        if special == "text":
            return encoding.encode_ordinary_batch(texts, num_threads=2)
        return encoding.encode_batch(texts, num_threads=2, allowed_special="all")

    return encode


def _tekken(module: Any, path: Path) -> Reference:
    tekken = json.loads(path.read_text())
    first = tekken["config"]["default_num_special_tokens"]
    count = tekken["config"]["default_vocab_size"] - first
    ranks = {base64.b64decode(row["token_bytes"]): row["rank"] for row in tekken["vocab"] if row["rank"] < count}
    plain = _tiktoken(module, ranks, {"pat_str": tekken["config"]["pattern"], "special_tokens": {}})
    return lambda texts, special: [[rank + first for rank in ranks] for ranks in plain(texts, special)]
