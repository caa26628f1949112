#!/usr/bin/env python3
"""Every static check: format, lint, types, layers, clippy, and the stub against the built extension.

All checks run even after one has failed; the exit code is 0 only if all passed. `--fix` formats, and repairs what the
linter can.
"""

from __future__ import annotations

import argparse
import sys

from doors import run_door
from setup_env import ROOT, prepare_or_exit
from steps import Step, run_steps, sum_up

PYTHON_FOLDERS = ["python", "trainer", "tools", "tests", "benches", "docs"]
DISTRIBUTED_FREE = ["config", "ops", "model", "optim"]
"""Trainer layers that never communicate by themselves."""


def ban(name: str, reason: str, folders: list[str]) -> list[str]:
    """Ruff's command for one banned name; an exception in pyproject.toml would let go every banned name at once."""
    table = f"lint.flake8-tidy-imports.banned-api.{name!r}.msg={reason!r}"
    return ["ruff", "check", "--isolated", "--quiet", "--select", "TID251", "--config", table, *folders]


def existing(*folders: str) -> list[str]:
    """Those of the folders that are in the checkout."""
    return [folder for folder in folders if (ROOT / folder).exists()]


def fast_steps(python: str, *, fix: bool) -> list[Step]:
    """Checks that need no Rust build."""
    layers = [f"trainer/megaflow_trainer/{layer}" for layer in DISTRIBUTED_FREE]
    folders = existing(*PYTHON_FOLDERS)
    return [
        Step("ruff format", ["ruff", "format", *([] if fix else ["--check"]), *folders]),
        Step("ruff check", ["ruff", "check", *(["--fix"] if fix else []), *folders]),
        Step(
            "ruff: _core is private", ban("megaflow._core", "private to python/megaflow", existing("trainer", "tools"))
        ),
        Step(
            "ruff: who communicates",
            ban("torch.distributed", "only parallel/, checkpoint/ and training/", existing("python", *layers)),
        ),
        Step("layers of the trainer", ["lint-imports", "--no-cache"], {"PYTHONPATH": f"{ROOT / 'trainer'}"}),
        Step("layers of the crates", [python, "tools/check_crate_layers.py"]),
        Step("cargo fmt", ["cargo", "fmt", "--all", *([] if fix else ["--check"])]),
    ]


def slow_steps(python: str) -> list[Step]:
    """Checks that read torch's types or compile Rust."""
    return [
        Step("mypy", ["mypy"]),
        Step(
            "clippy",
            [
                "cargo",
                "clippy",
                "--workspace",
                "--all-targets",
                "--all-features",
                "--keep-going",
                "--quiet",
                "--",
                "-D",
                "warnings",
            ],
        ),
        Step(
            "stub of megaflow._core",
            [python, "-m", "mypy.stubtest", "megaflow._core", "--mypy-config-file", "pyproject.toml"],
        ),
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="only what needs no build: seconds")
    parser.add_argument("--fix", action="store_true", help="let the formatters and linters repair what they can")
    options = parser.parse_args()
    environment = prepare_or_exit(extension=not options.fast)
    python = str(environment.python)
    steps = fast_steps(python, fix=options.fix) + ([] if options.fast else slow_steps(python))
    outcomes = run_steps(steps, environment.variables())
    sys.exit(sum_up("checks", outcomes))


if __name__ == "__main__":
    sys.exit(run_door(main))
