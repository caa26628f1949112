"""A rank does not outlive its launcher: it would go on writing into a folder that a new run takes for its own.

Imports no torch, so that it is in force from the first moment.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping

GRACE_S = 25.0
"""How long a rank without launcher may take to save and leave; then it is killed, as it may wait for ever for a peer
that is gone.
"""
_POLL_S = 0.2


def end_with_launcher(environment: Mapping[str, str], *, grace_s: float = GRACE_S) -> None:
    """If torchrun started this process, ask it to stop as soon as torchrun is gone: it saves, and ends.

    Before training has begun, the request ends it at once.
    """
    if not {"LOCAL_RANK", "TORCHELASTIC_RUN_ID"} <= environment.keys():
        return
    launcher = os.getppid()
    threading.Thread(target=_watch, args=(launcher, grace_s), name="launcher watch", daemon=True).start()


def _watch(launcher: int, grace_s: float) -> None:
    while os.getppid() == launcher:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os.kill(os.getpid(), signal.SIGKILL)
