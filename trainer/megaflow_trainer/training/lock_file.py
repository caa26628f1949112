"""The lock of a run folder as others see it; without torch, so that tools can ask."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

LOCK = "run.lock"
HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
"""What locking fails with while another process holds it."""


def is_held(folder: Path) -> bool | None:
    """Whether a process holds the lock of a run folder; None if nobody can tell: no lock file, or no locks here."""
    try:
        with (folder / LOCK).open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except PermissionError:
        return None
    except OSError as error:
        return True if error.errno in HELD else None
    return False
