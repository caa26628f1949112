"""The Rust extension. Use the classes of `megaflow` instead: these are their inside."""

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

__version__: Final[str]
__all__ = [
    "ArrayView",
    "BatchBuffer",
    "GptDataset",
    "IndexedDataset",
    "PairWriter",
    "Prefetcher",
    "SampleSource",
    "Tokenizer",
    "__version__",
    "checksum_file",
    "discover",
    "merge",
    "plan_shards",
    "preprocess",
    "resolve_prefix",
    "split_matrix",
    "split_sequences",
    "verify",
]

@final
class ArrayView:
    @property
    def __array_interface__(self) -> dict[str, Any]: ...

@final
class Tokenizer:
    @staticmethod
    def load(path: str | PathLike[str], merges: str | PathLike[str] | None = None) -> Tokenizer: ...
    def encode(
        self, text: str, *, special_tokens_in_text: str = "text", add_special_tokens: bool = False
    ) -> NDArray[np.uint32]: ...
    def encode_batch(
        self,
        texts: list[str],
        *,
        special_tokens_in_text: str,
        add_special_tokens: bool,
        threads: int,
        cache_bytes: int,
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def decode_many(self, ids: NDArray[np.uint32], begins: NDArray[np.int64], ends: NDArray[np.int64]) -> list[str]: ...
    @property
    def special_ids(self) -> list[int]: ...
    def eod(self, token: str | None = None) -> tuple[str, int] | None: ...
    def token_id(self, token: str) -> int | None: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def engine(self) -> str: ...
    @property
    def model_kind(self) -> str: ...
    @property
    def files(self) -> list[Path]: ...

def discover(names: list[str | PathLike[str]], takes_text: bool) -> list[Path]: ...
def plan_shards(
    inputs: list[tuple[str, str, Any, tuple[int, int] | None]], input_format: str, num_shards: int
) -> list[list[tuple[int, tuple[int, int] | None]]]: ...
def preprocess(
    settings: dict[str, Any], tokenizer: Tokenizer, progress: Callable[[int, int, int, int, int], None]
) -> dict[str, Any]: ...
def merge(
    prefixes: Sequence[str | PathLike[str]],
    output: str | PathLike[str],
    *,
    widen: bool,
    force: bool,
    command: Sequence[str],
    progress: Callable[[int, int], None],
) -> dict[str, Any]: ...
def verify(
    prefix: str | PathLike[str], *, threads: int, vocab_size: int | None, progress: Callable[[int, int], None]
) -> dict[str, Any]: ...
def checksum_file(path: str | PathLike[str]) -> dict[str, Any]: ...

@final
class PairWriter:
    def __new__(cls, prefix: str | PathLike[str], dtype: str) -> PairWriter: ...
    def append(
        self,
        tokens: NDArray[np.uint8],
        sequence_lengths: NDArray[np.int32],
        sequences_per_document: NDArray[np.uint32],
    ) -> None: ...
    def finish(self) -> dict[str, Any]: ...
    def publish(self, text: str) -> Path: ...
    def close(self) -> None: ...

def resolve_prefix(path: str | PathLike[str]) -> Path: ...

@final
class IndexedDataset:
    def __new__(cls, prefix: str | PathLike[str], *, with_modes: bool = False) -> IndexedDataset: ...
    @property
    def prefix(self) -> Path: ...
    @property
    def num_sequences(self) -> int: ...
    @property
    def num_documents(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    def sequence_tokens(self, index: int) -> tuple[int, int]: ...
    def document_tokens(self, index: int) -> tuple[int, int]: ...
    def tokens(self) -> ArrayView: ...
    def sequence_lengths(self) -> ArrayView: ...
    def document_boundaries(self) -> ArrayView: ...
    def sequence_modes(self) -> ArrayView: ...
    def content_key(self) -> str: ...

@final
class SampleSource:
    @property
    def num_samples(self) -> int: ...
    @property
    def sample_len(self) -> int: ...
    def read(self, index: int) -> NDArray[np.int64]: ...
    def layout(self, index: int) -> tuple[list[tuple[int, int, int, int]], list[int]]: ...

@final
class GptDataset:
    def __new__(
        cls,
        indexed: IndexedDataset,
        *,
        seq_len: int,
        num_samples: int | None,
        seed: int,
        split: str | None,
        split_name: str,
        add_extra_token: bool,
        keep_partial: bool,
        pad_id: int,
        num_threads: int,
        cache: tuple[str | PathLike[str], str, str] | None,
    ) -> GptDataset: ...
    def source(self) -> SampleSource: ...
    @property
    def sequences(self) -> tuple[int, int]: ...
    @property
    def num_epochs(self) -> int: ...
    @property
    def separate_last_epoch(self) -> bool: ...
    @property
    def tokens_per_epoch(self) -> int: ...
    @property
    def cached(self) -> tuple[str, str | None] | None: ...
    def document_index(self) -> ArrayView: ...
    def sample_index(self) -> ArrayView: ...
    def shuffle_index(self) -> ArrayView: ...

@final
class InstantDataset:
    def __new__(
        cls,
        indexed: IndexedDataset,
        *,
        seq_len: int,
        num_samples: int | None,
        seed: int,
        split: str | None,
        split_name: str,
        add_extra_token: bool,
        keep_partial: bool,
        shuffle: str,
        pad_id: int,
    ) -> InstantDataset: ...
    def source(self) -> SampleSource: ...
    @property
    def sequences(self) -> tuple[int, int]: ...
    @property
    def num_epochs(self) -> int: ...
    @property
    def tokens_per_epoch(self) -> int: ...
    @property
    def window_samples(self) -> int | None: ...

@final
class BestFitDataset:
    def __new__(
        cls,
        indexed: IndexedDataset,
        *,
        seq_len: int,
        num_samples: int | None,
        seed: int,
        split: str | None,
        split_name: str,
        add_extra_token: bool,
        pad_id: int,
    ) -> BestFitDataset: ...
    def source(self) -> SampleSource: ...
    @property
    def sequences(self) -> tuple[int, int]: ...
    @property
    def num_epochs(self) -> int: ...
    @property
    def tokens_per_epoch(self) -> int: ...
    @property
    def samples_per_epoch(self) -> int: ...

@final
class MockDataset:
    def __new__(
        cls,
        lengths: Sequence[int],
        *,
        vocab_size: int,
        eod_id: int,
        seq_len: int,
        num_samples: int | None,
        seed: int,
        split: str | None,
        split_name: str,
        add_extra_token: bool,
    ) -> MockDataset: ...
    def source(self) -> SampleSource: ...
    @property
    def num_epochs(self) -> int: ...
    @property
    def sequences(self) -> tuple[int, int]: ...
    @property
    def tokens_per_epoch(self) -> int: ...
    def shuffle_index(self) -> ArrayView: ...

@final
class Blend:
    @staticmethod
    def greedy(
        sources: Sequence[SampleSource],
        weights: Sequence[float],
        size: int,
        cache: tuple[str | PathLike[str], str, str] | None,
    ) -> Blend: ...
    @staticmethod
    def exhaustive(
        sources: Sequence[SampleSource], cache: tuple[str | PathLike[str], str, str] | None
    ) -> Blend: ...
    @staticmethod
    def shares(
        sources: Sequence[SampleSource], phases: Sequence[tuple[int, Sequence[float]]], num_samples: int
    ) -> Blend: ...
    def source(self) -> SampleSource: ...
    @property
    def cached(self) -> tuple[str, str | None] | None: ...
    def locate(self, index: int) -> tuple[int, int]: ...
    def counts(self, count: int) -> list[int]: ...
    def dataset_index(self) -> ArrayView | None: ...
    def dataset_sample_index(self) -> ArrayView | None: ...

def share_counts(phases: Sequence[tuple[int, Sequence[float]]], count: int) -> list[int]: ...
def normalized_weights(weights: Sequence[float]) -> NDArray[np.float64]: ...
def fill_in_middle(
    source: SampleSource,
    *,
    rate: float,
    spm_rate: float,
    seed: int,
    prefix_id: int,
    middle_id: int,
    suffix_id: int,
    eod_id: int | None,
    pad_id: int,
    tokenizer: Tokenizer | None,
) -> SampleSource: ...
def split_matrix(split: str) -> list[tuple[float, float] | None]: ...
def split_sequences(split: str, num_sequences: int) -> list[tuple[int, int] | None]: ...

@final
class BatchBuffer:
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    @property
    def sample_ids(self) -> NDArray[np.int64]: ...
    @property
    def wait_s(self) -> float: ...

@final
class Prefetcher:
    def __new__(
        cls,
        source: SampleSource,
        *,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        num_threads: int,
        prefetch: int,
        consumed_samples: int,
    ) -> Prefetcher: ...
    def next(self) -> BatchBuffer | None: ...
    @property
    def num_batches(self) -> int: ...
    @property
    def consumed_samples(self) -> int: ...
    def totals(self) -> dict[str, Any]: ...
