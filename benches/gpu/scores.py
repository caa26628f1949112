#!/usr/bin/env python3
"""Cross entropy with its gradient of a chunk of scores in bf16, on a GPU: the kernel against torch compiled.

    python3 benches/gpu/scores.py

Prints milliseconds and GB/s by bytes that must move: 2 read and 2 written a score. A copy (2 read, 2 written) shows
what the memory gives. Medians; half a minute.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from pathlib import Path

import torch
from timing import need_gpu, show, time_ms

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "trainer"), str(ROOT / "python")]

from megaflow_trainer.ops.scores import score_chunk  # noqa: E402
from megaflow_trainer.ops.scores_kernel import TILE, score_in_place  # noqa: E402

COLUMNS = ((50304, 50257), (128256, 128256))
"""Padded and real vocabulary of GPT-2 and of Llama 3."""
SCORES = 1 << 28
TILES = ((2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16), (16384, 16), (16384, 32), (32768, 32))
"""Columns at once, warps."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.parse_args()
    device = need_gpu()
    start = time.perf_counter()
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}; tile in use {TILE}")
    compiled = torch.compile(score_chunk, dynamic=False)
    for columns, vocab_size in COLUMNS:
        rows = SCORES // columns
        scores = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
        target = torch.randint(0, vocab_size, (rows,), device=device)
        weights, losses = torch.full((rows,), 1 / rows, device=device), torch.empty(rows, device=device)
        given = (target, weights, 1.0, vocab_size)
        wanted_losses, wanted = compiled(scores, *given)
        print(f"{rows} x {columns}", flush=True)
        copy = torch.empty_like(scores)
        show("copy", time_ms(functools.partial(copy.copy_, scores)), 4 * scores.numel())
        show("torch, compiled", time_ms(functools.partial(compiled, scores, *given)), 4 * scores.numel())
        for tile in TILES:
            copy.copy_(scores)
            score_in_place(copy, target, weights, losses, 1.0, vocab_size, tile=tile)
            if not torch.allclose(copy.float(), wanted.float(), rtol=2e-2, atol=1e-9):
                raise SystemExit("the kernel's gradients are not those of torch")
            torch.testing.assert_close(losses, wanted_losses, rtol=1e-5, atol=1e-5)
            work = functools.partial(score_in_place, copy, target, weights, losses, 1.0, vocab_size, tile=tile)
            show(f"kernel {tile}", time_ms(work), 4 * scores.numel())
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
