#!/usr/bin/env python3
"""All tests: Rust (unit, integration and documentation tests), then Python.

python3 tools/run_tests.py                     # what `make test` runs
python3 tools/run_tests.py --all               # the slow ones too, and those for a GPU where there is one
python3 tools/run_tests.py -- -k loader -x     # words after -- go to pytest, and only pytest runs
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys

from doors import run_door
from setup_env import ROOT, Environment, prepare_or_exit
from steps import Step, run_steps, sum_up


def pytest_command(environment: Environment, *, slow: bool, words: list[str]) -> list[str]:
    """Pytest with the marker expression of this run."""
    expression: list[str] = []
    if slow:
        expression = ["-m", "not bench and not tokenizers" + ("" if shutil.which("nvidia-smi") else " and not gpu")]
    return [str(environment.python), "-m", "pytest", *expression, *words]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="also tests marked slow, and gpu where there is one")
    parser.add_argument("words", nargs="*", help="words for pytest; then only pytest runs")
    options = parser.parse_args()
    environment = prepare_or_exit()
    # --workspace with the boundary crate, whose features the wheel has too: otherwise the heavy crates compile twice.
    rust = Step("cargo test", ["cargo", "test", "--workspace", "--release", "--quiet"])
    outcomes = run_steps([] if options.words else [rust], environment.variables())
    command = pytest_command(environment, slow=options.all, words=options.words)
    print(f"\n=== pytest: {shlex.join(command)}", flush=True)
    exit_code = subprocess.run(command, cwd=ROOT, env=environment.variables(), check=False).returncode
    if any(outcome.exit_code != 0 for outcome in outcomes):
        sys.exit(sum_up("Rust tests", outcomes))
    sys.exit(exit_code)  # pytest's own summary is the last line


if __name__ == "__main__":
    sys.exit(run_door(main))
