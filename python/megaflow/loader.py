"""Batches of one data-parallel rank, gathered by threads ahead of need.

Legend: `b` micro-batch, `s` sequence length of the model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from megaflow import _core
from megaflow.batch import Batch, MaskOptions, make_batch
from megaflow.errors import CheckpointError, ConfigError, ForkError
from megaflow.samples import describe_changes

if TYPE_CHECKING:
    from megaflow.origin import SampleOrigin

STATE_VERSION = 1
TOKEN_TYPES = ("uint16", "int32", "int64")


class SampleSet(Protocol):
    """What a loader reads: `GPTDataset`, a blend, `StreamingDataset`, or anything else with these members.

    A set whose samples stay has `source`. One that is read in order has `open_at(position)`, which gives an object with
    `source` and `position(count)`; see `megaflow.StreamingDataset`.
    """

    add_extra_token: bool
    pad_id: int

    @property
    def fingerprint(self) -> str:
        """A key of the samples and their order."""

    @property
    def description(self) -> dict[str, Any]:
        """What the fingerprint is made of, in plain types."""

    def __len__(self) -> int: ...


class Loader:
    """An iterator of the batches of one data-parallel rank. Threads gather them ahead; no process is started.

    Micro-batch `k` of rank `r` holds position `consumed + k*b*dp_size + r*b` and the `b - 1` behind it. The end that
    does not fill a micro-batch of every rank is dropped. Batches do not depend on `num_threads` or `prefetch`.

    A loader belongs to the process that made it, and to one thread at a time. Close it, or use it as a context manager,
    to end its threads at once; else they end when it is collected.

    Args:
        dataset: the samples.
        micro_batch_size: `b`, samples in a batch.
        dp_rank: this rank.
        dp_size: data-parallel ranks. All advance together.
        num_threads: threads that gather. With 0 each batch is gathered when it is asked for. A caller that would have
            to wait gathers a batch itself where that takes less than half a millisecond.
        prefetch: batches gathered ahead.
        consumed_samples: samples that all ranks together have received before; where to start. A stream makes all
            samples before it anew; load a state instead.
        dtype: type of the tokens: "uint16", "int32" or "int64". Narrow ones are gathered faster and sent to a device
            sooner; cast them there.
        order: "single" walks the dataset once. "cyclic" repeats it without end, each epoch in an order of its own:
            position `p` is sample `torch.randperm(n, generator=torch.Generator().manual_seed(seed + p // n))[p % n]` of
            the `n` of the dataset, on every rank alike. The order of an epoch takes 8 bytes a sample.
        seed: of the cyclic order.
        document_masking: whether batches tell where documents begin: `position_ids` and `cu_seqlens`. None: as the
            dataset says. The dataset's `reset_position_ids`, `reset_attention_mask`, `create_attention_mask` and
            `eod_mask_loss` hold for batches too.

    Raises:
        ConfigError: if a setting is wrong.
    """

    def __init__(  # noqa: PLR0913 - keywords, each with its default
        self,
        dataset: SampleSet,
        micro_batch_size: int,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        num_threads: int = 1,
        prefetch: int = 4,
        consumed_samples: int = 0,
        dtype: Literal["uint16", "int32", "int64"] = "int64",
        order: Literal["single", "cyclic"] = "single",
        seed: int = 1234,
        document_masking: bool | None = None,
    ) -> None:
        self.dataset = dataset
        self._masks = MaskOptions.of(dataset, document_masking=document_masking)
        self._settings: dict[str, Any] = {
            "micro_batch_size": micro_batch_size,
            "dp_rank": dp_rank,
            "dp_size": dp_size,
            "num_threads": num_threads,
            "prefetch": prefetch,
        }
        if dtype not in TOKEN_TYPES:
            raise ConfigError(f"dtype = {dtype!r}: expected one of {', '.join(TOKEN_TYPES)}")
        self.dtype = np.dtype(dtype)
        if order not in ("single", "cyclic"):
            raise ConfigError(f"order = {order!r}: expected single or cyclic")
        self._sampler: dict[str, Any] = {"order": order, **({"seed": seed} if order == "cyclic" else {})}
        self._cyclic = self._make_cyclic(seed) if order == "cyclic" else None
        self._opened: Any = None
        self._process = os.getpid()
        self._prefetcher: _core.Prefetcher | None = self._start(consumed_samples)
        self._at_close: tuple[dict[str, Any], dict[str, Any]] = ({}, {})

    def _make_cyclic(self, seed: int) -> _core.Cyclic:
        if hasattr(self.dataset, "open_at"):
            raise ConfigError("a stream is read in order and repeats itself: leave order at single, and give epochs")
        if not 0 <= seed < 2**64:
            raise ConfigError(f"seed = {seed}: expected 0 to 2^64 - 1")
        source: _core.SampleSource = self.dataset.source  # type: ignore[attr-defined]
        return _core.Cyclic(source, seed=seed)

    def _start(self, consumed_samples: int, position: str | None = None) -> _core.Prefetcher:
        settings = {**self._settings, "consumed_samples": consumed_samples}
        for name, value in settings.items():
            if not 0 <= value < 2**63:
                raise ConfigError(f"{name} = {value}: expected 0 or more")
        source: _core.SampleSource
        if self._cyclic is not None:
            source = self._cyclic.source()
        elif hasattr(self.dataset, "open_at"):
            self._opened = self.dataset.open_at(position)
            source = self._opened.source
        else:
            source = self.dataset.source  # type: ignore[attr-defined]
        with_starts = self._masks is not None and self._masks.document_masking
        return _core.Prefetcher(source, **settings, dtype=self.dtype.name, with_starts=with_starts)

    def _open(self) -> _core.Prefetcher:
        if self._prefetcher is None:
            raise ConfigError("this loader is closed; make a new one and load the state_dict of this one into it")
        return self._prefetcher

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            StopIteration: behind the last whole batch.
            DataFormatError: if the data of this batch is damaged. The loader stays at this batch.
            ForkError: in a child forked from the process that made the loader.
        """
        received = self._open().next()
        if received is None:
            raise StopIteration
        sample_ids = received.sample_ids
        if self._cyclic is not None:
            sample_ids = np.array(self._cyclic.locate(sample_ids.tolist()), dtype=np.int64)
        return make_batch(received, sample_ids, self._masks, has_extra_token=self.dataset.add_extra_token)

    @property
    def consumed_samples(self) -> int:
        """Samples that all ranks together have received, once each has received as many batches as this one."""
        if self._prefetcher is None:
            return int(self._at_close[0]["consumed_samples"])
        return self._prefetcher.consumed_samples

    def set_micro_batch_size(self, micro_batch_size: int) -> None:
        """From the next batch on, batches hold this many samples: the row of samples goes on exactly (ramp-up).

        All ranks must do so after the same batch. Statistics start again from 0.

        Raises:
            ConfigError: if the loader is closed or the size makes no sense; the loader then goes on as it was.
        """
        self._open()
        state, before = self.state_dict(), self._settings["micro_batch_size"]
        self._settings["micro_batch_size"] = micro_batch_size
        try:
            self._prefetcher = self._start(state["consumed_samples"], state.get("position"))
        except ConfigError:
            self._settings["micro_batch_size"] = before
            raise

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, in plain types: what was received counts, what was gathered ahead does not.

        It is the same on every rank, and fits any `dp_size`, `micro_batch_size`, `num_threads`, `prefetch` and `dtype`.
        A closed loader still tells.
        """
        if self._prefetcher is None:
            return self._at_close[0]
        consumed = self._prefetcher.consumed_samples
        state: dict[str, Any] = {
            "version": STATE_VERSION,
            "consumed_samples": consumed,
            "num_samples": self._num_samples(),
            "fingerprint": self.dataset.fingerprint,
            "dataset": self.dataset.description,
            "sampler": self._sampler,
        }
        if self._opened is not None:
            state["position"] = self._opened.position(consumed)
        return state

    def _num_samples(self) -> int | None:
        return None if hasattr(self.dataset, "open_at") else len(self.dataset)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to where another loader stood. Statistics start again from 0.

        Raises:
            CheckpointError: if the state was saved for another dataset or order, or is not a loader's.
        """
        self._open()
        missing = [name for name in ("consumed_samples", "fingerprint", "dataset") if name not in state]
        if missing or state.get("version") != STATE_VERSION:
            found = f"version {state.get('version')!r}" + (f" without {', '.join(missing)}" if missing else "")
            raise CheckpointError(f"not the state of a loader of version {STATE_VERSION}: found {found}")
        self._check_dataset(state)
        consumed, position = int(state["consumed_samples"]), state.get("position")
        if self._opened is None and self._cyclic is None and not 0 <= consumed <= len(self.dataset):
            raise CheckpointError(
                f"the state has consumed {consumed} samples, but this dataset has {len(self.dataset)}; "
                "ask for at least as many samples as before"
            )
        if self._opened is not None and position is None:
            raise CheckpointError("the state has no `position`, so it is not that of a stream")
        self._prefetcher = self._start(consumed, position)

    def _check_dataset(self, state: Mapping[str, Any]) -> None:
        sampler = state.get("sampler", {"order": "single"})
        if sampler != self._sampler:
            raise CheckpointError(
                f"the state was saved for another order of samples: the sampler was {sampler} and is {self._sampler}"
            )
        if self._cyclic is not None and state.get("num_samples") != len(self.dataset):
            raise CheckpointError(
                f"the state was saved for another order of samples: the cyclic order of {state.get('num_samples')} "
                f"samples is not that of {len(self.dataset)}; ask for as many samples as before"
            )
        if state["fingerprint"] == self.dataset.fingerprint:
            return
        changes = self._changes(state)
        if changes:
            raise CheckpointError(
                f"the state was saved for another order of samples: {'; '.join(changes)}; "
                "going on would repeat some samples and leave out others"
            )

    def _changes(self, state: Mapping[str, Any]) -> list[str]:
        """What differs between the order that a state was saved for and this one, in words."""
        saved, current = state["dataset"], self.dataset.description
        if hasattr(self.dataset, "changes"):
            # The dataset knows which differences lie behind the position, such as weights of a later phase.
            changes: list[str] = self.dataset.changes(saved, int(state["consumed_samples"]))
            return changes
        return describe_changes(saved, current)

    def origin(self, step: int, *, global_batch_size: int | None = None) -> list[SampleOrigin]:
        """Where the samples of a global batch come from: for each its documents, with source file and line.

        Args:
            step: number of the global batch from the start of the data, from 0.
            global_batch_size: samples of a global batch; by default one micro-batch of each rank.

        Returns:
            One entry a sample, in the order of the samples. A stream is read anew up to them.

        Raises:
            SampleIndexError: if the data end before that batch.
        """
        from megaflow.origin import OriginFinder

        size = global_batch_size or self._settings["micro_batch_size"] * self._settings["dp_size"]
        positions = list(range(step * size, (step + 1) * size))
        if self._cyclic is not None:
            positions = self._cyclic.locate(positions)
        return OriginFinder(self.dataset).samples(positions)

    def stats(self) -> dict[str, Any]:
        """What was received and waited for, since the loader was made or its state loaded.

        Returns:
            `batches`, `samples`, `token_bytes`: received. `ready_when_asked`: batches that lay ready when they were
            asked for. `mean_queue_depth`: batches found ready at a request. `host_wait_s`: seconds for which the caller
            was blocked, `max_wait_s`: for one batch at most. `gather_s`: seconds of gathering, added over threads.
            `request_to_ready_s`: seconds from the moment a batch could be gathered until it was ready, added over
            batches. `cache_misses`: page faults for which gathering waited for the disk, `disk_bytes`: bytes read from
            it (both 0 where the system does not tell). Of a stream also `stream`: what `OpenStream.counts` says.
        """
        if self._prefetcher is None:
            return self._at_close[1]
        totals: dict[str, Any] = dict(self._prefetcher.totals())
        totals["mean_queue_depth"] = totals.pop("queue_depth") / max(totals["batches"], 1)
        if self._opened is not None:
            totals["stream"] = self._opened.counts()
        return totals

    def close(self) -> None:
        """Ends the threads. Batches received stay valid; `state_dict()` and `stats()` keep their last answer."""
        if self._prefetcher is not None:
            if os.getpid() != self._process:
                raise ForkError(f"the loader was made in process {self._process}; close it there")
            try:
                self._at_close = (self.state_dict(), self.stats())
            finally:  # the threads end, whatever became of the files
                self._prefetcher = None
                self._opened = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        rank = f", rank {self._settings['dp_rank']} of {self._settings['dp_size']}"
        size = self._settings["micro_batch_size"]
        return f"Loader({self.dataset!r}, micro_batch_size {size}{rank}, {self.consumed_samples} samples consumed)"

    def __reduce__(self) -> tuple[Any, ...]:
        raise ConfigError(
            "a Loader has threads and cannot be pickled or copied; pass its dataset and state_dict() and make the "
            "loader there (it needs no worker processes: do not put it into a torch DataLoader)"
        )
