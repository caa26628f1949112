"""Training samples of a tokenized corpus, in Megatron's order.

Legend: `T` sequence length of the model (`seq_len`).
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Sequence
from os import PathLike
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from megaflow import _core
from megaflow.errors import ConfigError
from megaflow.indexed import IndexedDataset, to_position

SPLIT_NAMES = ("train", "valid", "test")


class GPTDataset:
    """Samples of `seq_len + 1` tokens, cut from shuffled documents; bit for bit those of Megatron-LM.

    The order is a function of data, split, seed, `seq_len` and, where it takes more than one epoch, `num_samples`.

    Args:
        data: an `IndexedDataset`, or the prefix of a pair.
        seq_len: `T`, tokens that the model sees of one sample.
        num_samples: samples that must be reached, by repeating the documents; None is one epoch. There may be more.
        seed: of the shuffles, 0 to 2^32 - 1.
        split: shares of train, valid and test, such as "969,30,1". None takes everything.
        split_name: "train", "valid" or "test".
        add_extra_token: samples overlap by one token, whose shift makes the labels.
        keep_partial: the tokens left over at the end make one more sample, padded. Megatron does so for valid only.
        pad_id: id that fills up a short sample. It must be no token: labels of this id are not counted in the loss.
        eod_id: id that ends a document; needed for the four options below that look for it.
        reset_position_ids: positions start again behind each `eod_id`.
        reset_attention_mask: no attention across an `eod_id`.
        eod_mask_loss: no loss where the input is `eod_id`.
        create_attention_mask: samples carry `attention_mask`. It takes `T * T` bytes a sample: rather give the
            attention a causal flag.

    Raises:
        ConfigError: if a setting is wrong, or samples are asked of a split without tokens.
        MissingFileError, FileAccessError, DataFormatError: as `IndexedDataset`.
    """

    def __init__(  # noqa: PLR0913 - Megatron's settings, by their names
        self,
        data: IndexedDataset | str | PathLike[str],
        *,
        seq_len: int,
        num_samples: int | None = None,
        seed: int = 1234,
        split: str | None = "1,0,0",
        split_name: str = "train",
        add_extra_token: bool = True,
        keep_partial: bool = False,
        pad_id: int = -1,
        eod_id: int | None = None,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        eod_mask_loss: bool = False,
        create_attention_mask: bool = False,
    ) -> None:
        seq_len = _integer("seq_len", seq_len, 1, 2**31 - 1)
        num_samples = None if num_samples is None else _integer("num_samples", num_samples, 0, 2**63 - 1)
        seed = _integer("seed", seed, 0, 2**32 - 1)
        if eod_id is None and (reset_position_ids or reset_attention_mask or eod_mask_loss):
            raise ConfigError(
                "reset_position_ids, reset_attention_mask and eod_mask_loss need eod_id, the id that ends a document"
            )
        self.indexed = data if isinstance(data, IndexedDataset) else IndexedDataset(data)
        self.seq_len = seq_len
        self.num_samples = num_samples
        self.seed = seed
        self.split = split
        self.split_name = split_name
        self.add_extra_token = add_extra_token
        self.keep_partial = keep_partial
        self.pad_id = pad_id
        self.eod_id = eod_id
        self.reset_position_ids = reset_position_ids
        self.reset_attention_mask = reset_attention_mask
        self.eod_mask_loss = eod_mask_loss
        self.create_attention_mask = create_attention_mask
        self._core = _core.GptDataset(
            self.indexed._core,
            seq_len=seq_len,
            num_samples=num_samples,
            seed=seed,
            split=split,
            split_name=split_name,
            add_extra_token=add_extra_token,
            keep_partial=keep_partial,
            pad_id=pad_id,
        )
        self.source = self._core.source()
        """What the loader's threads read: `[T + 1]` int64 tokens a sample (`[T]` without the extra token)."""

    @classmethod
    def build_splits(
        cls,
        data: IndexedDataset | str | PathLike[str],
        *,
        seq_len: int,
        split: str = "969,30,1",
        num_samples: Sequence[int | None] = (None, None, None),
        seed: int = 1234,
        keep_partial: bool = False,
        **options: Any,
    ) -> tuple[GPTDataset | None, GPTDataset | None, GPTDataset | None]:
        """The train, valid and test samples of one pair.

        Args:
            data: an `IndexedDataset`, or the prefix of a pair.
            seq_len: as for the class.
            split: shares of the three, such as "969,30,1".
            num_samples: samples asked of each of the three; None is one epoch.
            seed: as for the class, the same for the three.
            keep_partial: as for the class; for the valid split only, as in Megatron.
            options: the class's other arguments, the same for the three.

        Returns:
            Three datasets. None where the split is switched off (share 0), or rounds to no sequence and no sample is
            asked of it.

        Raises:
            ConfigError: as the class, also if samples are asked of a split that rounds to no sequence.
        """
        if len(num_samples) != len(SPLIT_NAMES):
            raise ConfigError(f"num_samples needs three entries, for train, valid and test; got {len(num_samples)}")
        indexed = data if isinstance(data, IndexedDataset) else IndexedDataset(data)
        datasets: list[GPTDataset | None] = []
        ranges = _core.split_sequences(split, indexed.num_sequences)
        for name, wanted, sequences in zip(SPLIT_NAMES, num_samples, ranges, strict=True):
            if sequences is None or (sequences[0] == sequences[1] and not wanted):
                datasets.append(None)
                continue
            partial = keep_partial and name == "valid"
            settings: dict[str, Any] = {
                "seq_len": seq_len,
                "num_samples": wanted,
                "seed": seed,
                "keep_partial": partial,
            }
            datasets.append(cls(indexed, split=split, split_name=name, **settings, **options))
        train, valid, test = datasets
        return train, valid, test

    @property
    def document_index(self) -> NDArray[np.int32]:
        """Sequences in the order in which they are cut, all epochs one after the other, int32. A view."""
        return np.asarray(self._core.document_index())

    @property
    def sample_index(self) -> NDArray[Any]:
        """(position in the document index, offset) where each sample begins, `[len + 1, 2]`, int32 or int64. A view."""
        return np.asarray(self._core.sample_index())

    @property
    def shuffle_index(self) -> NDArray[Any]:
        """Order of the samples, uint32 or int64. A view."""
        return np.asarray(self._core.shuffle_index())

    @property
    def num_epochs(self) -> int:
        """Times that the sequences are repeated."""
        return self._core.num_epochs

    @property
    def separate_last_epoch(self) -> bool:
        """Whether the last epoch is shuffled apart from the others, because little of it is needed."""
        return self._core.separate_last_epoch

    @property
    def description(self) -> dict[str, Any]:
        """Everything that determines the samples and their order, in plain types."""
        return {
            "order": "megatron",
            "data": self.indexed.content_key,
            "sequences": list(self._core.sequences),
            "split": self.split,
            "split_name": self.split_name,
            "seed": self.seed,
            "seq_len": self.seq_len,
            "num_samples": self.num_samples,
            "add_extra_token": self.add_extra_token,
            "keep_partial": self.keep_partial,
            "num_epochs": self.num_epochs,
            "separate_last_epoch": self.separate_last_epoch,
        }

    @property
    def fingerprint(self) -> str:
        """A key of the samples and their order: another one for other data, split, seed, `seq_len` or `num_samples`."""
        return hashlib.sha256(json.dumps(self.description, sort_keys=True).encode()).hexdigest()

    def __len__(self) -> int:
        return self.source.num_samples

    def tokens(self, index: SupportsIndex) -> NDArray[np.int64]:
        """Tokens of one sample with the extra one, int64 `[T + 1]` (`[T]` without it), padded with `pad_id`.

        An array of its own.

        Raises:
            SampleIndexError: if there is no such sample.
            DataFormatError: if the data is damaged.
        """
        return self.source.read(to_position(index, len(self), "sample"))

    def pieces(self, index: SupportsIndex) -> list[tuple[int, int, int]]:
        """Where the tokens of one sample come from: (sequence, first token in it, tokens), in their order."""
        pieces, _ = self.source.layout(to_position(index, len(self), "sample"))
        return [piece[1:] for piece in pieces]

    def __getitem__(self, index: SupportsIndex | None) -> dict[str, NDArray[Any]]:
        """One sample as Megatron gives it, in arrays of its own.

        Args:
            index: position, counted from the end if negative; None gives the first sample with no loss at all, a
                stand-in where a rank has no data.

        Returns:
            `tokens`, `labels`, `position_ids` int64 `[T]`; `loss_mask` float32 `[T]`; and, where it was asked for,
            `attention_mask` bool `[1, T, T]`, True where attention is masked. Padding is 0 in tokens and labels.

        Raises:
            SampleIndexError: if there is no such sample.
            DataFormatError: if the data is damaged.
        """
        text = self.tokens(0 if index is None else index)
        if self.add_extra_token:
            tokens, labels = text[:-1], text[1:].copy()
        else:
            tokens, labels = text, np.append(text[1:], self.pad_id)
        sample = {"tokens": tokens, "labels": labels, **self._masks(tokens)}
        sample["loss_mask"][labels == self.pad_id] = 0.0
        tokens[tokens == self.pad_id] = 0
        labels[labels == self.pad_id] = 0
        if index is None:
            sample["loss_mask"][:] = 0.0
        return sample

    def _masks(self, tokens: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Loss mask, position ids and, where it was asked for, attention mask."""
        position_ids = np.arange(self.seq_len, dtype=np.int64)
        loss_mask = np.ones(self.seq_len, dtype=np.float32)
        is_eod = tokens == self.eod_id if self.eod_id is not None else np.zeros(self.seq_len, dtype=bool)
        if self.eod_mask_loss:
            loss_mask[is_eod] = 0.0
        # Segment of each token: the number of document ends before it.
        segment = np.cumsum(is_eod) - is_eod
        masks: dict[str, NDArray[Any]] = {"loss_mask": loss_mask}
        if self.create_attention_mask:
            visible = np.tri(self.seq_len, dtype=bool)
            if self.reset_attention_mask:
                visible &= segment[:, None] == segment[None, :]
            masks["attention_mask"] = ~visible[None]
        if self.reset_position_ids:
            starts = np.concatenate(([0], np.flatnonzero(is_eod) + 1))
            position_ids -= starts[segment]
        masks["position_ids"] = position_ids
        return masks

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.indexed, self._settings())

    def _settings(self) -> dict[str, Any]:
        names = (
            "seq_len",
            "num_samples",
            "seed",
            "split",
            "split_name",
            "add_extra_token",
            "keep_partial",
            "pad_id",
            "eod_id",
        )
        flags = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask")
        return {name: getattr(self, name) for name in names + flags}

    def __repr__(self) -> str:
        split = "" if self.split is None else f", {self.split_name} of {self.split}"
        samples = f"{len(self)} samples of {self.seq_len} tokens, seed {self.seed}"
        return f"GPTDataset({self.indexed.prefix!r}{split}: {samples})"


def _rebuild(kind: type[GPTDataset], indexed: IndexedDataset, settings: dict[str, Any]) -> GPTDataset:
    return kind(indexed, **settings)


def _integer(name: str, value: SupportsIndex, low: int, high: int) -> int:
    number = operator.index(value)
    if not low <= number <= high:
        raise ConfigError(f"{name} = {number}: expected {low} to {high}")
    return number
