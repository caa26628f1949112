"""Every tokenizer over every document of the three corpora: against its reference, and against the recorded ids.

The live comparison is left out unless asked for (`pytest -m tokenizers`); the recorded ids, a hash over all documents
of a corpus each (tools/make_tokenizer_golden.py made them from the references), are compared in every run.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from helpers.families import FETCHED, SHARED, Family, corpora, digest, path_of, reference
from megaflow import Tokenizer

RECORDED = json.loads(Path(__file__).with_name("tokenizer_ids.json").read_text())
FAMILIES = [pytest.param(family, id=family.name) for family in (*SHARED, *FETCHED)]
SLOW_HERE = {"bert-base-uncased"}
"""Runs on the reference engine itself: a megabyte a second."""


@pytest.fixture(scope="module")
def texts(shared: Path) -> dict[str, list[str]]:
    return corpora(shared)


def differing(ids: np.ndarray, offsets: np.ndarray, expected: list[list[int]]) -> list[int]:
    """Numbers of the documents whose ids are not the expected ones."""
    rows = zip(pairwise(offsets.tolist()), expected, strict=True)
    return [number for number, ((begin, end), row) in enumerate(rows) if ids[begin:end].tolist() != row]


@pytest.mark.tokenizers
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_document_has_the_reference_ids(
    family: Family, texts: dict[str, list[str]], shared: Path, fetched_tokenizers: Path
) -> None:
    path = path_of(family, shared, fetched_tokenizers)
    expected_of = reference(family, path, fetched_tokenizers)
    tokenizer = Tokenizer.from_file(path)
    checked = 0
    for name in ("prose", "code", "multi"):
        ids, offsets = tokenizer.encode_batch(texts[name], threads=2)
        expected = expected_of(texts[name], "text")
        assert differing(ids, offsets, expected) == [], f"{family.name}, {name}: numbers of the documents that differ"
        recorded = RECORDED["families"][family.name]["corpora"][name]
        assert digest(np.concatenate(expected), [len(row) for row in expected]) == recorded, "another reference"
        checked += len(expected)
    assert checked == RECORDED["documents"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sample_has_the_recorded_ids(
    family: Family, texts: dict[str, list[str]], shared: Path, fetched_tokenizers: Path
) -> None:
    tokenizer = Tokenizer.from_file(path_of(family, shared, fetched_tokenizers))
    ids, offsets = tokenizer.encode_batch(texts["sample"], threads=2)
    assert digest(ids, np.diff(offsets)) == RECORDED["families"][family.name]["corpora"]["sample"]


@pytest.mark.parametrize("family", [param for param in FAMILIES if param.id not in SLOW_HERE])
def test_every_document_has_the_recorded_ids(
    family: Family, texts: dict[str, list[str]], shared: Path, fetched_tokenizers: Path
) -> None:
    tokenizer = Tokenizer.from_file(path_of(family, shared, fetched_tokenizers))
    for name in ("prose", "code", "multi"):
        ids, offsets = tokenizer.encode_batch(texts[name], threads=2)
        assert digest(ids, np.diff(offsets)) == RECORDED["families"][family.name]["corpora"][name], name


def test_one_wrong_id_is_seen(texts: dict[str, list[str]]) -> None:
    """The comparisons above would fail on a single id, or on an id that moved to the next document."""
    tokenizer = Tokenizer.gpt2()
    documents = texts["sample"]
    ids, offsets = tokenizer.encode_batch(documents)
    expected = [ids[begin:end].tolist() for begin, end in pairwise(offsets)]
    recorded = RECORDED["families"]["gpt2"]["corpora"]["sample"]
    assert differing(ids, offsets, expected) == []
    assert digest(ids, np.diff(offsets)) == recorded
    wrong = ids.copy()
    wrong[offsets[5]] ^= 1
    assert differing(wrong, offsets, expected) == [5]
    assert digest(wrong, np.diff(offsets)) != recorded
    moved = np.diff(offsets)
    moved[7:9] += (1, -1)
    assert digest(ids, moved) != recorded
