"""Rules that recognise why a run ended: out of memory, hung, killed, a rank lost."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from findings import Finding
from megaflow.errors import MegaflowError
from megaflow_trainer.config import exit_codes
from megaflow_trainer.config.memory import estimate_memory
from megaflow_trainer.config.remedies import list_remedies
from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.training.lock_file import is_held
from run_record import Record


def find_out_of_memory(record: Record) -> Iterator[Finding]:
    """The run ended because memory ran out."""
    if not _is_short_of_memory(record):
        return
    parts, remedies = "", ["--micro-batch-size, then --recompute-granularity full, then --use-distributed-optimizer"]
    if record.config is not None:
        parts, remedies = _divide_memory(record.config), list_remedies(record.config)
    yield Finding(
        symptom="out-of-memory",
        rank=0,
        title="out of memory",
        seen=record.reason + parts,
        cause="weights, gradients, optimizer and activations of a rank are more than its device has",
        remedies=(*remedies, "python tools/plan.py with the same flags shows which layouts fit"),
    )


def _is_short_of_memory(record: Record) -> bool:
    return record.end.get("exit_code") == exit_codes.OUT_OF_MEMORY or "out of memory" in record.reason


def _divide_memory(config: TrainConfig) -> str:
    if config.model.vocab_size is None:
        return ""
    try:
        device, _ = estimate_memory(config)
    except (MegaflowError, ArithmeticError):
        return ""  # sizes that fit no layout: the trainer says more of that
    return "; by formula (GiB): " + ", ".join(f"{name} {size / 2**30:.2f}" for name, size in device.items())


def find_end(record: Record) -> Iterator[Finding]:
    """An end that needs somebody to look."""
    code = record.end.get("exit_code")
    if not isinstance(code, int) or code not in _ADVICE or _is_short_of_memory(record):
        return
    if code == exit_codes.DIVERGED and record.events("nonfinite"):
        return  # told with the steps
    cause, do = exit_codes.MEANINGS[code], _ADVICE[code]
    if code == exit_codes.HUNG:
        cause, do = _find_hung(record, cause, do)
    yield Finding(
        symptom="stopped",
        rank=3 if code in (exit_codes.STOPPED, exit_codes.OUT_OF_TIME) else 0,
        title=f"the run ended with code {code}",
        seen=record.reason,
        cause=cause,
        remedies=(do,),
    )


_ADVICE = {
    exit_codes.FAULT: "mend what that sentence says, then start the same command again; python tools/doctor.py looks "
    "at the machine",
    exit_codes.DIVERGED: "a lower --lr, a longer --lr-warmup-iters, --clip-grad 1.0, --bf16",
    exit_codes.HUNG: "look into stacks/rank_N.txt of the run folder, then start the same command again",
    exit_codes.RANK_LOST: "the message of the rank that died says why, or the system's log (dmesg: out of memory)",
    exit_codes.STOPPED: "start the same command again",
    exit_codes.OUT_OF_TIME: "start the same command again",
}


def _find_hung(record: Record, cause: str, do: str) -> tuple[str, str]:
    """Which rank the others waited for: one that left no stacks, or that stood elsewhere than in communication."""
    places = {rank: _read_place(record, rank) for rank in range(min(len(record.hosts), MOST_RANKS))}
    silent = [rank for rank, place in places.items() if not place]
    apart = [rank for rank, place in places.items() if place and not place.endswith("phase communication")]
    again = "then start the same command again"
    if silent and len(silent) < len(places):
        rank = f"rank {silent[0]} on {record.hosts[silent[0]]}"
        return f"{rank} did not even write where it stood: it is stopped, or its machine", f"look at {rank}, {again}"
    if apart and len(apart) < len(places):
        return f"{places[apart[0]]}, and others wait for it", f"look into stacks/rank_{apart[0]}.txt, {again}"
    return cause, do


MOST_RANKS = 4096
"""Ranks whose stacks are looked for."""


def _read_place(record: Record, rank: int) -> str:
    """The first line of what a rank wrote when it hung; empty if it wrote nothing since the last start."""
    path = record.folder / "stacks" / f"rank_{rank}.txt"
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            line = file.readline(500).strip()
        began = datetime.strptime(str(record.start.get("time")), "%Y-%m-%dT%H:%M:%S%z").timestamp()
        return line if path.stat().st_mtime >= began else ""
    except OSError:
        return ""
    except ValueError:  # no time of the start
        return line


def find_killed(record: Record) -> Iterator[Finding]:
    """A run that has written no end although its process is gone."""
    if record.end or not record.start or is_held(record.folder) is not False:
        return
    yield Finding(
        symptom="killed",
        rank=0,
        title="the run was killed without a word",
        seen="no end is written, and no process holds the run folder's lock",
        cause="the kernel, because the machine's memory ran out (torchrun: signal 9); a scheduler; a loss of power",
        remedies=(
            "dmesg, or the scheduler's log: does it say out of memory?",
            "then --micro-batch-size, --recompute-granularity full; python tools/plan.py shows what fits",
            "else the same command: with --save it goes on from the last checkpoint",
        ),
    )
