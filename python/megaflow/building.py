"""From what names the data to the samples of the three splits, as Megatron-LM builds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from megaflow import _core
from megaflow.blend import (
    BlendedDataset,
    BlendRow,
    Phase,
    format_table,
    normalize,
    sizes_of_megatron,
    table_row,
)
from megaflow.blend_arguments import BlendSpec, DataSpec
from megaflow.dataset import SPLIT_NAMES, GPTDataset
from megaflow.errors import ConfigError
from megaflow.indexed import IndexedDataset

AnyDataset = GPTDataset | BlendedDataset
WEIGHT_KINDS = ("shares", "epochs")


@dataclass(frozen=True, slots=True)
class SplitDatasets:
    """The samples of the three splits, and what there is to say of them at start."""

    train: AnyDataset | None
    """None where the split is switched off, has nothing, or nothing is asked of it."""
    valid: AnyDataset | None
    """As `train`."""
    test: AnyDataset | None
    """As `train`."""
    notes: tuple[str, ...] = ()
    """Sentences: splits that round to nothing, caches that were not used."""

    @property
    def datasets(self) -> dict[str, AnyDataset]:
        """Those that exist, by the name of their split."""
        named = zip(SPLIT_NAMES, (self.train, self.valid, self.test), strict=True)
        return {name: dataset for name, dataset in named if dataset is not None}

    def tables(self) -> dict[str, str]:
        """For each split a table: dataset, documents, tokens, share asked for and given, samples, epochs."""
        return {name: format_table(table_rows(dataset)) for name, dataset in self.datasets.items()}


@dataclass(kw_only=True, slots=True)
class Builder:
    """What all datasets of a run have in common.

    Raises:
        ConfigError: from `build`, if settings do not agree or a split cannot give the samples asked of it.
    """

    seq_len: int
    """Tokens that the model sees of one sample."""
    seed: int = 1234
    """Seed of the shuffles, the same for every split and dataset."""
    split: str = "969,30,1"
    """Shares of train, valid and test. Not for data that are named for each split."""
    order: str = "megatron"
    """"megatron" or "instant"."""
    weight_kind: str = "shares"
    """What weights are: "shares" of the samples, or "epochs" that each dataset is read."""
    phases: Sequence[Phase] | None = None
    """Weights that change, for the train split: (first sample, weights)."""
    cache_dir: str | PathLike[str] | None = None
    """Folder where indices are kept."""
    options: dict[str, Any] = field(default_factory=dict)
    """Other arguments of `GPTDataset`, the same for all."""
    _opened: dict[str, IndexedDataset] = field(default_factory=dict)
    _notes: list[str] = field(default_factory=list)

    def build(self, data: DataSpec, num_samples: Sequence[int | None]) -> SplitDatasets:
        """The datasets of the three splits.

        Args:
            data: what `read_data_arguments` found.
            num_samples: samples asked of train, valid and test; None is every sample once.
        """
        if self.weight_kind not in WEIGHT_KINDS:
            raise ConfigError(f"weight_kind = {self.weight_kind!r}: expected {' or '.join(map(repr, WEIGHT_KINDS))}")
        if len(num_samples) != len(SPLIT_NAMES):
            raise ConfigError(f"num_samples needs three entries, for train, valid and test; got {len(num_samples)}")
        self._notes.clear()
        built: list[AnyDataset | None] = []
        for number, (name, wanted) in enumerate(zip(SPLIT_NAMES, num_samples, strict=True)):
            spec = data.blend if data.per_split is None else data.per_split[number]
            split = self.split if data.per_split is None else None
            built.append(None if spec is None else self._build_split(spec, split, name, wanted, data))
        train, valid, test = built
        return SplitDatasets(train, valid, test, tuple(self._notes))

    def _build_split(
        self, spec: BlendSpec, split: str | None, name: str, wanted: int | None, data: DataSpec
    ) -> AnyDataset | None:
        is_off = split is not None and _core.split_matrix(split)[SPLIT_NAMES.index(name)] is None
        if is_off or wanted == 0:
            return None
        # Megatron wraps a single prefix only if it has a weight, and never where each split is named.
        is_single = len(spec.prefixes) == 1 and (spec.weights is None or data.per_split is not None)
        if is_single and not (name == "train" and self.phases):
            return self._build_single(spec.prefixes[0], split, name, wanted)
        return self._build_blend(spec, split, name, wanted)

    def _build_single(self, prefix: str, split: str | None, name: str, wanted: int | None) -> GPTDataset | None:
        # A train split without documents is an error as soon as samples are asked of it.
        if self._is_empty(prefix, split, name) and (wanted is None or name != "train"):
            return None
        return self._make(prefix, split, name, wanted)

    def _build_blend(self, spec: BlendSpec, split: str | None, name: str, wanted: int | None) -> BlendedDataset | None:
        phases = list(self.phases) if self.phases and name == "train" else None
        weights = None if spec.weights is None else list(spec.weights)
        prefixes, kept = list(spec.prefixes), self._kept(spec, split, name, phases)
        if not kept:
            return None
        prefixes = [prefixes[number] for number in kept]
        weights = None if weights is None else [weights[number] for number in kept]
        if weights is not None and self.weight_kind == "epochs":
            wanted, weights = self._from_epochs(prefixes, weights, split, name, wanted)
        if phases is not None:
            phases = [(at, [own[number] for number in kept]) for at, own in phases]
            weights = None
        sizes = self._sizes(len(prefixes), weights, phases, wanted)
        datasets = [self._make(prefix, split, name, size) for prefix, size in zip(prefixes, sizes, strict=True)]
        blend = BlendedDataset(
            datasets, weights, num_samples=wanted, order=self.order, phases=phases, cache_dir=self.cache_dir
        )
        self._note_cache(blend)
        return blend

    def _kept(self, spec: BlendSpec, split: str | None, name: str, phases: Sequence[Phase] | None) -> list[int]:
        """Datasets that can give something. One that has none is left out of valid and test, and an error of train."""
        kept, is_weighted = [], spec.weights is not None or phases is not None
        for number, prefix in enumerate(spec.prefixes):
            shares = [spec.weights[number]] if spec.weights is not None and phases is None else [1.0]
            if phases is not None:
                shares = [weights[number] for _, weights in phases if number < len(weights)]
            if not any(shares):
                self._notes.append(f"{name}: {prefix} has weight 0 and is not read")
            elif not self._is_empty(prefix, split, name) or (name == "train" and is_weighted):
                kept.append(number)
        return kept

    def _sizes(
        self, count: int, weights: list[float] | None, phases: Sequence[Phase] | None, wanted: int | None
    ) -> list[int | None]:
        """Samples for which each dataset of a blend is built."""
        if wanted is None or (weights is None and phases is None):
            return [None] * count
        if self.order == "megatron" and weights is not None:
            return list(sizes_of_megatron(weights, wanted))
        changing = [(at, list(own)) for at, own in phases] if phases is not None else [(0, normalize(weights or []))]
        return list(_core.share_counts(changing, wanted))

    def _from_epochs(
        self, prefixes: Sequence[str], epochs: Sequence[float], split: str | None, name: str, wanted: int | None
    ) -> tuple[int, list[float]]:
        """Weights that read each dataset so often, and the samples that this makes where no number is asked for."""
        samples = [
            own * self._make(prefix, split, name, None, probe=True).samples_per_epoch
            for prefix, own in zip(prefixes, epochs, strict=True)
        ]
        total = int(sum(samples)) if wanted is None else wanted
        if wanted is not None and wanted > sum(samples) * 1.0001 + 1:
            self._notes.append(
                f"{name}: {wanted} samples are more than the epochs of its datasets make ({int(sum(samples))}); "
                "their ratio holds, each is read more often"
            )
        return total, samples

    def _is_empty(self, prefix: str, split: str | None, name: str) -> bool:
        indexed = self._open(prefix)
        found: tuple[int, int] | None = (0, indexed.num_sequences)
        if split is not None:
            found = _core.split_sequences(split, indexed.num_sequences)[SPLIT_NAMES.index(name)]
        if found is not None and found[0] < found[1]:
            return False
        note = f"{name}: the share of {split} rounds to none of the {indexed.num_sequences} documents of {prefix}"
        self._notes.append(note)
        return True

    def _make(
        self, prefix: str, split: str | None, name: str, wanted: int | None, *, probe: bool = False
    ) -> GPTDataset:
        options = dict(self.options)
        keep_partial = bool(options.pop("keep_partial", False)) and name == "valid"
        order = self.order
        if probe and options.get("packing", "concatenate") == "concatenate":
            order = "instant"  # It tells the same counts and builds no index.
        dataset = GPTDataset(
            self._open(prefix),
            seq_len=self.seq_len,
            num_samples=wanted,
            seed=self.seed,
            split=split,
            split_name=name,
            keep_partial=keep_partial,
            order=order,
            cache_dir=self.cache_dir,
            **options,
        )
        self._note_cache(dataset)
        return dataset

    def _note_cache(self, dataset: AnyDataset) -> None:
        outcome, reason = dataset.cached or ("", None)
        if reason is not None:
            self._notes.append(f"index of {dataset!r} {outcome}: {reason}")

    def _open(self, prefix: str) -> IndexedDataset:
        if prefix not in self._opened:
            self._opened[prefix] = IndexedDataset(prefix)
        return self._opened[prefix]


def table_rows(dataset: AnyDataset) -> list[BlendRow]:
    """The lines of a dataset's table: one, or one for each dataset of a blend."""
    if isinstance(dataset, BlendedDataset):
        return dataset.table()
    return [table_row(dataset, 1.0, len(dataset), max(len(dataset), 1))]
