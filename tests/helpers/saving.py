"""A process that does nothing but save checkpoints, to be killed."""

from __future__ import annotations

from pathlib import Path

import torch

from megaflow_trainer.checkpoint import store
from megaflow_trainer.checkpoint.saver import Saver

NAMES = tuple(f"model/{number}" for number in range(6))
ROWS = 40_000


def make_tensors(step: int) -> dict[str, torch.Tensor]:
    """Tensors that tell which step they are of."""
    return {name: torch.full((ROWS,), float(step * 10 + place)) for place, name in enumerate(NAMES)}


def save_for_ever(root: str) -> None:
    """Go on from the last complete step as a run does, and save step after step."""
    torch.set_num_threads(1)
    folder = Path(root)
    store.prepare_folder(folder)
    found = store.find_checkpoint(folder)
    step = 0 if found.path is None else store.count_iterations(found.path)
    saver = Saver(folder, None, keeping=store.Keeping(last=2))
    while True:
        step += 1
        saver.start(step, make_tensors(step), {"step": step})
        saver.finish()
