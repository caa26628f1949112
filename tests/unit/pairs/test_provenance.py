"""Every document leads back to its line or row: of one job, of partitions, of shards, and of what was merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megaflow import IndexedDataset, PreprocessOptions, Tokenizer, merge, preprocess
from megaflow.partitions import run_partitions
from megaflow.provenance import origin_of
from megaflow.shards import preprocess_shard

BAD = "{broken"
NUM_LINES = 60


def lines(first: int) -> list[str]:
    """Lines that say their number: every seventh is blank, every fifth is bad."""
    return [
        "" if number % 7 == 3 else BAD if number % 5 == 2 else json.dumps({"text": f"{first + number} word " * 3})
        for number in range(NUM_LINES)
    ]


@pytest.fixture
def corpora(tmp_path: Path) -> dict[str, list[str]]:
    """Two files; the second begins at another place among the partitions."""
    made = {}
    for name, first in (("a", 0), ("b", 1000)):
        path = tmp_path / f"{name}.jsonl"
        content = lines(first)[: NUM_LINES if name == "a" else NUM_LINES - 7]
        path.write_text("\n".join(content) + "\n")
        made[str(path)] = content
    return made


def sidecar_of(prefix: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(f"{prefix}.json").read_text())
    return content


def check_lines(prefix: Path, corpora: dict[str, list[str]]) -> int:
    """Compares the text of each document with the line that the sidecar names; the number of documents."""
    tokenizer, pair, sidecar = Tokenizer.gpt2(), IndexedDataset(prefix), sidecar_of(prefix)
    for document in range(pair.num_documents):
        origin = origin_of(sidecar, document)
        assert origin is not None
        assert origin.number is not None
        content = corpora[origin.path]
        if origin.range is not None:
            # Lines are counted from the first that begins in the range.
            before = "\n".join(content).encode()[: origin.range[0] - 1].decode()
            content = content[before.count("\n") + 1 :]
        text = tokenizer.decode(pair[int(pair.document_boundaries[document])])
        assert json.loads(content[origin.number - 1])["text"] == text.removesuffix("<|endoftext|>"), (document, origin)
    return pair.num_documents


def good(corpora: dict[str, list[str]]) -> int:
    return sum(line not in ("", BAD) for content in corpora.values() for line in content)


def options(prefix: Path, **more: Any) -> PreprocessOptions:
    return PreprocessOptions(output_prefix=str(prefix), on_bad_record="skip", workers=2, block_bytes=100, **more)


def test_lines_of_one_job(corpora: dict[str, list[str]], tmp_path: Path) -> None:
    preprocess(list(corpora), options(tmp_path / "out"))
    assert check_lines(tmp_path / "out_text_document", corpora) == good(corpora)


@pytest.mark.parametrize("partitions", [2, 7])
def test_lines_of_partitions(partitions: int, corpora: dict[str, list[str]], tmp_path: Path) -> None:
    run_partitions(list(corpora), options(tmp_path / "out"), partitions)
    assert check_lines(tmp_path / "out_text_document", corpora) == good(corpora)


def test_a_partition_of_a_large_input_has_no_list_of_the_lines_of_others(tmp_path: Path) -> None:
    """Half of 200,000 lines are not its own: as runs they would be more than a sidecar holds."""
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\n' * 200_000)
    preprocess(path, PreprocessOptions(output_prefix=str(tmp_path / "out"), every=(1, 2)))
    sidecar = sidecar_of(tmp_path / "out_text_document")
    assert sidecar["sources"][0]["lines_without_document"] == []
    origin = origin_of(sidecar, 99_999)
    assert origin is not None
    assert origin.number == 200_000


def test_lines_of_shards_before_and_after_the_merge(corpora: dict[str, list[str]], tmp_path: Path) -> None:
    shards = []
    for index in range(3):
        report = preprocess_shard(list(corpora), options(tmp_path / "out"), index, 3, tokenizer=Tokenizer.gpt2())
        shards.append(Path(report.pairs[0].prefix))
    assert sum(check_lines(prefix, corpora) for prefix in shards) == good(corpora)
    ends = {source["path"]: source["range"] for source in sidecar_of(shards[2])["sources"]}
    (last,) = ends
    assert ends[last][1] == Path(last).stat().st_size
    merge(shards, tmp_path / "all")
    assert check_lines(tmp_path / "all", corpora) == good(corpora)
    sources = sidecar_of(tmp_path / "all")["sources"]
    assert [(source["path"], source["range"]) for source in sources] == [(path, None) for path in corpora]


def test_rows_of_shards_are_rows_of_the_file(tmp_path: Path) -> None:
    texts = [None if number % 6 == 4 else f"{number} word" for number in range(100)]
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": texts}), path, row_group_size=10)
    tokenizer = Tokenizer.gpt2()
    shards = []
    for index in range(3):
        report = preprocess_shard(path, options(tmp_path / "out"), index, 3, tokenizer=tokenizer)
        shards.append(Path(report.pairs[0].prefix))
    merge(shards, tmp_path / "all")
    seen = []
    for prefix in (*shards, tmp_path / "all"):
        pair, sidecar = IndexedDataset(prefix), sidecar_of(prefix)
        for document in range(pair.num_documents):
            origin = origin_of(sidecar, document)
            assert origin is not None
            text = tokenizer.decode(pair[document]).removesuffix("<|endoftext|>")
            assert origin.number is not None
            assert (origin.range, texts[origin.number - 1]) == (None, text)
            seen.append(origin.number)
    expected = [number + 1 for number, text in enumerate(texts) if text is not None]
    assert seen == expected * 2
    assert [(source["range"], source["num_lines"]) for source in sidecar_of(tmp_path / "all")["sources"]] == [
        (None, 100)
    ]
    ranges = [source["range"] for prefix in shards for source in sidecar_of(prefix)["sources"]]
    assert (ranges[0][0], ranges[-1][1]) == (0, 100)
