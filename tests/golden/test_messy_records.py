"""Each oddity of the messy corpus has its documented outcome, in both policies."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from helpers.containers import LINES, table_of, write_lines, write_table
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


def outcome(path: Path, prefix: Path, case: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Runs a case under both policies and compares it with what is expected."""
    name = f"{case['file']} as {path.name}"
    good = [entry for entry in case["expected"] if not is_bad(entry)]
    skip = PreprocessOptions(output_prefix=str(prefix), append_eod=False, on_bad_record="skip", workers=2)
    strict = PreprocessOptions(output_prefix=f"{prefix}.strict", workers=2)
    if not good:
        with pytest.raises(NoDocumentsError, match=f"the input has {len(case['expected'])} records"):
            preprocess(path, skip, tokenizer=tokenizer)
        return
    report = preprocess(path, skip, tokenizer=tokenizer)
    texts = document_texts(Path(f"{prefix}_text_document"), tokenizer)
    assert len(texts) == len(good), name
    assert all(map(matches, good, texts)), (name, texts)
    assert report.num_rejected == len(case["expected"]) - len(good), name
    if len(good) == len(case["expected"]):
        preprocess(path, strict, tokenizer=tokenizer)
        return
    number = 1 + next(index for index, entry in enumerate(case["expected"]) if is_bad(entry))
    with pytest.raises(DataFormatError, match=rf"{path.name}: (line {number} \(byte \d+\)|row {number}): .*skip"):
        preprocess(path, strict, tokenizer=tokenizer)
    assert not Path(f"{strict.output_prefix}_text_document.idx").exists()
    rejects = [json.loads(text) for text in Path(f"{prefix}.rejects.jsonl").read_text().splitlines()]
    assert [reject.get("line", reject.get("row")) for reject in rejects] == [number]


@pytest.mark.parametrize("ending", list(LINES))
def test_messy_records_have_their_outcome(ending: str, shared: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.gpt2()
    for case in cases(shared):
        data = (shared / "data" / "corpora" / "messy" / case["file"]).read_bytes()
        stem = case["file"].removesuffix(".jsonl")
        outcome(write_lines(tmp_path, stem, ending, data), tmp_path / f"{stem}.out", case, tokenizer)
    assert len(cases(shared)) == 24


def test_messy_values_have_their_outcome_in_parquet(shared: Path, tmp_path: Path) -> None:
    """Where the oddity is one of values, not of lines: empty, white space, lists, nulls, escapes, special tokens."""
    tokenizer = Tokenizer.gpt2()
    seen = 0
    for case in cases(shared):
        values = [_value(entry) for entry in case["expected"]]
        if not values or _NOT_A_VALUE in values or len({isinstance(value, list) for value in values if value}) > 1:
            continue
        path = write_table(tmp_path, case["file"].removesuffix(".jsonl"), ".parquet", table_of(values))
        outcome(path, tmp_path / f"{path.stem}.out", case, tokenizer)
        seen += 1
    assert seen == 12


_NOT_A_VALUE = "no value of a column"


def _value(entry: Any) -> Any:
    if isinstance(entry, str):
        return entry
    return None if entry == {"bad": "text is null"} else _NOT_A_VALUE


def test_files_that_are_not_what_they_seem(shared: Path, tmp_path: Path) -> None:
    folder = shared / "data" / "corpora" / "messy"
    cut = PreprocessOptions(output_prefix=str(tmp_path / "cut"), on_bad_record="skip")
    with pytest.raises(DataFormatError, match=r"gzip_truncated.jsonl.gz: damaged compressed data"):
        preprocess(folder / "gzip_truncated.jsonl.gz", cut)
    assert list(tmp_path.iterdir()) == []
    report = preprocess(folder / "not_gzip.jsonl.gz", PreprocessOptions(output_prefix=str(tmp_path / "plain")))
    assert report.records == 2
    assert "not_gzip.jsonl.gz: the name promises gzip data" in report.warnings[0]
