"""Which piece of which tensor lies where in a checkpoint: torch's DCP metadata, kept as JSON instead of a pickle.

    {"model/blocks.0.mlp.up.weight": {"dtype": "F32", "shape": [4096, 1024],
                                      "chunks": [{"at": [0, 0], "shape": [4096, 1024], "file": "part_00000"}]}}

A chunk lies in its file under the tensor's name and its place: `model/blocks.0.mlp.up.weight@0,0`. Checkpoints of the
first format (whole tensors in model, optimizer and rng.safetensors) are described in the same way when they are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megaflow.errors import CheckpointError
from megaflow_trainer.checkpoint.parts import DTYPES, open_part

LAYOUT = "tensors.json"
SUFFIX = ".safetensors"
_KINDS = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk lies: a file of the checkpoint and the key in it; what its writer found out about the file."""

    file: str
    key: str
    file_bytes: int = 0
    file_sum: str = ""


def name_chunk(index: MetadataIndex) -> str:
    """The key of a chunk in its file."""
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"


def describe(metadata: Metadata, places: dict[MetadataIndex, Place]) -> dict[str, Any]:
    """The layout as JSON.

    Args:
        metadata: what DCP planned; every entry is a tensor.
        places: where each chunk was written.
    """
    tensors = {}
    for name, item in metadata.state_dict_metadata.items():
        assert isinstance(item, TensorStorageMetadata), "only tensors are saved"
        chunks = [
            {
                "at": list(chunk.offsets),
                "shape": list(chunk.sizes),
                "file": places[MetadataIndex(name, chunk.offsets)].file,
            }
            for chunk in item.chunks
        ]
        tensors[name] = {"dtype": DTYPES[item.properties.dtype], "shape": list(item.size), "chunks": chunks}
    return tensors


def read_layout(path: Path) -> Metadata:
    """The layout of a checkpoint of either format, as DCP wants it.

    Raises:
        CheckpointError: if it cannot be read, or is not one.
    """
    if not (path / LAYOUT).exists():
        return _read_first_format(path)
    try:
        described = json.loads((path / LAYOUT).read_text(encoding="utf-8"))
        return _build(
            (
                name,
                _KINDS[item["dtype"]],
                item["shape"],
                [(c["at"], c["shape"], c["file"], None) for c in item["chunks"]],
            )
            for name, item in described.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / LAYOUT} cannot be read: {error!r}") from None


def _read_first_format(path: Path) -> Metadata:
    found = []
    for file in sorted(path.glob(f"*{SUFFIX}")):
        with open_part(file) as part:
            for key in part.keys():  # noqa: SIM118
                piece = part.get_slice(key)
                shape = piece.get_shape()
                chunks = [([0] * len(shape), shape, file.name, key)]
                found.append((f"{file.stem}/{key}", _KINDS[piece.get_dtype()], shape, chunks))
    if not found:
        raise CheckpointError(f"{path}: holds no tensors")
    return _build(found)


Row = tuple[str, torch.dtype, list[int], list[tuple[list[int], list[int], str, str | None]]]


def _build(rows: Iterable[Row]) -> Metadata:
    places: dict[MetadataIndex, Place] = {}
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, dtype, shape, chunks in rows:
        for offsets, _, file, key in chunks:
            index = MetadataIndex(name, torch.Size(offsets))
            places[index] = Place(file, key or name_chunk(index))
        tensors[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(shape),
            chunks=[ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, _, _ in chunks],
        )
    return Metadata(state_dict_metadata=tensors, storage_data=places)
