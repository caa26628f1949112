"""Blends, per-split data, mock data and index files against those that Megatron-LM made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaflow.blend import BlendedDataset
from megaflow.blend_arguments import BlendSpec, DataSpec
from megaflow.building import AnyDataset, Builder, SplitDatasets
from megaflow.dataset import SPLIT_NAMES, GPTDataset
from megaflow.loader import Loader
from megaflow.mock import MockGPTDataset

pytestmark = pytest.mark.golden

CASES = (
    "single_1epoch",
    "single_multiepoch_nosep",
    "single_B_multiseq_int32",
    "single_none_sizes",
    "single_split_100_0_0",
    "blend_weighted3",
    "blend_noweights_sized",
    "per_split",
    "eod_resets",
    "valid_keep_partial",
)
FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask")
EOD = 50256
TOKENIZER = {
    "class": "megatron.core.tokenizers.text.text_tokenizer.MegatronTokenizerText",
    "tokenizer_path": None,
    "vocab_size": "50257",
}


@pytest.fixture
def goldens(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the goldens as current directory: the paths in Megatron's descriptions are relative to it."""
    folder = tmp_path / "goldens"
    folder.mkdir()
    shutil.copytree(shared / "goldens" / "datasets", folder / "datasets")
    monkeypatch.chdir(folder)
    return shared / "goldens" / "samples"


def read_case(samples: Path, name: str) -> tuple[dict[str, Any], Any]:
    return json.loads((samples / "cases.json").read_text())[name], np.load(samples / f"{name}.npz")


def data_spec(config: dict[str, Any]) -> DataSpec:
    def blend(entry: Any) -> BlendSpec:
        prefixes, weights = entry
        return BlendSpec(tuple(prefixes), None if weights is None else tuple(weights))

    if "blend_per_split" in config:
        train, valid, test = (blend(entry) for entry in config["blend_per_split"])
        return DataSpec(per_split=(train, valid, test))
    return DataSpec(blend(config["blend"]))


def build(case: dict[str, Any], cache_dir: Path | None = None) -> SplitDatasets:
    config = case["config"]
    options: dict[str, Any] = {flag: config[flag] for flag in FLAGS} | {"eod_id": EOD, "cache_tokenizer": TOKENIZER}
    options["keep_partial"] = not config.get("drop_last_partial_validation_sequence", True)
    builder = Builder(
        seq_len=case["sequence_length"],
        seed=case["random_seed"],
        split=config.get("split", "1,0,0"),
        cache_dir=cache_dir,
        options=options,
    )
    return builder.build(data_spec(config), case["sizes"])


def parts(dataset: AnyDataset) -> list[GPTDataset]:
    return dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]


def same(found: Any, expected: Any, message: str) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), message
    np.testing.assert_array_equal(found, expected, err_msg=message)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_indices_equal_megatron(goldens: Path, tmp_path: Path, name: str, cached: bool) -> None:
    case, recorded = read_case(goldens, name)
    built = build(case, tmp_path / "cache" if cached else None)
    assert set(built.datasets) == set(case["splits"])
    for split, dataset in built.datasets.items():
        facts = case["splits"][split]
        assert (len(dataset), type(dataset).__name__) == (facts["len"], facts["class"])
        for number, part in enumerate(parts(dataset)):
            for array in ("document_index", "sample_index", "shuffle_index"):
                same(getattr(part, array), recorded[f"{split}.{number}.{array}"], f"{split} {number} {array}")
            assert part.num_samples == facts["mid"][number]["num_samples"]
        if isinstance(dataset, BlendedDataset):
            same(dataset.dataset_index, recorded[f"{split}.dataset_index"], split)
            same(dataset.dataset_sample_index, recorded[f"{split}.dataset_sample_index"], split)


@pytest.mark.parametrize("name", CASES)
def test_samples_equal_megatron(goldens: Path, name: str) -> None:
    case, recorded = read_case(goldens, name)
    for split, dataset in build(case).datasets.items():
        count = len(recorded[f"{split}.sample.tokens"])
        assert count == min(20, len(dataset))
        for part, positions in (("sample", range(count)), ("last", [len(dataset) - 1])):
            samples = [dataset[position] for position in positions]
            for field in ("tokens", "labels", "loss_mask", "position_ids"):
                if f"{split}.{part}.{field}" in recorded:
                    expected = recorded[f"{split}.{part}.{field}"].reshape(len(samples), -1)
                    found = [sample[field] for sample in samples]
                    np.testing.assert_array_equal(found, expected, err_msg=f"{split} {field}")


