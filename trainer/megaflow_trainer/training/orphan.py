"""A rank does not outlive its launcher: it would go on writing into a folder that a new run takes for its own.

Imports no torch, so that it is in force from the first moment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

_PR_SET_PDEATHSIG = 1


def end_with_launcher(environment: Mapping[str, str]) -> None:
    """If torchrun started this process, let the system kill it when torchrun is gone (Linux only).

    Killed, not asked to stop: a rank whose peers are gone may wait in a collective for ever.
    """
    if sys.platform != "linux" or not {"LOCAL_RANK", "TORCHELASTIC_RUN_ID"} <= environment.keys():
        return
    launcher = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it went before the request was in force
        os.kill(os.getpid(), signal.SIGKILL)
