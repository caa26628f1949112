"""Killed at any moment of saving, a run finds a complete step, and what it finds is what was saved."""

from __future__ import annotations

import multiprocessing as mp
import random
import time
from pathlib import Path

import pytest
import torch

from helpers.saving import make_tensors, save_for_ever
from megaflow_trainer.checkpoint import dcp, store

ROUNDS = 30
WAIT_S = 120

pytestmark = pytest.mark.timeout(900)


def list_folders(root: Path) -> set[str]:
    return {path.name for path in root.glob("iter_*")}


def test_thirty_kills_at_random_moments_of_saving_leave_a_complete_step(tmp_path: Path) -> None:
    context = mp.get_context("forkserver")  # torch is imported once, and each process begins from there
    context.set_forkserver_preload(["torch", "helpers.saving"])
    rng = random.Random(7)
    steps, halves = [0], 0
    for _ in range(ROUNDS):
        before = list_folders(tmp_path)
        process = context.Process(target=save_for_ever, args=(str(tmp_path),), daemon=True)
        process.start()
        deadline = time.monotonic() + WAIT_S
        while list_folders(tmp_path) == before and time.monotonic() < deadline:
            time.sleep(0.001)  # until it saves
        time.sleep(rng.uniform(0, 0.05))
        process.kill()
        process.join()
        halves += any(name.endswith((".writing", ".deleting")) for name in list_folders(tmp_path))
        found = store.find_checkpoint(tmp_path)
        if found.path is None:
            assert steps == [0], "a step that was there is lost"
            continue
        step = store.count_iterations(found.path)
        assert store.read_state(found.path)["step"] == step
        saved = dcp.read_tensors(found.path, "")
        expected = make_tensors(step)
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[name], expected[name]) for name in expected)
        assert step >= steps[-1]
        steps.append(step)
    assert halves >= 5, "the kills did not fall into the saving"
    assert steps[-1] > 0
