"""Packages as `tools/doctor.py` sees them. They are imported in a process of their own: one that ends the process, or
crashes it, takes nothing else along.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from doctor_lines import Asked, Line

NEEDED = {
    "numpy": ("everything", "numpy"),
    "rich": ("the data commands", "rich"),
    "yaml": ("the trainer and the planner", "pyyaml"),
    "safetensors": ("checkpoints", "safetensors"),
}
OPTIONAL = {
    "transformer_engine": ("fp8 and fused layers (--transformer-impl transformer_engine)", "transformer-engine"),
    "flash_attn": ("another flash attention (torch has one of its own)", "flash-attn"),
    "apex": ("fused optimizers, from its source only: the index's apex is another package", "apex"),
    "torchao": ("low-precision optimizers", "torchao"),
    "liger_kernel": ("fused cross entropy and norms", "liger-kernel"),
    "wandb": ("--wandb-project", "wandb"),
    "tensorboard": ("--tensorboard-dir", "tensorboard"),
    "pyarrow": ("Parquet and Arrow through Python", "pyarrow"),
    "ray": ("--executor ray", "ray"),
    "nltk": ("--split-sentences", "nltk"),
    "fsspec": ("remote inputs", "fsspec"),
}
FIRST = ("megaflow", "torch")
LIMIT_S = 180
"""Seconds for the imports of all packages; the largest take some twenty."""

PROGRAM = """
import importlib, json, os, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
except (ImportError, ValueError, OSError):
    pass
for module in sys.argv[2:]:
    with open(sys.argv[1], "a", encoding="utf-8") as told:
        told.write(module + chr(10))
        told.flush()
        try:
            importlib.import_module(module)
        except BaseException as error:
            name = type(error).__name__
            first = (str(error).splitlines() or [""])[0]
            told.write(json.dumps(f"{name}: {first}" if first else name) + chr(10))
        else:
            told.write(json.dumps("") + chr(10))
os._exit(0)
"""


def check_packages(asked: Asked) -> Iterator[Line]:
    """Packages: there, broken, or missing. What an import does, of whatever kind, is told."""
    for module, (purpose, package) in NEEDED.items():
        fault = find_fault(module)
        if fault:
            text = f"{package} cannot be imported: {fault}"
            yield Line("fail", "packages", text, f"pip install --force-reinstall {package}; needed for {purpose}")
    missing = []
    for module, (purpose, package) in OPTIONAL.items():
        if not _is_there(module):
            missing.append(f"{package} ({purpose})")
            continue
        fault = find_fault(module)
        if fault:
            text = f"{package} is installed and cannot be imported: {fault}"
            yield Line(
                "fail", "packages", text, f"pip uninstall {package}, or a build for this torch; needed for {purpose}"
            )
        else:
            yield Line("ok", "packages", f"{package} {_version(package)}")
    if missing:
        yield Line("ok", "packages", f"not installed, not needed unless asked for: {', '.join(missing)}")


def find_fault(module: str) -> str:
    """Why a module cannot be imported; nothing if it can. The first call tries all of them, in one process."""
    modules = dict.fromkeys([*FIRST, *NEEDED, *filter(_is_there, OPTIONAL), module])
    return _import_all(tuple(modules), os.pathsep.join(sys.path))[module]


@functools.lru_cache(maxsize=8)
def _import_all(modules: Sequence[str], paths: str) -> dict[str, str]:
    """The fault of each module; where one takes the process along, those behind it are tried in another one."""
    faults: dict[str, str] = {}
    while len(faults) < len(modules):
        rest = modules[len(faults) :]
        told, end = _import_some(rest, paths)
        faults |= told
        if len(told) < len(rest):
            faults[rest[len(told)]] = end
    return faults


def _import_some(modules: Sequence[str], paths: str) -> tuple[dict[str, str], str]:
    """The faults of the modules up to the one that ended the process, and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "told"
        path.touch()
        try:
            done = subprocess.run(
                [sys.executable, "-c", PROGRAM, str(path), *modules],
                env={**os.environ, "PYTHONPATH": paths},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=LIMIT_S,
                check=False,
            )
            end = _describe_end(done.returncode)
        except subprocess.TimeoutExpired:
            end = f"no end within {LIMIT_S} s"
        except OSError as error:
            end = f"no process could be started: {error.strerror}"
        lines = path.read_text(encoding="utf-8").splitlines()
    return dict(zip(lines[::2], map(json.loads, lines[1::2]), strict=False)), end


def _describe_end(code: int) -> str:
    if code >= 0:
        return f"it ends the process, with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"it crashes the process, by {name}"


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ValueError, ImportError):  # as of a module put in place by hand
        return module in sys.modules


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(version unknown)"
