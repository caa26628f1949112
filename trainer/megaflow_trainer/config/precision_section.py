"""The section of fp8: how products in 8 bits are scaled, and where there are none."""

from __future__ import annotations

from dataclasses import dataclass

from megaflow_trainer.config.limits import MOST_HELD, at_least, at_most, one_of, raise_faults

FP8_WIDTH = 1024
"""Inputs and outputs that a linear layer has at least for its products to be in fp8, on one rank. Rounding costs by
tokens x (inputs + outputs), products gain by tokens x inputs x outputs: below this nothing is won on an H200."""

FP8_MULTIPLE = 16
"""What both have to be a multiple of."""
MOST_MARGIN = 16
"""Powers of two that may be left free: e4m3 has 18 in all, so that beyond this nothing is left of a tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """How products in fp8 are scaled, and which blocks have none."""

    recipe: str = "tensorwise"
    """What scales of fp8 follow: tensorwise (the tensor itself), delayed (its largest values in past steps) or rowwise
    (each row by itself; gradients of weights stay in 16 bits)."""
    history_len: int = 1
    """Past steps that delayed scales look at."""
    history_algo: str = "most_recent"
    """What of them a delayed scale follows: most_recent, or max."""
    margin: int = 0
    """Powers of two that delayed scales leave free above the largest value."""
    keeps_ends: bool = False
    """Whether the first and the last blocks keep their products in 16 bits."""
    start_layers: int = 1
    """How many first blocks do."""
    end_layers: int = 1
    """How many last blocks do."""

    def __post_init__(self) -> None:
        raise_faults(
            one_of("precision", ("tensorwise", "delayed", "rowwise"), recipe=self.recipe)
            + one_of("precision", ("most_recent", "max"), history_algo=self.history_algo)
            + at_least("precision", 1, history_len=self.history_len)
            + at_most("precision", MOST_HELD, "lower it", history_len=self.history_len)
            + at_most("precision", MOST_MARGIN, "lower it", margin=self.margin)
            + at_least("precision", 0, margin=self.margin, start_layers=self.start_layers, end_layers=self.end_layers)
        )

    def has_fp8(self, number: int, num_layers: int) -> bool:
        """Whether the block of that number, counted from 0, may have products in fp8."""
        return not self.keeps_ends or self.start_layers <= number < num_layers - self.end_layers
