"""Training samples of a tokenized corpus: in Megatron's order, or in one that needs no index.

Legend: `T` sequence length of the model (`seq_len`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflow import _core
from megaflow.errors import ConfigError
from megaflow.indexed import IndexedDataset, describe_missing_ends
from megaflow.megatron_cache import cache_arguments, describe_dataset
from megaflow.samples import BY_EOD, MASK_OPTIONS, SampleDataset, check_integer
from megaflow.tokenizer import Tokenizer

SPLIT_NAMES = ("train", "valid", "test")
ORDERS = ("megatron", "instant")
SHUFFLES = ("samples", "documents")
PACKINGS = ("concatenate", "best_fit")


@dataclass(frozen=True, kw_only=True, slots=True)
class FillInMiddle:
    """Documents are cut in three and reordered, so that a model learns to fill gaps (Bavarian et al., 2022).

    What becomes of a sample is a function of the seed and its position alone.
    """

    rate: float
    """Part of the documents that is reordered, 0 to 1."""
    prefix_id: int
    """Id that marks the prefix."""
    middle_id: int
    """Id that marks the middle."""
    suffix_id: int
    """Id that marks the suffix."""
    spm_rate: float = 0.5
    """Part of the reordered documents that is written suffix first, 0 to 1."""
    tokenizer: Tokenizer | None = None
    """Cuts fall between letters of the text, and its parts are tokenized anew; None cuts between tokens."""

    def apply(self, source: _core.SampleSource, *, seed: int, eod_id: int | None, pad_id: int) -> _core.SampleSource:
        """The samples of `source`, reordered."""
        return _core.fill_in_middle(
            source,
            rate=self.rate,
            spm_rate=self.spm_rate,
            seed=seed,
            prefix_id=self.prefix_id,
            middle_id=self.middle_id,
            suffix_id=self.suffix_id,
            eod_id=eod_id,
            pad_id=pad_id,
            tokenizer=None if self.tokenizer is None else self.tokenizer._core,
        )

    @property
    def description(self) -> dict[str, Any]:
        """What determines the reordering, in plain types."""
        names = ("rate", "spm_rate", "prefix_id", "middle_id", "suffix_id")
        tokenizer = None if self.tokenizer is None else self.tokenizer.fingerprint
        return {**{name: getattr(self, name) for name in names}, "tokenizer": tokenizer}


class GPTDataset(SampleDataset):
    """Samples of `seq_len + 1` tokens of one pair.

    In order "megatron" they are cut from shuffled documents, bit for bit as Megatron-LM does; the order is a function
    of data, split, seed, `seq_len` and, where it takes more than one epoch, `num_samples`. In order "instant" they are
    cut in file order and handed out by a permutation that is computed on the fly: no index, the same start at any size,
    every epoch shuffled anew, and a larger `num_samples` never reorders.

    Args:
        data: an `IndexedDataset`, or the prefix of a pair.
        seq_len: `T`, tokens that the model sees of one sample.
        num_samples: samples that must be reached, by repeating the documents; None is one epoch. In order "megatron"
            there may be more.
        seed: of the shuffles, 0 to 2^32 - 1.
        split: shares of train, valid and test, such as "969,30,1". None takes everything.
        split_name: "train", "valid" or "test".
        add_extra_token: samples overlap by one token, whose shift makes the labels.
        keep_partial: the tokens left over at the end make one more sample, padded. Megatron does so for valid only.
        pad_id: id that fills up a short sample. It must be no token: labels of this id are not counted in the loss.
        eod_id: id that ends a document; needed for the next three options, which look for it. Where documents do not
            end with it (some are looked at), a warning says so.
        reset_position_ids: positions start again behind each `eod_id`.
        reset_attention_mask: no attention across an `eod_id`.
        eod_mask_loss: no loss where the input is `eod_id`.
        create_attention_mask: samples carry `attention_mask`. It takes `T * T` bytes a sample: rather give the
            attention a causal flag.
        document_masking: samples carry `cu_seqlens`, and positions start again, where a document begins, whether or not
            an `eod_id` stands before it.
        order: "megatron" or "instant".
        shuffle: in order "instant": "samples", or "documents" too, within windows of some 256 of them.
        packing: "concatenate" cuts wherever a sample is full; "best_fit" (with order "instant") packs documents whole,
            and builds an index of 16 bytes a document in memory.
        fim: reorders documents for filling in the middle.
        num_threads: threads that build the index.
        cache_dir: folder where the index is kept under Megatron's names and shared by all processes; None builds it in
            memory. For order "megatron".
        cache_tokenizer: what Megatron writes of its tokenizer into the description of the index.

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
        document_masking: bool = False,
        order: str = "megatron",
        shuffle: str = "samples",
        packing: str = "concatenate",
        fim: FillInMiddle | None = None,
        num_threads: int = 1,
        cache_dir: str | PathLike[str] | None = None,
        cache_tokenizer: Mapping[str, Any] | None = None,
    ) -> None:
        self.seq_len = check_integer("seq_len", seq_len, 1, 2**31 - 1)
        self.num_samples = None if num_samples is None else check_integer("num_samples", num_samples, 0, 2**63 - 1)
        self.seed = check_integer("seed", seed, 0, 2**32 - 1)
        self.split = split
        self.split_name = split_name
        self.add_extra_token = add_extra_token
        self.keep_partial = keep_partial
        self.pad_id = pad_id
        masks = (eod_id, reset_position_ids, reset_attention_mask, eod_mask_loss, create_attention_mask)
        self._set_masks(dict(zip(MASK_OPTIONS, (*masks, document_masking), strict=True)))
        self.order = order
        self.shuffle = shuffle
        self.packing = packing
        self.fim = fim
        self.num_threads = check_integer("num_threads", num_threads, 1, 1024)
        self.cache_dir = cache_dir
        self.cache_tokenizer = cache_tokenizer
        self._check_order()
        self.indexed = data if isinstance(data, IndexedDataset) else IndexedDataset(data)
        self._warn_of_missing_ends()
        self._core = self._build()
        self.source = self._core.source()
        if fim is not None:
            self.source = fim.apply(self.source, seed=self.seed, eod_id=eod_id, pad_id=pad_id)

    def _warn_of_missing_ends(self) -> None:
        by_eod = [name for name in BY_EOD if getattr(self, name)]
        if not by_eod or self.eod_id is None:
            return
        message = describe_missing_ends(self.indexed, self.eod_id, by_eod)
        if message is not None:
            warnings.warn(message, stacklevel=3)

    def _check_order(self) -> None:
        for name, known in (("order", ORDERS), ("shuffle", SHUFFLES), ("packing", PACKINGS)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} = {getattr(self, name)!r}: expected {' or '.join(map(repr, known))}")
        if self.order == "megatron" and (self.shuffle, self.packing) != ("samples", "concatenate"):
            raise ConfigError(
                f"shuffle {self.shuffle!r} with packing {self.packing!r} is no order of Megatron's, which always "
                "shuffles documents and concatenates them; give order 'instant'"
            )
        if self.packing == "best_fit" and (self.shuffle == "documents" or self.keep_partial):
            raise ConfigError("packing 'best_fit' packs whole documents in any case; drop shuffle and keep_partial")

    def _build(self) -> _core.GptDataset | _core.InstantDataset | _core.BestFitDataset:
        common: dict[str, Any] = {
            "seq_len": self.seq_len,
            "num_samples": self.num_samples,
            "seed": self.seed,
            "split": self.split,
            "split_name": self.split_name,
            "add_extra_token": self.add_extra_token,
            "pad_id": self.pad_id,
        }
        if self.packing == "best_fit":
            return _core.BestFitDataset(self.indexed._core, **common)
        common["keep_partial"] = self.keep_partial
        if self.order == "instant":
            return _core.InstantDataset(self.indexed._core, shuffle=self.shuffle, **common)
        return _core.GptDataset(self.indexed._core, num_threads=self.num_threads, cache=self._cache(), **common)

    def _cache(self) -> Any:
        if self.cache_dir is None:
            return None
        content = {"add_extra_token": self.add_extra_token, "keep_partial": self.keep_partial}
        return cache_arguments(self.cache_dir, self.megatron_description, content)

    @property
    def megatron_description(self) -> dict[str, Any]:
        """What Megatron-LM writes beside an index of these samples."""
        return describe_dataset(
            prefix=self.indexed.prefix,
            num_samples=self.num_samples,
            split_name=self.split_name,
            seed=self.seed,
            seq_len=self.seq_len,
            split=self.split,
            tokenizer=self.cache_tokenizer,
        )

    @property
    def cached(self) -> tuple[str, str | None] | None:
        """What became of the cache: "found", "adopted" (Megatron's, checked), "built", "replaced" or "not kept", and
        why.

        None where no folder was given.
        """
        return self._core.cached if isinstance(self._core, _core.GptDataset) else None

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
    def _index(self) -> _core.GptDataset:
        if isinstance(self._core, _core.GptDataset):
            return self._core
        raise ConfigError(f"order {self.order!r} has no document, sample and shuffle index; order 'megatron' has")

    @property
    def document_index(self) -> NDArray[np.int32]:
        """Sequences in the order in which they are cut, all epochs one after the other, int32. A view."""
        return np.asarray(self._index.document_index())

    @property
    def sample_index(self) -> NDArray[Any]:
        """(position in the document index, offset) where each sample begins, `[len + 1, 2]`, int32 or int64. A view."""
        return np.asarray(self._index.sample_index())

    @property
    def shuffle_index(self) -> NDArray[Any]:
        """Order of the samples, uint32 or int64. A view."""
        return np.asarray(self._index.shuffle_index())

    @property
    def num_epochs(self) -> int:
        """Times that the sequences are repeated, a begun one included."""
        return self._core.num_epochs

    @property
    def separate_last_epoch(self) -> bool:
        """Whether the last epoch is shuffled apart from the others, because little of it is needed (order
        "megatron").
        """
        return isinstance(self._core, _core.GptDataset) and self._core.separate_last_epoch

    @property
    def sequences(self) -> tuple[int, int]:
        """First sequence of the split, and the one behind its last."""
        return self._core.sequences

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens of the split."""
        return self._core.tokens_per_epoch

    @property
    def samples_per_epoch(self) -> float:
        """Samples that the tokens of the split make."""
        if isinstance(self._core, _core.BestFitDataset):
            return float(self._core.samples_per_epoch)
        return self.tokens_per_epoch / self.seq_len

    @property
    def description(self) -> dict[str, Any]:
        """Everything that determines the samples and their order, in plain types."""
        description: dict[str, Any] = {
            "order": self.order,
            "data": self.indexed.content_key,
            "sequences": list(self._core.sequences),
            "split": self.split,
            "split_name": self.split_name,
            "seed": self.seed,
            "seq_len": self.seq_len,
            "num_samples": self.num_samples,
            "add_extra_token": self.add_extra_token,
            "keep_partial": self.keep_partial,
        }
        if self.fim is not None:
            description["fim"] = self.fim.description
        if self.order == "megatron":
            return {
                **description,
                "num_epochs": self.num_epochs,
                "separate_last_epoch": self.separate_last_epoch,
            }
        repeats = self.num_samples is not None
        return {**description, "shuffle": self.shuffle, "packing": self.packing, "repeats": repeats}

    def recipe(self) -> dict[str, Any]:
        """How this dataset is opened again, in plain types; `megaflow.origin.open_dataset` does.

        Raises:
            ConfigError: with fill in the middle, whose tokenizer exists in memory only.
        """
        if self.fim is not None:
            raise ConfigError("fill in the middle reorders documents with a tokenizer that exists in memory only")
        prefix = os.path.abspath(self.indexed.prefix)  # noqa: PTH100 - `..` stays what it is
        return {"kind": "GPTDataset", "prefix": prefix, "settings": self._settings()}

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
            "order",
            "shuffle",
            "packing",
            "fim",
            "num_threads",
            "cache_dir",
            "cache_tokenizer",
        )
        return {name: getattr(self, name) for name in names + MASK_OPTIONS}

    def __repr__(self) -> str:
        split = "" if self.split is None else f", {self.split_name} of {self.split}"
        samples = f"{len(self)} samples of {self.seq_len} tokens, seed {self.seed}"
        return f"GPTDataset({self.indexed.prefix!r}{split}: {samples})"


def _rebuild(kind: type[GPTDataset], indexed: IndexedDataset, settings: dict[str, Any]) -> GPTDataset:
    return kind(indexed, **settings)
