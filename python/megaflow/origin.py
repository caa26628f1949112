"""From a training iteration back to the documents: source file, line and text of each piece of each sample."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from megaflow import _core
from megaflow.dataset import GPTDataset
from megaflow.errors import CheckpointError, ConfigError, DataFormatError, MissingFileError
from megaflow.indexed import IndexedDataset
from megaflow.provenance import Origin, origin_of
from megaflow.sidecar import read_sidecar

MANIFEST = "run.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceOrigin:
    """A run of tokens of a sample, and the document that it was cut from."""

    dataset: str
    """Prefix of the pair; of a stream, the name of the input."""
    document: int | None
    """Number of the document in the pair; None for a stream."""
    first_token: int
    """First token in the sequence (of a stream: in the document)."""
    tokens: int
    origin: Origin | None
    """Place in the source; None if no sidecar names it."""
    sequence: int | None = None
    """Number of the sequence in the pair; None for a stream."""
    byte: int | None = None
    """Byte at which the line begins in its unpacked source, where that is known."""

    def as_dict(self) -> dict[str, Any]:
        """Plain types."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrigin:
    """What a sample is made of."""

    sample: int
    """Position in the dataset."""
    pieces: tuple[PieceOrigin, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain types."""
        return {"sample": self.sample, "pieces": [piece.as_dict() for piece in self.pieces]}


class OriginFinder:
    """Names the documents of samples; keeps the sidecars that it has read.

    Args:
        dataset: samples that stay (`GPTDataset`, a blend), or a `StreamingDataset`, which is read anew up to them.
        start: of a stream, the position (of a loader's state) from which it is read; by default its beginning.
    """

    def __init__(self, dataset: Any, start: str | None = None) -> None:
        self.dataset = dataset
        self.start = start
        self._sidecars: dict[str, dict[str, Any] | None] = {}

    def samples(self, positions: Iterable[int]) -> list[SampleOrigin]:
        """Origin of each sample.

        Raises:
            SampleIndexError: if there is no such sample.
            DataFormatError: if the data or a sidecar is damaged.
        """
        positions = [int(position) for position in positions]
        if hasattr(self.dataset, "open_at"):
            return self._of_stream(positions)
        return [self._of_sample(position) for position in positions]

    def _of_sample(self, position: int) -> SampleOrigin:
        parts = self._parts()
        pieces, _ = self.dataset.source.layout(position)
        found = tuple(self._piece(parts[number], *place) for number, *place in pieces)
        return SampleOrigin(sample=position, pieces=found)

    def _parts(self) -> Sequence[IndexedDataset]:
        parts: Sequence[IndexedDataset] | None = getattr(self.dataset, "indexed_parts", None)
        return [self.dataset.indexed] if parts is None else parts

    def _piece(self, indexed: IndexedDataset, sequence: int, first: int, count: int) -> PieceOrigin:
        # Empty documents hold no sequence, so the last that begins there is meant.
        document = int(np.searchsorted(indexed.document_boundaries, sequence, side="right")) - 1
        prefix = indexed.prefix
        if prefix not in self._sidecars:
            self._sidecars[prefix] = read_sidecar(prefix)
        return PieceOrigin(
            dataset=prefix,
            document=document,
            sequence=sequence,
            first_token=first,
            tokens=count,
            origin=origin_of(self._sidecars[prefix], document),
        )

    def _of_stream(self, positions: list[int]) -> list[SampleOrigin]:
        found: dict[int, SampleOrigin] = {}
        stream = self.dataset.open_at(self.start)
        for position in sorted(set(positions)):
            pieces = tuple(_stream_piece(piece) for piece in stream.pieces_at(position))
            found[position] = SampleOrigin(sample=position, pieces=pieces)
        return [found[position] for position in positions]


def _stream_piece(piece: dict[str, Any]) -> PieceOrigin:
    is_row = piece["byte"] == 0 and piece["number"] > 1
    counted = piece["counted_from"]
    origin = Origin(
        path=piece["path"],
        format="stream",
        unit="row" if is_row else "line",
        number=piece["number"],
        range=None if counted == 0 else (counted, counted),
    )
    return PieceOrigin(
        dataset=piece["path"],
        document=None,
        first_token=piece["first_token"],
        tokens=piece["tokens"],
        origin=origin,
        byte=None if is_row else piece["byte"],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """The samples of one training iteration of a run."""

    iteration: int
    first_sample: int
    num_samples: int
    dataset: Any
    cyclic_seed: int | None = None
    """Seed of the cyclic order in which the samples were drawn; None for the dataset's own order."""

    def origins(self) -> list[SampleOrigin]:
        """Origin of each sample of the global batch, in the order in which they were drawn."""
        positions = list(range(self.first_sample, self.first_sample + self.num_samples))
        if self.cyclic_seed is not None:
            positions = _core.Cyclic(self.dataset.source, seed=self.cyclic_seed).locate(positions)
        return OriginFinder(self.dataset).samples(positions)


def find_iteration(run: str | PathLike[str], iteration: int) -> Iteration:
    """The samples of an iteration, from the manifest `run.json` of the run alone.

    Args:
        run: the run folder, or its manifest.
        iteration: from 1, as the log counts them.

    Raises:
        MissingFileError: if there is no manifest, or the data are gone.
        DataFormatError: if the manifest is damaged, or was written without its data.
        ConfigError: if the run has no such iteration.
        CheckpointError: if the data are not those that the run was trained on.
    """
    path = Path(run)
    path = path / MANIFEST if path.is_dir() else path
    data = _start_of(path, iteration)
    start = data["consumed_samples"], iteration - 1 - data["from_iteration"]
    first = _samples_before(data["batches"], *start)
    count = _batch_at(data["batches"], first)
    dataset = open_dataset(data["dataset"])
    if dataset.fingerprint != data["fingerprint"]:
        raise CheckpointError(
            f"{path}: the run was trained on data of fingerprint {data['fingerprint'][:16]}, those under the same name "
            f"have {dataset.fingerprint[:16]}; put the data of the run back"
        )
    seed = data.get("sampler", {}).get("seed")
    return Iteration(iteration=iteration, first_sample=first, num_samples=count, dataset=dataset, cyclic_seed=seed)


def _start_of(path: Path, iteration: int) -> dict[str, Any]:
    """The data of the last start of the run that trained this iteration."""
    try:
        starts = json.loads(path.read_text(encoding="utf-8"))["starts"]
        earlier = [start for start in starts if start["from_iteration"] < iteration]
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no manifest of a run; name the folder given with --run-dir") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataFormatError(f"{path}: not the manifest of a run: {error}") from None
    if iteration < 1 or not earlier:
        raise ConfigError(f"iteration {iteration}: the run counts its iterations from 1")
    data: dict[str, Any] | None = earlier[-1].get("data")
    if data is None or data["dataset"].get("kind") is None:
        reason = "it does not say how the data were opened" if data is None else data["dataset"].get("reason")
        raise DataFormatError(f"{path}: the samples of iteration {iteration} cannot be found: {reason}")
    if iteration > data["last_iteration"]:
        raise ConfigError(f"iteration {iteration}: the run ends with iteration {data['last_iteration']}")
    return {**data, "from_iteration": earlier[-1]["from_iteration"]}


def _samples_before(batches: list[list[int]], consumed: int, steps: int) -> int:
    """Samples before the step that comes `steps` steps after the one that starts at `consumed`.

    `batches` are (samples consumed, size of the global batch from there on).
    """
    for place, (_, size) in enumerate(batches):
        end = batches[place + 1][0] if place + 1 < len(batches) else None
        count = steps if end is None else min(steps, max(0, -(-(end - consumed) // size)))
        consumed += count * size
        steps -= count
    return consumed


def _batch_at(batches: list[list[int]], consumed: int) -> int:
    return [size for first, size in batches if first <= consumed][-1]


def open_dataset(recipe: dict[str, Any]) -> Any:
    """The dataset that `recipe_of` described.

    Raises:
        DataFormatError: for a kind that is not known.
    """
    kind = recipe.get("kind")
    if kind == "GPTDataset":
        return GPTDataset(recipe["prefix"], **recipe["settings"])
    if kind == "BlendedDataset":
        from megaflow.blend import BlendedDataset

        return BlendedDataset([open_dataset(part) for part in recipe["datasets"]], **recipe["settings"])
    if kind == "StreamingDataset":
        from megaflow.streaming import StreamingDataset

        return StreamingDataset.from_recipe(recipe)
    raise DataFormatError(f"a dataset of kind {kind!r} cannot be opened from a manifest by this version")


def recipe_of(dataset: Any) -> dict[str, Any]:
    """How a dataset is opened again, in plain types; for the manifest of a run.

    Raises:
        ConfigError: for a dataset that only exists in memory.
    """
    if hasattr(dataset, "recipe"):
        recipe: dict[str, Any] = dataset.recipe()
        return recipe
    raise ConfigError(f"a {type(dataset).__name__} cannot be opened again from a manifest")
