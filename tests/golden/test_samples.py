"""Indices and samples against those that Megatron-LM made: every case of a single dataset, all three splits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaflow import GPTDataset, Loader

pytestmark = pytest.mark.golden

SPLITS = ("train", "valid", "test")
CASES = (
    "single_1epoch",
    "single_multiepoch_nosep",
    "single_B_multiseq_int32",
    "single_none_sizes",
    "single_split_100_0_0",
    "eod_resets",
    "valid_keep_partial",
)
FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask")
EOD = 50256


def read_case(shared: Path, name: str) -> tuple[dict[str, Any], Any]:
    folder = shared / "goldens" / "samples"
    return json.loads((folder / "cases.json").read_text())[name], np.load(folder / f"{name}.npz")


def build(shared: Path, case: dict[str, Any]) -> Iterator[tuple[str, GPTDataset]]:
    """The datasets of a case that Megatron-LM built, by name of their split; the others must be None."""
    config = case["config"]
    (path,), weights = config["blend"]
    assert weights is None
    datasets = GPTDataset.build_splits(
        shared / "goldens" / path,
        seq_len=case["sequence_length"],
        split=config["split"],
        num_samples=case["sizes"],
        seed=case["random_seed"],
        keep_partial=not config.get("drop_last_partial_validation_sequence", True),
        eod_id=EOD,
        **{flag: config[flag] for flag in FLAGS},
    )
    for split, dataset in zip(SPLITS, datasets, strict=True):
        if split not in case["splits"]:
            assert dataset is None
            continue
        assert dataset is not None
        yield split, dataset


@pytest.mark.parametrize("name", CASES)
def test_indices_equal_megatron(shared: Path, name: str) -> None:
    case, recorded = read_case(shared, name)
    built = dict(build(shared, case))
    assert set(built) == set(case["splits"])
    for split, dataset in built.items():
        for array in ("document_index", "sample_index", "shuffle_index"):
            expected = recorded[f"{split}.0.{array}"]
            found = getattr(dataset, array)
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            np.testing.assert_array_equal(found, expected, err_msg=f"{split} {array}")
        assert len(dataset) == case["splits"][split]["len"]


@pytest.mark.parametrize("name", CASES)
def test_samples_equal_megatron(shared: Path, name: str) -> None:
    case, recorded = read_case(shared, name)
    for split, dataset in build(shared, case):
        count = len(recorded[f"{split}.sample.tokens"])
        assert count == min(20, len(dataset))
        for part, positions in (("sample", range(count)), ("last", [len(dataset) - 1])):
            samples = [dataset[position] for position in positions]
            for field in ("tokens", "labels", "loss_mask", "position_ids"):
                if f"{split}.{part}.{field}" not in recorded:
                    assert (part, field) == ("last", "position_ids"), "not recorded"
                    continue
                expected = recorded[f"{split}.{part}.{field}"].reshape(len(samples), -1)
                np.testing.assert_array_equal(
                    [sample[field] for sample in samples], expected, err_msg=f"{split} {field}"
                )


def test_attention_masks_equal_megatron(shared: Path) -> None:
    case, recorded = read_case(shared, "eod_resets")
    length = case["sequence_length"]
    for split, dataset in build(shared, case):
        bits = np.unpackbits(recorded[f"{split}.sample.attention_mask"]).astype(bool)
        for index, expected in enumerate(bits.reshape(4, 1, length, length)):
            np.testing.assert_array_equal(dataset[index]["attention_mask"], expected)


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_loader_equals_megatron(shared: Path, name: str, num_threads: int) -> None:
    case, recorded = read_case(shared, name)
    for split, dataset in build(shared, case):
        expected = {field: recorded[f"{split}.sample.{field}"] for field in ("tokens", "labels")}
        with Loader(dataset, 1, num_threads=num_threads) as loader:
            for index, batch in zip(range(len(expected["tokens"])), loader):  # noqa: B905 - the loader goes on
                for field, array in (("tokens", batch.tokens), ("labels", batch.labels)):
                    # The loader leaves padding visible; Megatron turns it into 0 once it has masked the loss.
                    found = np.where(array[0] == dataset.pad_id, 0, array[0])
                    np.testing.assert_array_equal(found, expected[field][index], err_msg=f"{split} {field} {index}")


def test_another_seed_differs_from_megatron(shared: Path) -> None:
    # Negative control of the comparisons above.
    case, recorded = read_case(shared, "single_1epoch")
    for split, dataset in build(shared, {**case, "random_seed": case["random_seed"] + 1}):
        assert not np.array_equal(dataset.document_index, recorded[f"{split}.0.document_index"])
        assert not np.array_equal(dataset[0]["tokens"], recorded[f"{split}.sample.tokens"][0])
