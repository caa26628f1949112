"""Initial weights from a checkpoint or a Hugging Face folder, as they are or grown: more layers, tokens, positions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megaflow.errors import CheckpointError
from megaflow_trainer.checkpoint import store
from megaflow_trainer.checkpoint.dcp import read_tensors
from megaflow_trainer.checkpoint.held import Held, as_held, put_whole
from megaflow_trainer.checkpoint.hf import is_hf_folder, read_hf
from megaflow_trainer.checkpoint.megatron import MASTER, find_megatron, list_kinds, read_megatron
from megaflow_trainer.config.sections import ModelConfig
from megaflow_trainer.parallel.collectives import copy_from_first, do_on_first, gather_objects

_GROWN = ("embedding.weight", "head.weight", "positions.weight")
_BLOCK = re.compile(r"blocks\.(\d+)\.")


def read_weights(
    folder: Path, model: ModelConfig | None = None, *, flag: str = "--init-from"
) -> tuple[dict[str, Tensor], Path]:
    """Weights by our names, from a Hugging Face folder, a torch_dist checkpoint of Megatron-Core, or the last complete
    checkpoint of a `--save` folder.

    Args:
        folder: where they are.
        model: the shape of this run, by which Megatron's weights are read.
        flag: what named the folder, for messages.

    Raises:
        CheckpointError: if the folder is none of them.
    """
    if is_hf_folder(folder):
        return read_hf(folder)[1], folder
    megatron = find_megatron(folder)
    if megatron is not None:
        if model is None:
            raise CheckpointError(f"{megatron}: a checkpoint of Megatron-Core is read by a run, with {flag}")
        return read_megatron(megatron, model, MASTER if MASTER in list_kinds(megatron) else ""), megatron
    path = folder if store.find_damage(folder) is None else store.find_checkpoint(folder).path
    if path is None:
        raise CheckpointError(
            f"{flag} {folder}: neither a complete checkpoint (this trainer's or Megatron-Core's torch_dist) nor a "
            "Hugging Face folder"
        )
    return read_full_weights(path), path


def describe_source(path: Path) -> str:
    """Where weights came from, in words."""
    if is_hf_folder(path):
        return f"the Hugging Face folder {path}"
    return f"Megatron-Core's {path}" if find_megatron(path) else str(path)


def read_full_weights(path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint in the greatest precision that it holds."""
    masters = read_tensors(path, "optimizer/master.")
    return {**read_tensors(path, "model/"), **masters}


Shape = tuple[int, ...]


@torch.no_grad()
def fill_weights(
    targets: Mapping[str, Held | Tensor],
    read: Callable[[], tuple[dict[str, Tensor], Path]],
    group: dist.ProcessGroup | None = None,
    *,
    vocab_size: int,
    may_grow: bool,
) -> tuple[Path, list[str]]:
    """Copy saved weights over initial ones; all names and shapes are compared before any is changed.

    With `may_grow`, layers behind the saved ones keep their initial values, and so do the rows of the vocabulary and
    of positions that the saved tables do not have. Rows of padding (from `vocab_size` on) may always be missing.

    The first rank of `group` reads and sends one whole weight after the other; each rank keeps what it holds of it.

    Returns:
        What was read, and what was grown, a line each.

    Raises:
        CheckpointError: on all ranks, naming the first tensor that does not fit, with both shapes and the remedy.
    """
    own = {name: as_held(target) for name, target in targets.items()}
    shapes: dict[str, Shape] = {}
    for part in gather_objects({name: held.shape for name, held in own.items()}, group):
        shapes |= part
    source: dict[str, Tensor] = {}

    def take() -> tuple[Path, list[str], list[tuple[str, Shape, torch.dtype]]]:
        found, path = read()
        saved: dict[str, Shape] = {name: tuple(weight.shape) for name, weight in found.items()}
        check_weights(path, shapes, saved, vocab_size=vocab_size, may_grow=may_grow)
        source.update(found)
        lines = _describe_growth(shapes, saved, _count_blocks(saved))
        return path, lines, [(name, saved[name], found[name].dtype) for name in saved]

    path, lines, order = do_on_first(take, group)
    for name, shape, dtype in order:
        whole = source.pop(name).contiguous() if source else torch.empty(shape, dtype=dtype)
        copy_from_first(whole, group)
        if name in own:
            put_whole(own[name], whole)
    return path, lines


def check_weights(
    path: Path, targets: Mapping[str, Shape], saved: Mapping[str, Shape], *, vocab_size: int, may_grow: bool
) -> None:
    """Compare names and whole shapes of saved weights with those of the model.

    Raises:
        CheckpointError: naming the first tensor that does not fit, with both shapes and the remedy.
    """
    depth = _count_blocks(saved)
    unknown = next((name for name in saved if name not in targets), None)
    if unknown is not None:
        raise CheckpointError(f"{path}: tensor {unknown} of the checkpoint is not in this model")
    for name, target in targets.items():
        fault = _find_fault(name, target, saved.get(name), depth=depth, vocab_size=vocab_size, may_grow=may_grow)
        if fault:
            raise CheckpointError(f"{path}: {fault}")


def _find_fault(
    name: str, target: Shape, saved: Shape | None, *, depth: int, vocab_size: int, may_grow: bool
) -> str | None:
    block = _BLOCK.match(name)
    is_new_layer = block is not None and int(block[1]) >= depth
    hint = "; --grow keeps initial values where the checkpoint has none"
    if saved is None:
        if is_new_layer and may_grow:
            return None
        return f"tensor {name} of this model is not in the checkpoint" + (hint if is_new_layer else "")
    if saved == target:
        return None
    is_longer = name in _GROWN and saved[1:] == target[1:] and saved[0] < target[0]
    is_padding = name != "positions.weight" and vocab_size <= min(saved[0], target[0])
    if (is_longer and may_grow) or (name in _GROWN and is_padding and saved[1:] == target[1:]):
        return None
    shapes = f"tensor {name} has shape {saved} in the checkpoint and {target} in this run"
    return shapes + (hint if is_longer else "; start with the model flags that the checkpoint was made with")


def _count_blocks(weights: Iterable[str]) -> int:
    return 1 + max((int(block[1]) for name in weights if (block := _BLOCK.match(name))), default=-1)


def _describe_growth(targets: Mapping[str, Shape], source: Mapping[str, Shape], depth: int) -> list[str]:
    lines = []
    if _count_blocks(targets) > depth:
        lines.append(f"layers {depth} to {_count_blocks(targets) - 1} keep their initial weights")
    for name in _GROWN:
        if name in source and source[name][0] < targets[name][0]:
            lines.append(f"{name}: rows {source[name][0]} to {targets[name][0] - 1} keep their initial values")
    return lines
