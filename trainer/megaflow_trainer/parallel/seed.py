"""Random numbers of training. Initial weights do not come from here.

Dropout between layers follows from a number per sample, whatever rank the sample or a part of it is on. Dropout inside
an attention kernel comes from torch's generator: each rank has a stream of its own, since no two hold the same samples,
heads and queries.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from megaflow_trainer.parallel.mesh import Mesh


def seed_dropout(seed: int, mesh: Mesh, *, step: int = 0) -> None:
    """Start this rank's stream: a function of the run's seed, the rank and the step it starts at."""
    digest = hashlib.sha256(f"{seed}/dropout/{mesh.rank}/{step}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def number_samples(seed: int, first: int, count: int, mesh: Mesh) -> Tensor:
    """A number for each of `count` samples from which its dropout follows, int64 `[count]`.

    Args:
        seed: of the run.
        first: place of the first one among all samples that the run reads, counted from 0.
        count: how many.
        mesh: whose device they go to.
    """
    digest = hashlib.sha256(f"{seed}/samples".encode()).digest()
    base = int.from_bytes(digest[:8], "little") >> 2
    return torch.arange(base + first, base + first + count, device=mesh.device)


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
