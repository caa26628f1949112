"""What a run says on the console, once for all ranks."""

from __future__ import annotations

from megaflow_trainer.parallel.mesh import Mesh


def say(mesh: Mesh, line: str) -> None:
    """Print a line once for all ranks."""
    if mesh.is_first:
        print(line, flush=True)
