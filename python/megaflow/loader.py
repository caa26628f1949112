"""Batches of one data-parallel rank, gathered by threads ahead of need.

Legend: `b` micro-batch, `s` sequence length of the model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from megaflow import _core
from megaflow.errors import CheckpointError, ConfigError, ForkError

if TYPE_CHECKING:
    from megaflow.origin import SampleOrigin

STATE_VERSION = 1
# Entries of a dataset's description that may change between save and load: a longer run walks the same order as long as
# its epochs are the same, and the description says what they are.
FREE_ENTRIES = frozenset({"num_samples"})
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


class Batch:
    """One micro-batch, in memory that belongs to whoever holds its arrays.

    Every array takes part in DLPack: `torch.from_dlpack(batch.tokens)` and `jax.dlpack.from_dlpack` copy nothing.
    """

    __slots__ = ("_received", "labels", "loss_mask", "sample_ids", "tokens")

    def __init__(
        self,
        tokens: NDArray[Any],
        labels: NDArray[Any],
        sample_ids: NDArray[np.int64],
        received: _core.BatchBuffer,
        loss_mask: NDArray[np.float32] | None = None,
    ) -> None:
        self.tokens = tokens
        """Inputs, `[b, s]` of the loader's dtype; 0 where a sample is short."""
        self.labels = labels
        """The next token of each input, `[b, s]`; 0 where there is none. A view of the same memory as `tokens`, one
        token further, unless the samples have no extra token."""
        self.loss_mask = loss_mask
        """float32 `[b, s]`: 0 where the label is padding, else 1. None if every label is a token."""
        self.sample_ids = sample_ids
        """Positions of the samples in the dataset, int64 `[b]`."""
        self._received = received

    @property
    def wait_s(self) -> float:
        """Seconds for which the caller was blocked for this batch."""
        return self._received.wait_s

    @property
    def request_to_ready_s(self) -> float:
        """Seconds from the moment it could be gathered until it was ready."""
        return self._received.request_to_ready_s

    @property
    def queue_depth(self) -> int:
        """Batches that lay ready when this one was asked for."""
        return self._received.queue_depth

    @property
    def cache_misses(self) -> int:
        """Page faults for which its gathering waited for the disk; 0 where the system does not tell."""
        return self._received.cache_misses

    @property
    def disk_bytes(self) -> int:
        """Bytes read from the disk for it; 0 where the system does not tell."""
        return self._received.disk_bytes


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
    ) -> None:
        self.dataset = dataset
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
        return _core.Prefetcher(source, **settings, dtype=self.dtype.name)

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
        buffer: NDArray[Any] = np.asarray(received)
        has_extra_token = self.dataset.add_extra_token
        if has_extra_token and received.is_full:
            tokens, labels, loss_mask = buffer[:, :-1], buffer[:, 1:], None
        else:
            tokens, labels, loss_mask = _mask_padding(buffer, received.short_rows, has_extra_token=has_extra_token)
        sample_ids = received.sample_ids
        if self._cyclic is not None:
            sample_ids = np.array(self._cyclic.locate(sample_ids.tolist()), dtype=np.int64)
        return Batch(tokens, labels, sample_ids, received, loss_mask)

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
        names = sorted((saved.keys() | current.keys()) - FREE_ENTRIES)
        return [
            f"{name} was {saved.get(name)!r} and is {current.get(name)!r}"
            for name in names
            if saved.get(name) != current.get(name)
        ]

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
            self._at_close = (self.state_dict(), self.stats())
            self._prefetcher = None
            self._opened = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise ConfigError(
            "a Loader has threads and cannot be pickled or copied; pass its dataset and state_dict() and make the "
            "loader there (it needs no worker processes: do not put it into a torch DataLoader)"
        )


def _mask_padding(
    buffer: NDArray[Any], short_rows: list[tuple[int, int]], *, has_extra_token: bool
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.float32]]:
    """Tokens, labels and loss mask of a batch with rows that end in padding, or whose last label there is none."""
    for row, count in short_rows:
        buffer[row, count:] = 0
    if has_extra_token:
        tokens, labels = buffer[:, :-1], buffer[:, 1:]
    else:
        tokens, labels = buffer, np.roll(buffer, -1, axis=1)
        labels[:, -1] = 0
    loss_mask = np.ones(labels.shape, dtype=np.float32)
    for row, count in short_rows:
        loss_mask[row, max(count - 1, 0) :] = 0.0
    if not has_extra_token:
        loss_mask[:, -1] = 0.0
    return tokens, labels, loss_mask
