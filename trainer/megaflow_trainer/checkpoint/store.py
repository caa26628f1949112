"""One checkpoint is one folder, `iter_0000010/`, of safetensors files and `state.json`.

A folder under its final name is complete: it was written aside, flushed to the disk and renamed. `state.json` lists the
files with their sizes and SHA-256 sums, and holds a sum of itself: a folder that was damaged later is known too.
`latest_checkpointed_iteration.txt` names the one to go on from; if it is missing or wrong, or that folder is damaged,
the last good one is taken, and what was passed over is told.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megaflow.errors import CheckpointError, FileAccessError

POINTER = "latest_checkpointed_iteration.txt"
_STATE = "state.json"
_ASIDE = ".writing"
_SUM = "sha256"
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint must hold to be of use: files by name, entries of the state by name and type."""

    files: Sequence[str] = ()
    entries: Mapping[str, type] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Found:
    """The checkpoint to go on from, if there is one, and a line for each that was passed over, with the reason."""

    path: Path | None
    passed_over: tuple[str, ...]


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
        listed = {name: _write_tensors(aside / f"{name}.safetensors", tensors) for name, tensors in files.items()}
        whole = {**state, "iteration": step, "files": listed}
        _write_text(aside / _STATE, json.dumps({**whole, _SUM: sum_state(whole)}, indent=1))
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


def find_checkpoint(root: Path, contents: Contents = Contents()) -> Found:
    """Look for the checkpoint to go on from: the one the pointer names if it is good, else the last good one.

    Every byte of those that are looked at is read and compared with its sum.

    Raises:
        CheckpointError: if there are checkpoints, or a pointer to one, and none is good: a fresh start would overwrite
            what may still be saved by hand.
    """
    named, passed_over = _read_pointer(root)
    found = [path for path in root.glob("iter_*") if not path.name.endswith(_ASIDE)]
    order = [root / f"iter_{named:07d}"] if named is not None else []
    order += [path for path in sorted(found, key=_count_iterations, reverse=True) if path not in order]
    for path in order:
        fault = find_damage(path, contents)
        if fault is None:
            return Found(path, tuple(passed_over))
        passed_over.append(f"{path}: {fault}")
    if passed_over:
        raise CheckpointError(
            f"{root}: none of its checkpoints can be loaded ({'; '.join(passed_over)}); "
            "move the folder away, or choose another --save"
        )
    return Found(None, ())


def find_damage(path: Path, contents: Contents = Contents()) -> str | None:
    """Why a folder is not a good checkpoint; None if it is one."""
    if not path.is_dir():
        return "there is no such folder"
    try:
        state = json.loads((path / _STATE).read_text(encoding="utf-8"))
        fault = _find_fault(state, contents)
        if fault is not None:
            return f"{_STATE} is damaged: {fault}"
        if state["iteration"] != _count_iterations(path):
            return f"{_STATE} is of iteration {state['iteration']}"
        for name, listed in state["files"].items():
            file = path / f"{name}.safetensors"
            if not file.is_file():
                return f"{file.name} is missing"
            if file.stat().st_size != listed["bytes"]:
                return f"{file.name} has {file.stat().st_size} bytes instead of {listed['bytes']}"
            if _sum_file(file) != listed[_SUM]:
                return f"{file.name} is damaged: its bytes are not those that were written"
    except FileNotFoundError:
        return f"{_STATE} is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError):  # not JSON, not UTF-8
        return f"{_STATE} is damaged: not JSON"
    return None


def _find_fault(state: Any, contents: Contents) -> str | None:
    """What is wrong with the content of a state."""
    if not isinstance(state, dict):
        return "not a mapping"
    for name, kind in {"iteration": int, "files": dict, _SUM: str, **contents.entries}.items():
        if not isinstance(state.get(name), kind):
            return f"{name} is missing or not of type {kind.__name__}"
    for name, listed in state["files"].items():
        if not isinstance(listed, dict) or not {"bytes", _SUM} <= listed.keys():
            return f"files.{name} does not give bytes and {_SUM}"
    for name in contents.files:
        if name not in state["files"]:
            return f"files does not list {name}"
    if state[_SUM] != sum_state({name: value for name, value in state.items() if name != _SUM}):
        return "it was changed after it was written"
    return None


def _count_iterations(path: Path) -> int:
    """The number in the name of a checkpoint's folder; -1 if there is none."""
    match = re.fullmatch(r"iter_(\d{7,18})", path.name, re.ASCII)
    return int(match[1]) if match else -1


def sum_state(state: Mapping[str, Any]) -> str:
    """The sum of a state's content, however the file is laid out."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _sum_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def read_state(path: Path) -> dict[str, Any]:
    """What was saved beside the tensors, of a checkpoint that `find_checkpoint` has found good.

    Raises:
        CheckpointError: if it cannot be read any more.
    """
    try:
        state: dict[str, Any] = json.loads((path / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / _STATE} cannot be read: {error}") from None
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


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write one file; returns what the state says of it."""
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # what it raises on a full disk, too
        raise OSError(str(error)) from None
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, _SUM: _sum_file(path)}


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


def _read_pointer(root: Path) -> tuple[int | None, list[str]]:
    """The iteration that the pointer names, and a line if there is a pointer that names none."""
    path = root / POINTER
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None, []
    except (OSError, ValueError):
        text = ""
    if text.isascii() and text.isdigit() and len(text) <= 18:
        return int(text), []
    return None, [f"{path}: does not name an iteration"]


def _cannot_write(path: Path, error: OSError) -> FileAccessError:
    return FileAccessError(f"{path}: cannot be written: {error.strerror or error}; choose another --save folder")
