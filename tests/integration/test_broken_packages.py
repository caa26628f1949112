"""A package that breaks as it is imported ends a command in one sentence with a remedy, never as if all went well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

DOORS = {
    "plan": (["tools/plan.py"], "yaml"),
    "diagnose": (["tools/diagnose.py", "tests/golden/runs/flat-loss"], "yaml"),
    "pretrain": (["trainer/pretrain.py", "--mock-data"], "yaml"),
    "pretrain's torch": (["trainer/pretrain.py", "--mock-data", "--vocab-size", "9", "--train-iters", "1"], "torch"),
    "stats": (["-m", "megaflow", "stats", "PREFIX"], "numpy"),
    "preprocess": (["-c", "from megaflow.cli.start import preprocess; raise SystemExit(preprocess())"], "dataclasses"),
}
FAULTS = {
    "OSError('libbroken.so: cannot open shared object file')": "OSError: libbroken.so: cannot open",
    "ImportError('undefined symbol: x')": "ImportError: undefined symbol: x",
    "SystemExit(0)": "",
}


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(folder), str(ROOT / "python"), str(ROOT / "trainer")])
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("door", DOORS)
def test_a_package_that_breaks_is_one_sentence(door: str, fault: str, tmp_path: Path) -> None:
    words, package = DOORS[door]
    (tmp_path / f"{package}.py").write_text(f"raise {fault}\n")
    done = run(words, tmp_path)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert FAULTS[fault] in done.stderr
    assert "make build" in done.stderr or "python tools/doctor.py" in done.stderr


def test_doctor_tells_all_of_them_and_ends_with_its_summary(tmp_path: Path) -> None:
    for package, content in {
        "yaml": "raise OSError('libyaml.so')",
        "wandb": "raise SystemExit(0)",
        "nltk": "import os; os.kill(os.getpid(), 11)",
    }.items():
        (tmp_path / f"{package}.py").write_text(content)
    words = ["tools/doctor.py", "--no-collective", "--save", str(tmp_path), "--preset", "gpt2_small"]
    done = run(words, tmp_path)
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert "FAIL  packages: pyyaml cannot be imported: OSError: libyaml.so" in lines
    assert "FAIL  packages: wandb is installed and cannot be imported: SystemExit: 0" in lines
    assert "FAIL  packages: nltk is installed and cannot be imported: it crashes the process, by SIGSEGV" in lines
    assert lines[-1].endswith("to mend")
    assert "Traceback" not in done.stderr
