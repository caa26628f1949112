"""From the samples of a step back to their documents, and to the file and line these came from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import megaflow
from megaflow.errors import MegaflowError
from megaflow.provenance import origin_of


class Documents:
    """Names the documents of samples of one dataset.

    Args:
        dataset: what the loader reads; one that cannot say where a sample comes from gives samples without documents.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._sidecar: dict[str, Any] | None = None
        self._is_read = False

    def name(self, sample: int) -> list[dict[str, Any]]:
        """The documents of a sample in their order: number in the pair, and where it came from if the sidecar tells."""
        if not (hasattr(self.dataset, "pieces") and hasattr(self.dataset, "indexed")):
            return []
        bounds = np.asarray(self.dataset.indexed.document_boundaries)
        sequences = [piece[0] for piece in self.dataset.pieces(sample)]
        numbers = dict.fromkeys(int(n) for n in np.searchsorted(bounds, sequences, side="right") - 1)
        return [{"document": number, "origin": self._find_origin(number)} for number in numbers]

    def _find_origin(self, document: int) -> str | None:
        if not self._is_read:
            self._sidecar, self._is_read = _read_sidecar(str(self.dataset.indexed.prefix)), True
        origin = origin_of(self._sidecar, document) if self._sidecar else None
        return None if origin is None else str(origin)


def _read_sidecar(prefix: str) -> dict[str, Any] | None:
    try:
        return megaflow.read_sidecar(prefix)
    except (MegaflowError, OSError, ValueError):
        return None  # its faults were told when the data were opened


def describe_documents(found: Sequence[dict[str, Any]], prefix: str | None) -> str:
    """Some documents in words."""
    names = [item["origin"] or f"document {item['document']}" for item in found]
    where = "" if prefix is None or any(item["origin"] for item in found) else f" of {Path(prefix).name}"
    return ", ".join(names) + where
