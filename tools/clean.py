#!/usr/bin/env python3
"""Removes what the other targets made in this checkout; sources, runs and anything outside it stay."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from doors import run_door

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    ".venv",
    "demo",
    "target",
    "dist",
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
    ".import_linter_cache",
    ".hypothesis",
)


def main() -> None:
    """Removes folders, byte code and the built extension, and says which."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    found = [ROOT / name for name in FOLDERS if (ROOT / name).exists()]
    for top in ("python", "trainer", "tools", "tests", "benches", "examples"):
        found += (ROOT / top).rglob("__pycache__")
    found += (ROOT / "python" / "megaflow").glob("_core*.so")
    for path in found:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if path.name != "__pycache__":
            print(f"removed {path.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(run_door(main))
