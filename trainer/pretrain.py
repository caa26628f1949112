"""Pretrain a GPT: flags or a recipe -> configuration -> run.

torchrun --nproc_per_node=8 trainer/pretrain.py --config trainer/recipes/gpt2_124m_1gpu.yaml --data-path corpus
python trainer/pretrain.py --help
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from megaflow.errors import MegaflowError
from megaflow_trainer.config import format_help, read_command

EXIT_BAD_CONFIG = 2
PATIENCE_S = 5.0


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit code (see --help)."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if "--help" in argv or "-h" in argv:
        if rank == 0:
            print(format_help())
        return 0
    try:
        config, notes = read_command(argv, world_size=world_size)
    except MegaflowError as error:
        say_early(str(error), rank=rank)
        return EXIT_BAD_CONFIG
    from megaflow_trainer.training.launch import launch  # only now: a fault in the flags does not wait for torch

    return launch(config, notes, rank=rank, world_size=world_size, local_rank=int(os.environ.get("LOCAL_RANK", "0")))


def say_early(message: str, *, rank: int) -> None:
    """Say a fault that every rank finds alike before the ranks meet: the first rank speaks, the others let it.

    A launcher ends all ranks as soon as one has left, so the others stay until the first has surely spoken.
    """
    if rank == 0:
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(PATIENCE_S)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # before the run began, which says more
        sys.exit(130)
