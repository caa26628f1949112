"""What every test shares: quiet thread settings, the `shared` data folder, and a header that says what is left out."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# Before anything imports numpy or torch: several processes share few cores in these tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the tests in the background lets them ignore Ctrl-C, and so would every process that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]


def shared_folder() -> Path:
    """Test data that is not part of the repository: `MEGAFLOW_SHARED`, or `shared` beside the checkout."""
    return Path(os.environ.get("MEGAFLOW_SHARED") or ROOT.parent / "shared")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The shared test data; a test that asks for it is skipped where it is not at hand."""
    folder = shared_folder()
    if not (folder / "goldens").is_dir():
        pytest.skip(f"no shared test data at {folder} (set MEGAFLOW_SHARED to its folder)")
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the tokenizers are that tools/fetch_tokenizers.py fetched."""
    parser.addoption("--tokenizers", type=Path, default=ROOT / ".tokenizers", help="folder of fetched tokenizers")


@pytest.fixture(scope="session")
def fetched_tokenizers(request: pytest.FixtureRequest) -> Path:
    """Folder of fetched tokenizers; it need not be there."""
    folder: Path = request.config.getoption("--tokenizers")
    return folder


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Says which tests this run leaves out, and where the shared data is."""
    expression = config.getoption("markexpr")
    folder = shared_folder()
    others = "slow: `make test-all`; bench: `make bench`; gpu: `-m gpu`; tokenizers: `-m tokenizers`"
    return [
        f"selected: {expression or 'everything'} ({others})",
        f"shared test data: {folder if folder.is_dir() else 'none, tests that need it are skipped'}",
    ]
