"""Each oddity of the messy corpus has its documented outcome, in both policies."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megaflow import IndexedDataset, PreprocessOptions, Tokenizer, preprocess
from megaflow.errors import DataFormatError, NoDocumentsError

pytestmark = pytest.mark.golden


def cases(shared: Path) -> list[dict[str, Any]]:
    folder = shared / "data" / "corpora" / "messy"
    entries: list[dict[str, Any]] = json.loads((folder / "expected.json").read_text())["files"]
    return [entry for entry in entries if not entry["file"].endswith(".gz")]


def is_bad(expected: Any) -> bool:
    return isinstance(expected, dict) and "bad" in expected


def document_texts(prefix: Path, tokenizer: Tokenizer) -> list[list[str]]:
    dataset = IndexedDataset(prefix)
    bounds = dataset.document_boundaries
    ranges = (range(int(begin), int(end)) for begin, end in pairwise(bounds))
    return [[tokenizer.decode(dataset[sequence]) for sequence in sequences] for sequences in ranges]


def matches(expected: Any, texts: list[str]) -> bool:
    if isinstance(expected, str):
        return texts == ([expected] if expected else [])
    if "either" in expected:
        return any(matches(choice, texts) for choice in expected["either"] if not is_bad(choice))
    if "sequences" in expected:
        return texts == expected["sequences"]
    [text] = texts
    digest = hashlib.sha256(text.encode()).hexdigest()
    return (len(text), digest) == (expected["text_len"], expected["text_sha256_utf8"])


def test_messy_records_have_their_outcome(shared: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.gpt2()
    seen = 0
    for case in cases(shared):
        path = shared / "data" / "corpora" / "messy" / case["file"]
        prefix = tmp_path / case["file"]
        good = [entry for entry in case["expected"] if not is_bad(entry)]
        has_bad = len(good) < len(case["expected"])
        skip = PreprocessOptions(output_prefix=str(prefix), append_eod=False, on_bad_record="skip", workers=2)
        if not case["expected"]:
            with pytest.raises(NoDocumentsError, match="the input has 0 records"):
                preprocess(path, skip, tokenizer=tokenizer)
            continue
        report = preprocess(path, skip, tokenizer=tokenizer)
        texts = document_texts(Path(f"{prefix}_text_document"), tokenizer)
        assert len(texts) == len(good), case["file"]
        assert all(map(matches, good, texts)), (case["file"], texts)
        assert report.num_rejected == len(case["expected"]) - len(good)
        strict = PreprocessOptions(output_prefix=str(tmp_path / "strict"), workers=2)
        if has_bad:
            line = 1 + next(index for index, entry in enumerate(case["expected"]) if is_bad(entry))
            with pytest.raises(DataFormatError, match=rf"{case['file']}: line {line} \(byte \d+\): .*skip"):
                preprocess(path, strict, tokenizer=tokenizer)
            assert not (tmp_path / "strict_text_document.idx").exists()
            rejects = [
                json.loads(text) for text in (tmp_path / f"{case['file']}.rejects.jsonl").read_text().splitlines()
            ]
            assert [reject["line"] for reject in rejects] == [line]
        else:
            preprocess(path, strict, tokenizer=tokenizer)
            (tmp_path / "strict_text_document.idx").unlink()
        seen += 1
    assert seen == 23
