"""From a process to a rank: meet the others, train, and end in one sentence whatever happens."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from megaflow.errors import MegaflowError
from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.parallel.mesh import Launch, build_mesh, choose_device, start_group
from megaflow_trainer.training.faults import FaultBoard
from megaflow_trainer.training.run import describe_restart, train

EXIT_FAULT, EXIT_INTERRUPTED = 1, 130


def launch(config: TrainConfig, notes: Sequence[str], *, rank: int, world_size: int, local_rank: int) -> int:
    """Train as one of `world_size` ranks; returns the exit code. Several ranks meet where the launcher says (env://)."""
    own = Launch(rank=rank, world_size=world_size, local_rank=local_rank)
    try:
        store = next(dist.rendezvous("env://"))[0] if world_size > 1 else None
    except (RuntimeError, ValueError) as error:  # the address is wrong, taken or silent
        FaultBoard(rank, None).report(f"the ranks did not meet: {str(error).splitlines()[0]}; start them by torchrun")
        return EXIT_FAULT
    board = FaultBoard(rank, store)
    try:
        device, backend, device_notes = choose_device(own, config.parallel.backend)
        start_group(own, store, backend)
        code = train(config, build_mesh(own, device, backend), [*notes, *device_notes])
    except MegaflowError as error:
        board.report(str(error))
        return EXIT_FAULT
    except KeyboardInterrupt:
        board.report("interrupted; " + describe_restart(config))
        return EXIT_INTERRUPTED
    except Exception as error:  # a fault of the program itself: it is raised again, unless it is another rank's echo
        if isinstance(error, RuntimeError) and board.has_any():
            return EXIT_FAULT  # a connection broke because another rank left, which has said why
        board.mark()
        raise
    if world_size > 1:
        dist.destroy_process_group()
    return code
