"""Several datasets as one: Megatron's order, or exact shares that may change on the way."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflow import _core
from megaflow.dataset import GPTDataset
from megaflow.errors import ConfigError
from megaflow.megatron_cache import cache_arguments, describe_blend
from megaflow.samples import FREE_ENTRIES, MASK_OPTIONS, SampleDataset, check_integer

# Megatron builds each dataset of a blend for somewhat more samples than its share.
SURPLUS = 1.005
Phase = tuple[int, Sequence[float]]


def normalize(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum, as numpy adds them.

    Raises:
        ConfigError: if one is negative or no number, or none is above 0.
    """
    check_weights(weights)
    return [float(weight) for weight in _core.normalized_weights(list(weights))]


def check_weights(weights: Sequence[float], names: Sequence[str] | None = None) -> None:
    """Whether weights mean something.

    Raises:
        ConfigError: if one is negative or no number, none is above 0, or there are not as many as `names`.
    """
    if names is not None and len(weights) != len(names):
        raise ConfigError(f"the blend has {len(weights)} weights for {len(names)} datasets; give each one")
    for number, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            of = f" of {names[number]}" if names is not None else ""
            raise ConfigError(f"weight {number + 1}{of} is {weight}; expected a finite number of 0 or more")
    if not sum(weights) > 0:
        raise ConfigError("all weights of the blend are 0; give at least one dataset a share")


def wanted_samples(weights: Sequence[float], num_samples: int) -> list[int]:
    """Samples that each dataset of Megatron's weighted blend gives: the share of `num_samples`, rounded up."""
    return [math.ceil(num_samples * weight) for weight in normalize(weights)]


def with_surplus(wanted: Sequence[int]) -> list[int]:
    """Samples for which Megatron builds each dataset of a weighted blend."""
    return [math.ceil(count * SURPLUS) for count in wanted]


def sizes_of_megatron(weights: Sequence[float], num_samples: int) -> list[int]:
    """The same, but enough where that is not: a blend of few samples can draw more of a dataset than its share rounded
    up and the surplus, and Megatron-LM then fails when it reads the last ones.
    """
    wanted = wanted_samples(weights, num_samples)
    sizes, total, shares = with_surplus(wanted), sum(wanted), normalize(weights)
    # The dataset that is drawn lags behind its share, so no count passes share x (total - 1) + 1.
    if all(share * max(total - 1, 1) + 1 <= size for share, size in zip(shares, sizes, strict=True)):
        return sizes
    return [max(pair) for pair in zip(sizes, _core.greedy_counts(shares, total), strict=True)]


@dataclass(frozen=True, slots=True)
class BlendRow:
    """One dataset of a blend: one line of the table at start."""

    name: str
    """Its prefix."""
    num_documents: int
    """Sequences that the split takes of it."""
    num_tokens: int
    """Tokens of those."""
    requested: float
    """Share of the samples asked for, 0 to 1."""
    achieved: float
    """Share that it gives of all samples, 0 to 1."""
    num_samples: int
    """Samples that it gives."""
    epochs: float
    """Times that its tokens are read."""


def format_table(rows: Sequence[BlendRow]) -> str:
    """The rows as aligned text, with a heading."""
    heading = ("dataset", "documents", "tokens", "requested", "achieved", "samples", "epochs")
    cells = [
        (
            row.name,
            f"{row.num_documents:,}",
            f"{row.num_tokens:,}",
            f"{100 * row.requested:.3f}%",
            f"{100 * row.achieved:.3f}%",
            f"{row.num_samples:,}",
            f"{row.epochs:.3f}",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in (heading, *cells)) for column in range(len(heading))]
    lines = [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in (heading, *cells)
    ]
    return "\n".join(lines)


