"""Megatron's blends restated in plain numpy, one step at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Order = tuple[NDArray[np.int16], NDArray[np.int64]]


def weighted(weights: Sequence[float], size: int) -> Order:
    """`size` samples: each step draws the dataset that lags most behind its share, the first of several.

    An empty dataset (share 0) is never drawn; in Megatron a tie at lag 0 would draw it and fail at its first sample.
    """
    shares = np.array(weights, dtype=np.float64)
    shares = shares / shares.sum()
    counts = np.zeros(len(shares))
    datasets, samples = np.zeros(size, np.int16), np.zeros(size, np.int64)
    for step in range(size):
        drawn = int(np.argmax(np.where(shares > 0, shares * max(float(step), 1.0) - counts, -np.inf)))
        datasets[step], samples[step] = drawn, counts[drawn]
        counts[drawn] += 1
    return datasets, samples


def exhaustive(sizes: Sequence[int]) -> Order:
    """The same until every dataset is used up; one that is used up is not drawn."""
    total = sum(sizes)
    shares, limits = np.array(sizes) / float(total), np.array(sizes)
    counts = np.zeros(len(sizes))
    datasets, samples = np.zeros(total, np.int16), np.zeros(total, np.int64)
    for step in range(total):
        lag = np.where(counts < limits, shares * max(float(step), 1.0) - counts, -np.inf)
        drawn = int(np.argmax(lag))
        datasets[step], samples[step] = drawn, counts[drawn]
        counts[drawn] += 1
    return datasets, samples


def shares_of(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum, as Megatron's builder hands them to its blend, which divides once more."""
    own = np.array(weights, dtype=np.float64)
    return [float(share) for share in own / np.sum(own)]


def sizes_of_weighted(weights: Sequence[float], num_samples: int) -> tuple[int, list[int]]:
    """Samples of a weighted blend, and those for which each dataset is built."""
    shares = shares_of(weights)
    wanted = [math.ceil(num_samples * share) for share in shares]
    drawn = np.bincount(weighted(shares, sum(wanted))[0], minlength=len(weights)).tolist()
    # Megatron builds for the first of the two and fails where the second is larger.
    return sum(wanted), [max(math.ceil(count * 1.005), own) for count, own in zip(wanted, drawn, strict=True)]
