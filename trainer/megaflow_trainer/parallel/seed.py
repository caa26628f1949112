"""Random streams: each data-parallel rank drops other activations; initial weights do not come from here."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from megaflow_trainer.parallel.mesh import Mesh


def seed_dropout(seed: int, mesh: Mesh, *, step: int = 0) -> None:
    """Start this rank's dropout stream: a function of the run's seed, the rank and the step it starts at."""
    digest = hashlib.sha256(f"{seed}/dropout/{mesh.dp_rank}/{step}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def get_rng_state(mesh: Mesh) -> dict[str, Tensor]:
    """The generators' states of this rank, as byte tensors."""
    state = {"cpu": torch.get_rng_state()}
    if mesh.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(mesh.device)
    return state


def set_rng_state(state: dict[str, Tensor], mesh: Mesh) -> None:
    """Go on with the streams that `get_rng_state` returned."""
    torch.set_rng_state(state["cpu"])
    if mesh.device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], mesh.device)
