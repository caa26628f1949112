"""The test settings refuse what would otherwise pass in silence: each tried on a small file of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run_pytest(folder: Path, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` as a test file under the project's settings and conftest."""
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "tests/conftest.py", folder / "tests")
    (folder / "tests/test_it.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import pytest\n@pytest.mark.unheard\ndef test_it(): pass\n", "'unheard' not found in `markers`"),
        ("import warnings\ndef test_it(): warnings.warn('old')\n", "UserWarning: old"),
        ("import pytest\n@pytest.mark.xfail\ndef test_it(): pass\n", "XPASS(strict)"),
        ("import pytest\n@pytest.mark.parametrize('x', [])\ndef test_it(x): pass\n", "Empty parameter set"),
    ],
    ids=["unknown marker", "warning", "unexpected pass", "no parameters"],
)
def test_refused(tmp_path: Path, code: str, says: str):
    done = run_pytest(tmp_path, code)
    assert done.returncode != 0
    assert says in done.stdout + done.stderr


def test_slow_gpu_bench_and_tokenizers_are_left_out_and_the_header_says_so(tmp_path: Path):
    code = "import pytest\ndef test_kept(): pass\n" + "".join(
        f"@pytest.mark.{mark}\ndef test_{mark}(): pass\n"
        for mark in ("slow", "gpu", "bench", "tokenizers", "dist", "golden")
    )
    done = run_pytest(tmp_path, code)
    assert "3 passed, 4 deselected" in done.stdout
    assert "selected: not slow and not gpu and not bench and not tokenizers" in done.stdout


def test_a_test_that_hangs_is_stopped(tmp_path: Path):
    done = run_pytest(tmp_path, "import time\ndef test_it(): time.sleep(60)\n", "--timeout", "1")
    assert done.returncode != 0
    assert "Timeout" in done.stdout + done.stderr


def test_the_shared_fixture_skips_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MEGAFLOW_SHARED", str(tmp_path / "nothing"))
    done = run_pytest(tmp_path, "def test_it(shared): pass\n")
    assert "1 skipped" in done.stdout
    assert "no shared test data at" in done.stdout


@pytest.mark.parametrize("folder", ["dist", "build", "venv"])
def test_no_folder_of_tests_is_passed_over_for_its_name(tmp_path: Path, folder: str):
    own = tmp_path / "tests" / folder
    own.mkdir(parents=True)
    (own / "test_more.py").write_text("def test_more(): pass\n")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout
