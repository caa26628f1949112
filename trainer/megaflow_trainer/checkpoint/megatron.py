"""Weights from a `torch_dist` checkpoint of Megatron-Core, whatever layout wrote it.

The format is torch's DCP: its description is a pickle, which is read here by an unpickler that knows the few classes of
such a description and refuses all else; tensors are read with `weights_only`. `common.pt`, a pickle of arguments, is
not opened: the shape comes from this run's configuration.

Megatron's rows of queries, keys and values stand group by group (the queries of a group, its key, its value), ours all
queries, all keys, all values; its first product of an MLP with a gate holds the gate above the rest.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, Metadata, filesystem, metadata

from megaflow.errors import CheckpointError
from megaflow_trainer.checkpoint.dcp import load_tensors
from megaflow_trainer.config.sections import ModelConfig
from megaflow_trainer.model.gpt import build_gpt
from megaflow_trainer.model.sockets import Sockets

_DESCRIPTION, _POINTER = ".metadata", "latest_checkpointed_iteration.txt"


class _Ignored:
    """Stands for what Megatron-Core adds to a description and nobody needs here."""


_KNOWN: dict[tuple[str, str], Any] = {
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
        for name in (
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        )
    },
    **{
        ("torch.distributed.checkpoint.filesystem", name): getattr(filesystem, name)
        for name in ("_StorageInfo", "_StoragePrefix")
    },
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): {"torch.strided": torch.strided}.__getitem__,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): _Ignored,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): _Ignored,
}
"""Every name that a description may use, and what it stands for."""


class _Description(pickle.Unpickler):
    """Reads a description and runs nothing that it does not need."""

    def find_class(self, module: str, name: str) -> Any:
        """One of the known names."""
        try:
            return _KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of a description") from None


class MegatronReader(FileSystemReader):
    """torch's reader of DCP folders, with a description that is read safely."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The description.

        Raises:
            CheckpointError: if it cannot be read, or asks for more than a description needs.
        """
        path = Path(self.path) / _DESCRIPTION
        try:
            with path.open("rb") as file:
                found = _Description(file).load()
        except Exception as error:  # an unpickler raises whatever the bytes lead it to
            raise CheckpointError(f"{path}: cannot be read: {error}") from None
        if not isinstance(found, Metadata):
            raise CheckpointError(f"{path}: holds {type(found).__name__}, no description of a checkpoint")
        return found


def find_megatron(folder: Path) -> Path | None:
    """The folder of a Megatron-Core checkpoint: the given one, or the one that its pointer names; None without one."""
    if (folder / _DESCRIPTION).is_file():
        return folder
    try:
        named = (folder / _POINTER).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    inner = folder / (f"iter_{int(named):07d}" if named.isascii() and named.isdigit() else "release")
    return inner if (inner / _DESCRIPTION).is_file() else None


def read_megatron(folder: Path, model: ModelConfig) -> dict[str, Tensor]:
    """The weights by our names, on the CPU, in the dtypes of the checkpoint.

    Args:
        folder: a checkpoint that `find_megatron` found.
        model: the shape of this run.

    Raises:
        CheckpointError: if a tensor is missing or of another shape than this run's, or this model is of a kind that is
            not read.
    """
    if model.is_latent or model.num_mtp_layers:
        raise CheckpointError(
            f"{folder}: multi-latent attention and multi-token prediction are not read from Megatron-Core's checkpoints"
        )
    reader = MegatronReader(folder)
    saved = {
        name: item
        for name, item in reader.read_metadata().state_dict_metadata.items()
        if isinstance(item, metadata.TensorStorageMetadata)
    }
    sources = {name: _find_source(name, model, saved) for name in _list_names(model)}
    wanted = dict.fromkeys(source for found, _, _ in sources.values() for source in found)
    missing = [name for found, _, _ in sources.values() if not any(n in saved for n in found) for name in found[:1]]
    if missing:
        raise CheckpointError(f"{folder}: tensor {missing[0]} is not in the checkpoint")
    targets = {
        name: torch.empty(saved[name].size, dtype=saved[name].properties.dtype) for name in wanted if name in saved
    }
    load_tensors(targets, folder, None, reader=reader)
    weights = {}
    for name, (found, layer, change) in sources.items():
        tensor = targets[next(candidate for candidate in found if candidate in targets)]
        try:
            weights[name] = change(tensor if layer is None else tensor[layer]).contiguous()
        except (RuntimeError, IndexError):
            raise CheckpointError(
                f"{folder}: tensor {found[0]} has shape {tuple(tensor.shape)}, which does not fit this run's heads or "
                "layers; start with the model flags that the checkpoint was made with"
            ) from None
    return weights


Change = Callable[[Tensor], Tensor]
Source = tuple[list[str], int | None, Change]
"""Names that a weight may have, its place on a leading axis of layers, and what makes it ours."""


def _find_source(name: str, model: ModelConfig, saved: Iterable[str]) -> Source:
    outer = {
        "embedding.weight": "embedding.word_embeddings.weight",
        "positions.weight": "embedding.position_embeddings.weight",
        "head.weight": "output_layer.weight",
        "norm.weight": "decoder.final_layernorm.weight",
        "norm.bias": "decoder.final_layernorm.bias",
    }
    if name in outer:
        return [outer[name]], None, _as_is
    _, layer, rest = name.split(".", 2)
    stem, _, kind = rest.rpartition(".")
    stems, change = _BLOCK[stem]
    own = [f"{inner}_{kind}" if inner.endswith("layer_norm") else f"{inner}.{kind}" for inner in stems]
    stacked = [f"decoder.layers.{inner}" for inner in own]
    if any(candidate in saved for candidate in stacked):
        return stacked, int(layer), lambda tensor: change(tensor, model)
    return [f"decoder.layers.{layer}.{inner}" for inner in own], None, lambda tensor: change(tensor, model)


def _as_is(tensor: Tensor, model: ModelConfig | None = None) -> Tensor:
    return tensor


def _split_groups(rows: Tensor, model: ModelConfig) -> Tensor:
    """Rows `[(g (q + 2) d), ...]`, group by group, to all queries, all keys, all values."""
    g, d = model.kv_heads, model.head_width
    q = model.num_heads // g
    by_group = rows.reshape(g, q + 2, d, *rows.shape[1:])
    parts = by_group.split([q, 1, 1], dim=1)
    return torch.cat([part.reshape(-1, *rows.shape[1:]) for part in parts])


_BLOCK: dict[str, tuple[tuple[str, ...], Callable[[Tensor, ModelConfig], Tensor]]] = {
    "attention_norm": (("self_attention.linear_qkv.layer_norm", "input_layernorm"), _as_is),
    "attention.qkv": (("self_attention.linear_qkv",), _split_groups),
    "attention.q_norm": (("self_attention.q_layernorm",), _as_is),
    "attention.k_norm": (("self_attention.k_layernorm",), _as_is),
    "attention.proj": (("self_attention.linear_proj",), _as_is),
    "mlp_norm": (("mlp.linear_fc1.layer_norm", "pre_mlp_layernorm"), _as_is),
    "mlp.gate": (("mlp.linear_fc1",), lambda rows, _: rows.chunk(2)[0]),
    "mlp.up": (("mlp.linear_fc1",), lambda rows, model: rows.chunk(2)[1] if model.activation == "swiglu" else rows),
    "mlp.down": (("mlp.linear_fc2",), _as_is),
}
"""Our parts of a block, by the names that Megatron's two kinds of layers give them."""


def _list_names(model: ModelConfig) -> list[str]:
    shape = build_gpt(model, Sockets(), device=torch.device("meta"), dtype=torch.float32)
    return [name for name, _ in shape.named_parameters()]
