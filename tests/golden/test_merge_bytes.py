"""Merging and partitions give Megatron-LM's bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.documents import pair_bytes
from megaflow import merge, verify
from megaflow.merging import prefixes_in
from megaflow.partitions import run_partitions
from megaflow.preprocessing import PreprocessOptions

pytestmark = pytest.mark.golden

OPTIONS = {"append_eod": True, "special_tokens_in_text": "encode", "workers": 2}


def test_merged_partitions_equal_megatrons(shared: Path, tmp_path: Path) -> None:
    golden = shared / "goldens" / "bin"
    merge([golden / f"tiny_part3_eod_{index}_text_document" for index in range(3)], tmp_path / "merged")
    assert pair_bytes(tmp_path / "merged") == pair_bytes(golden / "tiny_part3_eod_text_document")
    merge([golden / f"tiny_part3_eod_{index}_text_document" for index in (1, 0, 2)], tmp_path / "other")
    assert pair_bytes(tmp_path / "other") != pair_bytes(golden / "tiny_part3_eod_text_document")


@pytest.mark.parametrize("keep_parts", [False, True])
def test_partitions_give_megatrons_order_and_parts(keep_parts: bool, shared: Path, tmp_path: Path) -> None:
    golden = shared / "goldens"
    options = PreprocessOptions(output_prefix=str(tmp_path / "tiny_part3_eod"), **OPTIONS)
    run_partitions([golden / "inputs" / "tiny.jsonl"], options, 3, keep_parts=keep_parts)
    names = ["tiny_part3_eod_text_document"]
    names += [f"tiny_part3_eod_{index}_text_document" for index in range(3)] if keep_parts else []
    for name in names:
        assert pair_bytes(tmp_path / name) == pair_bytes(golden / "bin" / name)
    assert {path.stem for path in tmp_path.iterdir()} == set(names)


def test_every_golden_pair_is_right(shared: Path) -> None:
    for folder in ("bin", "datasets"):
        for prefix in prefixes_in(shared / "goldens" / folder):
            assert verify(prefix).num_faults == 0, prefix