class BlendedDataset(SampleDataset):
    """Samples of several datasets.

    In order "megatron" each step draws the dataset that lags most behind its share, bit for bit as Megatron-LM does,
    from a table of 10 bytes a sample. In order "instant" the dataset of a sample is computed: at every prefix each
    dataset has given its exact share to within two samples (half a sample with two datasets), nothing is stored, and
    the weights may change at stated samples without touching what came before.

    Args:
        datasets: `GPTDataset`s that agree in `seq_len`, extra token and padding. Each must hold what the blend draws of
            it.
        weights: shares, in any unit. None takes every sample of every dataset, or the first `num_samples` of such a
            blend.
        num_samples: samples of the blend. With weights and order "megatron" each share is rounded up, so there may be
            more.
        order: "megatron" or "instant".
        phases: weights that change: (first sample, weights), the first at 0. Instead of `weights`; order "instant".
        cache_dir: folder where Megatron's table is kept and shared by all processes.

    Raises:
        ConfigError: if weights mean nothing, a dataset holds fewer samples than are drawn of it, or settings do not
            agree.
    """

    def __init__(
        self,
        datasets: Sequence[GPTDataset],
        weights: Sequence[float] | None = None,
        *,
        num_samples: int | None = None,
        order: str = "megatron",
        phases: Sequence[Phase] | None = None,
        cache_dir: str | PathLike[str] | None = None,
    ) -> None:
        if not datasets:
            raise ConfigError("a blend needs at least one dataset")
        self.datasets = list(datasets)
        self.names = [dataset.indexed.prefix for dataset in datasets]
        first = datasets[0]
        for name in ("seq_len", "add_extra_token", "pad_id", *MASK_OPTIONS):
            if any(getattr(dataset, name) != getattr(first, name) for dataset in datasets):
                raise ConfigError(f"the datasets of a blend must have the same {name}")
            setattr(self, name, getattr(first, name))
        self.num_samples = None if num_samples is None else check_integer("num_samples", num_samples, 0, 2**63 - 1)
        self.order = order
        self.cache_dir = cache_dir
        self.phases = self._read_phases(weights, phases)
        self.is_weighted = weights is not None or phases is not None
        self._core = self._build()
        self.source = self._core.source()

    def _read_phases(self, weights: Sequence[float] | None, phases: Sequence[Phase] | None) -> list[Phase]:
        if weights is not None and phases is not None:
            raise ConfigError("weights and phases are one setting; give one of them")
        if phases is not None and self.order != "instant":
            raise ConfigError(
                "weights that change on the way need order 'instant': in order 'megatron' how often each dataset is "
                "repeated decides about its order, so a change would reorder the past"
            )
        if (weights is not None or phases is not None) and self.num_samples is None:
            raise ConfigError("a blend with weights has no natural end; give num_samples")
        if weights is None and phases is None:
            lengths = [float(len(dataset)) for dataset in self.datasets]
            return [(0, lengths if any(lengths) else [1.0] * len(lengths))]
        changing = phases or () if weights is None else [(0, weights)]
        read: list[Phase] = [(at, list(own)) for at, own in changing]
        for _, own in read:
            check_weights(own, self.names)
        return read

    def _build(self) -> _core.Blend:
        sources = [dataset.source for dataset in self.datasets]
        weights = [float(weight) for weight in self.phases[0][1]]
        if self.order == "instant":
            total = sum(len(dataset) for dataset in self.datasets)
            size = total if self.num_samples is None else self.num_samples
            size = size if self.is_weighted else min(size, total)
            return _core.Blend.shares(sources, [(at, list(own)) for at, own in self.phases], size)
        if self.order != "megatron":
            raise ConfigError(f"order = {self.order!r}: expected 'megatron' or 'instant'")
        if self.num_samples is None:
            return _core.Blend.exhaustive(sources, self._cache(normalize(weights), None))
        if self.is_weighted:
            size = sum(wanted_samples(weights, self.num_samples))
        else:
            size = min(self.num_samples, sum(len(dataset) for dataset in self.datasets))
        # Megatron's builder divides given weights by their sum before its blend does so again; sizes are divided once.
        given = normalize(weights) if self.is_weighted else weights
        return _core.Blend.greedy(sources, given, size, self._cache(normalize(given), size))

    def _cache(self, weights: Sequence[float], size: int | None) -> Any:
        if self.cache_dir is None:
            return None
        datasets = [dataset.megatron_description for dataset in self.datasets]
        description = describe_blend(datasets, self.datasets[0].split_name, weights, size)
        content = [dataset.description for dataset in self.datasets]
        return cache_arguments(self.cache_dir, description, content)

    @property
    def cached(self) -> tuple[str, str | None] | None:
        """What became of the cache of the table, as for `GPTDataset`."""
        return self._core.cached

    @property
    def dataset_index(self) -> NDArray[np.int16]:
        """Dataset of each sample, int16. A view. Order "megatron" only."""
        return np.asarray(self._table(self._core.dataset_index()))

    @property
    def dataset_sample_index(self) -> NDArray[np.int64]:
        """Number of each sample in its dataset, int64. A view. Order "megatron" only."""
        return np.asarray(self._table(self._core.dataset_sample_index()))

    def _table(self, array: _core.ArrayView | None) -> _core.ArrayView:
        if array is None:
            raise ConfigError("order 'instant' computes where a sample comes from: ask locate() or counts()")
        return array

    def locate(self, index: int) -> tuple[int, int]:
        """(dataset, number of the sample in it) of one sample.

        Raises:
            SampleIndexError: if there is no such sample.
        """
        return self._core.locate(index)

    def counts(self, num_samples: int | None = None) -> list[int]:
        """Samples that each dataset gives to the first `num_samples`; None is all."""
        return self._core.counts(len(self) if num_samples is None else num_samples)

    def table(self) -> list[BlendRow]:
        """What each dataset was asked for and gives. Of weights that change, the mean over the samples."""
        counts, size = self.counts(), max(len(self), 1)
        requested = self._requested()
        return [table_row(*entry, size) for entry in zip(self.datasets, requested, counts, strict=True)]

    def _requested(self) -> list[float]:
        size = max(len(self), 1)
        bounds = [*(at for at, _ in self.phases if at < size), size]
        requested = [0.0] * len(self.datasets)
        for (begin, end), (_, weights) in zip(pairwise(bounds), self.phases, strict=False):
            for number, weight in enumerate(normalize(weights)):
                requested[number] += weight * (end - begin) / size
        return requested

    @property
    def description(self) -> dict[str, Any]:
        """Everything that determines the samples and their order, in plain types."""
        return {
            "order": f"blend {self.order}",
            "phases": [[at, normalize(weights)] for at, weights in self.phases],
            "num_samples": self.num_samples,
            "datasets": [dataset.description for dataset in self.datasets],
        }

    def changes(self, saved: Mapping[str, Any], consumed_samples: int) -> list[str]:
        """As for all datasets; weights that change behind `consumed_samples` only are no change."""
        current = self.description
        if saved.get("order") != current["order"]:
            return [f"order was {saved.get('order')!r} and is {current['order']!r}"]
        before, now = (_drawn_until(side, consumed_samples) for side in (saved, current))
        if before == now:
            return []
        found = [
            f"the phase at sample {old[0]} drew {_words(old[1])}; that at sample {new[0]} now draws {_words(new[1])}"
            for old, new in zip(before, now, strict=False)
            if old != new
        ]
        if len(before) != len(now):
            found.append(f"up to sample {consumed_samples} there were {len(before)} phases of weights, now {len(now)}")
        return found

    def recipe(self) -> dict[str, Any]:
        """How this blend is opened again, in plain types; `megaflow.origin.open_dataset` does."""
        settings: dict[str, Any] = {"num_samples": self.num_samples, "order": self.order}
        if self.order == "instant" and self.is_weighted:
            settings["phases"] = [[at, list(weights)] for at, weights in self.phases]
        elif self.is_weighted:
            settings["weights"] = list(self.phases[0][1])
        recipes = [dataset.recipe() for dataset in self.datasets]
        return {"kind": "BlendedDataset", "datasets": recipes, "settings": settings}

    def __reduce__(self) -> tuple[Any, ...]:
        settings: dict[str, Any] = {"num_samples": self.num_samples, "order": self.order, "cache_dir": self.cache_dir}
        weights = None
        if self.order == "instant" and self.is_weighted:
            settings["phases"] = self.phases
        elif self.is_weighted:
            weights = list(self.phases[0][1])
        return _rebuild, (type(self), self.datasets, weights, settings)

    def __repr__(self) -> str:
        return f"BlendedDataset({len(self)} samples of {self.seq_len} tokens from {len(self.datasets)} datasets)"


