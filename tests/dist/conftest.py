"""The ranks that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.ranks import RankPool


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Two ranks on the CPU, joined by gloo."""
    with RankPool(2, tmp_path_factory.mktemp("ranks")) as pool:
        yield pool
