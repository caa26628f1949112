"""torch's distributed checkpoint (DCP) over our own files: DCP plans which rank writes and reads which piece, so that a
checkpoint loads under any layout; the pieces and their description are plain data, and nothing is unpickled.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megaflow.errors import CheckpointError
from megaflow_trainer.checkpoint.held import Box, Held, as_held
from megaflow_trainer.checkpoint.layout import SUFFIX, Place, describe, name_chunk, read_layout
from megaflow_trainer.checkpoint.parts import open_part, write_part
from megaflow_trainer.parallel.collectives import gather_objects

Finish = Callable[[dict[str, Any], dict[str, dict[str, Any]]], None]
"""Takes the layout and what is known of each file, and publishes the checkpoint; the first rank calls it."""


class PartWriter(StorageWriter):
    """Writes the pieces of this rank into one file of a folder; the first rank of the group ends the checkpoint.

    Args:
        folder: where the files go; made by `prepare`.
        prepare: makes the folder; called by the first rank before any rank writes.
        finish: publishes; called by the first rank when the files of all ranks are on the disk.
        on_progress: called after each tensor.
    """

    def __init__(
        self, folder: Path, *, prepare: Callable[[], None], finish: Finish, on_progress: Callable[[], None]
    ) -> None:
        self.folder, self.prepare, self.end, self.on_progress = folder, prepare, finish, on_progress

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a writer writes one checkpoint."""

    def storage_meta(self) -> StorageMeta | None:
        """Nothing that planners need."""
        return None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing yet: the folder is made when all ranks have planned."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder, and give each rank a file."""
        self.prepare()
        return [dataclasses.replace(plan, storage_data=f"part_{rank:05d}{SUFFIX}") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the pieces that the plan gives to this rank."""
        tensors, file, results = {}, str(plan.storage_data), []
        for item in plan.items:
            value = planner.resolve_data(item)
            assert isinstance(value, Tensor), "only tensors are saved"
            tensors[name_chunk(item.index)] = value
        if tensors:
            size, total = write_part(self.folder / file, tensors, on_progress=self.on_progress)
            for item in plan.items:
                place = Place(file, name_chunk(item.index), size, total)
                results.append(WriteResult(index=item.index, size_in_bytes=0, storage_data=place))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Describe what all ranks have written, and publish it."""
        places: dict[MetadataIndex, Place] = {
            MetadataIndex(result.index.fqn, result.index.offset): result.storage_data
            for rank in results
            for result in rank
        }
        files = {place.file: {"bytes": place.file_bytes, "sha256": place.file_sum} for place in places.values()}
        self.end(describe(metadata, places), files)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Writers are made here, never found by name."""
        return False


class PartReader(StorageReader):
    """Reads pieces of a checkpoint folder of either format."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places: dict[MetadataIndex, Place] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a reader reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The layout."""
        return read_layout(self.folder)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keep where things are."""
        self.places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what is asked for into the tensors of the run; of a piece only the part that is needed is read."""
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self.places[item.storage_index].file, []).append(item)
        for file, items in by_file.items():
            with open_part(self.folder / file) as part:
                for item in items:
                    key = self.places[item.storage_index].key
                    window = tuple(
                        slice(at, at + length) for at, length in zip(item.storage_offsets, item.lengths, strict=True)
                    )
                    piece = part.get_slice(key)[window] if window else part.get_tensor(key)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(piece)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Readers are made here, never found by name."""
        return False


class CopiesPlanner(DefaultSavePlanner):
    """Plans with what this rank answers for, and takes the bytes from copies of its memory."""

    def __init__(self, tensors: Mapping[str, Held], copies: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.tensors, self.copies = tensors, copies
        self.numbers: dict[MetadataIndex, int] = {}

    def create_local_plan(self) -> SavePlan:
        """One item a box."""
        items = []
        for name, held in self.tensors.items():
            for number, box in enumerate(held.boxes):
                if box.is_owned:
                    index = MetadataIndex(name, torch.Size(box.at))
                    self.numbers[index] = number
                    items.append(_make_item(index, held, box))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The box in the copy."""
        return self.tensors[index.fqn].view(self.numbers[index], self.copies[index.fqn])


def _make_item(index: MetadataIndex, held: Held, box: Box) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(box.at), torch.Size(box.shape))
    properties = TensorProperties(dtype=held.local.dtype)
    return WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, torch.Size(held.shape)))


