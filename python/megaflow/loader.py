"""Batches of one data-parallel rank, gathered by threads ahead of need.

Legend: `b` micro-batch, `s` sequence length of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megaflow import _core
from megaflow.errors import CheckpointError, ConfigError

STATE_VERSION = 1
# Entries of a dataset's description that may change between save and load: a longer run walks the same order as long as
# its epochs are the same, and the description says what they are.
FREE_ENTRIES = frozenset({"num_samples"})


class SampleSet(Protocol):
    """What a loader reads: `GPTDataset`, or anything else with these members."""

    source: _core.SampleSource
    """Samples for the threads, each `[s + 1]` int64, or `[s]` without the extra token."""
    add_extra_token: bool
    pad_id: int

    @property
    def fingerprint(self) -> str:
        """A key of the samples and their order."""

    @property
    def description(self) -> dict[str, Any]:
        """What the fingerprint is made of, in plain types."""

    def __len__(self) -> int: ...


class Batch:
    """One micro-batch, in memory that belongs to whoever holds its arrays."""

    __slots__ = ("labels", "sample_ids", "tokens", "wait_s")

    def __init__(
        self, tokens: NDArray[np.int64], labels: NDArray[np.int64], sample_ids: NDArray[np.int64], wait_s: float
    ) -> None:
        self.tokens = tokens
        """Inputs, int64 `[b, s]`; `pad_id` of the dataset where a sample is short."""
        self.labels = labels
        """The next token of each input, int64 `[b, s]`. A view of the same memory as `tokens`, one token further."""
        self.sample_ids = sample_ids
        """Positions of the samples in the dataset, int64 `[b]`."""
        self.wait_s = wait_s
        """Seconds for which the caller was blocked for this batch."""


class Loader:
    """An iterator of the batches of one data-parallel rank. Threads gather them ahead; no process is started.

    Micro-batch `k` of rank `r` holds sample `consumed + k*b*dp_size + r*b` and the `b - 1` behind it. The end that does
    not fill a micro-batch of every rank is dropped. Batches do not depend on `num_threads` or `prefetch`.

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
        consumed_samples: samples that all ranks together have received before; where to start.

    Raises:
        ConfigError: if a setting is wrong.
    """

    def __init__(
        self,
        dataset: SampleSet,
        micro_batch_size: int,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        num_threads: int = 1,
        prefetch: int = 4,
        consumed_samples: int = 0,
    ) -> None:
        self.dataset = dataset
        self._settings = {
            "micro_batch_size": micro_batch_size,
            "dp_rank": dp_rank,
            "dp_size": dp_size,
            "num_threads": num_threads,
            "prefetch": prefetch,
        }
        self._prefetcher: _core.Prefetcher | None = self._start(consumed_samples)
        self._at_close: tuple[int, dict[str, Any]] = (consumed_samples, {})

    def _start(self, consumed_samples: int) -> _core.Prefetcher:
        settings = {**self._settings, "consumed_samples": consumed_samples}
        for name, value in settings.items():
            if not 0 <= value < 2**63:
                raise ConfigError(f"{name} = {value}: expected 0 or more")
        return _core.Prefetcher(self.dataset.source, **settings)

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
        buffer: NDArray[np.int64] = np.asarray(received)
        if self.dataset.add_extra_token:
            tokens, labels = buffer[:, :-1], buffer[:, 1:]
        else:
            tokens, labels = buffer, np.roll(buffer, -1, axis=1)
            labels[:, -1] = self.dataset.pad_id
        return Batch(tokens, labels, received.sample_ids, received.wait_s)

    @property
    def consumed_samples(self) -> int:
        """Samples that all ranks together have received, once each has received as many batches as this one."""
        return self._at_close[0] if self._prefetcher is None else self._prefetcher.consumed_samples

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, in plain types: what was received counts, what was gathered ahead does not.

        It is the same on every rank, and fits any `dp_size`, `micro_batch_size`, `num_threads` and `prefetch`. A closed
        loader still tells.
        """
        return {
            "version": STATE_VERSION,
            "consumed_samples": self.consumed_samples,
            "num_samples": len(self.dataset),
            "fingerprint": self.dataset.fingerprint,
            "dataset": self.dataset.description,
        }

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
        consumed = int(state["consumed_samples"])
        if not 0 <= consumed <= len(self.dataset):
            raise CheckpointError(
                f"the state has consumed {consumed} samples, but this dataset has {len(self.dataset)}; "
                "ask for at least as many samples as before"
            )
        self._prefetcher = self._start(consumed)

    def _check_dataset(self, state: Mapping[str, Any]) -> None:
        if state["fingerprint"] == self.dataset.fingerprint:
            return
        saved, current = state["dataset"], self.dataset.description
        names = sorted((saved.keys() | current.keys()) - FREE_ENTRIES)
        changes = [
            f"{name} was {saved.get(name)!r} and is {current.get(name)!r}"
            for name in names
            if saved.get(name) != current.get(name)
        ]
        if changes:
            raise CheckpointError(
                f"the state was saved for another order of samples: {'; '.join(changes)}; "
                "going on would repeat some samples and leave out others"
            )

    def stats(self) -> dict[str, Any]:
        """What was received and waited for, since the loader was made or its state loaded.

        Returns:
            `batches`, `samples`: received. `ready_when_asked`: batches that lay ready when they were asked for.
            `mean_queue_depth`: batches found ready at a request. `host_wait_s`: seconds for which the caller was
            blocked. `gather_s`: seconds of gathering, added over threads. `request_to_ready_s`: seconds from the moment
            a batch could be gathered until it was ready, added over batches.
        """
        totals: dict[str, Any] = dict(self._at_close[1] if self._prefetcher is None else self._prefetcher.totals())
        totals["mean_queue_depth"] = totals.pop("queue_depth") / max(totals["batches"], 1)
        return totals

    def close(self) -> None:
        """Ends the threads. Batches received stay valid; `state_dict()` and `stats()` keep their last answer."""
        if self._prefetcher is not None:
            self._at_close = (self._prefetcher.consumed_samples, self._prefetcher.totals())
            self._prefetcher = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise ConfigError(
            "a Loader has threads and cannot be pickled or copied; pass its dataset and state_dict() and make the "
            "loader there (it needs no worker processes: do not put it into a torch DataLoader)"
        )
