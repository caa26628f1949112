"""Names and descriptions of index files that Megatron-LM and this package share.

Megatron names a cache after the md5 of a description: the dataset's path, split, seed, sequence length, number of
samples and tokenizer. What the description leaves out (the data themselves, the extra token, the partial sample) stands
in a file beside it, and a cache whose file says something else is built anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from megaflow import _core

CacheArguments = tuple[str | PathLike[str], str, str]
FORMAT_VERSION = 1


def describe_dataset(
    *,
    prefix: str,
    num_samples: int | None,
    split_name: str,
    seed: int,
    seq_len: int,
    split: str | None,
    tokenizer: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Megatron's description of one dataset of one split."""
    return {
        "class": "GPTDataset",
        "dataset_path": prefix,
        "num_samples": num_samples,
        "index_split": split_name,
        "random_seed": seed,
        "sequence_length": seq_len,
        "split": split,
        "split_matrix": None if split is None else _split_matrix(split),
        "tokenizer": None if tokenizer is None else dict(tokenizer),
    }


def describe_blend(
    datasets: Sequence[Mapping[str, Any]], split_name: str, weights: Sequence[float] | None, size: int | None
) -> dict[str, Any]:
    """Megatron's description of a blend, from those of its datasets."""
    return {
        "class": "BlendedDataset",
        "datasets": [dict(dataset) for dataset in datasets],
        "split": split_name,
        "weights": None if weights is None else list(weights),
        "size": size,
    }


def cache_arguments(folder: str | PathLike[str], description: Mapping[str, Any], content: Any) -> CacheArguments:
    """Where an index is kept: begin of the files' names, description, and what must be the same beside it.

    Args:
        folder: the cache's folder. It is made if need be.
        description: Megatron's.
        content: whatever else determines the index, in plain types.
    """
    text = json.dumps(description, indent=4)
    key = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
    split = description.get("index_split", description.get("split"))
    side = json.dumps({"format": FORMAT_VERSION, "content": content}, sort_keys=True) + "\n"
    return Path(folder) / f"{key}-{description['class']}-{split}", text, side


def _split_matrix(split: str) -> list[tuple[float, float] | None]:
    """Shares of the splits as Python adds them up: the first bound is the whole number 0."""
    rows = _core.split_matrix(split)
    first = rows[0]
    return [None if first is None else (0, first[1]), *rows[1:]]
