"""Writes a checkpoint of this trainer as Megatron-Core's torch_dist, in each format that names states by weight.

Apart from the reader: names, order of rows and cuts are written out here again.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megaflow_trainer.checkpoint.dcp import read_tensors

FORMATS = ("plain", "fully_reshardable", "fully_sharded_model_space")
OUTER = {
    "embedding.weight": ("embedding.word_embeddings.weight", 0),
    "positions.weight": ("embedding.position_embeddings.weight", None),
    "head.weight": ("output_layer.weight", 0),
    "norm.weight": ("decoder.final_layernorm.weight", None),
    "norm.bias": ("decoder.final_layernorm.bias", None),
}
"""Our names, Megatron's, and the dim that tensor parallelism cuts."""
INNER = {
    "attention_norm.weight": ("self_attention.linear_qkv.layer_norm_weight", None),
    "attention_norm.bias": ("self_attention.linear_qkv.layer_norm_bias", None),
    "attention.qkv.weight": ("self_attention.linear_qkv.weight", 0),
    "attention.qkv.bias": ("self_attention.linear_qkv.bias", 0),
    "attention.proj.weight": ("self_attention.linear_proj.weight", 1),
    "attention.proj.bias": ("self_attention.linear_proj.bias", None),
    "mlp_norm.weight": ("mlp.linear_fc1.layer_norm_weight", None),
    "mlp_norm.bias": ("mlp.linear_fc1.layer_norm_bias", None),
    "mlp.up.weight": ("mlp.linear_fc1.weight", 0),
    "mlp.up.bias": ("mlp.linear_fc1.bias", 0),
    "mlp.down.weight": ("mlp.linear_fc2.weight", 1),
    "mlp.down.bias": ("mlp.linear_fc2.bias", None),
}


def write_megatron(
    source: Path, folder: Path, *, step: int, num_heads: int, num_groups: int, kind: str, tp: int = 2
) -> None:
    """Write iteration `step` of a `--save` folder into `folder`, with its optimizer in one of the formats."""
    tensors = read_tensors(source / f"iter_{step:07d}", "")
    masters = {**_take(tensors, "model/"), **_take(tensors, "optimizer/master.")}
    states = {
        ("param" if kind == "fully_reshardable" else "fp32_param"): masters,
        "exp_avg": _take(tensors, "optimizer/exp_avg."),
        "exp_avg_sq": _take(tensors, "optimizer/exp_avg_sq."),
    }
    out = dict(_convert(_take(tensors, "model/"), num_heads, num_groups, lambda whole, dim, halves: whole))

    def cut(whole: Tensor, dim: int | None, halves: int) -> Tensor:
        if kind != "fully_sharded_model_space" or whole.dim() == 1:  # one dim: flattened already
            return whole
        counts = [1] * whole.dim()
        if whole.dim() > 1 and halves:
            counts[0] = len(whole)  # a rank holds one layer
        if dim is not None:
            counts[dim + bool(halves)] *= tp * max(halves, 1)
        return cut_and_flatten(whole, counts)

    for name, own in states.items():
        for key, tensor in _convert(own, num_heads, num_groups, cut).items():
            out[f"optimizer.state.{name}.{key}"] = tensor
    path = folder / f"iter_{step:07d}"
    path.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is alone
        dcp.save(out, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))


def cut_and_flatten(whole: Tensor, counts: list[int]) -> Tensor:
    """`[X, Y, ...]` cut into `counts` parts a dim, each part in a row: `[X / x, Y / y, ..., x y ...]`."""
    rows = [whole]
    for dim, count in enumerate(counts):
        rows = [part for row in rows for part in row.chunk(count, dim)]
    return torch.stack([row.reshape(-1) for row in rows]).reshape(*counts, -1)


def _take(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _convert(
    own: Mapping[str, Tensor], num_heads: int, num_groups: int, cut: Callable[[Tensor, int | None, int], Tensor]
) -> dict[str, Tensor]:
    """Weights, or states of them, by Megatron's names; layers are stacked. `cut` gets the dim that is cut, and for a
    stack 1, for one of two halves 2.
    """
    found = {key: cut(own[name], dim, 0) for name, (key, dim) in OUTER.items() if name in own}
    num_layers = 1 + max(int(name.split(".")[1]) for name in own if name.startswith("blocks."))
    for inner, (key, dim) in INNER.items():
        if f"blocks.0.{inner}" not in own:
            continue
        layers = []
        for layer in range(num_layers):
            tensor = own[f"blocks.{layer}.{inner}"]
            if ".qkv." in inner:
                tensor = _interleave(tensor, num_heads, num_groups)
            gate = own.get(f"blocks.{layer}.{inner.replace('.up.', '.gate.')}") if ".up." in inner else None
            layers.append(tensor if gate is None else torch.cat([gate, tensor]))
        found[f"decoder.layers.{key}"] = cut(torch.stack(layers), dim, 1 if gate is None else 2)
    return found


def _interleave(rows: Tensor, num_heads: int, num_groups: int) -> Tensor:
    """All queries, keys and values as groups: some queries, their key, their value."""
    width = len(rows) // (num_heads + 2 * num_groups)
    queries, keys, values = rows.split([num_heads * width, num_groups * width, num_groups * width])
    each = num_heads // num_groups * width
    parts = []
    for group in range(num_groups):
        parts += [queries[group * each : (group + 1) * each]]
        parts += [rest[group * width : (group + 1) * width] for rest in (keys, values)]
    return torch.cat(parts)