class BoxesPlanner(DefaultLoadPlanner):
    """Plans with the boxes that this rank holds."""

    def __init__(self, tensors: Mapping[str, Held]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.tensors = tensors

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Keep what there is."""
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """What to read for each box."""
        assert self.metadata is not None
        items = []
        for name, held in self.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(box.at), torch.Size(box.shape)) for box in held.boxes]
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata), "only tensors are saved"
            items += create_read_items_for_chunk_list(name, saved, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The box in this rank's memory."""
        assert index.index is not None, "the number of the box"
        return self.tensors[index.fqn].view(index.index)


def save_tensors(
    tensors: Mapping[str, Held | Tensor],
    writer: PartWriter,
    group: dist.ProcessGroup | None,
    *,
    copies: Mapping[str, Tensor],
) -> None:
    """Save what the ranks of `group` hold; what several hold alike is written once. Communicates over `group`.

    Args:
        tensors: by name: what this rank holds, or whole tensors; DTensors say which shard they are.
        writer: where to.
        group: the ranks; None for one.
        copies: what is written, by name: this rank's memory, in that of the CPU.

    Raises:
        CheckpointException: on all ranks, if one could not write. A single rank raises its own error.
    """
    planner = CopiesPlanner({name: as_held(tensor) for name, tensor in tensors.items()}, copies)
    if group is not None:
        dcp.save({}, storage_writer=writer, planner=planner, process_group=group)
        return
    planner.set_up_planner({}, writer.storage_meta(), is_coordinator=True)  # dcp.save warns that it is alone
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    written = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [written])


def load_tensors(
    targets: Mapping[str, Held | Tensor],
    path: Path,
    group: dist.ProcessGroup | None,
    *,
    reader: StorageReader | None = None,
) -> None:
    """Fill tensors by name from a checkpoint, each rank what it holds of them; dtypes are converted.

    Names and shapes must have been compared (`check_tensors`). Every rank reads for itself; `group` agrees on failures.
    `reader` is for folders of another kind than ours.

    Raises:
        CheckpointError: on all ranks alike, if a file cannot be read.
    """
    failure: str | None = None
    try:
        _load_own({name: as_held(tensor) for name, tensor in targets.items()}, reader or PartReader(path))
    except CheckpointError as error:
        failure = str(error)
    found = next((text for text in gather_objects(failure, group) if text is not None), None)
    if found is not None:
        raise CheckpointError(found)


def _load_own(targets: Mapping[str, Held], reader: StorageReader) -> None:
    metadata, planner = reader.read_metadata(), BoxesPlanner(targets)
    planner.set_up_planner({}, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    (plan,) = planner.create_global_plan([planner.create_local_plan()])
    reader.read_data(planner.finish_plan(plan), planner).wait()


def describe_failure(error: BaseException) -> str:
    """The first reason that a rank gave, in words."""
    failures = getattr(error, "failures", None)
    if not failures:
        return str(getattr(error, "strerror", None) or error)
    rank, (reason, _) = next(iter(failures.items()))
    return f"{getattr(reason, 'strerror', None) or reason} (rank {rank})"


def list_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The whole shape of every tensor of a checkpoint."""
    return {
        name: tuple(item.size)
        for name, item in read_layout(path).state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }


def read_tensors(path: Path, prefix: str) -> dict[str, Tensor]:
    """All tensors whose name begins with `prefix`, whole, on the CPU, without it; one process reads alone.

    Raises:
        CheckpointError: if a file is damaged.
    """
    metadata = read_layout(path)
    targets = {
        name: torch.empty(item.size, dtype=item.properties.dtype)
        for name, item in metadata.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(item, TensorStorageMetadata)
    }
    load_tensors(targets, path, None)
    return {name.removeprefix(prefix): tensor for name, tensor in targets.items()}


def check_tensors(
    path: Path, wanted: Mapping[str, tuple[int, ...]], *, saved: Mapping[str, tuple[int, ...]], known: str
) -> None:
    """Compare names and whole shapes before anything is changed.

    Args:
        path: the checkpoint, for messages.
        wanted: shapes of the whole tensors that the run asks of it, by name; those of all ranks.
        saved: shapes in the checkpoint, by name.
        known: saved tensors whose names begin so must all be wanted.

    Raises:
        CheckpointError: naming the first tensor that is missing, unknown or of another shape, with both shapes.
    """
    for name, shape in wanted.items():
        if name not in saved:
            raise CheckpointError(f"{path}: tensor {_short(name)} of this model is not in the checkpoint{_hint(name)}")
        if saved[name] != shape:
            raise CheckpointError(
                f"{path}: tensor {_short(name)} has shape {saved[name]} in the checkpoint and {shape} in "
                "this run; start with the model flags that the checkpoint was made with"
            )
    for name in saved:
        if name.startswith(known) and name not in wanted:
            raise CheckpointError(f"{path}: tensor {_short(name)} of the checkpoint is not in this model{_hint(name)}")


def _short(name: str) -> str:
    return name.partition("/")[2] or name


def _hint(name: str) -> str:
    return "; --no-load-optim begins with fresh optimizer states" if name.startswith("optimizer/") else ""