@pytest.mark.parametrize("name", ["blend_weighted3", "blend_noweights_sized", "per_split"])
def test_loader_equals_megatron(goldens: Path, name: str) -> None:
    case, recorded = read_case(goldens, name)
    for split, dataset in build(case).datasets.items():
        expected = recorded[f"{split}.sample.tokens"]
        with Loader(dataset, 2, num_threads=2) as loader:
            found = np.concatenate([next(loader).tokens for _ in range(len(expected) // 2)])
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", CASES)
def test_cache_files_have_megatrons_names_and_descriptions(goldens: Path, tmp_path: Path, name: str) -> None:
    case, _ = read_case(goldens, name)
    cache = tmp_path / "cache"
    build(case, cache)
    names = {path.name for path in cache.iterdir()}
    for split, facts in case["splits"].items():
        entries = [(entry["hash"], "GPTDataset", entry["description"]) for entry in facts["mid"]]
        if facts["class"] == "BlendedDataset":
            entries.append((facts["blend_hash"], "BlendedDataset", facts["blend_description"]))
        for key, kind, description in entries:
            stem = f"{key}-{kind}-{split}"
            assert (cache / f"{stem}-description.txt").read_text() == description
            arrays = ("document_index", "sample_index", "shuffle_index")
            arrays = arrays if kind == "GPTDataset" else ("dataset_index", "dataset_sample_index")
            assert {f"{stem}-{array}.npy" for array in arrays} <= names
    assert not [name for name in names if name.endswith((".tmp", "-lock"))]


def test_a_cache_that_megatron_wrote_is_compared_and_used(goldens: Path, tmp_path: Path) -> None:
    case, recorded = read_case(goldens, "blend_weighted3")
    cache = tmp_path / "cache"
    cache.mkdir()
    write_as_megatron(cache, case, recorded)
    before = {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}
    for dataset in build(case, cache).datasets.values():
        assert dataset.cached == ("adopted", None)
        assert [part.cached for part in parts(dataset)] == [("adopted", None)] * 3
    assert {name: (cache / name).stat().st_mtime_ns for name in before} == before
    assert all(dataset.cached == ("found", None) for dataset in build(case, cache).datasets.values())


def test_a_wrong_cache_that_megatron_wrote_is_replaced(goldens: Path, tmp_path: Path) -> None:
    # Negative control: each array of one dataset in turn is another one of the same shape.
    case, recorded = read_case(goldens, "single_1epoch")
    for array in ("document_index", "sample_index", "shuffle_index"):
        cache = tmp_path / array
        cache.mkdir()
        wrong = dict(recorded)
        changed = wrong[f"train.0.{array}"].copy()
        changed[1] = changed[2]
        wrong[f"train.0.{array}"] = changed
        write_as_megatron(cache, case, wrong)
        train = build(case, cache).train
        assert isinstance(train, GPTDataset)
        outcome, reason = train.cached or ("", None)
        assert outcome == "replaced"
        assert array.split("_")[0] in (reason or "")
        same(getattr(train, array), recorded[f"train.0.{array}"], array)
        (path,) = cache.glob(f"*-GPTDataset-train-{array}.npy")
        same(np.load(path, mmap_mode="r"), recorded[f"train.0.{array}"], array)


def write_as_megatron(cache: Path, case: dict[str, Any], recorded: Any) -> None:
    """The files that Megatron-LM leaves: arrays by numpy, no side file."""
    for split, facts in case["splits"].items():
        for number, entry in enumerate(facts["mid"]):
            stem = cache / f"{entry['hash']}-GPTDataset-{split}"
            Path(f"{stem}-description.txt").write_text(entry["description"])
            for array in ("document_index", "sample_index", "shuffle_index"):
                np.save(f"{stem}-{array}.npy", recorded[f"{split}.{number}.{array}"])
        if facts["class"] == "BlendedDataset":
            stem = cache / f"{facts['blend_hash']}-BlendedDataset-{split}"
            Path(f"{stem}-description.txt").write_text(facts["blend_description"])
            for array in ("dataset_index", "dataset_sample_index"):
                np.save(f"{stem}-{array}.npy", recorded[f"{split}.{array}"])


def test_mock_data_equal_megatron(shared: Path) -> None:
    recorded = np.load(shared / "goldens" / "samples" / "mock.npz")
    for split, size in zip(SPLIT_NAMES, (100, 10, 10), strict=True):
        mock = MockGPTDataset(vocab_size=50257, eod_id=EOD, seq_len=64, num_samples=size, split_name=split)
        np.testing.assert_array_equal(mock.shuffle_index[:100], recorded[f"{split}.shuffle_head"])
        found = [mock[index]["tokens"] for index in range(10)]
        np.testing.assert_array_equal(found, recorded[f"{split}.tokens"])


def test_other_weights_differ_from_megatron(goldens: Path) -> None:
    # Negative control of the comparisons above.
    case, recorded = read_case(goldens, "blend_weighted3")
    config = {**case["config"], "blend": [case["config"]["blend"][0], [0.4, 0.4, 0.2]]}
    train = build({**case, "config": config}).train
    assert isinstance(train, BlendedDataset)
    assert not np.array_equal(train.dataset_index[:1000], recorded["train.dataset_index"])
