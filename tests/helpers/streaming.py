"""A process that does nothing but read global batches of a stream, to be killed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from megaflow import Loader, StreamingDataset

GLOBAL_BATCH = 4
STREAM: dict[str, Any] = {"seq_len": 16, "shuffle_window": 500, "shard_bytes": 1500, "block_bytes": 400}


def open_loaders(folder: Path, dp_size: int) -> list[Loader]:
    """The loaders of all ranks, over the texts in a folder."""
    dataset = StreamingDataset(sorted(map(str, folder.glob("*.jsonl"))), **STREAM)
    size = GLOBAL_BATCH // dp_size
    return [Loader(dataset, size, dp_rank=rank, dp_size=dp_size, num_threads=1) for rank in range(dp_size)]


def next_global_batch(loaders: list[Loader]) -> np.ndarray:
    """Number and tokens of each sample of the next global batch, `[4, 1 + s]`."""
    batches = [next(loader) for loader in loaders]
    rows = [np.concatenate([batch.sample_ids[:, None], batch.tokens], axis=1) for batch in batches]
    return np.concatenate(rows)


def read_for_ever(name: str, dp_size: int) -> None:
    """Go on from the last state as a run does, and keep each global batch with the state behind it."""
    folder = Path(name)
    loaders, state = open_loaders(folder, dp_size), folder / "state.json"
    saved = json.loads(state.read_text()) if state.exists() else {"number": 0}
    if "loader" in saved:
        for loader in loaders:
            loader.load_state_dict(saved["loader"])
    number = saved["number"]
    while True:
        np.save(folder / f"batch-{number}.npy", next_global_batch(loaders))
        number += 1
        aside = state.with_suffix(".writing")
        aside.write_text(json.dumps({"number": number, "loader": loaders[-1].state_dict()}))
        aside.replace(state)
        time.sleep(0.001)
