"""The ranks that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from helpers.ranks import RankPool


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Two ranks on the CPU, joined by gloo."""
    with RankPool(2, tmp_path_factory.mktemp("ranks")) as pool:
        yield pool


@pytest.fixture(scope="session")
def gpu_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """As many ranks as this machine has GPUs, 2, 4 or 8 of them, joined by NCCL."""
    count = max((size for size in (1, 2, 4, 8) if size <= torch.cuda.device_count()), default=1)
    if count == 1:
        pytest.skip("fewer than two GPUs here")
    with RankPool(count, tmp_path_factory.mktemp("ranks"), has_gpus=True) as pool:
        yield pool


@pytest.fixture(scope="session")
def eight_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Eight ranks, of which a test of a smaller layout uses the first ones."""
    with RankPool(8, tmp_path_factory.mktemp("ranks")) as pool:
        yield pool
