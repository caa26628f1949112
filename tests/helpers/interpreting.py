"""Kernels of Triton on the CPU: a script of this folder in a process of its own, because the interpreter is chosen when
triton is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def interpret(script: str, found: Path, *words: str) -> dict[str, Any]:
    """What `script`, which is handed `words`, has written to the file `found`."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name(script)), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    values: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    return values
