"""The sentence that a rank ends with, where torchrun looks for it: it shows it again below its own traceback."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Where torchrun lets a rank leave what it ended with (torch.distributed.elastic.multiprocessing.errors)."""


def leave_last_word(environment: Mapping[str, str], message: str) -> None:
    """Leave a fault for torchrun's summary; without torchrun, or where the file cannot be written, nothing happens."""
    name = environment.get(VARIABLE)
    if not name:
        return
    said = {"py_callstack": f"error: {message}", "timestamp": str(int(time.time()))}
    try:
        Path(name).write_text(json.dumps({"message": {"message": message, "extraInfo": said}}), encoding="utf-8")
    except OSError:
        return  # the sentence was said on standard error already
