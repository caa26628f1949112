"""Which runs can compile their blocks, and which do so unless told otherwise."""

from __future__ import annotations

from megaflow_trainer.config.sections import TrainConfig


def find_compile_obstacle(config: TrainConfig) -> str | None:
    """Why this version cannot compile the blocks of a run, or None."""
    own = config.parallel
    if own.zero == 3:
        return "parallel.zero 3 gathers weights inside of blocks, and this version does not compile those"
    if own.pp > 1 and own.schedule in ("zero_bubble", "zbv"):
        return f"parallel.schedule {own.schedule} takes backward apart, which compiled blocks do not allow"
    return None


def find_default_obstacle(config: TrainConfig) -> str | None:
    """Why the blocks of a run are not compiled unless it is asked for, or None."""
    own = config.recompute
    if own.compression != "none" or own.is_offloaded:
        return (
            "recompute.compression and is_offloaded change what blocks keep, which is not tried with compiled blocks "
            "(--compile asks for it)"
        )
    return find_compile_obstacle(config)
