#!/usr/bin/env python3
"""Checks who may depend on whom among the crates, and that Python's crates stay at the boundary. Offline; a second.

The rule is `ALLOWED` below (docs/architecture.md draws it). A new crate fails until it has a row.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from doors import run_door

ROOT_MANIFEST = Path(__file__).resolve().parents[1] / "Cargo.toml"
ALLOWED: dict[str, set[str]] = {
    "megaflow-core": set(),
    "megaflow-source": {"megaflow-core"},
    "megaflow-tokenize": {"megaflow-core"},
    "megaflow-indexed": {"megaflow-core"},
    "megaflow-build": {"megaflow-core", "megaflow-source", "megaflow-tokenize", "megaflow-indexed"},
    "megaflow-sample": {"megaflow-core", "megaflow-indexed"},
    "megaflow-stream": {"megaflow-core", "megaflow-source", "megaflow-tokenize", "megaflow-sample"},
    "megaflow-prefetch": {"megaflow-core"},
}
BOUNDARY = "megaflow-py"
"""The crate that may depend on every other one, and alone on `PYTHON_CRATES`."""
PYTHON_CRATES = {"pyo3", "numpy"}


def violations(metadata: dict[str, Any]) -> list[str]:
    """One line for each forbidden edge in what `cargo metadata --no-deps` printed; test dependencies count too."""
    members = {package["name"] for package in metadata["packages"]}
    problems = []
    for package in metadata["packages"]:
        name = package["name"]
        if name != BOUNDARY and name not in ALLOWED:
            problems.append(f"{name}: a new crate needs a row in tools/check_crate_layers.py")
            continue
        for dependency in package["dependencies"]:
            to = dependency["name"]
            is_ours = to in members or to in ALLOWED or to == BOUNDARY
            if name != BOUNDARY and to in PYTHON_CRATES:
                problems.append(f"{name} depends on {to}: only {BOUNDARY} may know Python")
            elif is_ours and name != BOUNDARY and to not in ALLOWED[name]:
                allowed = ", ".join(sorted(ALLOWED[name])) or "nothing"
                problems.append(f"{name} depends on {to}: allowed is {allowed}")
    return problems


def cargo_metadata(manifest: Path) -> dict[str, Any]:
    """Packages of the workspace, read without the network."""
    command = ["cargo", "metadata", "--no-deps", "--offline", "--format-version", "1", "--manifest-path", str(manifest)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"cargo metadata failed: {done.stderr.strip()}")
    metadata: dict[str, Any] = json.loads(done.stdout)
    return metadata


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--manifest-path", type=Path, default=ROOT_MANIFEST, help="the workspace's Cargo.toml")
    metadata = cargo_metadata(parser.parse_args().manifest_path)
    problems = violations(metadata)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"crate layers: {len(metadata['packages'])} crates, {len(problems)} forbidden edges")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    sys.exit(run_door(main))
