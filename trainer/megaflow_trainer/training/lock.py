"""One run a folder: two that save into one folder would take each other's half-written checkpoints for leftovers."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from megaflow.errors import FileAccessError
from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.parallel.collectives import do_on_first
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.training.lock_file import HELD, LOCK

PATIENCE_S = 3.0
"""How long a run waits for one that is just ending: the system needs a moment to clear a killed process away."""


@contextmanager
def hold_folders(config: TrainConfig, mesh: Mesh, *, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Hold the folders that the run writes for as long as the body runs. The first rank holds them for all.

    The lock belongs to the process: the system releases it however the process ends.

    Raises:
        FileAccessError: on all ranks, if another run writes there, or the folder cannot be written.
    """
    with ExitStack() as held:

        def take() -> None:
            for folder, flag in _list_folders(config):
                file = take_lock(folder, flag, patience_s=patience_s)
                if file is not None:
                    held.enter_context(file)

        do_on_first(take, mesh.world_group)
        yield


def _list_folders(config: TrainConfig) -> list[tuple[Path, str]]:
    """The folders, each once by whatever spelling, with the flag that names it."""
    assert config.log.run_dir is not None, "resolved"
    named = [(config.checkpoint.save, "--save"), (config.log.run_dir, "--run-dir")]
    found: dict[Path, str] = {}
    for folder, flag in named:
        if folder is not None:
            found.setdefault(Path(folder).resolve(), flag)
    return list(found.items())


def take_lock(folder: Path, flag: str, *, patience_s: float = PATIENCE_S) -> TextIO | None:
    """Lock a folder, made if it is not there; close what is returned to release it.

    Returns:
        None on a file system that has no locks.

    Raises:
        FileAccessError: if another process holds it, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise FileAccessError(f"{folder}: cannot be written: {error.strerror}; choose another {flag} folder") from None
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in HELD:
                file.close()
                return None
            if time.monotonic() >= deadline:
                holder = _read_holder(file)
                file.close()
                raise FileAccessError(
                    f"{folder}: another run ({holder}) writes here; wait until it has ended, or choose another {flag}"
                ) from None
            time.sleep(0.1)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def _read_holder(file: TextIO) -> str:
    file.seek(0)
    return " ".join(file.read().split()) or "which does not say its name"
