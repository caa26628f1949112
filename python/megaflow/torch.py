"""Batches as torch tensors, and in the shapes that other training loops ask for. The one module that imports torch.

Legend: `b` micro-batch, `s` sequence length of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from megaflow.batch import Batch
from megaflow.errors import ConfigError
from megaflow.loader import Loader, SampleSet

IGNORED = -100
"""The label that torch's cross entropy leaves out."""
_WHERE_ASKED = ("loss_mask", "position_ids", "cu_seqlens", "attention_mask")


def to_tensors(batch: Batch) -> dict[str, torch.Tensor]:
    """A batch as tensors on the batch's own memory, which lives as long as they do: nothing is copied.

    Returns:
        `tokens` and `labels` `[b, s]` of the loader's dtype, `sample_ids` int64 `[b]`, and those of `loss_mask`,
        `position_ids`, `cu_seqlens` and `attention_mask` that the batch has; see `Batch`.
    """
    tensors = {
        "tokens": torch.from_numpy(batch.tokens),
        "labels": torch.from_numpy(batch.labels),
        "sample_ids": torch.from_numpy(batch.sample_ids),
    }
    return tensors | _masks_of(batch)


def _masks_of(batch: Batch) -> dict[str, torch.Tensor]:
    found = {name: getattr(batch, name) for name in _WHERE_ASKED}
    return {name: torch.from_numpy(array) for name, array in found.items() if array is not None}


def masked_labels(batch: Batch) -> torch.Tensor:
    """Labels for torch's cross entropy, int64 `[b, s]`, -100 where a label does not count. Memory of their own."""
    labels = torch.from_numpy(batch.labels.astype(np.int64))
    return labels if batch.loss_mask is None else labels.masked_fill_(torch.from_numpy(batch.loss_mask == 0), IGNORED)


class LoaderDataset(IterableDataset[dict[str, torch.Tensor]]):
    """Whole batches for `torch.utils.data.DataLoader(dataset, batch_size=None)`, and for what is built on it.

    Without workers (`num_workers=0`, the fast way: reading happens in Rust threads) each pass goes on where the last
    one stopped, and `state_dict` and `load_state_dict` are those of the loader. With workers each makes a loader of its
    own, under fork, spawn or forkserver alike; batches then come in the same order, every pass begins at the start, and
    the end that does not fill a batch of every worker is dropped.

    Args:
        dataset: the samples.
        micro_batch_size: `b`.
        options: of `Loader`.
    """

    def __init__(self, dataset: SampleSet, micro_batch_size: int, **options: Any) -> None:
        super().__init__()
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.options = options
        self._loader: Loader | None = None
        self._state: dict[str, Any] | None = None

    def _own_loader(self) -> Loader:
        if self._loader is None:
            self._loader = Loader(self.dataset, self.micro_batch_size, **self.options)
            if self._state is not None:
                self._loader.load_state_dict(self._state)
        return self._loader

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        if worker is None:
            for batch in self._own_loader():
                yield to_tensors(batch)
            return
        # Worker w of n takes every n-th batch of this rank: it is rank w * dp_size + r of n * dp_size.
        rank, size = self.options.get("dp_rank", 0), self.options.get("dp_size", 1)
        share = {"dp_rank": worker.id * size + rank, "dp_size": worker.num_workers * size}
        with Loader(self.dataset, self.micro_batch_size, **{**self.options, **share}) as loader:
            for batch in loader:
                # Memory of its own: it is sent to another process.
                yield {name: tensor.clone() for name, tensor in to_tensors(batch).items()}

    def __len__(self) -> int:
        """Batches of this rank from the start of the dataset. Loops that know it (Lightning) fetch none ahead of need.

        Raises:
            TypeError: for a stream without `num_samples`.
        """
        try:
            num_samples = len(self.dataset)
        except ConfigError as error:
            raise TypeError(str(error)) from None
        return num_samples // (self.micro_batch_size * int(self.options.get("dp_size", 1)))

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands; see `Loader.state_dict`."""
        return self._own_loader().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to where another loader stood; see `Loader.load_state_dict`."""
        self._own_loader().load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        # What a worker process gets: no threads.
        return {**self.__dict__, "_loader": None, "_state": None}


class MapDataset(Dataset[dict[str, torch.Tensor]]):
    """Samples by position, for samplers of torch, Lightning or Hugging Face.

    Args:
        dataset: samples that stay: `GPTDataset`, a blend.
        names: keys under which tokens and labels are given. Hugging Face's models take `("input_ids", "labels")` and
            shift the labels themselves: give `shifts_labels=True`.
        shifts_labels: whether the model shifts the labels; they then equal the inputs.
    """

    def __init__(
        self, dataset: Any, *, names: tuple[str, str] = ("tokens", "labels"), shifts_labels: bool = False
    ) -> None:
        if hasattr(dataset, "open_at"):
            raise ConfigError("a stream has no samples by position; use LoaderDataset")
        self.dataset = dataset
        self.names = names
        self.shifts_labels = shifts_labels

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One sample: inputs int64 `[s]`, labels int64 `[s]` with -100 where there is none or, with the dataset's
        `eod_mask_loss`, the input ends a document; `position_ids` int64 `[s]` where they start again with documents.
        """
        text = torch.from_numpy(self.dataset.tokens(index))
        is_padding = text == self.dataset.pad_id
        labels = text.masked_fill(is_padding, IGNORED)
        text = text.masked_fill(is_padding, 0)
        inputs = text[:-1] if self.dataset.add_extra_token else text
        if self.shifts_labels:
            labels = labels[: len(inputs)]
        elif self.dataset.add_extra_token:
            labels = labels[1:]
        else:
            labels = torch.cat([labels[1:], labels.new_tensor([IGNORED])])
        if self.dataset.eod_mask_loss:
            ends = inputs == self.dataset.eod_id
            labels[1:].masked_fill_(ends[:-1], IGNORED) if self.shifts_labels else labels.masked_fill_(ends, IGNORED)
        return {self.names[0]: inputs, self.names[1]: labels, **self._positions(index)}

    def _positions(self, index: int) -> dict[str, torch.Tensor]:
        if not (self.dataset.reset_position_ids or self.dataset.document_masking):
            return {}
        return {"position_ids": torch.from_numpy(self.dataset[index]["position_ids"])}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Several samples."""
        return [self[index] for index in indices]


