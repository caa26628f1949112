"""Whether a Triton kernel can be made here: there may be no triton, no compiler, or a GPU that it does not know."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import TypeVar

from megaflow.errors import first_line

Result = TypeVar("Result")


def try_kernel(work: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """What `work` returns, which imports a kernel and launches it; or None and in a few words what came in between."""
    try:
        import triton.language  # noqa: F401 - what kernels are written in
        from triton.errors import TritonError  # of its compiler and assembler
    except (Exception, SystemExit) as error:  # whatever a package that does not fit this machine raises
        return None, f"{type(error).__name__}: {first_line(error)}"
    try:
        return work(), None
    except (ImportError, TritonError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        return None, f"{type(error).__name__}: {first_line(error)}"
