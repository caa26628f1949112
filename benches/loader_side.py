#!/usr/bin/env python3
"""One side of benches/loader.py, in a process of its own: reads batches of a pair and prints what they cost as JSON.

    python loader_side.py SIDE PREFIX SEQ_LEN BATCH NUM_BATCHES FOLDER

Imports, opening and 40 batches are not counted. A package that is absent is told, not an error.
"""

from __future__ import annotations

import itertools
import json
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

WARM_UP = 40


class Pair:
    """What all sides are given."""

    def __init__(self, prefix: str, seq_len: int, batch: int, num_batches: int, folder: Path) -> None:
        self.prefix = prefix
        self.seq_len = seq_len
        self.batch = batch
        self.num_samples = batch * (num_batches + WARM_UP + 2)
        self.folder = folder

    @property
    def num_tokens(self) -> int:
        return Path(f"{self.prefix}.bin").stat().st_size // 2

    def blocks(self) -> list[int]:
        """Starts of fixed blocks in a global shuffle, repeated until there are enough."""
        starts = list(range(0, self.num_tokens - self.seq_len - 1, self.seq_len))
        random.Random(1).shuffle(starts)
        return list(itertools.islice(itertools.cycle(starts), self.num_samples))


def ours(order: str, dtype: str, num_threads: int) -> Callable[[Pair], Iterator[Any]]:
    def run(pair: Pair) -> Iterator[Any]:
        from megaflow import GPTDataset, Loader

        dataset = GPTDataset(pair.prefix, seq_len=pair.seq_len, num_samples=pair.num_samples, order=order)
        return iter(Loader(dataset, pair.batch, num_threads=num_threads, dtype=dtype))  # type: ignore[arg-type]

    return run


