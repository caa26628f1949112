"""A checkpoint is complete or does not count, at whatever moment the writer was killed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from megaflow.errors import CheckpointError, FileAccessError
from megaflow_trainer.checkpoint import store

FILES = {"model": {"w": torch.arange(6.0).view(2, 3)}, "rng": {"cpu.0": torch.zeros(8, dtype=torch.uint8)}}


class KilledError(BaseException):
    """Stands for SIGKILL: nothing catches it, so the disk holds what it held at that moment."""


def write(root: Path, step: int) -> Path:
    return store.write_checkpoint(root, step, FILES, {"note": step})


def find_step(root: Path) -> int | None:
    path = store.find_checkpoint(root)
    return None if path is None else store.read_state(path)["iteration"]


def kill_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    """Raise at the given call of those that change the disk for good."""
    count = [0]

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == moment:
                raise KilledError
            return function(*args, **kwargs)

        return counted

    monkeypatch.setattr(os, "fsync", wrap(os.fsync))
    for name in ("rename", "mkdir"):
        monkeypatch.setattr(Path, name, wrap(getattr(Path, name)))
    monkeypatch.setattr(store, "save_file", wrap(store.save_file))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = write(tmp_path, 5)
    assert torch.equal(store.read_tensors(path, "model")["w"], FILES["model"]["w"])
    assert store.read_state(path)["note"] == 5
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "5\n"


def test_killed_at_any_moment_of_saving_a_complete_step_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = 0
    for moment in range(1, 40):
        root = tmp_path / str(moment)
        write(root, 5)
        with monkeypatch.context() as patch:
            kill_at(patch, moment)
            try:
                write(root, 10)
            except KilledError:
                moments += 1
        assert find_step(root) in (5, 10)
        store.prepare_folder(root)
        write(root, 10)
        assert find_step(root) == 10
        assert not list(root.glob("*.writing"))
    assert moments >= 10


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, 5)
    write(tmp_path, 5)
    assert find_step(tmp_path) == 5


@pytest.mark.parametrize("pointer", [None, "", "words", "7", "-3"])
def test_without_a_good_pointer_the_last_complete_step_is_taken(tmp_path: Path, pointer: str | None) -> None:
    for step in (5, 10):
        write(tmp_path, step)
    if pointer is None:
        (tmp_path / store.POINTER).unlink()
    else:
        (tmp_path / store.POINTER).write_text(pointer)
    assert find_step(tmp_path) == 10


def test_a_good_pointer_is_followed(tmp_path: Path) -> None:
    for step in (5, 10):
        write(tmp_path, step)
    (tmp_path / store.POINTER).write_text("5")
    assert find_step(tmp_path) == 5


def cut(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def lose(path: Path) -> None:
    (path / "rng.safetensors").unlink()


def break_state(path: Path) -> None:
    (path / "state.json").write_text('{"iteration": 10, "fi')


def odd_state(path: Path) -> None:
    (path / "state.json").write_text(json.dumps([1, 2]))


def lose_state(path: Path) -> None:
    (path / "state.json").unlink()


@pytest.mark.parametrize("damage", [cut, lose, break_state, odd_state, lose_state])
def test_a_damaged_step_is_passed_over(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    write(tmp_path, 5)
    damage(write(tmp_path, 10))
    assert find_step(tmp_path) == 5


def test_a_folder_without_checkpoints_gives_none(tmp_path: Path) -> None:
    assert store.find_checkpoint(tmp_path) is None
    assert store.find_checkpoint(tmp_path / "missing") is None


def test_another_shape_names_the_tensor_and_both_shapes(tmp_path: Path) -> None:
    target = {"w": torch.zeros(2, 4)}
    with pytest.raises(
        CheckpointError, match=r"tensor w has shape \(2, 3\) in the checkpoint and \(2, 4\) in this run"
    ):
        store.fill_tensors(target, FILES["model"], tmp_path)


def test_missing_and_unknown_tensors_are_named_before_anything_is_changed(tmp_path: Path) -> None:
    target = {"w": torch.zeros(2, 3), "x": torch.zeros(1)}
    with pytest.raises(CheckpointError, match="tensor x of this model is not in the checkpoint"):
        store.fill_tensors(target, FILES["model"], tmp_path)
    with pytest.raises(CheckpointError, match="tensor w of the checkpoint is not in this model"):
        store.fill_tensors({}, FILES["model"], tmp_path)
    assert target["w"].count_nonzero() == 0


def test_a_file_that_is_not_safetensors_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"junk" * 10)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        store.read_tensors(tmp_path, "model")


def test_a_full_disk_leaves_the_earlier_step_and_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 5)

    def refuse(*_: Any) -> None:
        raise SafetensorError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "save_file", refuse)
        with pytest.raises(FileAccessError, match="cannot be written: No space left on device"):
            write(tmp_path, 10)
    assert find_step(tmp_path) == 5


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileAccessError, match="cannot be written: Not a directory; choose another --save folder"):
        store.prepare_folder(tmp_path / "file" / "inside")
