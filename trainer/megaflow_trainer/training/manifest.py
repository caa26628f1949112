"""`run.json` in the run folder: what was started, with what, on what, over which data; every later start; every end.

It is enough to repeat the run and to rebuild its loader: `config.yaml` beside it is the resolved configuration as a
recipe, and each start names its data with their fingerprints.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

import megaflow
from megaflow.errors import FileAccessError
from megaflow_trainer.config.fields import to_dict
from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.parallel.collectives import do_on_first, gather_objects
from megaflow_trainer.parallel.mesh import Mesh

MANIFEST, RECIPE = "run.json", "config.yaml"
_VARIABLES = ("CUDA_", "NCCL_", "TORCH", "PYTORCH_", "OMP_", "MKL_", "SLURM_JOB_ID", "SLURM_NODELIST", "WORLD_SIZE")


@dataclass(slots=True)
class Ending:
    """How a start of the run ended; filled in as it gets on."""

    iteration: int = 0
    exit_code: int | None = None
    reason: str = "it did not say: killed, or still running"
    has_begun: bool = False
    """Whether training has begun."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a start of the run begins, and what it reads."""

    step: int
    checkpoint: str | None
    data: Mapping[str, Any] = field(default_factory=dict)


def write_manifest(folder: Path, config: TrainConfig, mesh: Mesh, origin: Origin) -> None:
    """Add this start to the manifest of the run, and write the recipe. All ranks call it, the first one writes.

    The data's part holds what `describe_batches` gives: with it `megaflow inspect --run` finds the documents of an
    iteration.

    Raises:
        FileAccessError: on all ranks, if the folder cannot be written.
    """
    own = {"host": platform.node(), "device": describe_device(mesh.device), "process": os.getpid()}
    ranks = gather_objects(own, mesh.world_group)

    def write() -> None:
        entry = describe_start(config, mesh, origin) | {"ranks": ranks}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _put(folder / MANIFEST, {"name": config.log.name, "starts": [*read_starts(folder), entry]})
            aside = folder / f"{RECIPE}.writing"
            aside.write_text(yaml.safe_dump(_as_plain(to_dict(config)), sort_keys=False), encoding="utf-8")
            aside.replace(folder / RECIPE)
        except OSError as error:
            raise FileAccessError(
                f"{folder / MANIFEST}: cannot be written: {error.strerror}; choose another --run-dir"
            ) from None

    do_on_first(write, mesh.world_group)


def describe_start(config: TrainConfig, mesh: Mesh, origin: Origin) -> dict[str, Any]:
    """Everything that is known when a run starts or goes on."""
    return {
        "command": [Path(sys.executable).name, *sys.argv],
        "folder": str(Path.cwd()),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "from_iteration": origin.step,
        "from_checkpoint": origin.checkpoint,
        "world_size": mesh.world_size,
        "device": describe_device(mesh.device),
        "backend": mesh.backend,
        "code": describe_code(Path(__file__).parent),
        "versions": {
            "megaflow": megaflow.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "system": platform.platform(),
        },
        "packages": list_packages(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
        "data": dict(origin.data),
        "config": to_dict(config),
    }


def describe_data(dataset: Any) -> dict[str, Any]:
    """A dataset: its fingerprint, what its order is made of, its pairs, and their tokenizers if sidecars tell."""
    parts = getattr(dataset, "datasets", (dataset,))
    prefixes = [str(part.indexed.prefix) for part in parts if hasattr(part, "indexed")]
    return {
        "fingerprint": dataset.fingerprint,
        "description": getattr(dataset, "description", None),
        "pairs": [{"prefix": str(Path(prefix).resolve()), "tokenizer": _read_tokenizer(prefix)} for prefix in prefixes],
    }


def _read_tokenizer(prefix: str) -> Any:
    try:
        return (megaflow.read_sidecar(prefix) or {}).get("tokenizer")
    except (OSError, ValueError):
        return None


def describe_device(device: torch.device) -> str:
    """The device's name as its maker gives it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()}"


def describe_code(folder: Path) -> dict[str, Any]:
    """The commit of the checkout that the trainer lies in, and whether files differ from it; empty outside of one."""

    def ask(*words: str) -> str | None:
        command = ["git", "-C", str(folder), *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    if commit is None:
        return {}
    return {"commit": commit, "is_changed": bool(ask("status", "--porcelain", "--untracked-files=no"))}


def list_packages() -> dict[str, str]:
    """Every installed package with its version."""
    found = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
    return dict(sorted((name, version) for name, version in found.items() if name))


@contextmanager
def record_end(folder: Path, mesh: Mesh, ending: Ending) -> Iterator[None]:
    """Write into the last start how it ended, whatever ends the body; the first rank does."""
    try:
        yield
    except BaseException as error:
        ending.reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise
    finally:
        if mesh.is_first:
            note_end(folder, ending)


def note_end(folder: Path, ending: Ending) -> None:
    """Write how a start ended, if the last one in the manifest is that of this process."""
    starts = read_starts(folder)
    if not starts or os.getpid() not in [rank["process"] for rank in starts[-1].get("ranks", [])]:
        return
    starts[-1]["end"] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "iteration": ending.iteration,
        "exit_code": ending.exit_code,
        "reason": ending.reason,
    }
    try:
        name = json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get("name")
        _put(folder / MANIFEST, {"name": name, "starts": starts})
    except (OSError, ValueError):
        return  # the run has ended; what it was is written already


def read_starts(folder: Path) -> list[Any]:
    """The starts of a run, the first one first; none if there is no manifest."""
    try:
        return list(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["starts"])
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return []


def _put(path: Path, content: Mapping[str, Any]) -> None:
    aside = path.with_suffix(f".writing{os.getpid()}")  # after a lost rank any other may write
    aside.write_text(json.dumps(content, indent=1), encoding="utf-8")
    aside.replace(path)


def _as_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _as_plain(item) for name, item in value.items()}
    return [_as_plain(item) for item in value] if isinstance(value, tuple | list) else value
