"""Modules of benches/gpu, which find one another in their folder."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[2] / "benches" / "gpu"


@contextmanager
def import_benches(*names: str) -> Iterator[dict[str, ModuleType]]:
    """The modules by name; none of the folder stays imported behind it."""
    before, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - before:
            if getattr(sys.modules[name], "__file__", None) and Path(str(sys.modules[name].__file__)).parent == FOLDER:
                del sys.modules[name]


def start(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A program of the folder in a process of its own."""
    command = [sys.executable, str(FOLDER / script), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
