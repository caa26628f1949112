"""From the loader to the device: the next micro-batch, its mask, and the time that was spent waiting for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megaflow import Batch, Loader
from megaflow.errors import ConfigError, DataFormatError, MegaflowError
from megaflow_trainer.model.context import number_documents
from megaflow_trainer.training.clock import FEED, H2D, HOST_WAIT, LOADER_BOUND, Clock


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """One micro-batch on the device. Legend: b micro-batch, s sequence."""

    tokens: Tensor  # int64 [b, s]
    labels: Tensor  # int64 [b, s]
    mask: Tensor | None  # float32 [b, s], 1 where the prediction counts; None: everywhere
    num_tokens: float  # predictions that count; of a sample that ranks share, this rank's part of them
    sample_ids: tuple[int, ...] = ()  # where its samples stand in the dataset
    documents: Tensor | None = None  # int64 [b, S], the document of each token of the whole samples, if asked for


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A micro-batch as the loader gives it."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    mask: NDArray[np.float32] | None
    sample_ids: tuple[int, ...] = field(default=())
    documents: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A batch on its way to a GPU, or why there is none."""

    position: dict[str, Any]  # of the loader before it
    batch: DeviceBatch | None = None
    began: Any = None  # events of the copy
    arrived: Any = None
    error: MegaflowError | None = None


class Feed:
    """Takes batches from a loader to a device. With `eod_id`, predictions made at that token do not count. With
    `document_end`, the token that ends a document, batches tell the document of each token; with `by_documents` they do
    so as the loader's positions tell.

    On a GPU one batch is copied ahead while the device computes (`prepare`). The position is that of the batches that
    were handed out.
    """

    def __init__(
        self,
        loader: Loader,
        device: torch.device,
        clock: Clock,
        *,
        vocab_size: int,
        eod_id: int | None,
        document_end: int | None = None,
        by_documents: bool = False,
    ) -> None:
        self.loader = loader
        self.device = device
        self.clock = clock
        self.vocab_size = vocab_size
        self.eod_id = eod_id
        self.document_end = document_end
        self.by_documents = by_documents
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: _Ahead | None = None

    @property
    def consumed_samples(self) -> int:
        """Samples of all ranks that were handed out."""
        return int(self.state_dict()["consumed_samples"])

    def state_dict(self) -> dict[str, Any]:
        """The loader's position behind the last batch that was handed out."""
        return self.loader.state_dict() if self._ahead is None else self._ahead.position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position; a batch that was copied ahead is forgotten."""
        self._ahead = None
        self.loader.load_state_dict(state)

    def prepare(self) -> None:
        """Start copying the next batch, once the work on this one has been given to a GPU; else nothing.

        What is wrong with that batch, the end of the data included, is raised when it is asked for.
        """
        if self.stream is None or self._ahead is not None:
            return
        position = self.loader.state_dict()
        try:
            self._ahead = self._copy(self.stream, position)
        except MegaflowError as error:
            self._ahead = _Ahead(position, error=error)

    def next(self) -> DeviceBatch:
        """The next micro-batch of this rank.

        Raises:
            ConfigError: if the data end before the run does.
            DataFormatError: if a token is outside the vocabulary.
        """
        if self.stream is None:
            with self.clock.phase(LOADER_BOUND) as phase:
                batch = self._read()
                if batch.queue_depth:  # it had arrived before the step asked: nothing was waited for
                    phase.name = FEED
            with self.clock.phase(FEED):
                host = self._check(batch)
                with self.clock.host(H2D):
                    return self._pack(host)
        earlier_work = self.clock.mark()
        ahead = self._ahead or self._copy(self.stream, {})
        self._ahead = None
        if ahead.error is not None:
            raise ahead.error
        assert ahead.batch is not None, "it has a batch or an error"
        self._hand_over(ahead.batch, ahead.arrived)
        self.clock.count(LOADER_BOUND, earlier_work, ahead.arrived)
        self.clock.count(H2D, ahead.began, ahead.arrived)
        return ahead.batch

    def _copy(self, stream: torch.cuda.Stream, position: dict[str, Any]) -> _Ahead:
        """Start copying the next batch on a stream of its own."""
        host = self._check(self._read())
        with torch.cuda.stream(stream):
            began = self.clock.mark(stream)
            batch = self._pack(host)
        return _Ahead(position, batch, began, self.clock.mark(stream))

    def _read(self) -> Batch:
        try:
            with self.clock.host(HOST_WAIT):
                return next(self.loader)
        except StopIteration:
            raise ConfigError("the data end before the run does; lower --train-iters or --eval-iters") from None

    def _check(self, batch: Batch) -> HostBatch:
        largest = max(int(batch.tokens.max()), int(batch.labels.max()))
        if largest >= self.vocab_size:
            raise DataFormatError(
                f"token {largest} in one of samples {batch.sample_ids.tolist()} is outside the vocabulary of "
                f"{self.vocab_size} tokens; name the tokenizer that the data were made with, or a larger --vocab-size"
            )
        mask = batch.loss_mask
        if self.eod_id is not None:
            counts = (batch.tokens != self.eod_id).astype(np.float32)
            mask = counts if mask is None else mask * counts
        documents = None
        if self.by_documents:
            assert batch.position_ids is not None, "the loader was asked for them"
            documents = np.cumsum(batch.position_ids == 0, axis=1, dtype=np.int64) - 1
        return HostBatch(batch.tokens, batch.labels, mask, tuple(batch.sample_ids.tolist()), documents)

    def _pack(self, host: HostBatch) -> DeviceBatch:
        num_tokens = host.tokens.size if host.mask is None else int(host.mask.sum())
        mask = None if host.mask is None else self._send(host.mask)
        tokens, labels = self._send(host.tokens), self._send(host.labels)
        documents = None if host.documents is None else self._send(host.documents)
        if self.document_end is not None:
            documents = number_documents(tokens, self.document_end)
        return DeviceBatch(tokens, labels, mask, num_tokens, host.sample_ids, documents)

    def _send(self, array: NDArray[np.generic]) -> Tensor:
        """Copy an array to the device; the loader may reuse its buffer as soon as this returns."""
        tensor = torch.from_numpy(np.array(array))
        return tensor if self.stream is None else tensor.pin_memory().to(self.device, non_blocking=True)

    def _hand_over(self, batch: DeviceBatch, arrived: torch.cuda.Event) -> None:
        """Let the computing stream wait for the batch, and keep its memory until that stream is done with it."""
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(arrived)
        for tensor in (batch.tokens, batch.labels, batch.mask, batch.documents):
            if tensor is not None:
                tensor.record_stream(computing)
