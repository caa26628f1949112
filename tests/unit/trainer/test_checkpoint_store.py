"""A checkpoint is complete or does not count, at whatever moment the writer was killed."""

from __future__ import annotations

import json
import os
import shutil
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
    path = store.find_checkpoint(root).path
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


def flip(path: Path) -> None:
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def change_state(path: Path, **entries: object) -> None:
    """A state with other entries and the right sum, as another program might write it; None leaves an entry out."""
    state = json.loads((path / "state.json").read_text()) | entries
    state = {name: value for name, value in state.items() if value is not None and name != "sha256"}
    (path / "state.json").write_text(json.dumps({**state, "sha256": store.sum_state(state)}))


def edit_state(path: Path) -> None:
    (path / "state.json").write_text((path / "state.json").read_text().replace('"note": 10', '"note": 11'))


def binary_state(path: Path) -> None:
    (path / "state.json").write_bytes(b"\xff\xfe")


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (cut, "model.safetensors has 95 bytes instead of 96"),
    (flip, "model.safetensors is damaged"),
    (lose, "rng.safetensors is missing"),
    (break_state, "state.json is damaged: not JSON"),
    (binary_state, "state.json is damaged: not JSON"),
    (odd_state, "state.json is damaged: not a mapping"),
    (lose_state, "state.json is missing"),
    (edit_state, "state.json is damaged: it was changed"),
    (lambda path: change_state(path, iteration="ten"), "iteration is missing or not of type int"),
    (lambda path: change_state(path, iteration=7), "state.json is of iteration 7"),
    (lambda path: change_state(path, files=None), "files is missing or not of type dict"),
    (lambda path: change_state(path, files={"model": 96}), "files.model does not give bytes and sha256"),
    (lambda path: change_state(path, files={}), "files does not list model"),
    (lambda path: change_state(path, note=None), "note is missing or not of type int"),
    (lambda path: change_state(path, note="x"), "note is missing or not of type int"),
    (shutil.rmtree, "there is no such folder"),
]
CONTENTS = store.Contents(files=("model", "rng"), entries={"note": int})


@pytest.mark.parametrize("damage, reason", DAMAGES)
def test_a_damaged_step_is_passed_over_and_told(tmp_path: Path, damage: Callable[[Path], object], reason: str) -> None:
    good, bad = write(tmp_path, 5), write(tmp_path, 10)
    damage(bad)
    found = store.find_checkpoint(tmp_path, CONTENTS)
    assert found.path == good
    (line,) = found.passed_over
    assert line.startswith(f"{bad}: ")
    assert reason in line


@pytest.mark.parametrize("damage, reason", DAMAGES)
def test_with_none_left_a_fresh_start_is_refused(tmp_path: Path, damage: Callable[[Path], object], reason: str) -> None:
    damage(write(tmp_path, 10))
    with pytest.raises(CheckpointError, match="move the folder away, or choose another --save") as caught:
        store.find_checkpoint(tmp_path, CONTENTS)
    assert reason in str(caught.value)


def test_a_folder_of_another_program_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "iter_0000100" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"state\.json is missing"):
        store.find_checkpoint(tmp_path)


def test_a_folder_without_checkpoints_gives_none(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "missing"):
        assert store.find_checkpoint(root) == store.Found(None, ())


def test_a_first_checkpoint_that_was_cut_short_is_a_fresh_start(tmp_path: Path) -> None:
    (tmp_path / "iter_0000005.writing").mkdir()
    assert store.find_checkpoint(tmp_path) == store.Found(None, ())


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
