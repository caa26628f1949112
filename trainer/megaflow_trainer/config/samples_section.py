"""The section of the configuration that says how documents become samples, and in which order."""

from __future__ import annotations

from dataclasses import dataclass

from megaflow_trainer.config.limits import MOST_THREADS, at_least, at_most, fraction, one_of, raise_faults


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleConfig:
    """How documents become samples, and in which order these are read."""

    order: str = "megatron"
    """megatron (bit for bit Megatron's) or instant (computed: no index, the same start at any size)."""
    shuffle: str = "samples"
    """With order instant: samples, or documents (those of a window are shuffled before they are cut)."""
    packing: str = "concatenate"
    """concatenate (documents are cut where a sample is full) or best_fit (with order instant: whole documents,
    padded)."""
    blend_weights: str = "shares"
    """What the weights of a blend are: shares of the samples, or epochs that each dataset is read."""
    blend_schedule: str | None = None
    """JSON file with weights that change at stated samples; with order instant."""
    cache_dir: str | None = None
    """Folder where Megatron's indices are kept and shared by all ranks; none builds them in memory."""
    builder_threads: int = 1
    """Threads that build Megatron's indices."""
    fim_rate: float = 0.0
    """Part of the documents that is reordered for filling in the middle."""
    fim_spm_rate: float = 0.5
    """Part of those that is written suffix first."""
    fim_prefix_token: str = "<fim_prefix>"
    """Token of the tokenizer that marks the prefix."""
    fim_middle_token: str = "<fim_middle>"
    """Token of the tokenizer that marks the middle."""
    fim_suffix_token: str = "<fim_suffix>"
    """Token of the tokenizer that marks the suffix."""

    def __post_init__(self) -> None:
        raise_faults(
            one_of("samples", ("megatron", "instant"), order=self.order)
            + one_of("samples", ("samples", "documents"), shuffle=self.shuffle)
            + one_of("samples", ("concatenate", "best_fit"), packing=self.packing)
            + one_of("samples", ("shares", "epochs"), blend_weights=self.blend_weights)
            + at_most("samples", MOST_THREADS, "lower it", builder_threads=self.builder_threads)
            + at_least("samples", 1, builder_threads=self.builder_threads)
            + fraction("samples", fim_rate=self.fim_rate, fim_spm_rate=self.fim_spm_rate)
        )
