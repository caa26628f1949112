"""From a process to a rank: meet the others, train, and end in one sentence whatever happens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from megaflow.errors import MegaflowError, first_line
from megaflow_trainer.config.exit_codes import DIVERGED, FAULT, INTERRUPTED, OUT_OF_MEMORY, RANK_LOST
from megaflow_trainer.config.layout import make_layout
from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.parallel.mesh import Launch, build_mesh, choose_device, keep_launch_order, start_group
from megaflow_trainer.training.faults import FaultBoard
from megaflow_trainer.training.guards import DivergedError
from megaflow_trainer.training.manifest import Ending, note_end
from megaflow_trainer.training.meeting import Meeting, meet
from megaflow_trainer.training.oom import ShortageError
from megaflow_trainer.training.peers import PeerWatch
from megaflow_trainer.training.run import describe_restart, train
from megaflow_trainer.training.stop import hold_signals

_CODES: tuple[tuple[type[MegaflowError], int], ...] = ((ShortageError, OUT_OF_MEMORY), (DivergedError, DIVERGED))


def launch(config: TrainConfig, notes: Sequence[str], *, rank: int, world_size: int, local_rank: int) -> int:
    """Train as one of `world_size` ranks; returns the exit code. Several ranks meet where the launcher says (env://)."""
    own = Launch(rank=rank, world_size=world_size, local_rank=local_rank)
    try:
        meeting = meet(next(dist.rendezvous("env://"))[0], rank, world_size) if world_size > 1 else None
    except (RuntimeError, ValueError) as error:  # the address is wrong, taken or silent
        FaultBoard(rank, None).report(f"the ranks did not meet: {first_line(error)}; start them by torchrun")
        return FAULT
    ending = Ending()
    with hold_signals(lambda: ending.has_begun):
        return _run(config, notes, own, meeting, ending)


def _run(config: TrainConfig, notes: Sequence[str], own: Launch, meeting: Meeting | None, ending: Ending) -> int:
    """Train, and say and write down how it ended; returns the exit code."""
    rank, world_size = own.rank, own.world_size
    store, ranks = (None, ()) if meeting is None else (meeting.store, meeting.ranks)

    def record(code: int, reason: str | None = None) -> int:
        """Write the exit code down, if this rank has written its start."""
        ending.exit_code, ending.reason = code, reason or ending.reason
        if config.log.run_dir is not None:
            note_end(Path(config.log.run_dir), ending)
        return code

    board = FaultBoard(rank, store)
    peers = PeerWatch(rank, ranks, store, record=lambda reason: record(RANK_LOST, reason))
    peers.start()
    try:
        order_notes = keep_launch_order(config.parallel)
        device, backend, device_notes = choose_device(own, config.parallel.backend)
        device_notes += order_notes if device.type == "cuda" else []
        start_group(own, store, backend)
        layout = make_layout(config.parallel, world_size=world_size, num_kv_heads=config.model.kv_heads)
        code = train(config, build_mesh(own, device, backend, layout), [*notes, *device_notes], ending)
    except MegaflowError as error:
        peers.leave(is_well=False)
        board.report(str(error))
        return record(find_code(error)) if rank == 0 else find_code(error)
    except KeyboardInterrupt:
        peers.leave(is_well=False)
        board.report("interrupted; " + describe_restart(config))
        return record(INTERRUPTED, "interrupted") if rank == 0 else INTERRUPTED
    except Exception as error:  # a fault of the program itself: it is raised again, unless it is another rank's echo
        if isinstance(error, RuntimeError) and board.has_any():
            return FAULT  # a connection broke because another rank left, which has said why
        if isinstance(error, RuntimeError) and (peers.wait_for_lost() is not None or peers.is_store_gone()):
            lost = peers.describe_lost()
            board.report(f"{lost}; {describe_restart(config)}")
            return record(RANK_LOST, lost) if peers.is_writer() else RANK_LOST
        peers.leave(is_well=False)
        board.mark()
        if rank == 0:
            record(FAULT)
        raise
    else:
        peers.leave(is_well=True)
        if world_size > 1:
            dist.destroy_process_group()
        return code
    finally:
        peers.stop()


def find_code(error: MegaflowError) -> int:
    """The exit code of an error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAULT)
