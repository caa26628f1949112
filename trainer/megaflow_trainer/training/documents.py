"""From the samples of a step back to their documents, and to the file and line these came from."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import megaflow
from megaflow import StreamingDataset
from megaflow.errors import MegaflowError
from megaflow.origin import OriginFinder
from megaflow.provenance import origin_of
from megaflow_trainer.training.feed import Feed

_MARKS = 4
"""Steps that are remembered: on a GPU the numbers of a step come one step late."""


class Documents:
    """Names the documents of samples of one dataset, or of a blend of several.

    Args:
        dataset: what the loader reads; one that cannot say where a sample comes from gives samples without documents.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._sidecars: dict[str, dict[str, Any] | None] = {}
        self._marks: deque[tuple[int, str]] = deque(maxlen=_MARKS)

    def mark(self, feed: Feed) -> None:
        """Remember where a stream stands before a step: from there it is read again to name the step's documents."""
        if isinstance(self.dataset, StreamingDataset):
            state = feed.state_dict()
            self._marks.append((state["consumed_samples"], state["position"]))

    def name_all(self, samples: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
        """The documents of samples in their order: pair, number in it, and where it came from if the sidecar tells; of
        a stream the input, and line or row.
        """
        if isinstance(self.dataset, StreamingDataset):
            return self._name_streamed(samples)
        return {sample: self._name(sample) for sample in samples}

    def _name_streamed(self, samples: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
        start = next((at for first, at in reversed(self._marks) if first <= min(samples, default=0)), None)
        found = OriginFinder(self.dataset, start).samples(samples)
        return {
            sample.sample: [
                {"pair": piece.dataset, "document": piece.origin.number, "origin": str(piece.origin)}
                for piece in sample.pieces
                if piece.origin is not None
            ]
            for sample in found
        }

    def _name(self, sample: int) -> list[dict[str, Any]]:
        dataset = self.dataset
        while hasattr(dataset, "locate"):  # a blend
            number, sample = dataset.locate(sample)
            dataset = dataset.datasets[number]
        if not (hasattr(dataset, "pieces") and hasattr(dataset, "indexed")):
            return []
        prefix = str(dataset.indexed.prefix)
        bounds = np.asarray(dataset.indexed.document_boundaries)
        sequences = [piece[0] for piece in dataset.pieces(sample)]
        numbers = dict.fromkeys(int(n) for n in np.searchsorted(bounds, sequences, side="right") - 1)
        return [{"pair": prefix, "document": n, "origin": self._find_origin(prefix, n)} for n in numbers]

    def _find_origin(self, prefix: str, document: int) -> str | None:
        if prefix not in self._sidecars:
            self._sidecars[prefix] = _read_sidecar(prefix)
        sidecar = self._sidecars[prefix]
        origin = origin_of(sidecar, document) if sidecar else None
        return None if origin is None else str(origin)


def _read_sidecar(prefix: str) -> dict[str, Any] | None:
    try:
        return megaflow.read_sidecar(prefix)
    except (MegaflowError, OSError, ValueError):
        return None  # its faults were told when the data were opened


def describe_documents(found: Sequence[dict[str, Any]]) -> str:
    """Some documents in words."""
    return ", ".join(item["origin"] or f"document {item['document']} of {Path(item['pair']).name}" for item in found)
