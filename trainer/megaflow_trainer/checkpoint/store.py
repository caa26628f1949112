"""One checkpoint is one folder, `iter_0000010/`, of safetensors files and `state.json`.

A folder under its final name is complete: it was written aside, flushed to the disk and renamed. `state.json` lists the
files with their sizes, so that a folder that was damaged later is known too. `latest_checkpointed_iteration.txt` names
the one to go on from; if it is missing or wrong, the last complete folder is taken.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megaflow.errors import CheckpointError, FileAccessError

POINTER = "latest_checkpointed_iteration.txt"
_STATE = "state.json"
_ASIDE = ".writing"


def prepare_folder(root: Path) -> None:
    """Make the folder, prove that it can be written, and clear what a killed writer left.

    Raises:
        FileAccessError: if it cannot be made or written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f"probe{_ASIDE}"
        probe.touch()
        probe.unlink()
        for leftover in root.glob(f"iter_*{_ASIDE}"):
            shutil.rmtree(leftover)
    except OSError as error:
        raise _cannot_write(root, error) from None


def write_checkpoint(root: Path, step: int, files: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any]) -> Path:
    """Write and publish one checkpoint; called by one rank.

    Args:
        root: the `--save` folder.
        step: the iteration that is complete.
        files: tensors by file name (without `.safetensors`).
        state: everything else, JSON.

    Raises:
        FileAccessError: if the disk refuses; the checkpoints before this one are untouched.
    """
    final = root / f"iter_{step:07d}"
    aside = root / f"{final.name}{_ASIDE}"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        sizes = {name: _write_tensors(aside / f"{name}.safetensors", tensors) for name, tensors in files.items()}
        _write_text(aside / _STATE, json.dumps({**state, "iteration": step, "files": sizes}, indent=1))
        _flush_folder(aside)
        shutil.rmtree(final, ignore_errors=True)  # only a folder that the pointer does not name can be in the way
        aside.rename(final)
        _flush_folder(root)
        _write_text(root / f"{POINTER}{_ASIDE}", f"{step}\n")
        (root / f"{POINTER}{_ASIDE}").rename(root / POINTER)
        _flush_folder(root)
    except OSError as error:
        raise _cannot_write(final, error) from None
    return final


def find_checkpoint(root: Path) -> Path | None:
    """The checkpoint to go on from: the one the pointer names if it is complete, else the last complete one."""
    named = _read_pointer(root)
    found = sorted(path for path in root.glob("iter_*") if re.fullmatch(r"iter_\d{7,}", path.name))
    order = [root / f"iter_{named:07d}"] if named is not None else []
    order += sorted(found, key=lambda path: int(path.name[5:]), reverse=True)
    return next((path for path in order if is_complete(path)), None)


def is_complete(path: Path) -> bool:
    """Whether a folder holds a readable state and every file it lists, each of the size it says."""
    try:
        state = json.loads((path / _STATE).read_text(encoding="utf-8"))
        return all((path / f"{name}.safetensors").stat().st_size == size for name, size in state["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def read_state(path: Path) -> dict[str, Any]:
    """What was saved beside the tensors."""
    state: dict[str, Any] = json.loads((path / _STATE).read_text(encoding="utf-8"))
    return state


def read_tensors(path: Path, name: str) -> dict[str, Tensor]:
    """All tensors of one file, on the CPU.

    Raises:
        CheckpointError: if the file is damaged.
    """
    try:
        with safe_open(path / f"{name}.safetensors", framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path / name}.safetensors cannot be read: {error}") from None


def fill_tensors(targets: Mapping[str, Tensor], source: Mapping[str, Tensor], path: Path) -> None:
    """Copy saved tensors into those of the run, by name; all names and shapes are compared before any is changed.

    Raises:
        CheckpointError: naming the first tensor that is missing, unknown or of another shape, with both shapes.
    """
    for name, target in targets.items():
        if name not in source:
            raise CheckpointError(f"{path}: tensor {name} of this model is not in the checkpoint")
        if source[name].shape != target.shape:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {tuple(source[name].shape)} in the checkpoint and "
                f"{tuple(target.shape)} in this run; start with the model flags that the checkpoint was made with"
            )
    for name in source:
        if name not in targets:
            raise CheckpointError(f"{path}: tensor {name} of the checkpoint is not in this model")
    for name, target in targets.items():
        target.copy_(source[name])


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> int:
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # what it raises on a full disk, too
        raise OSError(str(error)) from None
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return path.stat().st_size


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_pointer(root: Path) -> int | None:
    try:
        return int((root / POINTER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _cannot_write(path: Path, error: OSError) -> FileAccessError:
    return FileAccessError(f"{path}: cannot be written: {error.strerror or error}; choose another --save folder")