def memmap_batched(pair: Pair) -> Iterator[Any]:
    """A memory map whose Dataset reads a whole batch at once, in torch's DataLoader without workers."""
    import torch

    class Blocks(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __init__(self) -> None:
            self.tokens = np.memmap(f"{pair.prefix}.bin", dtype=np.uint16, mode="r")
            self.starts = pair.blocks()

        def __len__(self) -> int:
            return len(self.starts)

        def __getitems__(self, indices: list[int]) -> torch.Tensor:
            out = np.empty((len(indices), pair.seq_len + 1), dtype=np.int64)
            for row, index in enumerate(indices):
                start = self.starts[index]
                out[row] = self.tokens[start : start + pair.seq_len + 1]
            return torch.from_numpy(out)

    return iter(torch.utils.data.DataLoader(Blocks(), batch_size=pair.batch, collate_fn=lambda batch: batch))


def nanogpt(pair: Pair) -> Iterator[Any]:
    """nanoGPT's way: a new memory map a batch, random offsets, two stacked tensors."""
    import torch

    def batches() -> Iterator[Any]:
        while True:
            data = np.memmap(f"{pair.prefix}.bin", dtype=np.uint16, mode="r")
            starts = torch.randint(len(data) - pair.seq_len, (pair.batch,)).tolist()
            rows = [(data[at : at + pair.seq_len], data[at + 1 : at + 1 + pair.seq_len]) for at in starts]
            yield tuple(torch.stack([torch.from_numpy(row[side].astype(np.int64)) for row in rows]) for side in (0, 1))

    return batches()


def torchdata(pair: Pair) -> Iterator[Any]:
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Blocks(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __init__(self) -> None:
            self.tokens = np.memmap(f"{pair.prefix}.bin", dtype=np.uint16, mode="r")
            self.starts = pair.blocks()

        def __len__(self) -> int:
            return len(self.starts)

        def __getitem__(self, index: int) -> torch.Tensor:
            start = self.starts[index]
            return torch.from_numpy(self.tokens[start : start + pair.seq_len + 1].astype(np.int64))

    return iter(StatefulDataLoader(Blocks(), batch_size=pair.batch))


def litdata(pair: Pair) -> Iterator[Any]:
    import litdata

    folder = pair.folder / "litdata"
    if not (folder / "index.json").exists():
        from litdata_documents import split_documents

        litdata.optimize(
            fn=split_documents,
            inputs=[pair.prefix],
            output_dir=str(folder),
            chunk_size=pair.seq_len * 2048 + 2048,
            item_loader=litdata.TokensLoader(),
            num_workers=1,
        )
    loader = litdata.TokensLoader(block_size=pair.seq_len + 1)
    dataset = litdata.StreamingDataset(str(folder), item_loader=loader, shuffle=True)
    return _repeat(lambda: iter(litdata.StreamingDataLoader(dataset, batch_size=pair.batch)))


def datatrove(pair: Pair) -> Iterator[Any]:
    import torch
    from datatrove.utils.dataset import DatatroveFolderDataset

    folder = pair.folder / "datatrove"
    folder.mkdir(exist_ok=True)
    link = folder / "tokens.ds"
    if not link.exists():
        link.symlink_to(Path(f"{pair.prefix}.bin").resolve())
    dataset = DatatroveFolderDataset(str(folder), pair.seq_len, token_size=2, shuffle=True)
    return _repeat(lambda: iter(torch.utils.data.DataLoader(dataset, batch_size=pair.batch)))


def megatron(pair: Pair) -> Iterator[Any]:
    import torch
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    class Tokenizer:
        eod, pad, vocab_size, unique_identifiers = 50256, -1, 50257, {"class": "bench"}

    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=pair.seq_len,
        blend=([pair.prefix], None),
        split="1,0,0",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=Tokenizer(),
        path_to_cache=str(pair.folder / "megatron"),
        mid_level_dataset_surplus=0.005,
    )
    indexed = IndexedDataset(pair.prefix, multimodal=False, mmap=True)
    ids = np.arange(len(indexed), dtype=np.int32)
    dataset = GPTDataset(indexed, pair.prefix, ids, pair.num_samples, Split.train, config)
    return iter(torch.utils.data.DataLoader(dataset, batch_size=pair.batch))


def _repeat(start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    while True:
        yield from start()


SIDES: dict[str, Callable[[Pair], Iterator[Any]]] = {
    "megaflow int64, no thread": ours("megatron", "int64", 0),
    "megaflow int64, 1 thread": ours("megatron", "int64", 1),
    "megaflow int64, 2 threads": ours("megatron", "int64", 2),
    "megaflow int64, 4 threads": ours("megatron", "int64", 4),
    "megaflow int64, instant order": ours("instant", "int64", 0),
    "megaflow uint16, no thread": ours("megatron", "uint16", 0),
    "megaflow uint16, instant order": ours("instant", "uint16", 0),
    "Megatron GPTDataset + DataLoader": megatron,
    "nanoGPT get_batch": nanogpt,
    "datatrove folder dataset": datatrove,
    "litdata TokensLoader": litdata,
    "torchdata StatefulDataLoader + memmap": torchdata,
    "memmap, batched Dataset": memmap_batched,
}


def spent() -> tuple[float, float]:
    """Wall and CPU seconds until now, of all threads and of children that have ended."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter(), own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def main() -> None:
    """Command line."""
    side, prefix, seq_len, batch, num_batches, folder = sys.argv[1:7]
    try:
        import torch

        torch.set_num_threads(1)
    except ImportError:
        pass
    pair = Pair(prefix, int(seq_len), int(batch), int(num_batches), Path(folder))
    try:
        batches = SIDES[side](pair)
    except ImportError as error:
        print(json.dumps({"missing": str(error)}))
        return
    for _ in range(WARM_UP):
        next(batches)
    wall, cpu = spent()
    for _ in range(int(num_batches)):
        next(batches)
    now_wall, now_cpu = spent()
    print(json.dumps({"wall_s": now_wall - wall, "cpu_s": now_cpu - cpu}))


if __name__ == "__main__":
    main()
