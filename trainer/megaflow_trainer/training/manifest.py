"""`run.json` in the run folder: the command, the resolved configuration, versions, and every later start."""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

import megaflow
from megaflow.errors import FileAccessError
from megaflow_trainer.config.fields import to_dict
from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.parallel.mesh import Mesh


def write_manifest(folder: Path, config: TrainConfig, mesh: Mesh, *, start_step: int, data: dict[str, Any]) -> None:
    """Add this start to the manifest of the run; one rank calls it.

    `data` is what `describe_batches` gives: with it `megaflow inspect --run` finds the documents of an iteration.

    Raises:
        FileAccessError: if the folder cannot be written.
    """
    entry: dict[str, Any] = {
        "command": [Path(sys.executable).name, *sys.argv],
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "from_iteration": start_step,
        "world_size": mesh.world_size,
        "device": describe_device(mesh.device),
        "backend": mesh.backend,
        "data_fingerprint": data["fingerprint"],
        "data": data,
        "versions": {
            "megaflow": megaflow.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "config": to_dict(config),
    }
    path = folder / "run.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        starts = [*_read_starts(path), entry]
        aside = path.with_suffix(".writing")
        aside.write_text(json.dumps({"name": config.log.name, "starts": starts}, indent=1), encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise FileAccessError(f"{path}: cannot be written: {error.strerror}; choose another --run-dir") from None


def describe_device(device: torch.device) -> str:
    """The device's name as its maker gives it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()}"


def _read_starts(path: Path) -> list[Any]:
    try:
        return list(json.loads(path.read_text(encoding="utf-8"))["starts"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return []
