"""Checkpoints of several ranks: each writes its part, all choose alike, and what is damaged is passed over by all."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from helpers.pairs import write_pair
from helpers.ranks import RankPool
from helpers.runs import read_curve, run_tiny
from megaflow.errors import FileAccessError, MegaflowError
from megaflow_trainer.checkpoint import dcp, store
from megaflow_trainer.checkpoint.saver import Saver
from megaflow_trainer.parallel.collectives import own_group
from megaflow_trainer.parallel.mesh import Mesh

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

LENGTH = ["--train-iters", "6", "--global-batch-size", "8", "--micro-batch-size", "2", "--save-interval", "3"]
WHOLE = torch.arange(30.0).view(6, 5)


def train_on_ranks(mesh: Mesh, prefix: str, flags: list[str]) -> int | str:
    try:
        return run_tiny(prefix, flags, mesh)
    except MegaflowError as error:
        return str(error)


@pytest.fixture(scope="module")
def saved(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A run of two ranks with checkpoints at 3 and 6."""
    folder = tmp_path_factory.mktemp("saved")
    prefix = write_pair(folder / "toy")
    assert two_ranks.run(train_on_ranks, prefix, [*LENGTH, "--save", str(folder / "run")]) == [0, 0]
    return prefix, folder / "run"


def test_both_ranks_write_a_part_and_every_tensor_is_there_once(saved: tuple[str, Path]) -> None:
    path = saved[1] / "iter_0000006"
    names = ["part_00000.safetensors", "part_00001.safetensors", "state.json", "tensors.json"]
    assert sorted(file.name for file in path.iterdir()) == names
    sizes = [(path / name).stat().st_size for name in names[:2]]
    assert min(sizes) > 0.4 * max(sizes)
    shapes = dcp.list_shapes(path)
    assert {"rng/cpu.0", "rng/cpu.1", "model/embedding.weight", "optimizer/exp_avg.embedding.weight"} <= shapes.keys()
    total = sum(torch.Size(shape).numel() for shape in dcp.list_shapes(path).values())
    assert total == sum(tensor.numel() for tensor in dcp.read_tensors(path, "").values())


def swap(path: Path) -> None:
    (path / "part_00000.safetensors").rename(path / "x")
    (path / "part_00001.safetensors").rename(path / "part_00000.safetensors")
    (path / "x").rename(path / "part_00001.safetensors")


def cut(path: Path) -> None:
    file = path / "part_00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def take_from_another_step(path: Path) -> None:
    shutil.copy(path.parent / "iter_0000003" / "part_00001.safetensors", path / "part_00001.safetensors")


def add_leftovers_of_a_larger_world(path: Path) -> None:
    shutil.copy(path / "part_00001.safetensors", path / "part_00007.safetensors")
    (path.parent / "iter_0000009.writing").mkdir()
    (path.parent / "iter_0000009.writing" / "part_00005.safetensors").write_bytes(b"half")


def point(text: str) -> Callable[[Path], object]:
    return lambda path: (path.parent / store.POINTER).write_text(text)


DAMAGES: dict[str, tuple[Callable[[Path], object], int]] = {
    "missing shard": (lambda path: (path / "part_00001.safetensors").unlink(), 3),
    "short shard": (cut, 3),
    "empty shard": (lambda path: (path / "part_00000.safetensors").write_bytes(b""), 3),
    "swapped shards": (swap, 3),
    "shard of another step": (take_from_another_step, 3),
    "broken layout": (lambda path: (path / "tensors.json").write_text("{"), 3),
    "broken state": (lambda path: (path / "state.json").write_bytes(b"\xff\x00"), 3),
    "missing state": (lambda path: (path / "state.json").unlink(), 3),
    "empty pointer": (point(""), 6),
    "wrong pointer": (point("7"), 6),
    "pointer to another": (point("3"), 3),
    "pointer in words": (point("last"), 6),
    "leftovers of a larger world": (add_leftovers_of_a_larger_world, 6),
}


def choose(mesh: Mesh, root: str) -> tuple[str, tuple[str, ...]]:
    found = store.find_checkpoint(Path(root), group=mesh.world_group)
    return str(found.path), found.passed_over


@pytest.mark.parametrize("name", DAMAGES)
def test_all_ranks_take_the_same_complete_step(
    two_ranks: RankPool, saved: tuple[str, Path], tmp_path: Path, name: str
) -> None:
    root = tmp_path / "run"
    shutil.copytree(saved[1], root)
    damage, step = DAMAGES[name]
    damage(root / "iter_0000006")
    first, second = two_ranks.run(choose, str(root))
    assert first == second
    assert first[0] == str(root / f"iter_{step:07d}")


