"""A checkpoint is complete or does not count, at whatever moment the writer was killed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaflow.errors import CheckpointError, FileAccessError
from megaflow_trainer.checkpoint import dcp, parts, store
from megaflow_trainer.checkpoint.dcp import PartWriter
from megaflow_trainer.checkpoint.saver import Saver

TENSORS = {"model/w": torch.arange(6.0).view(2, 3), "rng/cpu.0": torch.zeros(8, dtype=torch.uint8)}
PART = "part_00000.safetensors"


class KilledError(BaseException):
    """Stands for SIGKILL: nothing catches it, so the disk holds what it held at that moment."""


def write(root: Path, step: int) -> Path:
    saver = Saver(root, None)
    saver.start(step, TENSORS, {"note": step})
    saver.finish()
    return store.name_folder(root, step)


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
    monkeypatch.setattr(dcp, "write_part", wrap(dcp.write_part))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = write(tmp_path, 5)
    assert torch.equal(dcp.read_tensors(path, "model/")["w"], TENSORS["model/w"])
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
            writer = PartWriter(
                store.name_aside(root, 10),
                prepare=lambda root=root: store.make_aside(root, 10),
                finish=lambda layout, files, root=root: store.publish(
                    root, 10, {"note": 10}, layout=layout, files=files
                ),
                on_progress=lambda: None,
            )
            try:
                dcp.save_tensors(TENSORS, writer, None, copies=TENSORS)
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
    file = path / PART
    file.write_bytes(file.read_bytes()[:-1])


def lose(path: Path) -> None:
    (path / PART).unlink()


def break_state(path: Path) -> None:
    (path / "state.json").write_text('{"iteration": 10, "fi')


def odd_state(path: Path) -> None:
    (path / "state.json").write_text(json.dumps([1, 2]))


def lose_state(path: Path) -> None:
    (path / "state.json").unlink()


def flip(path: Path) -> None:
    file = path / PART
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
    (cut, f"{PART} has 175 bytes instead of 176"),
    (flip, f"{PART} is damaged"),
    (lose, f"{PART} is missing"),
    (lambda path: (path / PART).write_bytes(b""), f"{PART} has 0 bytes instead of 176"),
    (lambda path: (path / "tensors.json").write_text("{}"), "tensors.json has 2 bytes instead of"),
    (lambda path: (path / "tensors.json").unlink(), "tensors.json is missing"),
    (lambda path: change_state(path, format=3), "format 3 is not one that this version reads (1 and 2)"),
    (break_state, "state.json is damaged: not JSON"),
    (binary_state, "state.json is damaged: not JSON"),
    (odd_state, "state.json is damaged: not a mapping"),
    (lose_state, "state.json is missing"),
    (edit_state, "state.json is damaged: it was changed"),
    (lambda path: change_state(path, iteration="ten"), "iteration is missing or not of type int"),
    (lambda path: change_state(path, iteration=7), "state.json is of iteration 7"),
    (lambda path: change_state(path, files=None), "files is missing or not of type dict"),
    (lambda path: change_state(path, files={"tensors.json": 96}), "files.tensors.json does not give bytes and sha256"),
    (lambda path: change_state(path, files={}), "files does not list tensors.json"),
    (lambda path: change_state(path, note=None), "note is missing or not of type int"),
    (lambda path: change_state(path, note="x"), "note is missing or not of type int"),
    (shutil.rmtree, "there is no such folder"),
]
CONTENTS = store.Contents(entries={"note": int})


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


SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


def test_another_shape_names_the_tensor_and_both_shapes(tmp_path: Path) -> None:
    target = {"model/w": (2, 4)}
    with pytest.raises(
        CheckpointError, match=r"tensor w has shape \(2, 3\) in the checkpoint and \(2, 4\) in this run"
    ):
        dcp.check_tensors(tmp_path, target, saved=SHAPES, known="model/")


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    target = {"model/w": (2, 3), "model/x": (1,)}
    with pytest.raises(CheckpointError, match=r"tensor x of this model is not in the checkpoint$"):
        dcp.check_tensors(tmp_path, target, saved=SHAPES, known="model/")
    with pytest.raises(CheckpointError, match="tensor w of the checkpoint is not in this model"):
        dcp.check_tensors(tmp_path, {}, saved=SHAPES, known="model/")
    with pytest.raises(CheckpointError, match=r"m\.w .* not in the checkpoint; --no-load-optim begins with fresh"):
        dcp.check_tensors(tmp_path, {"optimizer/m.w": (1,)}, saved=SHAPES, known="model/")


def test_a_file_that_is_not_safetensors_is_an_error_in_words(tmp_path: Path) -> None:
    path = write(tmp_path, 5)
    (path / PART).write_bytes(b"junk" * 10)
    with pytest.raises(CheckpointError, match=rf"{PART} cannot be read"):
        dcp.read_tensors(path, "model/")


def test_tensors_of_every_dtype_and_shape_are_read_back_by_the_safetensors_package(tmp_path: Path) -> None:
    tensors = {
        f"{dtype}-{shape}": torch.arange(24).reshape(4, 6).to(dtype)[:, ::2].reshape(shape)
        for dtype in parts.DTYPES
        for shape in ((12,), (3, 4), (1, 12, 1))
    } | {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "turned": torch.arange(6.0).view(2, 3).T}
    size, total = parts.write_part(tmp_path / "x.safetensors", tensors, on_progress=lambda: None)
    assert ((tmp_path / "x.safetensors").stat().st_size, parts.sum_file(tmp_path / "x.safetensors")) == (size, total)
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].float(), tensor.float())


def test_the_first_format_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "iter_0000003"
    path.mkdir()
    files = {"model": {"w": torch.arange(6.0).view(2, 3)}, "optimizer": {"m.w": torch.ones(3)}, "rng": {"cpu.0": ROW}}
    listed = {}
    for name, tensors in files.items():
        save_file(tensors, path / f"{name}.safetensors")
        file = path / f"{name}.safetensors"
        listed[name] = {"bytes": file.stat().st_size, "sha256": parts.sum_file(file)}
    state = {"note": 3, "iteration": 3, "files": listed}
    (path / "state.json").write_text(json.dumps({**state, "sha256": store.sum_state(state)}))
    assert store.find_checkpoint(tmp_path, CONTENTS).path == path
    assert dcp.list_shapes(path) == {"model/w": (2, 3), "optimizer/m.w": (3,), "rng/cpu.0": (8,)}
    assert torch.equal(dcp.read_tensors(path, "model/")["w"], files["model"]["w"])
    (path / "rng.safetensors").unlink()
    assert store.find_damage(path, CONTENTS) == "rng.safetensors is missing"


ROW = torch.arange(8, dtype=torch.uint8)


@pytest.mark.parametrize(
    "keeping, kept",
    [
        (store.Keeping(), [2, 3, 4, 5, 6]),
        (store.Keeping(last=2), [5, 6]),
        (store.Keeping(last=2, every=3), [3, 5, 6]),
        (store.Keeping(last=1, every=2), [2, 4, 6]),
    ],
)
def test_old_checkpoints_are_removed_when_a_new_one_is_published(
    tmp_path: Path, keeping: store.Keeping, kept: list[int]
) -> None:
    saver = Saver(tmp_path, None, keeping=keeping)
    (tmp_path / "iter_0000001").mkdir()  # no checkpoint: whatever it is, it is left alone
    for step in range(2, 7):
        saver.start(step, TENSORS, {})
    saver.finish()
    assert sorted(store.count_iterations(path) for path in tmp_path.glob("iter_*")) == [1, *kept]
    assert find_step(tmp_path) == 6


def test_a_run_that_went_on_from_an_earlier_step_keeps_what_it_saves(tmp_path: Path) -> None:
    for step in (3, 6, 9):
        write(tmp_path, step)
    saver = Saver(tmp_path, None, keeping=store.Keeping(last=1))
    saver.start(4, TENSORS, {})
    saver.finish()
    assert sorted(store.count_iterations(path) for path in tmp_path.glob("iter_*")) == [4, 6, 9]
    assert find_step(tmp_path) == 4


def test_the_last_checkpoint_is_there_before_an_older_one_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def note(path: Path) -> None:
        seen.append((path.name, (tmp_path / store.POINTER).read_text(), find_step(tmp_path)))

    write(tmp_path, 1)
    monkeypatch.setattr(store, "_remove", note)
    saver = Saver(tmp_path, None, keeping=store.Keeping(last=1))
    saver.start(2, TENSORS, {})
    saver.finish()
    assert seen == [("iter_0000001", "2\n", 2)]


def test_training_may_change_what_is_being_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    write_part = parts.write_part

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert gate.wait(60)
        return write_part(*args, **kwargs)

    monkeypatch.setattr(dcp, "write_part", slow)
    weight = torch.ones(4)
    saver = Saver(tmp_path, None)
    saver.start(1, {"model/w": weight}, {})
    assert find_step(tmp_path) is None
    assert saver.take_saved() == []
    weight.zero_()
    gate.set()
    saver.finish()
    assert [saved.step for saved in saver.take_saved()] == [1]
    assert dcp.read_tensors(store.name_folder(tmp_path, 1), "model/")["w"].tolist() == [1.0] * 4


def test_a_full_disk_leaves_the_earlier_step_and_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 5)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(dcp, "write_part", refuse)
        saver = Saver(tmp_path, None)
        saver.start(10, TENSORS, {})
        with pytest.raises(FileAccessError, match="cannot be written: No space left on device"):
            saver.finish()
    assert find_step(tmp_path) == 5


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileAccessError, match="cannot be written: Not a directory; choose another --save folder"):
        store.prepare_folder(tmp_path / "file" / "inside")