class PinnedLoader:
    """Batches on a GPU, sent from page-locked memory while earlier work runs.

    The loader's buffers go around, so each is locked once, in place; a batch is then copied to the device without
    waiting, and its buffer is held until the copy is done. On a CPU it gives the tensors as they are.

    Args:
        loader: where batches come from; narrow tokens (`dtype="uint16"`) are sent in a quarter of the time.
        device: where they go.
        dtype: type of the tokens there.
    """

    def __init__(self, loader: Loader, device: torch.device, *, dtype: torch.dtype = torch.int64) -> None:
        self.loader = loader
        self.device = device
        self.dtype = dtype
        self._pinned: dict[int, int] = {}
        self._under_way: list[tuple[torch.cuda.Event, Batch]] = []

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in self.loader:
            yield self._send(batch)

    def _send(self, batch: Batch) -> dict[str, torch.Tensor]:
        if self.device.type != "cuda":
            tensors = to_tensors(batch)
            return {**tensors, **{name: tensors[name].to(self.dtype) for name in ("tokens", "labels")}}
        self._pin(batch)
        # One copy for tokens and labels: the labels are the same memory, one token further.
        base = batch.tokens.base if batch.tokens.base is not None else batch.tokens
        whole = torch.from_numpy(np.asarray(base)).to(self.device, non_blocking=True).to(self.dtype)
        sent = {"tokens": whole[:, :-1], "labels": whole[:, 1:]}
        if whole.shape == batch.tokens.shape:  # samples without an extra token have labels of their own
            labels = torch.from_numpy(batch.labels).to(self.device).to(self.dtype)
            sent = {"tokens": whole, "labels": labels}
        sent |= {name: tensor.to(self.device) for name, tensor in _masks_of(batch).items()}
        sent["sample_ids"] = torch.from_numpy(batch.sample_ids)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._under_way = [(done, held) for done, held in self._under_way if not done.query()]  # type: ignore[no-untyped-call]
        self._under_way.append((event, batch))
        return sent

    def _pin(self, batch: Batch) -> None:
        base = np.asarray(batch.tokens.base if batch.tokens.base is not None else batch.tokens)
        address, size = base.__array_interface__["data"][0], base.nbytes
        if self._pinned.get(address, 0) >= size:
            return
        code = torch.cuda.cudart().cudaHostRegister(address, size, 0)  # type: ignore[no-untyped-call]
        # 712: locked already, by an earlier loader whose memory was here. The copy is right all the same, if slower,
        # where the system has no memory to lock.
        torch.cuda.cudart().cudaGetLastError() if int(code) != 0 else None  # type: ignore[no-untyped-call]
        self._pinned[address] = size

    def close(self) -> None:
        """Waits for copies under way and unlocks the memory."""
        for done, _ in self._under_way:
            done.synchronize()
        self._under_way = []
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._pinned = {}


def megatron_iterator(loader: Loader, *, eod_id: int | None = None) -> Iterator[dict[str, torch.Tensor]]:
    """Batches as Megatron-LM's `--dataloader-type external` takes them from the datasets provider.

    Args:
        loader: of this data-parallel rank, at `consumed_samples`, with dtype int64.
        eod_id: with it, predictions made at that token have no loss (Megatron's `--eod-mask-loss`).

    Yields:
        `tokens`, `labels`, `position_ids` int64 `[b, s]` and `loss_mask` float32 `[b, s]`, as the dataset's options ask
        for them. Without `create_attention_mask` there is no attention mask: give Megatron
        `--no-create-attention-mask-in-dataloader`.
    """
    for batch in loader:
        tensors = to_tensors(batch)
        tokens = tensors["tokens"]
        mask = tensors.get("loss_mask", torch.ones(tokens.shape, dtype=torch.float32))
        if eod_id is not None:
            mask = mask.masked_fill(tokens == eod_id, 0.0)
        positions = tensors.get("position_ids")
        if positions is None:
            positions = torch.arange(tokens.shape[1]).expand(tokens.shape[0], -1).contiguous()
        given = {name: tensors[name] for name in ("attention_mask",) if name in tensors}
        labels = tensors["labels"].contiguous()
        yield {"tokens": tokens.contiguous(), "labels": labels, "loss_mask": mask, "position_ids": positions, **given}
