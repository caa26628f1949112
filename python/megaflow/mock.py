"""Made-up data, so that a run can be tried without any: Megatron's mock dataset, sample for sample."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflow import _core
from megaflow.dataset import SPLIT_NAMES
from megaflow.errors import ConfigError
from megaflow.samples import SampleDataset, check_integer

NUM_DOCUMENTS = 100_000
MAX_DOCUMENT_TOKENS = 4096


class MockGPTDataset(SampleDataset):
    """Samples of 100,000 documents that count upwards and end with `eod_id`, a third of them for each split.

    Args:
        vocab_size: ids, 0 to `vocab_size - 1`.
        eod_id: id that ends a document.
        seq_len: tokens that the model sees of one sample.
        num_samples: samples that must be reached; None is one epoch.
        seed: of the shuffles.
        split_name: "train", "valid" or "test".

    Raises:
        ConfigError: if a setting is wrong.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        eod_id: int,
        seq_len: int,
        num_samples: int | None = None,
        seed: int = 1234,
        split_name: str = "train",
    ) -> None:
        if split_name not in SPLIT_NAMES:
            raise ConfigError(f"split_name = {split_name!r}: expected one of {', '.join(SPLIT_NAMES)}")
        self.seq_len = check_integer("seq_len", seq_len, 1, 2**31 - 1)
        self.num_samples = None if num_samples is None else check_integer("num_samples", num_samples, 0, 2**63 - 1)
        self.seed = check_integer("seed", seed, 0, 2**32 - 1)
        self.vocab_size = check_integer("vocab_size", vocab_size, 1, 2**31 - 1)
        self.split_name = split_name
        self.add_extra_token = True
        self.pad_id = -1
        flags = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask")
        self._set_masks({"eod_id": eod_id, "document_masking": False, **dict.fromkeys(flags, False)})
        lengths = np.random.default_rng(seed=0).integers(1, MAX_DOCUMENT_TOKENS, size=NUM_DOCUMENTS, dtype=np.int32)
        self._core = _core.MockDataset(
            lengths.tolist(),
            vocab_size=self.vocab_size,
            eod_id=eod_id,
            seq_len=self.seq_len,
            num_samples=self.num_samples,
            seed=self.seed,
            split="1,1,1",
            split_name=split_name,
            add_extra_token=True,
        )
        self.source = self._core.source()

    @property
    def shuffle_index(self) -> NDArray[Any]:
        """Order of the samples. A view."""
        return np.asarray(self._core.shuffle_index())

    @property
    def num_epochs(self) -> int:
        """Times that the documents are repeated."""
        return self._core.num_epochs

    @property
    def description(self) -> dict[str, Any]:
        """Everything that determines the samples and their order, in plain types."""
        names = ("split_name", "seed", "seq_len", "num_samples", "vocab_size", "eod_id", "num_epochs")
        return {"order": "mock", **{name: getattr(self, name) for name in names}}

    def __reduce__(self) -> tuple[Any, ...]:
        names = ("vocab_size", "eod_id", "seq_len", "num_samples", "seed", "split_name")
        return _rebuild, ({name: getattr(self, name) for name in names},)

    def __repr__(self) -> str:
        return f"MockGPTDataset({len(self)} samples of {self.seq_len} tokens)"


def _rebuild(settings: dict[str, Any]) -> MockGPTDataset:
    return MockGPTDataset(**settings)
