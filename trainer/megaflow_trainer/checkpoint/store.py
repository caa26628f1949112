"""One checkpoint is one folder, `iter_0000010/`: files of tensors, `tensors.json` which says what lies where, and
`state.json` with everything else.

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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megaflow.errors import CheckpointError, FileAccessError
from megaflow_trainer.checkpoint.layout import LAYOUT, SUFFIX
from megaflow_trainer.checkpoint.parts import sum_file
from megaflow_trainer.parallel.collectives import do_on_first, gather_objects

FORMAT = 2
"""1: whole tensors in model, optimizer and rng.safetensors. 2: pieces, described by tensors.json."""
POINTER = "latest_checkpointed_iteration.txt"
STATE = "state.json"
_ASIDE, _DOOMED = ".writing", ".deleting"
_SUM = "sha256"


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint must hold to be of use: entries of the state by name and type."""

    entries: Mapping[str, type] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Found:
    """The checkpoint to go on from, if there is one, and a line for each that was passed over, with the reason."""

    path: Path | None
    passed_over: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Keeping:
    """Which checkpoints stay: the newest `last` (0: all), and those of iterations divisible by `every` (0: none)."""

    last: int = 0
    every: int = 0


KEEP_ALL = Keeping()
ANYTHING = Contents()


def name_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of an iteration lies."""
    return root / f"iter_{step:07d}"


def name_aside(root: Path, step: int) -> Path:
    """Where it is written until it is complete."""
    return root / f"iter_{step:07d}{_ASIDE}"


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
        for leftover in [*root.glob(f"iter_*{_ASIDE}"), *root.glob(f"iter_*{_DOOMED}")]:
            shutil.rmtree(leftover)
    except OSError as error:
        raise cannot_write(root, error) from None


def make_aside(root: Path, step: int) -> None:
    """Make an empty folder aside for a checkpoint; called by one rank.

    Raises:
        OSError: if the disk refuses.
    """
    aside = name_aside(root, step)
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(parents=True)


def publish(
    root: Path,
    step: int,
    state: Mapping[str, Any],
    *,
    layout: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Any]],
    keeping: Keeping = KEEP_ALL,
) -> Path:
    """Complete a checkpoint whose tensors are on the disk, give it its name, move the pointer, and only then remove
    those that need not be kept; called by one rank.

    Args:
        root: the `--save` folder.
        step: the iteration that is complete.
        state: everything that is no tensor, JSON.
        layout: what lies where (`layout.describe`).
        files: size and sum of each file of tensors, by name.
        keeping: which checkpoints stay.

    Raises:
        OSError: if the disk refuses; the checkpoints before this one are untouched.
    """
    aside, final = name_aside(root, step), name_folder(root, step)
    text = json.dumps(layout, indent=0)
    _write_text(aside / LAYOUT, text)
    described = {"bytes": len(text.encode()), _SUM: hashlib.sha256(text.encode()).hexdigest()}
    whole = {**state, "format": FORMAT, "iteration": step, "files": {**files, LAYOUT: described}}
    _write_text(aside / STATE, json.dumps({**whole, _SUM: sum_state(whole)}, indent=1))
    _flush_folder(aside)
    if final.exists():  # only a folder that the pointer does not name can be in the way
        _remove(final)
    aside.rename(final)
    _flush_folder(root)
    _write_text(root / f"{POINTER}{_ASIDE}", f"{step}\n")
    (root / f"{POINTER}{_ASIDE}").rename(root / POINTER)
    _flush_folder(root)
    for path in list_superfluous(root, step, keeping):
        _remove(path)
    return final


def list_superfluous(root: Path, step: int, keeping: Keeping) -> list[Path]:
    """The checkpoints before that of `step` that need not be kept, oldest first.

    Later ones, which a run that went on from an earlier one leaves, are left alone.
    """
    if keeping.last == 0:
        return []
    complete = [path for path in _list_folders(root) if (path / STATE).is_file() and count_iterations(path) < step]
    complete.sort(key=count_iterations)
    rest = complete[: len(complete) - (keeping.last - 1)] if keeping.last <= len(complete) else []
    return [path for path in rest if keeping.every == 0 or count_iterations(path) % keeping.every]


def find_checkpoint(root: Path, contents: Contents = ANYTHING, group: dist.ProcessGroup | None = None) -> Found:
    """Look for the checkpoint to go on from: the one the pointer names if it is good, else the last good one.

    Every byte of those that are looked at is read and compared with its sum; the ranks of `group` share the files, and
    all come to the same answer.

    Raises:
        CheckpointError: if there are checkpoints, or a pointer to one, and none is good: a fresh start would overwrite
            what may still be saved by hand.
    """
    order, passed_over = do_on_first(lambda: _list_candidates(root), group)
    for path in order:
        fault = find_damage(path, contents, group)
        if fault is None:
            return Found(path, tuple(passed_over))
        passed_over = [*passed_over, f"{path}: {fault}"]
    if passed_over:
        raise CheckpointError(
            f"{root}: none of its checkpoints can be loaded ({'; '.join(passed_over)}); "
            "move the folder away, or choose another --save"
        )
    return Found(None, ())


def _list_candidates(root: Path) -> tuple[list[Path], list[str]]:
    named, passed_over = _read_pointer(root)
    order = [name_folder(root, named)] if named is not None else []
    order += [path for path in sorted(_list_folders(root), key=count_iterations, reverse=True) if path not in order]
    return order, passed_over


def _list_folders(root: Path) -> list[Path]:
    return [path for path in root.glob("iter_*") if path.suffix not in (_ASIDE, _DOOMED)]


def find_damage(path: Path, contents: Contents = ANYTHING, group: dist.ProcessGroup | None = None) -> str | None:
    """Why a folder is not a good checkpoint; None if it is one. All ranks of `group` return the same."""
    fault, files = do_on_first(lambda: _check_state(path, contents), group)
    if fault is not None:
        return fault
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
    own = dict(sorted(files.items())[rank::size])
    found = [fault for fault in gather_objects(_check_files(path, own), group) if fault is not None]
    return found[0] if found else None


def _check_state(path: Path, contents: Contents) -> tuple[str | None, dict[str, dict[str, Any]]]:
    """What is wrong with the state of a checkpoint, or None and the files that it lists."""
    if not path.is_dir():
        return "there is no such folder", {}
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{STATE} is missing", {}
    except OSError as error:
        return f"cannot be read: {error.strerror}", {}
    except (ValueError, RecursionError):  # not JSON, not UTF-8
        return f"{STATE} is damaged: not JSON", {}
    fault = _find_fault(state, contents)
    if fault is not None:
        return f"{STATE} is damaged: {fault}", {}
    if state["iteration"] != count_iterations(path):
        return f"{STATE} is of iteration {state['iteration']}", {}
    suffix = SUFFIX if state.get("format", 1) == 1 else ""
    return None, {f"{name}{suffix}": listed for name, listed in state["files"].items()}


def _find_fault(state: Any, contents: Contents) -> str | None:
    """What is wrong with the content of a state."""
    if not isinstance(state, dict):
        return "not a mapping"
    for name, kind in {"iteration": int, "files": dict, _SUM: str, **contents.entries}.items():
        if not isinstance(state.get(name), kind):
            return f"{name} is missing or not of type {kind.__name__}"
    if state.get("format", 1) not in (1, FORMAT):
        return f"format {state['format']} is not one that this version reads (1 and {FORMAT})"
    for name, listed in state["files"].items():
        if not isinstance(listed, dict) or not {"bytes", _SUM} <= listed.keys():
            return f"files.{name} does not give bytes and {_SUM}"
    for name in ("model", "optimizer", "rng") if state.get("format", 1) == 1 else (LAYOUT,):
        if name not in state["files"]:
            return f"files does not list {name}"
    if state[_SUM] != sum_state({name: value for name, value in state.items() if name != _SUM}):
        return "it was changed after it was written"
    return None


def _check_files(path: Path, files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What is wrong with files of a checkpoint."""
    for name, listed in files.items():
        file = path / name
        try:
            size = file.stat().st_size
            if size != listed["bytes"]:
                return f"{name} has {size} bytes instead of {listed['bytes']}"
            if sum_file(file) != listed[_SUM]:
                return f"{name} is damaged: its bytes are not those that were written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def count_iterations(path: Path) -> int:
    """The number in the name of a checkpoint's folder; -1 if there is none."""
    match = re.fullmatch(r"iter_(\d{7,18})", path.name, re.ASCII)
    return int(match[1]) if match else -1


def sum_state(state: Mapping[str, Any]) -> str:
    """The sum of a state's content, however the file is laid out."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def read_state(path: Path) -> dict[str, Any]:
    """What was saved beside the tensors, of a checkpoint that `find_checkpoint` has found good.

    Raises:
        CheckpointError: if it cannot be read any more.
    """
    try:
        state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / STATE} cannot be read: {error}") from None
    return state


def _remove(path: Path) -> None:
    """Remove a checkpoint: it loses its name first, so that a kill half-way leaves nothing that looks complete."""
    doomed = path.with_name(f"{path.name}{_DOOMED}")
    if doomed.exists():
        shutil.rmtree(doomed)
    path.rename(doomed)
    shutil.rmtree(doomed)


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


def cannot_write(path: Path, error: OSError | str) -> FileAccessError:
    """The error of a folder that refuses."""
    reason = error if isinstance(error, str) else error.strerror or error
    return FileAccessError(f"{path}: cannot be written: {reason}; choose another --save folder")