def test_a_run_goes_on_from_the_step_before_and_ends_as_the_straight_one(
    two_ranks: RankPool, saved: tuple[str, Path], tmp_path: Path
) -> None:
    prefix, straight = saved
    root = tmp_path / "run"
    shutil.copytree(straight, root)
    swap(root / "iter_0000006")
    add_leftovers_of_a_larger_world(root / "iter_0000006")
    assert two_ranks.run(train_on_ranks, prefix, [*LENGTH, "--save", str(root)]) == [0, 0]
    assert read_curve(root) == read_curve(straight)
    assert not list(root.glob("*.writing"))


def test_with_every_step_damaged_all_ranks_refuse_alike(
    two_ranks: RankPool, saved: tuple[str, Path], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    shutil.copytree(saved[1], root)
    for step in (3, 6):
        cut(root / f"iter_{step:07d}")
    first, second = two_ranks.run(train_on_ranks, saved[0], [*LENGTH, "--save", str(root)])
    assert first == second
    assert "none of its checkpoints can be loaded" in str(first)


def make_line(mesh: Mesh) -> DeviceMesh:
    """All ranks as one axis."""
    assert mesh.world_group is not None
    return DeviceMesh.from_group(mesh.world_group, "cpu")


def save_shards(mesh: Mesh, root: str) -> None:
    """Each rank holds half of the rows of one tensor, a replica of another and a tensor of its own."""
    half = WHOLE.chunk(2)[mesh.rank].clone()
    tensors = {
        "model/rows": DTensor.from_local(half, make_line(mesh), [Shard(0)]),
        "model/all": DTensor.from_local(WHOLE.clone(), make_line(mesh), [Replicate()]),
        f"rng/cpu.{mesh.rank}": torch.full((3,), mesh.rank, dtype=torch.uint8),
    }
    with own_group(mesh.world_group) as group, Saver(Path(root), group) as saver:
        saver.start(1, tensors, {})
        half.zero_()  # the copy is what counts
        saver.finish()


def load_columns(mesh: Mesh, root: str) -> list[list[float]]:
    """Each rank asks for half of the columns of what was saved by rows."""
    target = DTensor.from_local(
        torch.zeros(6, 2 + (mesh.rank == 0)), make_line(mesh), [Shard(1)], shape=(6, 5), stride=(5, 1)
    )
    dcp.load_tensors({"model/rows": target}, Path(root) / "iter_0000001", mesh.world_group)
    return target.to_local().tolist()


def test_shards_are_saved_by_row_and_loaded_by_column_or_whole(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(save_shards, str(tmp_path))
    found = dcp.read_tensors(tmp_path / "iter_0000001", "")
    assert torch.equal(found["model/rows"], WHOLE)
    assert torch.equal(found["model/all"], WHOLE)
    assert found["rng/cpu.1"].tolist() == [1, 1, 1]
    first, second = two_ranks.run(load_columns, str(tmp_path))
    assert torch.equal(torch.cat([torch.tensor(first), torch.tensor(second)], dim=1), WHOLE)


def save_with_a_full_disk(mesh: Mesh, root: str, full_rank: int) -> str:
    """The disk of one rank refuses its part."""
    keep = dcp.write_part

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if mesh.rank == full_rank:
            raise OSError(errno.ENOSPC, "No space left on device")
        return keep(*args, **kwargs)

    dcp.write_part = refuse
    try:
        with own_group(mesh.world_group) as group, Saver(Path(root), group) as saver:
            saver.start(2, {"model/w": WHOLE, f"rng/cpu.{mesh.rank}": torch.zeros(3)}, {})
            try:
                saver.finish()
            except FileAccessError as error:
                return str(error)
    finally:
        dcp.write_part = keep
    return "saved"


@pytest.mark.parametrize("full_rank", [0, 1])
def test_a_disk_that_refuses_one_rank_is_an_error_on_all_and_publishes_nothing(
    two_ranks: RankPool, tmp_path: Path, full_rank: int
) -> None:
    two_ranks.run(save_shards, str(tmp_path))
    first, second = two_ranks.run(save_with_a_full_disk, str(tmp_path), full_rank)
    assert first == second
    assert f"No space left on device (rank {full_rank}); choose another --save" in first
    assert store.find_checkpoint(tmp_path).path == tmp_path / "iter_0000001"