def table_row(dataset: GPTDataset, requested: float, num_samples: int, size: int) -> BlendRow:
    """The line of one dataset that gives `num_samples` of `size` samples."""
    first, behind = dataset.sequences
    return BlendRow(
        name=dataset.indexed.prefix,
        num_documents=behind - first,
        num_tokens=dataset.tokens_per_epoch,
        requested=requested,
        achieved=num_samples / size,
        num_samples=num_samples,
        epochs=num_samples / dataset.samples_per_epoch if dataset.samples_per_epoch else 0.0,
    )


Drawn = list[tuple[int, list[tuple[float, dict[str, Any]]]]]


def _drawn_until(description: Mapping[str, Any], consumed_samples: int) -> Drawn:
    """For each phase that begins before a position, weight and description of the datasets that it draws."""
    datasets = [
        {name: value for name, value in dataset.items() if name not in FREE_ENTRIES}
        for dataset in description.get("datasets", [])
    ]
    return [
        (at, [(weight, own) for weight, own in zip(weights, datasets, strict=False) if weight > 0])
        for at, weights in description.get("phases", [])
        if at == 0 or at < consumed_samples
    ]


def _words(drawn: list[tuple[float, dict[str, Any]]]) -> str:
    return "; ".join(f"{weight:.6g} of {json.dumps(own, sort_keys=True)}" for weight, own in drawn)


def _rebuild(
    kind: type[BlendedDataset],
    datasets: Sequence[GPTDataset],
    weights: Sequence[float] | None,
    settings: dict[str, Any],
) -> BlendedDataset:
    return kind(datasets, weights, **settings)
