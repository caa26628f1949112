"""Weights and optimizer states from a `torch_dist` checkpoint of Megatron-Core, whatever layout wrote it.

The format is torch's DCP: its description is a pickle, which is read here by an unpickler that knows the few classes of
such a description and refuses all else; tensors are read with `weights_only`. `common.pt`, a pickle of arguments, is
not opened: the shape comes from this run's configuration.

Megatron's rows of queries, keys and values stand group by group (the queries of a group, its key, its value), ours all
queries, all keys, all values; its first product of an MLP with a gate holds the gate above the rest.

States of the optimizer stand as `optimizer.state.KIND.WEIGHT`: with the weight's shape (plain optimizers, and the
distributed one as `fully_reshardable`), or cut (`fully_sharded_model_space`): of a weight of `[X, Y]` whose ranks hold
`[x, y]` each, `[X / x, Y / y, x y]`. Its other formats name buckets instead of weights, and are not read.
"""

from __future__ import annotations

import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
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
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_MASTERS = ("fp32_param", "param")
MASTER = "master"
"""What masters are called here: Megatron's formats call them by two names."""


class _Ignored:
    """Stands for what Megatron-Core adds to a description and nobody needs here."""


def _pick_member(kind: type, name: str) -> Any:
    """In the place of `getattr`, by which early releases of Python 3.11 write members of an enumeration."""
    if kind is not metadata._MEM_FORMAT_ENCODING or name not in metadata._MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError(f"it asks for {name} of {kind}, which is no part of a description")
    return metadata._MEM_FORMAT_ENCODING[name]


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
    ("builtins", "getattr"): _pick_member,
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


def list_kinds(folder: Path) -> dict[str, int]:
    """Kinds of optimizer states that a checkpoint holds by the names of weights, and of how many of Megatron's tensors:
    master, exp_avg, exp_avg_sq.
    """
    return {kind: len(names) for kind, names in _sort(_list_saved(MegatronReader(folder))).items() if kind}


def read_megatron(folder: Path, model: ModelConfig, kind: str = "") -> dict[str, Tensor]:
    """The weights by our names, on the CPU, in the dtypes of the checkpoint; or a kind of optimizer states.

    Args:
        folder: a checkpoint that `find_megatron` found.
        model: the shape of this run.
        kind: one that `list_kinds` tells; the weights themselves if not given.

    Raises:
        CheckpointError: if a tensor is missing or of another shape than this run's, or this model is of a kind that is
            not read.
    """
    if model.is_latent or model.num_mtp_layers or model.num_experts is not None:
        raise CheckpointError(
            f"{folder}: multi-latent attention, multi-token prediction and experts are not read from Megatron-Core's "
            "checkpoints; convert it to a Hugging Face folder, and give that with --finetune"
        )
    reader = MegatronReader(folder)
    saved = _list_saved(reader)
    found = _sort(saved)
    plain, wanted = found.get("", {}), found.get(kind, {})
    sources = {name: _find_source(name, model, plain) for name in _list_names(model)}
    missing = [names[0] for names, _, _ in sources.values() if not any(name in wanted for name in names)]
    if missing:
        what = f"tensor {missing[0]}" if not kind else f"{kind} of {missing[0]}"
        raise CheckpointError(f"{folder}: {what} is not in the checkpoint")
    places = {name: next(one for one in names if one in wanted) for name, (names, _, _) in sources.items()}
    targets = {
        wanted[place]: torch.empty(saved[wanted[place]].size, dtype=saved[wanted[place]].properties.dtype)
        for place in places.values()
    }
    load_tensors(targets, folder, None, reader=reader)
    weights = {}
    for name, (_, layer, change) in sources.items():
        place = places[name]
        tensor = targets[wanted[place]]
        try:
            whole = _join_cuts(tensor, saved[plain[place]].size)
            weights[name] = change(whole if layer is None else whole[layer]).contiguous()
        except (RuntimeError, IndexError, KeyError):
            raise CheckpointError(
                f"{folder}: tensor {wanted[place]} has shape {tuple(tensor.shape)}, which does not fit this run's "
                "heads or layers; start with the model flags that the checkpoint was made with"
            ) from None
    return weights


def read_iteration(folder: Path) -> int | None:
    """The iteration in the name of a checkpoint's folder; None for a release."""
    found = re.fullmatch(r"iter_(\d{7,18})", folder.name, re.ASCII)
    return None if found is None else int(found[1])


Saved = Mapping[str, metadata.TensorStorageMetadata]


def _list_saved(reader: MegatronReader) -> Saved:
    return {
        name: item
        for name, item in reader.read_metadata().state_dict_metadata.items()
        if isinstance(item, metadata.TensorStorageMetadata)
    }


def _sort(saved: Iterable[str]) -> dict[str, dict[str, str]]:
    """Names of tensors by kind of state ("" for weights) and weight."""
    kinds: dict[str, dict[str, str]] = {"": {}}
    for name in saved:
        found = _STATE.fullmatch(name)
        kind, weight = ("", name) if found is None else found.groups()
        kinds.setdefault(MASTER if kind in _MASTERS else kind, {})[weight] = name
    return kinds


def _join_cuts(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor `[X / x, Y / y, ..., x y ...]` of flattened cuts as the whole one, `[X, Y, ...]`; others as they are.

    Raises:
        RuntimeError: if it is neither.
    """
    if list(tensor.shape) == list(shape):
        return tensor
    counts = tensor.shape[:-1]
    if len(counts) != len(shape) or 0 in counts or any(size % count for size, count in zip(shape, counts, strict=True)):
        raise RuntimeError(f"{tuple(tensor.shape)} is no cut of {tuple(shape)}")
    cut = [size // count for size, count in zip(shape, counts, strict=True)]
    num_dims = len(cut)
    apart = tensor.reshape(*counts, *cut)
    return apart.permute(*(axis for dim in range(num_dims) for axis in (dim, num_dims + dim))).reshape(tuple(shape))


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
